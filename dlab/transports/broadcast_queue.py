"""Messages to all other ranks without waiting for them: written once, read by each rank when it has time.

On one host a message is written to shared memory. Between hosts every rank has a thread per sender that receives its
messages. Taught in `04_async_sgd.ipynb`.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection

import torch
import torch.distributed as dist

from dlab.memory.backoff import Backoff, Peers
from dlab.memory.mapping import pages
from dlab.memory.posted_messages import PostedMessages
from dlab.transports.base import Transport
from dlab.transports.shared import share_memory


class BroadcastQueue(ABC):
    """Messages of `count` numbers between all ranks, in order for each sender.

    Only `pause` waits, so that a rank can keep reading while it waits to write; otherwise ranks whose queues are all
    full would wait for each other. Ranks that have died are in `gone`; what they posted can still be read.
    """

    def __init__(self, transport: Transport, count: int, dtype: torch.dtype, room: int) -> None:
        self.rank, self.size, self.count, self.dtype, self.room = transport.rank, transport.size, count, dtype, room
        self.others = [rank for rank in range(transport.size) if rank != transport.rank]
        self.gone: set[int] = set()

    @abstractmethod
    def behind(self) -> set[int]:
        """Return the ranks that have not read `room` messages of this rank, so that it may not post another."""

    @abstractmethod
    def post(self, message: torch.Tensor) -> None:
        """Post a message to all others; the tensor may be reused at once."""

    @abstractmethod
    def next(self, source: int) -> torch.Tensor | None:
        """Return the oldest unread message of a rank, valid until the next call; None if none has arrived."""

    @abstractmethod
    def pause(self, others: Collection[int]) -> None:
        """Wait a moment for one of these ranks to write or read a message, and notice if a rank is gone."""

    def wait(self, source: int) -> torch.Tensor | None:
        """Wait for the next message of a rank and return it; None if the rank is gone and there is none."""
        while (message := self.next(source)) is None:
            if source in self.gone:
                return self.next(source)  # it may have posted one just before
            self.pause([source])
        return message

    def close(self) -> None:  # noqa: B027  (shared memory needs no closing)
        """End all work in the background; nothing can be sent or received afterwards."""


def open_broadcast_queue(
    transport: Transport, count: int, dtype: torch.dtype, room: int = 32, timeout: float = 600.0
) -> BroadcastQueue:
    """Open a queue between all ranks, each of which must call it; memory is only used for unread messages."""
    front = pages(8 * transport.size)  # the process ids of the ranks
    memory = share_memory(transport, front + PostedMessages.bytes_for(transport.size, count, dtype, room))
    if memory is not None:
        peers = Peers(memory[: 8 * transport.size].cast("Q"), transport.rank)
        posted = PostedMessages(memory[front:], transport.size, count, dtype, room)
        return SharedBroadcastQueue(transport, posted, peers, count, dtype, room, timeout)
    return DistributedBroadcastQueue(transport, count, dtype, room)


class SharedBroadcastQueue(BroadcastQueue):
    """Messages in memory that all ranks map; a message costs one copy to write and none to read."""

    def __init__(
        self,
        transport: Transport,
        posted: PostedMessages,
        peers: Peers,
        count: int,
        dtype: torch.dtype,
        room: int,
        timeout: float,
    ) -> None:
        super().__init__(transport, count, dtype, room)
        self._posted, self._peers = posted, peers
        self._holding: int | None = None  # the sender of the last returned message, which is not yet counted as read
        self._awaited: list[int] = []
        self._backoff = Backoff(self._peers, timeout, self._whom)

    def behind(self) -> set[int]:
        """Return the ranks whose counters in shared memory say that `room` messages are unread."""
        self._put_down()
        return {other for other in self._readers() if self._posted.unread(self.rank, other) >= self.room}

    def post(self, message: torch.Tensor) -> None:
        """Write a message into a slot that all live ranks have read."""
        self._put_down()
        self._posted.post(self.rank, message, self._readers())

    def next(self, source: int) -> torch.Tensor | None:
        """Return the oldest unread message of a rank in its sender's memory, without a copy."""
        self._put_down()
        if not self._posted.unread(source, self.rank):
            return None
        self._backoff.reset()
        self._holding = source
        return self._posted.oldest(source, self.rank)

    def pause(self, others: Collection[int]) -> None:
        """Wait with a backoff: check again, yield the core, or sleep."""
        self._awaited = sorted(others)
        try:
            self._backoff()
        except ConnectionError:
            self.gone |= {other for other in self.others if self._peers.trouble(other)}
            self._backoff.reset()

    def _put_down(self) -> None:
        """Count the last returned message as read, so that its sender may reuse the slot."""
        if self._holding is not None:
            self._posted.mark_as_read(self._holding, self.rank)
            self._holding = None

    def _readers(self) -> list[int]:
        return [other for other in self.others if other not in self.gone]

    def _whom(self) -> tuple[list[int], str]:
        return self._awaited, "for {} to write or read a message"


