"""Slots in which a worker passes gradients to a server, and sees when it may write the next one."""

from __future__ import annotations

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import LINE, PAGE


class PushCount:
    """The number of pushes that the server has applied, and the staleness of the last one.

    The server writes, the worker reads; it is safe because the count is written last, after a fence.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._numbers = memory[offset : offset + LINE].cast("Q")

    def read(self) -> tuple[int, int]:
        """Return the number of pushes that are applied, and the staleness of the last one."""
        applied = self._numbers[0]
        fence()
        return applied, self._numbers[1]

    def write(self, applied: int, staleness: int) -> None:
        """Publish both; a worker that sees them also sees all that the server wrote before."""
        self._numbers[1] = staleness
        fence()
        self._numbers[0] = applied


class GradientSlot:
    """Memory for one part of a key: a gradient, or rows of it, or weights.

    The worker writes, the server that keeps the part reads, and counts the pushes that it has applied; it is safe
    because the worker writes the next gradient only when that count allows it, and posts it by a `RequestQueue`.
    """

    def __init__(self, memory: memoryview, offset: int, count: int, dtype: torch.dtype, rows: int) -> None:
        self._pushes = PushCount(memory, offset)
        self.begin = offset + PAGE
        nbytes = self._room(count, dtype, rows)
        self.raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=self.begin)
        self.gradient = self.raw[: count * dtype.itemsize].view(dtype)

    @classmethod
    def room(cls, count: int, dtype: torch.dtype, rows: int) -> int:
        """Return the bytes that it takes: a page for the count, and the gradient."""
        return PAGE + cls._room(count, dtype, rows)

    @staticmethod
    def _room(count: int, dtype: torch.dtype, rows: int) -> int:
        """Return the bytes of a gradient with the spans it leaves out, at most every second weight, or of rows."""
        return count * dtype.itemsize + 8 * rows + 16

    @property
    def applied(self) -> int:
        """The number of pushes that the server has applied."""
        return self._pushes.read()[0]

    @property
    def staleness(self) -> int:
        """The number of updates between the last push and the pull that it was computed on."""
        return self._pushes.read()[1]

    def apply(self, staleness: int) -> None:
        """For the server: count one more push as applied."""
        self._pushes.write(self.applied + 1, staleness)

    def spans_after(self, nbytes: int, count: int) -> torch.Tensor:
        """Return the memory behind a gradient for `count` spans of weights that it leaves out: begin and end."""
        start = -(-nbytes // 8) * 8
        return self.raw[start : start + 16 * count].view(torch.int64).view(count, 2)
