"""Ranks as threads of one process: an algorithm runs in milliseconds, and a deadlock is reported at once."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from dlab.transports.base import SendRequest, TensorAndRank, Transport, describe, mismatch

Wait = tuple[int, str, int]  # (1, "receive from", 2)


class Deadlock(RuntimeError):
    """Ranks wait for each other in a circle, or for one that has returned; the message names the chain of waits."""


class Aborted(BaseException):
    """Ends a rank that waits, directly or through others, for one that has failed."""


@dataclass(eq=False)
class _ThreadMessage:
    """A message that is delivered when the receiver has copied it."""

    tensor: torch.Tensor
    delivered: bool = False


class ThreadWorld:
    """The state that the threads of one rehearsal share: undelivered messages, and who waits for whom.

    `send` waits until its message is delivered, as it does for large messages on every transport: an algorithm that
    works only because small messages are buffered deadlocks here, and the chain of waits says why.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.broken: BaseException | None = None
        self._messages: dict[tuple[int, int], deque[_ThreadMessage]] = {}
        self._wants: dict[int, int] = {}  # by rank: the rank that it waits to receive from
        self._offers: dict[int, tuple[int, _ThreadMessage]] = {}  # by rank: whom it waits to send to, and what
        self._returned: set[int] = set()
        self._failed: set[int] = set()

    def post(self, message: _ThreadMessage, source: int, destination: int) -> None:
        """Put a message into the queue between two ranks."""
        self._messages.setdefault((source, destination), deque()).append(message)
        self.changed.notify_all()

    def take(self, source: int, destination: int) -> _ThreadMessage | None:
        """Return the next message for `destination`; None if there is none."""
        box = self._messages.get((source, destination))
        return box.popleft() if box else None

    def leave(self, rank: int) -> None:
        """Note that a rank has returned, which is a deadlock for any rank that waits for it."""
        with self.changed:
            self._returned.add(rank)
            for other in set(self._wants) | set(self._offers):
                self._check(other)
            self.changed.notify_all()

    def fail(self, rank: int, problem: BaseException) -> None:
        """Note that a rank has failed, and end the ranks that wait for it; a lost connection is not the first cause.

        The others continue as far as they can, so which of them fail does not depend on timing.
        """
        with self.changed:
            self._failed.add(rank)
            if not isinstance(problem, Aborted) and (self.broken is None or isinstance(self.broken, ConnectionError)):
                self.broken = problem
            self.changed.notify_all()

    def wait(self, rank: int, source: int | None, message: tuple[int, _ThreadMessage] | None) -> None:
        """Sleep until something has changed, or raise if no change can end the wait. The caller holds the lock."""
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
        """Follow the waits until a rank repeats or has ended, and return the chain; None if a rank can continue."""
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
        """Return the ranks that a rank really waits for, without those that have answered already."""
        waits = []
        source = self._wants.get(rank)
        if source is not None and not self._messages.get((source, rank)):
            waits.append((source, "receive from"))
        offer = self._offers.get(rank)
        if offer is not None and not offer[1].delivered:
            waits.append((offer[0], "send to"))
        return waits


def _tell(path: list[Wait], returned: set[int]) -> str:
    """Describe a chain of waits in words; a circle starts with its lowest rank."""
    last = path[-1][2]
    if last not in returned:
        first = path.index(min(path))
        path = path[first:] + path[:first]
    chain = ", ".join(f"rank {rank} waits to {verb} {other}" for rank, verb, other in path)
    return f"deadlock: {chain}" + (", which has returned" if last in returned else "")


class ThreadSend(SendRequest):
    """A message that waits in the queue between two ranks until the receiver takes it."""

    def __init__(self, world: ThreadWorld, source: int, destination: int, message: _ThreadMessage) -> None:
        self._world, self._source, self._offer = world, source, (destination, message)

    @property
    def done(self) -> bool:
        """Whether the receiver has copied it."""
        return self._offer[1].delivered

    def wait(self) -> None:
        """Wait until the receiver has copied it; a deadlock is noticed as in `send`."""
        with self._world.changed:
            while not self.done:
                self._world.wait(self._source, None, self._offer)


class ThreadTransport(Transport):
    """The transport of one rank of a `ThreadWorld`."""

    processes = False

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Post the outgoing message, and wait until it is delivered and the incoming one has arrived."""
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

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Post the message, and do not wait until it is delivered."""
        tensor, destination = outgoing
        message = _ThreadMessage(tensor)
        with self._world.changed:
            self._world.post(message, self.rank, destination)
        return ThreadSend(self._world, self.rank, destination, message)

    def _open(self, message: _ThreadMessage, tensor: torch.Tensor, source: int) -> None:
        if (message.tensor.numel(), message.tensor.dtype) != (tensor.numel(), tensor.dtype):
            raise mismatch(source, describe(message.tensor), self.rank, describe(tensor))
        tensor.view(-1).copy_(message.tensor.view(-1))
        message.delivered = True
        self._world.changed.notify_all()
