"""Who holds what: the samples of each rank and their labels, and the slice of each tensor that a rank holds.

Taught in `01_data_partitioning.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlab.events import Event
from dlab.kinds import SHARD, SLICE, ShardData
from dlab.views.base import COLOURS, View
from dlab.views.columns import Arrivals

if TYPE_CHECKING:
    from dlab.data import DataPartitioner

_LABELS = 60  # with more labels than this a row of bars is unreadable
_TEXT_LABELS = 20
_RANKS = 32  # rows of a set of shards, and of a tensor in the terminal
_TENSORS = 12  # tensors whose slices are drawn
_BARS = "▁▂▃▄▅▆▇█"
_INK = "#202020"

Slice = tuple[tuple[int, int], ...]  # (start, stop) in each dimension


class HeldSamples(NamedTuple):
    """One rank's part of a data set: the number of samples, in total and by label."""

    time: float
    samples: int
    histogram: list[int]
    labels: list[int | str]


class SlicedTensor:
    """A tensor that is spread over the ranks: its shape, and the slice that each rank holds."""

    def __init__(self, name: str, shape: Iterable[int]) -> None:
        self.name, self.shape = name, tuple(shape)
        self.slices: dict[int, tuple[float, Slice]] = {}  # by rank: the time of the event, and the slice

    def parts(self) -> list[tuple[Slice, list[int]]]:
        """Return each different slice with the ranks that hold it; several if it is replicated."""
        parts: dict[Slice, list[int]] = {}
        for rank, (_, piece) in sorted(self.slices.items()):
            parts.setdefault(piece, []).append(rank)
        return sorted(parts.items(), key=lambda part: part[1])

    def sides(self) -> tuple[int | None, int | None]:
        """Return the dimensions drawn downwards and to the right: those that are cut, if at most two are."""
        every = range(len(self.shape))
        cut = [d for d in every if any(piece[d] != (0, self.shape[d]) for piece, _ in self.parts())]
        shown = sorted([*cut, *(d for d in every if d not in cut)][:2])
        if len(shown) < 2:
            return None, shown[0] if shown else None
        return shown[0], shown[1]

    @property
    def drawable(self) -> bool:
        """Return whether it can be drawn as one rectangle, which needs cuts in at most two dimensions."""
        others = [d for d in range(len(self.shape)) if d not in self.sides()]
        return all(piece[d] == (0, self.shape[d]) for piece, _ in self.parts() for d in others)

    def __str__(self) -> str:
        return f"{self.name} ({' × '.join(map(str, self.shape)) or 'a single number'})"


