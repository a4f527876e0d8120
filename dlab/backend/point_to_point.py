"""Point to point with tags: sends and receives that go on by themselves, over rings in shared memory.

A message that nobody has asked for, but which lies in front of one that somebody waits for, is put aside.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from dlab.backend.works import Pending
from dlab.memory.backoff import Backoff
from dlab.memory.tensors import bytes_of
from dlab.transports import SharedTransport
from dlab.transports.checked import compare, header

ANY_SOURCE = -1
_HEADER = struct.Struct("<QQqQ")  # items, type, tag, bytes

Outcome = tuple[Pending, Exception | None, int]  # a work, what went wrong, and who sent it


@dataclass(eq=False)
class PendingReceive:
    """A receive that waits for its message."""

    source: int
    tag: int
    tensor: torch.Tensor
    work: Pending
    taken: bool = False  # its message is coming


@dataclass
class IncomingMessage:
    """A message on its way in: first its head, then its body, straight into the tensor of whoever waits for it."""

    head: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    body: memoryview | None = None
    read: int = 0
    receive: PendingReceive | None = None
    unwanted: bool = False  # its receiver expected something else, and has been told so

    @property
    def tag(self) -> int:
        """What it is matched by."""
        return int(_HEADER.unpack(self.head)[2])

    @property
    def kind(self) -> tuple[int, int]:
        """The number of items and the type, to be compared with what the receiver expects."""
        return _HEADER.unpack(self.head)[:2]


class PointToPoint:
    """One rank's sends and receives: begun by whoever asks, and carried on by a thread if they cannot end at once."""

    def __init__(self, transport: SharedTransport, name: str) -> None:
        self._transport, self._name = transport, name
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._out: dict[int, deque[tuple[memoryview, Pending | None]]] = defaultdict(deque)
        self._receives: list[PendingReceive] = []  # in the order in which they were made
        self._coming = {other: IncomingMessage() for other in transport.incoming}
        self._aside: dict[int, list[IncomingMessage]] = defaultdict(list)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        """Done when all of it is on its way: from then on the tensor may be changed."""
        self._transport.check(tensor, destination)
        content, work = bytes_of(tensor), Pending([tensor])
        head = memoryview(_HEADER.pack(*header(tensor), tag, len(content)))
        with self._changed:
            self._out[destination] += [(head, None), (content, work)]
        self._begin()
        return work

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Done when it is there. The source may be ANY_SOURCE."""
        someone = (self._transport.rank + 1) % self._transport.size
        self._transport.check(tensor, someone if source == ANY_SOURCE else source)
        receive = PendingReceive(source, tag, tensor, Pending([tensor], source))
        with self._changed:
            outcomes = list[Outcome]()
            if any(self._open(receive, other, outcomes) for other in self._sources(receive)):
                _announce(outcomes)
                return receive.work
            self._receives.append(receive)
        self._begin()
        return receive.work

    def close(self) -> None:
        """Whatever still waits is told so."""
        with self._changed:
            self._transport.peers.closed = True
            self._changed.notify_all()

    def _begin(self) -> None:
        """Get as far as possible at once; the thread does the rest."""
        with self._changed:
            _, outcomes = self._advance()
            if self._busy():
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        _announce(outcomes)

    def _busy(self) -> bool:
        return bool(self._receives) or any(self._out.values())

    def _serve(self) -> None:
        wait = Backoff(self._transport.peers, self._transport.timeout, self._whom)
        while True:
            with self._changed:
                while not self._busy():
                    if self._transport.peers.closed:
                        return
                    self._changed.wait()
                    wait.reset()
                moved, outcomes = self._advance()
            _announce(outcomes)
            if moved:
                wait.reset()
                continue
            try:
                wait()
            except Exception as problem:
                self._give_up(problem)

    def _whom(self) -> tuple[list[int], str]:
        """Whom the oldest of all waits for."""
        with self._changed:
            if self._receives:
                source = self._receives[0].source
                return ([], "to receive from anyone") if source == ANY_SOURCE else ([source], "to receive from {}")
            return [other for other, queue in self._out.items() if queue][:1], "to send to {}"

    def _give_up(self, problem: Exception) -> None:
        """Nothing more will come from, or go to, the rank that the oldest waits for."""
        with self._changed:
            others, _ = self._whom()
            lost = [receive for receive in self._receives if receive.source in (*others, ANY_SOURCE)]
            works = [receive.work for receive in lost]
            self._receives = [receive for receive in self._receives if receive not in lost]
            for other in others:
                works += [work for _, work in self._out[other] if work is not None]
                self._out[other].clear()
        _announce([(work, problem, ANY_SOURCE) for work in works])

    def _advance(self) -> tuple[int, list[Outcome]]:
        """Move whatever can be moved, and say what has come to its end."""
        moved, outcomes = 0, list[Outcome]()
        for destination, queue in self._out.items():
            while queue:
                part, work = queue[0]
                count = self._transport.outgoing[destination].put(part)
                moved += count
                if count < len(part):
                    queue[0] = (part[count:], work)
                    break
                queue.popleft()
                if work is not None:
                    outcomes.append((work, None, ANY_SOURCE))
        for source in {source for receive in self._receives for source in self._sources(receive)}:
            while self._wanted(source) and (count := self._read(source, outcomes)):
                moved += count
        return moved, outcomes

    def _sources(self, receive: PendingReceive) -> list[int]:
        return list(self._coming) if receive.source == ANY_SOURCE else [receive.source]

    def _wanted(self, source: int) -> bool:
        return any(receive.source in (source, ANY_SOURCE) for receive in self._receives)

    def _read(self, source: int, outcomes: list[Outcome]) -> int:
        """Read on in the message that comes from this rank; gives how many bytes were there."""
        ring, message, count = self._transport.incoming[source], self._coming[source], 0
        if message.body is None:
            count = ring.get(memoryview(message.head)[message.read :])
            message.read += count
            if message.read < len(message.head):
                return count
            self._address(message, source, outcomes)
        assert message.body is not None
        more = ring.get(message.body[message.read :])
        message.read += more
        if message.read == len(message.body):
            self._coming[source] = IncomingMessage()
            if message.receive is not None:
                self._receives.remove(message.receive)
                outcomes.append((message.receive.work, None, source))
            elif not message.unwanted:
                self._aside[source].append(message)
                if (receive := self._match(source, message.tag)) is not None:  # asked for while it was put aside
                    self._receives.remove(receive)
                    self._open(receive, source, outcomes)
        return count + more

    def _address(self, message: IncomingMessage, source: int, outcomes: list[Outcome]) -> None:
        """The head is there: where is the body to go?"""
        message.read, message.receive = 0, self._match(source, message.tag)
        if message.receive is not None:
            try:
                compare(message.kind, message.receive.tensor, source, self._transport.rank)
                message.body = bytes_of(message.receive.tensor)
                return
            except ValueError as problem:
                outcomes.append((message.receive.work, problem, source))
                self._receives.remove(message.receive)
                message.receive, message.unwanted = None, True
        message.body = memoryview(bytearray(_HEADER.unpack(message.head)[3]))

    def _match(self, source: int, tag: int) -> PendingReceive | None:
        """The oldest receive that waits for such a message."""
        for receive in self._receives:
            if receive.tag == tag and receive.source in (source, ANY_SOURCE) and not receive.taken:
                receive.taken, receive.source = True, source
                return receive
        return None

    def _open(self, receive: PendingReceive, source: int, outcomes: list[Outcome]) -> bool:
        """Take what was put aside for it, if there is such a message."""
        for message in self._aside[source]:
            if message.tag == receive.tag and message.body is not None:
                self._aside[source].remove(message)
                problem = None
                try:
                    compare(message.kind, receive.tensor, source, self._transport.rank)
                    bytes_of(receive.tensor)[:] = message.body
                except ValueError as error:
                    problem = error
                outcomes.append((receive.work, problem, source))
                return True
        return False


def _announce(outcomes: list[Outcome]) -> None:
    """Not under the lock: what waits for a work may ask for the next one."""
    for work, problem, source in outcomes:
        work.finish(problem, source)
