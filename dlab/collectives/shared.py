"""Reduce-scatter, all-gather and all-to-all through memory that all ranks of a host share; nothing is sent.

The others read a tensor from `shared_empty` in place: one copy, or one sum, and two barriers. A rank's private tensor
goes through a slot of shared memory in pieces that fit into the cache: one copy more, and a barrier for each piece.
Sharded operators and ZeRO are built on these three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dlab.collectives.ops import OPS, Tools, finish, prepare, tools
from dlab.collectives.shared_allreduce import BLOCK, NAMES, SharedAllReduce
from dlab.memory.mapping import LINE
from dlab.memory.plan_table import Plan
from dlab.transports import Transport
from dlab.transports.checked import header

PIECE = 512 << 10  # bytes of a private tensor that are in a slot at a time; there is room for two


class SharedCollectives(SharedAllReduce):
    """All-reduce and three more collectives over the ranks of a host; made by `SharedCollectives.connect`.

    Tensors are contiguous, and of one size on all ranks. The pieces of private ones use the two halves of a slot in
    turn. No rank overwrites what another still reads: before it fills a half again it has passed the barrier of the
    other half, which a reader only reaches when it has finished.
    """

    ROOM = SharedAllReduce.ROOM + 2 * PIECE

    def __init__(self, memory: memoryview, transport: Transport, timeout: float) -> None:
        super().__init__(memory, transport, timeout)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._half = 0
        self._cuts: dict[int, list[slice]] = {}  # by the number of items
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], list[list[Any]]] = {}

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write the tensors of all ranks into the output, one after another; a rank reads (n-1)/n of it from others."""
        plan, theirs, using, row = self._find("all-gather", tensor, "sum")
        length, result = tensor.numel(), using.view(_flat(output))
        if theirs is not None:
            self.table.meet(plan)
            for rank, other in enumerate(theirs):
                using.copy(result[rank * length : (rank + 1) * length], other)
            self.table.meet()
            return
        mine, step = using.view(row), PIECE // row.element_size()
        using.copy(result[self.rank * length : (self.rank + 1) * length], mine)
        for begin in range(0, max(1, length), step):
            piece = mine[begin : begin + step]
            slots = self._next_slots(row.dtype, (len(piece),), using)
            using.copy(slots[self.rank][0], piece)
            self.table.meet(plan)
            for rank in self._others:
                start = rank * length + begin
                using.copy(result[start : start + len(piece)], slots[rank][0])

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """Write this rank's part of the combination of all tensors, cut like `tensor_split`, into the output."""
        plan, theirs, using, row = self._find("reduce-scatter", tensor, op)
        result, combine = using.view(_flat(output)), using.combine
        if theirs is not None:
            self.table.meet(plan)
            for begin, end, first, second, others in theirs:
                block = result[begin:end]
                combine(first, second, block)
                for other in others:
                    combine(block, other, block)
            self.table.meet()
        else:
            parts = self._cut(using.view(row))
            own = parts[self.rank]

            def add(rank: int, begin: int, piece: Any) -> None:
                so_far, span = own if rank == self._others[0] else result, slice(begin, begin + len(piece))
                combine(so_far[span], piece, result[span])

            self._swap(parts, row.dtype, using, plan, add)
        finish(result, op, self.size)

    def all_to_all(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write rank r's part for this rank into part r of the output; all tensors have n equal parts."""
        plan, theirs, using, row = self._find("all-to-all", tensor, "sum")
        results = self._cut(using.view(_flat(output)))
        if theirs is not None:
            self.table.meet(plan)
            for result, other in zip(results, theirs, strict=True):
                using.copy(result, other)
            self.table.meet()
            return
        parts = self._cut(using.view(row))
        using.copy(results[self.rank], parts[self.rank])

        def keep(rank: int, begin: int, piece: Any) -> None:
            using.copy(results[rank][begin : begin + len(piece)], piece)

        self._swap(parts, row.dtype, using, plan, keep)

    def _swap(
        self, parts: list[Any], dtype: torch.dtype, using: Tools, plan: Plan, take: Callable[[int, int, Any], None]
    ) -> None:
        """Write a piece of each part for its rank into the slot, and read what the others have written for this one."""
        step = _stride(self.size) // dtype.itemsize
        for begin in range(0, max(1, len(parts[0])), step):  # no part is longer than the first
            pieces = [part[begin : begin + step] for part in parts]
            slots = self._next_slots(dtype, tuple(map(len, pieces)), using)
            for rank in self._others:
                using.copy(slots[self.rank][rank], pieces[rank])
            self.table.meet(plan)
            for rank in self._others:
                take(rank, begin, slots[rank][self.rank])

    # --- where things are

    def _find(self, name: str, tensor: torch.Tensor, op: str) -> tuple[Plan, Any, Tools, torch.Tensor]:
        """Return the plan; for a shared tensor, what this rank reads of each rank's; the tools; the tensor as a row.

        A reduce-scatter reads in blocks that fit into the cache. What was found for a shared tensor is cached, because
        finding it takes longer than a small collective.
        """
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype, name if op == "sum" else f"{name} {op}"
        if (known := self._known.get(key)) is not None and tensor.is_contiguous():
            return known
        row, _ = prepare(tensor, op)
        shared, using = self.find(row), tools(row.dtype, op)
        number, offset = (shared[0].number, shared[1]) if shared is not None else (0, 0)
        plan = (*header(row), OPS.index(op), number, offset, NAMES.index(name))
        if shared is None:
            return plan, None, using, row
        begin, end = (0, len(row)) if name == "all-gather" else self._bounds(len(row))
        theirs = [
            using.view(part) for part in shared[0].rows(offset + begin * row.element_size(), row.dtype, end - begin)
        ]
        read = _blocks(theirs, BLOCK // row.element_size()) if name == "reduce-scatter" else theirs
        self._known[key] = known = plan, read, using, row.new_empty(0)  # the row itself would keep the tensor alive
        return known

    def _bounds(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """Find where a rank's part of so many numbers begins and ends, like `tensor_split`; this rank's by default."""
        rank = self.rank if rank is None else rank
        length, longer = divmod(count, self.size)
        begin = rank * length + min(rank, longer)
        return begin, begin + length + (rank < longer)

    def _cut(self, whole: Any) -> list[Any]:
        if (cuts := self._cuts.get(len(whole))) is None:
            cuts = self._cuts[len(whole)] = [slice(*self._bounds(len(whole), rank)) for rank in range(self.size)]
        return [whole[cut] for cut in cuts]

    def _next_slots(self, dtype: torch.dtype, counts: tuple[int, ...], using: Tools) -> list[list[Any]]:
        """Return, by rank, the other half of its slot, with a region for each of these numbers of items."""
        self._half = 1 - self._half
        key = self._half, dtype, counts
        if key not in self._views:
            start, stride = SharedAllReduce.ROOM + self._half * PIECE, _stride(len(counts))
            regions = [self._scratch.rows(start + number * stride, dtype, count) for number, count in enumerate(counts)]
            self._views[key] = [list(map(using.view, slot)) for slot in zip(*regions, strict=True)]
        return self._views[key]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)  # a view takes a tenth of a small collective


def _blocks(parts: list[Any], step: int) -> list[tuple[int, int, Any, Any, list[Any]]]:
    """Cut the same part of every rank's tensor into blocks: begin, end, the first two ranks' block, and the others'."""
    begins = range(0, len(parts[0]), step)
    cuts = [[part[begin : begin + step] for part in parts] for begin in begins]
    return [(begin, begin + step, cut[0], cut[1], cut[2:]) for begin, cut in zip(begins, cuts, strict=True)]


def _stride(regions: int) -> int:
    """Return the bytes of one of so many regions in half a slot."""
    return PIECE // regions // LINE * LINE
