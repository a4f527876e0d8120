"""Who holds what in a hybrid: for each rank its place, its samples, its layers and its slices of their weights.

The table is made from the same plan as a run, and needs no ranks. Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from dlab.data.table import Bars, Table
from dlab.sharding.drawing import INK, colour_of
from dlab.sharding.slices import write_slices
from dlab.strategies.hybrid.drawing import CutPicture
from dlab.strategies.hybrid.plan import HybridPlan, Slices, block_of
from dlab.strategies.hybrid.strategy import Hybrid

_ROOM = 60  # characters for slices in a cell; `rows` has all


class HybridRow(NamedTuple):
    """What one rank holds."""

    rank: int
    coordinates: dict[str, int]
    samples: range | None  # of a batch
    stages: tuple[int, ...]
    layers: tuple[str, ...]
    slices: dict[str, Slices]  # by the name of the parameter

    @property
    def numbers(self) -> int:
        """The number of weights that the rank holds."""
        return sum(prod(each.stop - each.start for each in held) for held in self.slices.values())


class HybridTable(Table):
    """A row for each rank: coordinates, samples, layers, and slices of weights; a notebook shows a picture above it.

    `rows` has all ranks, also those that a long table leaves out, with all slices, of which a cell names the first cut
    ones.
    """

    def __init__(self, plan: HybridPlan, axes: Mapping[str, int], samples: int | None, kind: str) -> None:
        self.plan, self.axes, self.samples, self.kind = plan, dict(axes), samples, kind
        self.rows = [self._row(rank) for rank in range(prod(plan.grid.shape))]

    def _row(self, rank: int) -> HybridRow:
        at, stages = self.plan.grid.coordinates_of(rank), self.plan.stages_of(rank)
        names = (each.name for each in self.plan.layers if each.stage in stages)
        samples = None
        if self.samples is not None:
            part = torch.arange(self.samples).tensor_split(self.plan.lengths["dp"])[at["dp"]]
            samples = range(int(part[0]), int(part[-1]) + 1)
        layers = tuple(dict.fromkeys(map(block_of, names)))
        return HybridRow(
            rank, {name: at[name] for name in self.axes}, samples, stages, layers, self.plan.slices_of(rank)
        )

    def heading(self) -> list[str]:
        samples = "samples" if self.samples is None else f"samples of {self.samples:,}"
        return ["rank", *self.axes, samples, "layers", "weights", "slices"]

    def cells(self, row: HybridRow) -> list[int | str | Bars]:
        copies, copy_number = self.plan.lengths["dp"], self.plan.grid.coordinates_of(row.rank)["dp"]
        if row.samples is not None:
            samples = f"{row.samples.start}:{row.samples.stop}"
        else:
            samples = f"part {copy_number} of {copies}" if copies > 1 else "all"
        return [row.rank, *row.coordinates.values(), samples, ", ".join(row.layers), row.numbers, self._slices(row)]

    def _slices(self, row: HybridRow) -> str:
        """Return the slices that are cut, and what the rank holds whole, as far as these fit."""
        whole = [name for name, held in row.slices.items() if self._is_whole(name, held)]
        cut = [write_slices(name, held) for name, held in row.slices.items() if name not in whole]
        told = [_some(cut)] if cut else []
        return "; ".join(told + [f"whole: {_some(whole)}"] * bool(whole))

    def _is_whole(self, name: str, held: Slices) -> bool:
        shape = self.plan.entries[name].shape
        return all(each.stop - each.start == length for each, length in zip(held, shape, strict=True))

    def between(self, hidden: Sequence[HybridRow]) -> str:
        return f"… ranks {hidden[0].rank} to {hidden[-1].rank}: {len(hidden)} more"

    def picture(self) -> CutPicture:
        """Return a picture of the cuts inside the layers, of those between them, and of both."""
        return CutPicture(self.plan, self.axes, self.kind)

    def _html_row(self, row: HybridRow) -> str:
        at, lengths = self.plan.grid.coordinates_of(row.rank), self.plan.lengths
        colour = colour_of((at["pp"], at["tp"]), (lengths["pp"], lengths["tp"]))
        *cells, slices = self.cells(row)
        sides = ["right" if isinstance(cell, int) else "left" for cell in cells]
        texts = [f"<td style='text-align:{side}'>{escape(str(c))}</td>" for c, side in zip(cells, sides, strict=True)]
        style = f"text-align:left;background-color:{colour};color:{INK}"
        return f"<tr>{''.join(texts)}<td style='{style}'>{escape(str(slices))}</td></tr>"

    def _repr_html_(self) -> str:
        return f"<div>{self.picture()._repr_html_()}</div>{super()._repr_html_()}"


def _some(names: Sequence[str]) -> str:
    """Return as many names as fit, at least one, and the number of the others."""
    fitting = [count for count in range(2, len(names) + 1) if len(", ".join(names[:count])) <= _ROOM]
    shown = max(fitting, default=1)
    return ", ".join(names[:shown]) + f" and {len(names) - shown} more" * (shown < len(names))


def hybrid_table(
    model: nn.Module | Callable[[], nn.Module],
    axes: Mapping[str, int] | Hybrid,
    samples: int | None = None,
    **options: Any,
) -> HybridTable:
    """Return a table of what each rank of a hybrid holds: its samples, its layers, and its slices of their weights.

    `model` is a network, or a function that makes one; `axes` and the `options` are those of `dlab.Hybrid`, or `axes`
    is one. `samples` is the size of a global batch, as in `dlab.train(…, batch_size=samples, order="global")`; of a
    batch in this order a rank gets these samples. No rank need be there, and no weight is made.

    >>> dlab.hybrid_table(dlab.TwoLayer, {"dp": 2, "tp": 2}, samples=128)
    rank  dp  tp  samples of 128  layers  weights  slices
       0   0   0  0:64            1, 3      39760  1.weight[0:50, 0:784], 1.bias[0:50], 3.weight[0:10, 0:50]; …
       1   0   1  0:64            1, 3      39760  1.weight[50:100, 0:784], 1.bias[50:100] and 1 more; whole: 3.bias
       …
    """
    if isinstance(axes, Hybrid):
        if options:
            raise ValueError(f"axes is a strategy already: give it {', '.join(options)} when it is made")
        strategy = axes
    else:
        strategy = Hybrid(axes, **options)
    copies = strategy.axes.get("dp", 1)
    if samples is not None and (type(samples) is not int or samples < copies):
        raise ValueError(f"samples={samples!r}: give the number of samples of a batch, {copies} or more, 1 for each dp")
    made = _without_values(model)
    return HybridTable(strategy.plan(made), strategy.axes, samples, type(made).__name__)


def _without_values(model: Any) -> nn.Module:
    """Return a network to plan with: a new one without values, or a copy with the same weights."""
    if isinstance(model, nn.Module):  # a plan leaves hooks in the modules
        tensors = (*model.parameters(), *model.buffers())
        return copy.deepcopy(model, {id(each): each for each in tensors})
    made = None
    if callable(model):
        try:
            with torch.device("meta"):
                made = model()
        except (NotImplementedError, RuntimeError):  # it computes with values
            made = model()
    if not isinstance(made, nn.Module):
        raise TypeError(f"model={model!r:.80}: give a torch.nn.Module, or a function that makes one, as dlab.MLP")
    return made
