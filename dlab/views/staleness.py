"""Staleness: how old the weights were on which gradients were computed. Taught in `04_async_sgd.ipynb`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dlab.events import Event
from dlab.views.base import COLOURS, View
from dlab.views.columns import Arrivals

_SHOWN = 12  # ranks with their own row
_BINS = 40  # maximal number of bars in a row; a screen has no room for more
_BLOCKS = "▁▂▃▄▅▆▇█"


class StalenessRow(NamedTuple):
    """The updates of one rank, or of all ranks (-1): how many there were of each staleness."""

    name: str
    rank: int
    counts: Counter[int]

    @property
    def updates(self) -> int:
        return self.counts.total()

    @property
    def mean(self) -> float:
        return sum(staleness * count for staleness, count in self.counts.items()) / self.updates

    @property
    def most(self) -> int:
        return max(self.counts)


class Staleness(View):
    """The staleness of the gradients that each rank has applied, from `dlab.log(staleness=[0, 2, 1])`: a row per rank.

    The staleness of an update is the number of updates that were in the weights it was applied to, but not in those on
    which its gradient was computed. Rows are shares of a rank's own updates, so that fast and slow ranks can be
    compared.

    >>> Staleness(run.events)
    rank 0    96 updates   mean  1.4   most  5   0 █▃▂▁▁▁ 5
    """

    script, title = "staleness", "Staleness"
    reads = ("staleness",)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.counts: dict[int, Counter[int]] = {}  # by rank: the number of updates of each staleness
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Count the staleness of the updates in more events."""
        for rank, logged in self.take(events).logged.items():
            if logged.staleness:
                self.counts.setdefault(rank, Counter()).update(logged.staleness)

    @property
    def empty(self) -> bool:
        """Whether no rank has reported an update."""
        return not self.counts

    def rows(self) -> list[StalenessRow]:
        """Return a row for each of the first ranks, and one for all ranks together."""
        rows = [StalenessRow(f"rank {rank}", rank, counts) for rank, counts in sorted(self.counts.items())[:_SHOWN]]
        if len(self.counts) > 1:
            rows.append(StalenessRow("all", -1, sum(self.counts.values(), Counter())))
        return rows

    def bars(self) -> tuple[int, np.ndarray]:
        """Return how many values of staleness share a bar, and the heights: a row of shares for each of `rows()`."""
        highest = max((max(counts) for counts in self.counts.values()), default=0)
        width = -(-(highest + 1) // _BINS)
        shares = np.zeros((len(rows := self.rows()), highest // width + 1))
        for heights, row in zip(shares, rows, strict=True):
            for staleness, count in row.counts.items():
                heights[staleness // width] += count / row.updates
        return width, shares

    def figure(self) -> Figure:
        """Draw a histogram per rank, one below the other, on the same axis."""
        rows, (width, shares) = self.rows(), self.bars()
        figure = Figure(figsize=(7, 0.9 + 0.62 * max(len(rows), 2)), layout="constrained")
        label = "staleness: updates that the gradient's weights did not have"
        if not rows:
            figure.add_subplot(xlabel=label, ylabel="share of the updates")
            return figure
        grid = figure.subplots(len(rows), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        starts = np.arange(shares.shape[1]) * width
        for axes, row, heights in zip(grid, rows, shares, strict=True):
            colour = "#808080" if row.rank < 0 else COLOURS[row.rank % len(COLOURS)]
            axes.bar(starts + (width - 1) / 2, heights, width=0.9 * width, color=colour)
            axes.axvline(row.mean, color="black", linewidth=1.6)
            axes.set_ylabel(row.name, rotation=0, ha="right", va="center")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.yaxis.set_major_locator(MaxNLocator(2))
            axes.spines[["top", "right"]].set_visible(False)
            axes.text(1.01, 0.5, f"{row.updates} updates\nmean {row.mean:.1f}", transform=axes.transAxes, va="center")
        grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        grid[-1].set_xlabel(label)
        more = f"; {_SHOWN} of {len(self.counts)} ranks" if len(self.counts) > _SHOWN else ""
        figure.suptitle(f"share of the updates; the line is the mean{more}", fontsize=10)
        return figure

    def data(self) -> dict[str, Any]:
        """Return what the browser draws: a bar for each staleness."""
        width, shares = self.bars()
        rows = [
            {
                "name": row.name,
                "rank": row.rank,
                "updates": row.updates,
                "mean": row.mean,
                "shares": heights.astype(np.float32),
            }
            for row, heights in zip(self.rows(), shares, strict=True)
        ]
        return {"width": width, "rows": rows, "ranks": len(self.counts)}

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Staleness: no rank has reported an update yet."
        means = "; ".join(f"{row.name} mean {row.mean:.1f}, most {row.most}" for row in self.rows())
        return f"How stale gradients were when they were applied, a histogram per rank: {means}."

    def text(self) -> str:
        """Return the histograms as text for a terminal."""
        if self.empty:
            return "no rank has reported an update yet: dlab.log(staleness=[…])"
        width, shares = self.bars()
        last = width * shares.shape[1] - 1
        table = [(row.name, f"{row.updates}", f"{row.mean:.1f}", f"{row.most}") for row in self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for (name, *numbers), heights in zip(table, shares, strict=True):
            updates, mean, most = (f"{text:>{room}}" for text, room in zip(numbers, widths[1:], strict=True))
            lines.append(
                f"{name:<{widths[0]}}  {updates} updates   mean {mean}   most {most}   0 {_spark(heights)} {last}"
            )
        if len(self.counts) > _SHOWN:
            lines.insert(-1, f"… {len(self.counts) - _SHOWN} more ranks")
        return "\n".join(lines)


def _spark(shares: np.ndarray) -> str:
    """Draw a bar for each share and a dot for zero, so that a small share never looks like nothing."""
    heights = shares / shares.max() * (len(_BLOCKS) - 1)
    return "".join(_BLOCKS[round(height)] if share else "·" for share, height in zip(shares, heights, strict=True))
