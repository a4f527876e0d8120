"""All-reduce in place, in memory that all ranks of a host share, with a slot per rank; nothing is sent.

Each rank combines its own part of all slots, in blocks that fit into the cache, and writes the result back into every
slot. This costs two barriers, and the memory traffic of one read and one write of each slot.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any, TypeVar

import torch

from dlab.collectives.ops import OPS, Tools, finish, prepare, tools
from dlab.memory.mapping import PAGE, pages
from dlab.memory.plan_table import Plan, PlanTable
from dlab.memory.tensors import Arena, tensor_in
from dlab.transports import Transport, share_memory
from dlab.transports.checked import DTYPES, header

_STRIDED = torch.strided  # a global is found faster than an attribute of torch
BLOCK = 128 << 10  # bytes: small enough for the cache, large enough to hide Python's overhead
CHUNK = 1 << 20  # bytes of a private tensor that go through shared memory at a time
SMALL = 128 << 10  # bytes up to which it is faster that every rank sums everything, with one barrier instead of two

NAMES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "shared_empty")  # of collectives, for plans
# a plan holds the number of items, their type, the op, the number of the arena, the offset in it, and the collective
Block = tuple[Any, list[Any]]  # the same block of one rank's slot and of the others', as the tools' views
Slots = tuple[list[tuple[int, int]], list[list[Any]]]  # begin and end of each part; by rank and part, its region
Key = tuple[int, int, torch.dtype, str]  # address, number of items, type, op
F = TypeVar("F", bound="SharedAllReduce")


def _name(plan: Plan) -> str:
    """Name the collective of a plan: `an all-reduce`, `a reduce-scatter`, `shared_empty`."""
    name = NAMES[plan[5]]
    return name if name == "shared_empty" else f"{'an' if name[0] == 'a' else 'a'} {name}"


def _compare(mine: int, plan: Plan, theirs: int, other: Plan) -> str:
    """Describe how the plans of two ranks differ, for an error message."""
    if other[5] == plan[5]:
        return (
            f"rank {mine} brings {_tell(plan)} to {_name(plan)} and rank {theirs} brings {_tell(other)}: "
            f"all ranks must bring the same size{', type and op' if _has_op(plan) else ' and type'}"
        )
    return (
        f"rank {mine} is in {_name(plan)} and rank {theirs} in {_name(other)}: "
        "all ranks must call the same collectives in the same order"
    )


def _tell(plan: Plan) -> str:
    count, dtype, op, number, _, _ = plan
    where = "from shared_empty" if number else "of its own"
    how = f" for {OPS[op]}" if _has_op(plan) else ""
    return f"{count} {str(DTYPES[dtype]).removeprefix('torch.')} {where}{how}"


def _has_op(plan: Plan) -> bool:
    return NAMES[plan[5]] in ("all-reduce", "reduce-scatter")


class SharedAllReduce:
    """All-reduce through shared memory, for ranks on one host; made by `SharedAllReduce.connect`."""

    ROOM = CHUNK + 2 * SMALL  # bytes of a slot for private tensors

    def __init__(self, memory: memoryview, transport: Transport, timeout: float) -> None:
        self.rank, self.size, self.transport = transport.rank, transport.size, transport
        self.table = PlanTable(memory, self.rank, transport.members, timeout, _name, _compare)
        self.table.peers.together = transport.peers is not None and transport.peers.together
        self._scratch = Arena(memory[PlanTable.room(self.size) :], self.ROOM, self.size)
        self._turn = 0  # small tensors use two regions in turn
        self._arenas: dict[int, Arena] = {}  # by the address of this rank's slot
        self._made = 0
        # what was prepared for a tensor in an arena is cached: making views takes longer than using them
        self._known: dict[Key, Any] = {}  # by its address, length and type, and the operation
        self._slots: dict[tuple[int, torch.dtype], Slots] = {}  # of private tensors' chunks
        self._small: dict[Key, tuple[Plan, list[Any], Tools]] = {}

    @classmethod
    def connect(cls: type[F], transport: Transport, timeout: float = 600.0) -> F | None:
        """Connect all ranks, each of which must call it; None if they are not on one host."""
        memory = share_memory(transport, PlanTable.room(transport.size) + Arena.room(cls.ROOM, transport.size))
        return None if memory is None else cls(memory, transport, timeout)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor that all-reduce need not copy; every rank must call it."""
        count = prod(shape)
        nbytes = count * dtype.itemsize
        self.table.meet((count, DTYPES.index(dtype), 0, 0, 0, NAMES.index("shared_empty")))
        self._made += 1
        arena = Arena(self._share(Arena.room(nbytes, self.size)), nbytes, self.size, self._made)
        slot = arena.slot(self.rank)
        if count:
            start = ctypes.addressof(slot)
            self._arenas[start] = arena
            weakref.finalize(slot, self._forget, start)
        return tensor_in(slot, dtype, count).view(shape)

    def common(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate one tensor that all ranks share, so that all read what one writes; every rank must call it."""
        return tensor_in(self._share(pages(count * dtype.itemsize)), dtype, count)

    def _share(self, nbytes: int) -> memoryview:
        """Allocate more memory between these ranks, which can share it; every rank must call it."""
        memory = share_memory(self.transport, nbytes)
        assert memory is not None
        return memory

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor from `empty`, or a part of one, in the slots of all ranks; any other is refused."""
        row, _ = prepare(tensor, "sum")
        found = self.find(row)
        if found is None:
            raise ValueError("this tensor is not in memory that all ranks share: make it with shared_empty")
        arena, offset = found
        return arena.rows(offset, row.dtype, row.numel())

    def find(self, row: torch.Tensor) -> tuple[Arena, int] | None:
        """Return the arena that holds a flat tensor, and the offset in it; None if it is private."""
        address, nbytes = row.data_ptr(), row.numel() * row.element_size()
        for start, arena in self._arenas.items():
            if nbytes and start <= address and address + nbytes <= start + arena.nbytes:
                return arena, address - start
        return None

    def _forget(self, start: int) -> None:
        end = start + self._arenas.pop(start).nbytes
        self._known = {key: known for key, known in self._known.items() if not start <= key[0] < end}

    def allreduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        if tensor.layout is _STRIDED and tensor.is_contiguous():
            known = self._known.get((tensor.data_ptr(), tensor.numel(), tensor.dtype, op))
            if known is not None:
                plan, blocks, using = known
                self._reduce_shared(plan, blocks, using, op)
                return
        row, _ = prepare(tensor, op)
        if self.size == 1:
            return
        if (found := self._look_up(row, op)) is not None:
            self._reduce_shared(*found, op)
        elif row.numel() * row.element_size() <= SMALL:
            self._reduce_small(row, op)
        else:
            self._reduce_private(row, op)

    def _reduce_shared(self, plan: Plan, blocks: list[Block], using: Tools, op: str) -> None:
        """Reduce tensors in an arena: each rank combines its own part of all of them in place."""
        self.table.meet(plan)
        reduce_blocks(blocks, using, op)
        self.table.meet()

    def _look_up(self, tensor: torch.Tensor, op: str) -> tuple[Plan, list[Block], Tools] | None:
        """Return the plan, the blocks of this rank's part in every slot, and the tools; None for a private tensor."""
        found = self.find(tensor)
        if found is None:
            return None
        (arena, offset), using, count, dtype = found, tools(tensor.dtype, op), tensor.numel(), tensor.dtype
        parts = [row.tensor_split(self.size)[self.rank] for row in arena.rows(offset, dtype, count)]
        plan = (*header(tensor), OPS.index(op), arena.number, offset, 0)
        known = plan, blocks_of(parts, using), using
        self._known[tensor.data_ptr(), count, dtype, op] = known
        return known

    def _reduce_small(self, row: torch.Tensor, op: str) -> None:
        """Reduce a small private tensor: all ranks write theirs, and each sums all of them in the same order.

        The next call uses another region, and the one after that this one again: by then all ranks have passed the next
        barrier, and so have read it.
        """
        self._turn = 1 - self._turn
        key = (self._turn, row.numel(), row.dtype, op)
        if key not in self._small:
            using, rows = tools(row.dtype, op), self._scratch.rows(CHUNK + self._turn * SMALL, row.dtype, row.numel())
            self._small[key] = (*header(row), OPS.index(op), 0, 0, 0), list(map(using.view, rows)), using
        plan, rows, (view, combine, copy) = self._small[key]
        mine = view(row)
        copy(rows[self.rank], mine)
        self.table.meet(plan)
        combine(rows[0], rows[1], mine)
        for other in rows[2:]:
            combine(mine, other, mine)
        finish(mine, op, self.size)

    def _reduce_private(self, row: torch.Tensor, op: str) -> None:
        """Reduce a private tensor: each rank writes the others' parts into its slot, and reads back their results.

        This is done in chunks, so that the slots stay in the cache. A rank reads its own part in place. A part has the
        same region of a slot in every chunk, so a rank may write the next chunk while others still read its result.
        """
        plan = (*header(row), OPS.index(op), 0, 0, 0)
        using, others = tools(row.dtype, op), [rank for rank in range(self.size) if rank != self.rank]
        view, combine, copy = using
        whole, length = view(row), self.size * (_region(self.size) // row.element_size())
        for start in range(0, len(whole), length):
            chunk = whole[start : start + length]
            bounds, slots = self._slots_for(len(chunk), row.dtype, using)
            parts = [chunk[begin:end] for begin, end in bounds]
            mine = parts[self.rank]
            for other in others:
                copy(slots[self.rank][other], parts[other])
            self.table.meet(plan)
            for other in others:
                combine(mine, slots[other][self.rank], mine)
            finish(mine, op, self.size)
            copy(slots[self.rank][self.rank], mine)
            self.table.meet()
            for other in others:
                copy(parts[other], slots[other][other])

    def _slots_for(self, count: int, dtype: torch.dtype, using: Tools) -> Slots:
        """Return where the parts of a chunk begin and end, and every rank's slot, with a region for each part."""
        if (count, dtype) not in self._slots:
            bounds = [(count * part // self.size, count * (part + 1) // self.size) for part in range(self.size)]
            regions = [
                self._scratch.rows(part * _region(self.size), dtype, end - begin)
                for part, (begin, end) in enumerate(bounds)
            ]
            slots = [list(map(using.view, slot)) for slot in zip(*regions, strict=True)]
            self._slots[count, dtype] = bounds, slots
        return self._slots[count, dtype]


def blocks_of(parts: list[torch.Tensor], using: Tools) -> list[Block]:
    """Cut the same part of every slot into blocks that fit into the cache."""
    cuts = [map(using.view, part.split(BLOCK // part.element_size())) for part in parts]
    return [(first, others) for first, *others in zip(*cuts, strict=True) if len(first)]


def reduce_blocks(blocks: list[Block], using: Tools, op: str, spread: bool = True) -> None:
    """Combine each block of all slots in the first of them; with `spread`, copy the result to the others."""
    _, combine, copy = using
    for first, others in blocks:
        for other in others:
            combine(first, other, first)
        if op == "mean":  # asked here, too, since a call takes longer than to sum a small block
            finish(first, op, 1 + len(others))
        if spread:
            for other in others:
                copy(other, first)


def _region(size: int) -> int:
    """Return the bytes of a slot for one rank's part."""
    return CHUNK // size // PAGE * PAGE
