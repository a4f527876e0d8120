"""Point-to-point messages with tags: asynchronous sends and receives over rings in shared memory.

A message that no receive has asked for yet is set aside if one behind it is wanted.
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

Outcome = tuple[Pending, Exception | None, int]  # a work, its error, and the rank that sent it


@dataclass(eq=False)
class PendingReceive:
    """A receive that waits for its message."""

    source: int
    tag: int
    tensor: torch.Tensor
    work: Pending
    taken: bool = False  # its message is arriving


@dataclass
class IncomingMessage:
    """An arriving message: first the header, then the body, directly into the tensor of the receive that wants it."""

    head: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    body: memoryview | None = None
    read: int = 0
    receive: PendingReceive | None = None
    unwanted: bool = False  # it does not fit its receive, which has failed with an error

    @property
    def tag(self) -> int:
        """The tag that a receive must match."""
        return int(_HEADER.unpack(self.head)[2])

    @property
    def kind(self) -> tuple[int, int]:
        """The number of items and the type, to be compared with what the receiver expects."""
        return _HEADER.unpack(self.head)[:2]


class PointToPoint:
    """One rank's sends and receives: the caller starts them, and a thread continues those that cannot end at once."""

    def __init__(self, transport: SharedTransport, name: str) -> None:
        self._transport, self._name = transport, name
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._out: dict[int, deque[tuple[memoryview, Pending | None]]] = defaultdict(deque)
        self._receives: list[PendingReceive] = []  # in the order in which they were posted
        self._coming = {other: IncomingMessage() for other in transport.incoming}
        self._aside: dict[int, list[IncomingMessage]] = defaultdict(list)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        """Send a tensor; the work is done when all of it has been written, and then the tensor may be changed."""
        self._transport.check(tensor, destination)
        content, work = bytes_of(tensor), Pending([tensor])
        head = memoryview(_HEADER.pack(*header(tensor), tag, len(content)))
        with self._changed:
            self._out[destination] += [(head, None), (content, work)]
        self._begin()
        return work

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Receive into a tensor; the work is done when all of it has arrived. The source may be ANY_SOURCE."""
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
        """Stop the thread; operations that still wait fail with an error."""
        with self._changed:
            self._transport.peers.closed = True
            self._changed.notify_all()

    def _begin(self) -> None:
        """Get as far as possible at once, and leave the rest to the thread."""
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
        """Return whom the oldest operation waits for, and how."""
        with self._changed:
            if self._receives:
                source = self._receives[0].source
                return ([], "to receive from anyone") if source == ANY_SOURCE else ([source], "to receive from {}")
            return [other for other, queue in self._out.items() if queue][:1], "to send to {}"

    def _give_up(self, problem: Exception) -> None:
        """Fail the operations with the rank that the oldest one waits for."""
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
        """Move all data that can be moved, and return the operations that have ended."""
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
        """Continue to read the message from this rank, and return the number of bytes read."""
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
                if (receive := self._match(source, message.tag)) is not None:  # requested while it was being set aside
                    self._receives.remove(receive)
                    self._open(receive, source, outcomes)
        return count + more

    def _address(self, message: IncomingMessage, source: int, outcomes: list[Outcome]) -> None:
        """Decide, when the header is complete, where the body goes."""
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
        """Return the oldest receive that waits for such a message."""
        for receive in self._receives:
            if receive.tag == tag and receive.source in (source, ANY_SOURCE) and not receive.taken:
                receive.taken, receive.source = True, source
                return receive
        return None

    def _open(self, receive: PendingReceive, source: int, outcomes: list[Outcome]) -> bool:
        """Complete a receive with a message that was set aside, if there is one."""
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
    """Complete the works; not under the lock, because a callback may start the next operation."""
    for work, problem, source in outcomes:
        work.finish(problem, source)
