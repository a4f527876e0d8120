"""Tensors in shared memory, and the bytes of tensors that are sent through it, without copies."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dlab.memory.mapping import pages


def tensor_in(memory: Any, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """Return a tensor on these bytes, which keeps the memory alive."""
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor without a copy; keep the tensor alive as long as you use them."""
    if not tensor.is_cpu:
        raise TypeError(f"shared memory carries tensors on the CPU, not on {tensor.device}: call .cpu() first")
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class Arena:
    """A slot of `nbytes` for each rank.

    Every rank writes and reads every slot; it is safe because between a write and a read of the same bytes the ranks
    pass a barrier of a `PlanTable`, or the writer has announced it in `Counters`.
    """

    def __init__(self, memory: memoryview, nbytes: int, ranks: int, number: int = 0) -> None:
        self.number, self.nbytes, self._memory, self._ranks = number, nbytes, memory, range(ranks)

    @staticmethod
    def room(nbytes: int, ranks: int) -> int:
        """Return the bytes that it takes for so many ranks."""
        return ranks * pages(nbytes)

    def slot(self, rank: int) -> Any:
        """Return the bytes of a slot as an object that is freed, and can be watched, with the last tensor in it."""
        return (ctypes.c_char * self.nbytes).from_buffer(self._memory, rank * pages(self.nbytes))

    def rows(self, offset: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return the same part of every slot as tensors."""
        return [tensor_in(self.slot(rank), dtype, count, offset) for rank in self._ranks]