class DistributedBroadcastQueue(BroadcastQueue):
    """Messages sent by torch.distributed, for ranks on several hosts."""

    def __init__(self, transport: Transport, count: int, dtype: torch.dtype, room: int) -> None:
        super().__init__(transport, count, dtype, room)
        self._changed = threading.Condition()
        self._mailboxes: dict[int, deque[torch.Tensor]] = {other: deque() for other in self.others}
        self._sending: deque[tuple[torch.Tensor, list[dist.Work]]] = deque()
        self._threads = [threading.Thread(target=self._take_in, args=(other,), daemon=True) for other in self.others]
        for thread in self._threads:
            thread.start()

    def _take_in(self, source: int) -> None:
        while True:
            message = torch.empty(self.count + 1, dtype=self.dtype)
            try:
                dist.recv(message, source, tag=_TAG)
                last = bool(message[-1])
            except (RuntimeError, ValueError):  # the sender or the process group has ended
                last = True
            with self._changed:
                if last:
                    self.gone.add(source)
                else:
                    self._mailboxes[source].append(message[:-1])
                self._changed.notify_all()
            if last:
                return

    def behind(self) -> set[int]:
        """Return no rank: unread messages are kept in their readers' own memory."""
        return set()

    def post(self, message: torch.Tensor) -> None:
        """Send a copy to each rank; waits for the oldest if `room` messages are not sent yet."""
        self._send(message, last=False)

    def _send(self, message: torch.Tensor, last: bool) -> None:
        if len(self._sending) >= self.room:
            self._finish_oldest()
        mine = torch.empty(self.count + 1, dtype=self.dtype)
        mine[:-1] = message
        mine[-1] = last
        works = []
        for other in self.others:  # also to those that have closed, which wait for this rank's last message
            with contextlib.suppress(RuntimeError):  # it is dead, as the thread that receives from it notices
                works.append(dist.isend(mine, other, tag=_TAG))
        self._sending.append((mine, [work for work in works if work is not None]))

    def _finish_oldest(self) -> None:
        _, works = self._sending.popleft()
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait()

    def next(self, source: int) -> torch.Tensor | None:
        """Return the oldest received and unread message of a rank; None if there is none."""
        with self._changed:
            return self._mailboxes[source].popleft() if self._mailboxes[source] else None

    def pause(self, others: Collection[int]) -> None:
        """Wait until a message arrives or one of these ranks is gone, for at most 0.05 s."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._mailboxes.values()) or set(others) & self.gone, timeout=0.05)

    def close(self) -> None:
        """Let the others' threads end, and wait for this rank's: a process must not end while one of them receives."""
        self._send(torch.zeros(self.count, dtype=self.dtype), last=True)
        while self._sending:
            self._finish_oldest()
        for thread in self._threads:
            thread.join()


_TAG = 4711  # keeps these messages apart from all others between the same ranks
