"""All-reduce where the tensors lie: a slot per rank in memory that all ranks see; nothing is sent.

Each rank combines its own part of all slots, block by block so that a block stays in the cache, and writes the result
back into every slot. Two barriers, and the memory traffic of one read and one write of each slot.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from dlab.transports.checked import DTYPES
from dlab.transports.patience import Patience
from dlab.transports.shared import map_together

BLOCK = 128 << 10  # bytes: small enough for the cache, large enough that Python does not count
TIMEOUT = 600.0
_LINE = 8  # numbers of 8 bytes in a cache line
_PAGE = 4096


class Table:
    """A line of numbers per rank that all can read: says where each rank is, and what it is about to do."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._lines = map_together(8 * _LINE * self.size).cast("Q")
        self._count = 0

    def meet(self, *plan: int) -> None:
        """A barrier at which all ranks must have the same plan (up to 7 numbers); whoever differs is named."""
        start = self.rank * _LINE
        for place, number in enumerate(plan, start + 1):
            self._lines[place] = number
        self._count += 1
        self._lines[start] = self._count  # last: who sees the count sees the plan (x86 keeps the order of stores)
        for other in range(self.size):
            if self._lines[other * _LINE] < self._count:
                self._wait_for(other)
        for other in range(self.size) if plan else ():
            theirs = tuple(self._lines[other * _LINE + 1 : other * _LINE + 1 + len(plan)])
            if theirs != plan:
                raise ValueError(
                    f"rank {self.rank} brings {_tell(plan)} to an all-reduce and rank {other} {_tell(theirs)}: "
                    "all ranks must bring the same size, type and op"
                )

    def _wait_for(self, other: int) -> None:
        wait = Patience(TIMEOUT, lambda: f"rank {self.rank} has waited for rank {other} in an all-reduce")
        while self._lines[other * _LINE] < self._count:
            wait()


class Arena:
    """Memory with a slot of `nbytes` for each rank. Every rank must make it."""

    def __init__(self, nbytes: int) -> None:
        self.rank, self.size, self.nbytes = dist.get_rank(), dist.get_world_size(), nbytes
        self._stride = -(-nbytes // _PAGE) * _PAGE
        self._memory = map_together(max(_PAGE, self.size * self._stride))
        self._plans: dict[tuple[int, int, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}

    def slot(self, rank: int) -> Any:
        """The bytes of a slot, as an object that can be watched: it goes when the last tensor in it is gone."""
        return (ctypes.c_char * self.nbytes).from_buffer(self._memory, rank * self._stride)

    def combine(self, offset: int, dtype: torch.dtype, count: int, op: str) -> None:
        """My part of the work: combine my part of all slots and write it back into each."""
        key = (offset, count, dtype)
        if key not in self._plans:  # making the views takes longer than using them
            self._plans[key] = self._blocks(*key)
        for block in self._plans[key]:
            total = _COMBINE[op](block[0], block[1]) if self.size > 1 else block[0].clone()
            for other in block[2:]:
                _COMBINE[op](total, other, out=total)
            if op == "mean":
                total /= self.size
            for slot in block:
                slot.copy_(total)

    def _blocks(self, offset: int, count: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
        """The same block of every slot, for each block of my part."""
        if not count:
            return []
        rows = [tensor_in(self.slot(rank), dtype, count, offset) for rank in range(self.size)]
        parts = [row.tensor_split(self.size)[self.rank] for row in rows]
        cut = [part.split(BLOCK // dtype.itemsize) for part in parts]
        return [block for block in zip(*cut, strict=True) if block[0].numel()]


def tensor_in(slot: Any, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """A tensor in shared memory."""
    return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)


class Fused:
    """All-reduce through arenas, for the ranks of one process group on one host. Every rank must make it."""

    def __init__(self) -> None:
        self._table = Table()
        self._arenas: dict[int, tuple[int, Arena]] = {}  # by the address of my slot: its number, and the arena
        self._made = 0
        self._scratch = Arena(0)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that all-reduce need not copy. Every rank must call it."""
        count = prod(shape)
        self._table.meet(count, DTYPES.index(dtype), 0, 0, 0)
        arena = Arena(count * dtype.itemsize)
        self._made += 1
        slot = arena.slot(arena.rank)
        if count:
            start = ctypes.addressof(slot)
            self._arenas[start] = (self._made, arena)
            weakref.finalize(slot, self._arenas.pop, start, None)
        return tensor_in(slot, dtype, count).view(shape)

    def allreduce(self, row: torch.Tensor, op: str) -> None:
        """In place, on a contiguous row of numbers."""
        plan = (row.numel(), DTYPES.index(row.dtype), _OPS.index(op))
        nbytes = row.numel() * row.element_size()
        for start, (number, arena) in self._arenas.items():
            offset = row.data_ptr() - start
            if offset >= 0 and offset + nbytes <= arena.nbytes:
                self._table.meet(*plan, number, offset)
                arena.combine(offset, row.dtype, row.numel(), op)
                self._table.meet()
                return
        if nbytes > self._scratch.nbytes:
            self._table.meet(*plan, 0, 0)
            self._scratch = Arena(max(nbytes, 2 * self._scratch.nbytes))
        copy = tensor_in(self._scratch.slot(self._scratch.rank), row.dtype, row.numel())
        copy.copy_(row)
        self._table.meet(*plan, 0, 0)
        self._scratch.combine(0, row.dtype, row.numel(), op)
        self._table.meet()
        row.copy_(copy)


def _tell(plan: tuple[int, ...]) -> str:
    count, dtype, op, number, _ = plan
    where = "from shared_empty" if number else "of its own"
    return f"{count} {str(DTYPES[dtype]).removeprefix('torch.')} {where} for {_OPS[op]}"


_COMBINE: dict[str, Any] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
_OPS = tuple(_COMBINE)
