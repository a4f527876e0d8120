"""How many bytes a rank holds, measured: of parameters, gradients and the optimizer, and the most at any time.

`dlab.cost.zero_memory` has the formula. Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dlab.collectives import all_gather
from dlab.data.table import Bars, Table
from dlab.kinds import LOG
from dlab.transports import Transport


class HeldBytes(TypedDict):
    """The bytes that a rank holds."""

    parameters: int  # its own part, or all that the stage leaves whole
    gradients: int
    optimizer: int  # with master copies, if the parameters have 16 bits
    most: int  # of all these and what was there for a while, at any time until now


class Meter:
    """Counts what is there only for a while: gathered layers, and gradients that wait until they are given away."""

    def __init__(self) -> None:
        self._gathered: list[tuple[StorageWeakRef, int]] = []  # some of them may have been freed
        self._there = self._waiting = 0  # bytes of these, and of gradients
        self.most = 0

    def gathered(self, whole: torch.Tensor) -> None:
        """Count a gathered layer, until its memory is really free, whoever still uses it."""
        self._gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        self._there += whole.nbytes
        self._look()

    def waits(self, nbytes: int) -> None:
        """Count a gradient that waits; a negative number when it has been given away."""
        self._waiting += nbytes
        self._look()

    def _look(self) -> None:
        """Raise the maximum if there is more than ever; what has been freed is only looked for in that case."""
        if self._waiting + self._there > self.most:
            self._gathered = [(storage, nbytes) for storage, nbytes in self._gathered if not storage.expired()]
            self._there = sum(nbytes for _, nbytes in self._gathered)
            self.most = max(self.most, self._waiting + self._there)


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)


def table_of(held: HeldBytes, group: Transport) -> MemoryTable:
    """Return the table of all ranks, each of which must call this; costs an all-gather of four numbers."""
    mine = torch.tensor(list(held.values()))
    rows = [dict(zip(held, each.tolist(), strict=True)) for each in all_gather(mine, group)]
    return MemoryTable(rows)  # type: ignore[arg-type]


class MemoryTable(Table):
    """A table with a row per rank: the bytes that it holds.

    >>> MemoryTable([{"parameters": 2_700_000, "gradients": 700_000, "optimizer": 700_000, "most": 6_000_000}])
    rank  parameters  gradients  optimizer  most at a time
       0  2.7 MB      700 kB     700 kB     6 MB
    """

    def __init__(self, rows: Sequence[HeldBytes]) -> None:
        self.rows: list[tuple[int, HeldBytes]] = list(enumerate(rows))

    @classmethod
    def of(cls, events: Iterable[Any]) -> MemoryTable:
        """Return the table of a run with ZeRO, from its events; the last numbers of each rank count.

        >>> MemoryTable.of(run.events)
        """
        found: dict[int, HeldBytes] = {}
        for event in events:
            if event.kind == LOG and "held" in event.data:
                found[event.rank] = event.data["held"]
        return cls([found[rank] for rank in sorted(found)])

    def heading(self) -> list[str]:
        """Return the names of the columns."""
        return ["rank", "parameters", "gradients", "optimizer", "most at a time"]

    def cells(self, row: tuple[int, HeldBytes]) -> list[int | str | Bars]:
        """Return a rank and what it holds."""
        rank, held = row
        return [rank, *(_bytes(held[name]) for name in ("parameters", "gradients", "optimizer", "most"))]

    def between(self, hidden: Sequence[tuple[int, HeldBytes]]) -> str:
        """Return a line about the ranks that are not shown."""
        return f"… ranks {hidden[0][0]} to {hidden[-1][0]}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