class ShardView(View):
    """The shards of data sets and the slices of tensors, from each rank's last events of kind `shard` and `slice`.

    `shard`: {"name": "train", "samples": 15000, "histogram": [samples with label 0, with label 1, …]}, with "labels"
    if they are not 0, 1, 2, …; `slice`: {"tensor": "w", "shape": [4, 6], "slice": [[0, 2], [0, 6]]}.

    >>> ShardView(shard_events(parts))
    train   samples  labels 0..9  per label
    rank 0    15000  ▇█▇▇▇▆▇█▇▇   1348..1683
    """

    script, title = "shards", "Who holds what"
    reads = (SHARD, SLICE)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.shards: dict[str, dict[int, HeldSamples]] = {}  # by name of the data set and rank
        self.tensors: dict[str, SlicedTensor] = {}
        self._begun: float | None = None
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; a new report of a rank replaces its previous one."""
        if not (arrived := self.take(events)):
            return
        if self._begun is None:
            self._begun = arrived.first
        for event in arrived.others:
            if event.kind == SHARD:
                data, moment = event.data, max(0.0, event.time - self._begun)
                histogram = list(data.get("histogram") or [])
                labels = list(data.get("labels") or range(len(histogram)))
                shard = HeldSamples(moment, data["samples"], histogram, labels)
                self.shards.setdefault(data.get("name", "data"), {})[event.rank] = shard
            elif event.kind == SLICE:
                data, moment = event.data, max(0.0, event.time - self._begun)
                name, shape = data["tensor"], tuple(data["shape"])
                if name not in self.tensors or self.tensors[name].shape != shape:
                    self.tensors[name] = SlicedTensor(name, shape)
                piece = tuple((start, stop) for start, stop in data["slice"])
                self.tensors[name].slices[event.rank] = moment, piece

    @property
    def empty(self) -> bool:
        """Whether no rank has reported what it holds."""
        return not self.shards and not self.tensors

    def _drawn(self) -> list[SlicedTensor]:
        """Return the tensors to draw; of too many, some from all parts of the network."""
        drawable = [tensor for tensor in self.tensors.values() if tensor.drawable]
        count = min(_TENSORS, len(drawable))
        return [drawable[place * len(drawable) // count] for place in range(count)]

    def figure(self) -> Figure:
        """Draw a row of bars per rank and data set, and below them each tensor as a rectangle cut into its slices."""
        tensors = self._drawn()
        pairs = [tensors[start : start + 2] for start in range(0, len(tensors), 2)]
        heights = [0.5 + 0.42 * min(len(ranks), _RANKS) for ranks in self.shards.values()]
        heights += [max(_height(tensor) for tensor in pair) for pair in pairs]
        figure = Figure(figsize=(7, sum(heights, 0.3)), layout="constrained")
        if not heights:
            return figure
        rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for row, (name, ranks) in zip(rows, self.shards.items(), strict=False):
            _draw_shards(row.add_subplot(), name, dict(sorted(ranks.items())[:_RANKS]))
        for row, pair in zip(rows[len(self.shards) :], pairs, strict=True):
            for place, tensor in enumerate(pair):
                _draw_tensor(row.add_subplot(1, len(pair), place + 1), tensor)
        return figure

    def data(self) -> dict[str, Any]:
        """Return the rows of each data set and the rectangles of each tensor."""
        sets = []
        for name, ranks in self.shards.items():
            rows = [{"rank": rank, **shard._asdict()} for rank, shard in sorted(ranks.items())[:_RANKS]]
            for row in rows:
                if len(row["histogram"]) > _LABELS:
                    row["histogram"] = row["labels"] = []
            sets.append({"name": name, "rows": rows})
        tensors = []
        for tensor in self._drawn():
            down, right = tensor.sides()
            parts = [
                {
                    "ranks": ranks,
                    "words": _few(ranks),
                    "time": min(tensor.slices[rank][0] for rank in ranks),
                    "rows": [0, 1] if down is None else piece[down],
                    "columns": [0, 1] if right is None else piece[right],
                }
                for piece, ranks in tensor.parts()
            ]
            sizes = [1 if side is None else tensor.shape[side] for side in (down, right)]
            tensors.append({"name": str(tensor), "sides": [down, right], "sizes": sizes, "parts": parts})
        return {"sets": sets, "tensors": tensors, "end": self._last()}

    def _last(self) -> float:
        shards = [shard.time for ranks in self.shards.values() for shard in ranks.values()]
        return max(
            [*shards, *(moment for tensor in self.tensors.values() for moment, _ in tensor.slices.values())], default=0
        )

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Shards: no rank has reported what it holds yet."
        sentences = []
        for name, ranks in self.shards.items():
            counts = ", ".join(f"rank {rank} {shard.samples}" for rank, shard in sorted(ranks.items())[:_RANKS])
            sentences.append(f"Samples of {name}, with a bar per label: {counts}.")
        for tensor in self.tensors.values():
            parts = "; ".join(f"{_write(piece)} on {_name(ranks)}" for piece, ranks in tensor.parts()[:_RANKS])
            sentences.append(f"{tensor} is cut into {len(tensor.parts())}: {parts}.")
        return " ".join(sentences)

    def text(self) -> str:
        """Return the shards and slices as text for a terminal."""
        if self.empty:
            return "no rank has reported what it holds yet"
        tables = [_shard_lines(name, ranks) for name, ranks in self.shards.items()]
        tables += [_slice_lines(tensor) for tensor in self.tensors.values()]
        return "\n\n".join("\n".join(lines) for lines in tables)


def shard_events(partitioner: DataPartitioner, name: str = "train") -> list[Event]:
    """Return the events that show how a `DataPartitioner` has split its data: one of kind `shard` per rank."""
    now, events = time.time(), []
    for row in partitioner.table().rows:
        data: ShardData = {"name": name, "samples": row.count}
        if row.histogram is not None:
            data |= {"histogram": list(row.histogram.values()), "labels": list(row.histogram)}
        events.append(Event(now, row.rank, SHARD, dict(data)))
    return events


def _shard_lines(name: str, ranks: dict[int, HeldSamples]) -> list[str]:
    """Return a line per rank; all bars have the same scale."""
    rows = sorted(ranks.items())
    top = max((max(shard.histogram, default=0) for _, shard in rows), default=0)
    bars = max(len(shard.histogram) for _, shard in rows)
    labels = _label_names(rows[0][1].labels) if 0 < bars <= _TEXT_LABELS else ""
    table = [[name, "samples", f"labels {labels}" if labels else "", "per label" if bars else ""]]
    for rank, shard in rows[:_RANKS]:
        spread = f"{min(shard.histogram)}..{max(shard.histogram)}" if shard.histogram else ""
        drawn = "".join(_BARS[count * 7 // top] if count else "·" for count in shard.histogram) if labels else ""
        table.append([f"rank {rank}", str(shard.samples), drawn, spread])
    lines = _aligned(table, right=1)
    return [*lines, f"… {len(rows) - _RANKS} more ranks"] if len(rows) > _RANKS else lines


def _slice_lines(tensor: SlicedTensor) -> list[str]:
    """Return a line per rank: its slice, and its share of the whole tensor."""
    whole, table = prod(tensor.shape), [[str(tensor), "slice", "elements", "of the whole"]]
    for rank, (_, piece) in sorted(tensor.slices.items())[:_RANKS]:
        count = prod(stop - start for start, stop in piece)
        table.append([f"rank {rank}", _write(piece), str(count), f"{count / (whole or 1):.4g}"])
    lines = _aligned(table, right=2)
    hidden = len(tensor.slices) - _RANKS
    return [*lines, f"… {hidden} more ranks"] if hidden > 0 else lines


def _aligned(table: list[list[str]], right: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [f"{cell:{'>' if column == right else '<'}{widths[column]}}" for column, cell in enumerate(row)]
        lines.append("  ".join(cell for cell, width in zip(cells, widths, strict=True) if width).rstrip())
    return lines


def _label_names(labels: list[int | str]) -> str:
    first = labels[0] if labels else 0
    dense = len(labels) > 2 and isinstance(first, int) and labels == list(range(first, first + len(labels)))
    return f"{first}..{labels[-1]}" if dense else ", ".join(map(str, labels))


def _write(piece: Slice) -> str:
    """Write a slice in Python's notation: `[0:16, 392:784]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in piece)}]"


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _few(ranks: list[int]) -> str:
    """Write `0, 1, 2`, or `0 … 63` where there is no room for all ranks."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} … {ranks[-1]}"


def _draw_shards(axes: Axes, name: str, ranks: dict[int, HeldSamples]) -> None:
    """Draw a row per rank and a bar per label, all on the same scale."""
    top = max((max(shard.histogram, default=0) for shard in ranks.values()), default=0) or 1
    widest = max(ranks.values(), key=lambda shard: len(shard.histogram))
    drawn = len(widest.histogram) <= _LABELS
    for place, (rank, shard) in enumerate(ranks.items()):
        axes.axhline(place + 0.4, color="#C0C0C0", linewidth=0.8, zorder=0)
        if drawn:
            heights = [-0.8 * count / top for count in shard.histogram]
            axes.bar(range(len(heights)), heights, 0.8, bottom=place + 0.4, color=COLOURS[rank % len(COLOURS)])
    axes.set(ylim=(len(ranks) - 0.5, -0.6), title=f"samples of {name}")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(ranks)), [f"{shard.samples} samples" for shard in ranks.values()])
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    if drawn and widest.labels:
        every = -(-len(widest.labels) // 20)
        axes.set_xticks(range(0, len(widest.labels), every), list(map(str, widest.labels[::every])))
        axes.set_xlabel(f"label (the tallest bar is {top} samples)")
    else:
        axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _height(tensor: SlicedTensor) -> float:
    """Return the height of a tensor's picture in inches."""
    return 1.2 if tensor.sides()[0] is None else 2.3


