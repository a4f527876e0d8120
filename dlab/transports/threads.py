"""Ranks as threads of one process: to try an algorithm in milliseconds, and to be told at once when it deadlocks."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from dlab.transports.base import TensorAndRank, Transport, describe, mismatch

Wait = tuple[int, str, int]  # (1, "receive from", 2)


class Deadlock(RuntimeError):
    """Ranks wait for each other in a circle, or for one that has returned; the message is the chain."""


class Aborted(BaseException):
    """Ends a rank that waits for one that has failed, or for one that waits for it."""


@dataclass(eq=False)
class _ThreadMessage:
    """A message under way: it is delivered when the receiver has copied it."""

    tensor: torch.Tensor
    delivered: bool = False


class ThreadWorld:
    """Where the threads of one rehearsal meet: messages under way, and who waits for whom.

    `send` waits until its message is delivered, as large messages do everywhere: an algorithm that would only work
    because small messages are buffered deadlocks here, and the chain says why.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.broken: BaseException | None = None
        self._messages: dict[tuple[int, int], deque[_ThreadMessage]] = {}
        self._wants: dict[int, int] = {}  # rank: from whom it waits to receive
        self._offers: dict[int, tuple[int, _ThreadMessage]] = {}  # rank: to whom it waits to deliver, and what
        self._returned: set[int] = set()
        self._failed: set[int] = set()

    def post(self, message: _ThreadMessage, source: int, destination: int) -> None:
        """Put a message into the box between two ranks."""
        self._messages.setdefault((source, destination), deque()).append(message)
        self.changed.notify_all()

    def take(self, source: int, destination: int) -> _ThreadMessage | None:
        """The next message for `destination`, if there is one."""
        box = self._messages.get((source, destination))
        return box.popleft() if box else None

    def leave(self, rank: int) -> None:
        """A rank has returned; whoever waits for it will wait for ever."""
        with self.changed:
            self._returned.add(rank)
            for other in set(self._wants) | set(self._offers):
                self._check(other)
            self.changed.notify_all()

    def fail(self, rank: int, problem: BaseException) -> None:
        """A rank has failed: let go who waits for it. Who has only lost another one tells less than that one.

        The others go on as far as they can: so it does not depend on who is faster which of them fail as well.
        """
        with self.changed:
            self._failed.add(rank)
            if not isinstance(problem, Aborted) and (self.broken is None or isinstance(self.broken, ConnectionError)):
                self.broken = problem
            self.changed.notify_all()

    def wait(self, rank: int, source: int | None, message: tuple[int, _ThreadMessage] | None) -> None:
        """Sleep until something has changed, unless that cannot help any more. The lock is held."""
        if source is not None:
            self._wants[rank] = source
        if message is not None:
            self._offers[rank] = message
        try:
            self._check(rank)
            if isinstance(self.broken, Deadlock):
                raise self.broken
            if self._failed and self._dead_end(rank, []):
                raise Aborted
            self.changed.wait()
        finally:
            self._wants.pop(rank, None)
            self._offers.pop(rank, None)

    def _check(self, rank: int) -> None:
        if self.broken is None and (path := self._dead_end(rank, [])):
            self.broken = Deadlock(_tell(path, self._returned))
            self.changed.notify_all()

    def _dead_end(self, rank: int, path: list[Wait]) -> list[Wait] | None:
        """Follow who waits for whom until a rank comes again or has ended; None if somebody can still go on."""
        if rank in self._returned or rank in self._failed:
            return path
        for position, (waiting, _, _) in enumerate(path):
            if waiting == rank:
                return path[position:]
        for other, verb in self._waits(rank):
            if found := self._dead_end(other, [*path, (rank, verb, other)]):
                return found
        return None

    def _waits(self, rank: int) -> list[tuple[int, str]]:
        """Whom a rank waits for in earnest: not one whose answer is there and only has not been noticed yet."""
        waits = []
        source = self._wants.get(rank)
        if source is not None and not self._messages.get((source, rank)):
            waits.append((source, "receive from"))
        offer = self._offers.get(rank)
        if offer is not None and not offer[1].delivered:
            waits.append((offer[0], "send to"))
        return waits


def _tell(path: list[Wait], returned: set[int]) -> str:
    """The chain in words; a circle begins with its lowest rank."""
    last = path[-1][2]
    if last not in returned:
        first = path.index(min(path))
        path = path[first:] + path[:first]
    chain = ", ".join(f"rank {rank} waits to {verb} {other}" for rank, verb, other in path)
    return f"deadlock: {chain}" + (", which has returned" if last in returned else "")


class ThreadTransport(Transport):
    """One rank's end of a world."""

    processes = False

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Put a message out, and wait until it is taken and the one that we want has come."""
        world, message = self._world, None
        with world.changed:
            if outgoing is not None:
                message = _ThreadMessage(outgoing[0])
                world.post(message, self.rank, outgoing[1])
            while True:
                if incoming is not None and (found := world.take(incoming[1], self.rank)):
                    self._open(found, *incoming)
                    incoming = None
                waits_to_send = (outgoing[1], message) if outgoing and message and not message.delivered else None
                if incoming is None and waits_to_send is None:
                    return
                world.wait(self.rank, incoming[1] if incoming else None, waits_to_send)

    def _open(self, message: _ThreadMessage, tensor: torch.Tensor, source: int) -> None:
        if (message.tensor.numel(), message.tensor.dtype) != (tensor.numel(), tensor.dtype):
            raise mismatch(source, describe(message.tensor), self.rank, describe(tensor))
        tensor.view(-1).copy_(message.tensor.view(-1))
        message.delivered = True
        self._world.changed.notify_all()
