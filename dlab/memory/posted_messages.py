"""Messages that a rank posts once for all others, each of which reads them in place when it has time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import lines, pages
from dlab.memory.tensors import tensor_in


class PostedMessages:
    """Up to `room` messages of `count` numbers per rank that are not yet read by all.

    Each rank writes its own messages, how many it has posted and in which slot each is, and how many it has read of
    each other rank; all ranks read all of it. It is safe because a message is counted as posted after it is written,
    and as read after its reader has finished, with a fence in between; a slot is reused only when all have read it.
    """

    def __init__(self, memory: memoryview, ranks: int, count: int, dtype: torch.dtype, room: int) -> None:
        self._room, stride = room, self._stride(ranks, room) // 8
        self._table = memory[: 8 * ranks * stride].cast("Q")
        self._posted = [rank * stride for rank in range(ranks)]  # positions in the table
        self._read = [[place + 1 + source for source in range(ranks)] for place in self._posted]
        self._where = [place + 1 + ranks for place in self._posted]
        front, nbytes = pages(8 * ranks * stride), pages(count * dtype.itemsize)
        self._slots = [
            [tensor_in(memory, dtype, count, front + (rank * (room + 1) + slot) * nbytes) for slot in range(room + 1)]
            for rank in range(ranks)
        ]

    @staticmethod
    def _stride(ranks: int, room: int) -> int:
        """Return the bytes of a rank's part of the table: messages posted, messages read of each rank, and slots."""
        return lines(8 * (1 + ranks + room))

    @classmethod
    def bytes_for(cls, ranks: int, count: int, dtype: torch.dtype, room: int) -> int:
        """Return the bytes that it takes; memory for messages is only used when that many are unread."""
        return pages(ranks * cls._stride(ranks, room)) + ranks * (room + 1) * pages(count * dtype.itemsize)

    def unread(self, source: int, reader: int) -> int:
        """Return how many messages of one rank another rank has not read."""
        number = self._table[self._posted[source]] - self._table[self._read[reader][source]]
        fence()
        return number

    def post(self, source: int, message: torch.Tensor, readers: Iterable[int]) -> None:
        """For the sender: write a message into the first slot that all readers have read, so that few are used."""
        number = self._table[self._posted[source]]
        used = max((self.unread(source, reader) for reader in readers), default=0)
        taken = {self._table[self._where[source] + earlier % self._room] for earlier in range(number - used, number)}
        slot = next(slot for slot in range(self._room + 1) if slot not in taken)
        self._slots[source][slot].copy_(message)
        self._table[self._where[source] + number % self._room] = slot
        fence()
        self._table[self._posted[source]] = number + 1

    def oldest(self, source: int, reader: int) -> torch.Tensor:
        """For a reader: return the oldest unread message, which must exist, in its sender's memory."""
        number = self._table[self._read[reader][source]]
        return self._slots[source][self._table[self._where[source] + number % self._room]]

    def mark_as_read(self, source: int, reader: int) -> None:
        """For a reader: release the oldest message, so that the sender may reuse its slot."""
        fence()
        self._table[self._read[reader][source]] += 1
