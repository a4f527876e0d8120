"""Messages that a rank posts once for all others, each of whom reads them when it has time, where they lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import lines, pages
from dlab.memory.tensors import tensor_in


class PostedMessages:
    """Up to `room` messages of `count` numbers per rank that somebody has not read yet.

    Each rank writes its own messages, how many it has posted and in which slot each lies, and how many it has read of
    each other rank; all ranks read all of it. It is safe because a message is counted as posted after it is written,
    and as read after its reader is through, with a fence in between; only a slot that all have read is used again.
    """

    def __init__(self, memory: memoryview, ranks: int, count: int, dtype: torch.dtype, room: int) -> None:
        self._room, stride = room, self._stride(ranks, room) // 8
        self._table = memory[: 8 * ranks * stride].cast("Q")
        self._posted = [rank * stride for rank in range(ranks)]  # places in the table
        self._read = [[place + 1 + source for source in range(ranks)] for place in self._posted]
        self._where = [place + 1 + ranks for place in self._posted]
        front, nbytes = pages(8 * ranks * stride), pages(count * dtype.itemsize)
        self._slots = [
            [tensor_in(memory, dtype, count, front + (rank * (room + 1) + slot) * nbytes) for slot in range(room + 1)]
            for rank in range(ranks)
        ]

    @staticmethod
    def _stride(ranks: int, room: int) -> int:
        """The bytes that a rank has in the table: how many it has posted, how many it has read of each, and where."""
        return lines(8 * (1 + ranks + room))

    @classmethod
    def bytes_for(cls, ranks: int, count: int, dtype: torch.dtype, room: int) -> int:
        """What it takes; memory for messages is only used when that many lie unread."""
        return pages(ranks * cls._stride(ranks, room)) + ranks * (room + 1) * pages(count * dtype.itemsize)

    def unread(self, source: int, reader: int) -> int:
        """How many messages of one rank another one has not read."""
        number = self._table[self._posted[source]] - self._table[self._read[reader][source]]
        fence()
        return number

    def post(self, source: int, message: torch.Tensor, readers: Iterable[int]) -> None:
        """For their sender: into the first slot that no reader needs any more, so that few are used."""
        number = self._table[self._posted[source]]
        used = max((self.unread(source, reader) for reader in readers), default=0)
        taken = {self._table[self._where[source] + earlier % self._room] for earlier in range(number - used, number)}
        slot = next(slot for slot in range(self._room + 1) if slot not in taken)
        self._slots[source][slot].copy_(message)
        self._table[self._where[source] + number % self._room] = slot
        fence()
        self._table[self._posted[source]] = number + 1

    def oldest(self, source: int, reader: int) -> torch.Tensor:
        """For a reader, if there is one unread: the oldest message, where its sender has put it."""
        number = self._table[self._read[reader][source]]
        return self._slots[source][self._table[self._where[source] + number % self._room]]

    def mark_as_read(self, source: int, reader: int) -> None:
        """For a reader: the sender may use the place of the oldest again."""
        fence()
        self._table[self._read[reader][source]] += 1