def _draw_tensor(axes: Axes, tensor: SlicedTensor) -> None:
    """Draw the rectangle of the tensor; every slice has a colour and the numbers of the ranks that hold it."""
    down, right = tensor.sides()
    for piece, ranks in tensor.parts():
        top, bottom = (0, 1) if down is None else piece[down]
        start, stop = (0, 1) if right is None else piece[right]
        box: dict[str, Any] = {"facecolor": COLOURS[ranks[0] % len(COLOURS)], "edgecolor": "white", "linewidth": 1.5}
        axes.add_patch(Rectangle((start, top), stop - start, bottom - top, alpha=0.45, **box))
        axes.text((start + stop) / 2, (top + bottom) / 2, _few(ranks), ha="center", va="center", color=_INK)
    for axis, side in ((axes.yaxis, down), (axes.xaxis, right)):
        size = 1 if side is None else tensor.shape[side]
        cuts = {edge for piece, _ in tensor.parts() for edge in piece[side]} if side is not None else set()
        axis.set_ticks(sorted(cuts) if len(cuts) <= 9 else [0, size])
    axes.set(
        xlim=(0, 1 if right is None else tensor.shape[right] or 1), ylim=(1 if down is None else tensor.shape[down], 0)
    )
    axes.set_title(f"{tensor}: ranks", fontsize="medium")
    axes.set_xlabel("" if right is None else f"index in dimension {right}")
    axes.set_ylabel("" if down is None else f"index in dimension {down}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)
