"""Where a worker lays down a gradient for a server, and learns when it may lay down the next."""

from __future__ import annotations

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import LINE, PAGE


class PushCount:
    """How many pushes the server is through with, and how stale the last of them was.

    The server writes, the worker reads; it is safe because the count is written last, after a fence.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._numbers = memory[offset : offset + LINE].cast("Q")

    def read(self) -> tuple[int, int]:
        """The pushes that are in the weights, and the staleness of the last."""
        applied = self._numbers[0]
        fence()
        return applied, self._numbers[1]

    def write(self, applied: int, staleness: int) -> None:
        """Tell both; whatever the server has done before can be seen by who sees it."""
        self._numbers[1] = staleness
        fence()
        self._numbers[0] = applied


class GradientSlot:
    """Room for what belongs to one part of a key: a gradient, or rows of it, or weights.

    The worker writes, the server that keeps the part reads, and counts the pushes that are in the weights; it is safe
    because the worker lays down the next gradient only when that count says so, and asks by a `RequestQueue`.
    """

    def __init__(self, memory: memoryview, offset: int, count: int, dtype: torch.dtype, rows: int) -> None:
        self._pushes = PushCount(memory, offset)
        self.begin = offset + PAGE
        nbytes = self._room(count, dtype, rows)
        self.raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=self.begin)
        self.gradient = self.raw[: count * dtype.itemsize].view(dtype)

    @classmethod
    def room(cls, count: int, dtype: torch.dtype, rows: int) -> int:
        """The bytes that it takes: a page for the count, and the gradient."""
        return PAGE + cls._room(count, dtype, rows)

    @staticmethod
    def _room(count: int, dtype: torch.dtype, rows: int) -> int:
        """As it is, with spans that it leaves out, at most every second weight; or as rows with their numbers."""
        return count * dtype.itemsize + 8 * rows + 16

    @property
    def applied(self) -> int:
        """Pushes that the server is through with."""
        return self._pushes.read()[0]

    @property
    def staleness(self) -> int:
        """Of the last of them: updates by others between the pull that it was computed on and itself."""
        return self._pushes.read()[1]

    def apply(self, staleness: int) -> None:
        """For the server: one more."""
        self._pushes.write(self.applied + 1, staleness)

    def spans_after(self, nbytes: int, count: int) -> torch.Tensor:
        """Room behind a gradient of so many bytes for `count` spans of weights that it leaves out: begin and end."""
        start = -(-nbytes // 8) * 8
        return self.raw[start : start + 16 * count].view(torch.int64).view(count, 2)
