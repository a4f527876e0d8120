"""Tensors on shared memory, and the bytes of tensors that go through it: nothing is copied."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dlab.memory.mapping import pages


def tensor_in(memory: Any, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """A tensor on these bytes; it keeps the memory."""
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's content where it lies; hold the tensor as long as you use it."""
    if not tensor.is_cpu:
        raise TypeError(f"shared memory carries tensors on the CPU, not on {tensor.device}: call .cpu() first")
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class Arena:
    """A slot of `nbytes` for each rank.

    Every rank writes and reads every slot; it is safe because between a write and a read of the same bytes the ranks
    meet at a `PlanTable`, or one has announced it in `Counters`.
    """

    def __init__(self, memory: memoryview, nbytes: int, ranks: int, number: int = 0) -> None:
        self.number, self.nbytes, self._memory, self._ranks = number, nbytes, memory, range(ranks)

    @staticmethod
    def room(nbytes: int, ranks: int) -> int:
        """The bytes that it takes."""
        return ranks * pages(nbytes)

    def slot(self, rank: int) -> Any:
        """The bytes of a slot, as an object that can be watched: it goes when the last tensor in it is gone."""
        return (ctypes.c_char * self.nbytes).from_buffer(self._memory, rank * pages(self.nbytes))

    def rows(self, offset: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The same stretch of every slot."""
        return [tensor_in(self.slot(rank), dtype, count, offset) for rank in self._ranks]
