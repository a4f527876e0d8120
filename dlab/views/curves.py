"""Loss curves: what every rank's loss did, step by step, and how several runs compare. Taught in `00_tour.ipynb`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.columns import Arrivals, Column, Table
from dlab.views.still import COLOURS, View

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30  # characters of a curve in the terminal
_SMOOTH = 10  # steps to either side in the running mean that is drawn over the raw loss; fewer in a short run
_POINTS = 600  # of a curve that go to the browser; a screen has no more columns for it

Curve = Column  # a row per point: step, loss, seconds since the first event of its run


class LossCurves(View):
    """The losses that ranks have logged (`dlab.log(step=…, loss=…)`), a line per rank and one for their mean.

    Given runs by name, `LossCurves({"sync": run.events, …})`, one line for the mean of each. `by="time"` draws against
    the seconds since the run began instead of steps; the mean is then that of all losses that came about this time.

    >>> LossCurves(run.events)
    rank 0   59 steps   2.301 → 0.412  █▇▆▅▃▂▂▁
    """

    script, title = "curves", "Loss"

    def __init__(self, events: Iterable[Event] | Mapping[str, Iterable[Event]] = (), by: str = "step") -> None:
        if by not in ("step", "time"):
            raise ValueError(f"by={by!r}: loss curves are drawn by 'step' or by 'time'")
        self.by = by
        self._curves: dict[str, dict[int, Table]] = {}  # by name of the run and rank
        self._begun: dict[str, float] = {}
        if isinstance(events, Mapping):
            for name, of_run in events.items():
                self.add(of_run, name)
        else:
            self.add(events)

    def add(self, events: Iterable[Event] | Arrivals, run: str = "") -> None:
        """Take in more events, of the run with this name if there are several."""
        arrived, ranks = Arrivals.of(events), self._curves.setdefault(run, {})
        if not arrived:
            return
        begun = self._begun.setdefault(run, arrived.first)
        for rank, logged in arrived.logged.items():
            if points := logged.having("loss"):
                curve = ranks.setdefault(rank, Table(3))
                counted = np.arange(len(curve), len(curve) + len(points), dtype=np.float64)  # if no step is told
                seconds = np.maximum(0.0, points.times - begun)
                curve.extend(points.column("step", counted), points.column("loss"), seconds)

    @property
    def empty(self) -> bool:
        """Has no rank logged a loss?"""
        return not any(self._curves.values())

    @property
    def runs(self) -> dict[str, dict[int, Curve]]:
        """By name of the run and rank."""
        return {name: {rank: curve.rows for rank, curve in ranks.items()} for name, ranks in self._curves.items()}

    @property
    def losses(self) -> dict[int, Curve]:
        """By rank, of the only run or the first one."""
        return next(iter(self.runs.values()), {})

    def lines(self, every: int = 1, by: str | None = None) -> list[tuple[str, Curve]]:
        """What is drawn: (name, curve); ranks of a single run and their mean, or the means of several runs."""
        mean = _mean if (by or self.by) == "step" else _merge
        if len(runs := self.runs) > 1:
            return [(name, mean(of_run, every)) for name, of_run in runs.items() if of_run]
        ranks = sorted(self.losses.items())
        lines = [(f"rank {rank}", curve[_places(len(curve), every)]) for rank, curve in ranks]
        return [*lines, ("mean", mean(self.losses, every))] if len(lines) > 1 else lines

    def figure(self) -> Figure:
        """Each rank's own loss, faint, and its running mean, strong: after an all-reduce only the batches differ."""
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        xlabel, column = ("step", 0) if self.by == "step" else ("seconds since the run began", 2)
        axes = figure.add_subplot(xlabel=xlabel, ylabel="loss of the rank's own batch")
        for number, (name, curve) in enumerate(self.lines()):
            points = curve.T
            colour = "#404040" if name == "mean" else COLOURS[number % len(COLOURS)]
            if name != "mean":
                axes.plot(points[column], points[1], color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(points[column], _running_mean(points[1]), color=colour, linewidth=1.6, label=name)
        if not self.empty:
            axes.legend(ncols=2, frameon=False)
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        return figure

    def data(self) -> dict[str, Any]:
        """Every curve as arrays, by step and by time, thinned out to what a screen can show."""
        several, alone = len(self.runs) > 1, len(self.losses) == 1
        longest = max((len(curve) for ranks in self.runs.values() for curve in ranks.values()), default=0)
        every = longest // _POINTS + 1
        curves = []
        for number, ((name, by_step), (_, by_time)) in enumerate(
            zip(self.lines(every, "step"), self.lines(every, "time"), strict=True)
        ):
            mean = several or name == "mean"
            curve = {"name": name, "colour": -1 if name == "mean" else number, "strong": mean or alone}
            curves.append(curve | _columns(by_step) | ({"timely": _columns(by_time)} if mean else {}))
        return {"curves": curves, "by": self.by}

    @property
    def alt(self) -> str:
        """What the picture shows."""
        if self.empty:
            return "Loss curves: no rank has logged a loss yet."
        runs = self.runs
        last = {name: [curve[-1, 1] for curve in ranks.values()] for name, ranks in runs.items() if ranks}
        if len(runs) == 1:
            last = {f"rank {rank}": [curve[-1, 1]] for rank, curve in sorted(self.losses.items())}
        ends = ", ".join(f"{name} {sum(losses) / len(losses):.2f}" for name, losses in list(last.items())[:8])
        count = f"{len(runs)} runs" if len(runs) > 1 else f"{len(self.losses)} ranks"
        return f"Loss by {self.by} of {count}; the last losses are {ends}."

    def __str__(self) -> str:
        if self.empty:
            return "no rank has logged a loss yet"
        width = max(len(name) for name, _ in self.lines()) + 2
        return "\n".join(
            f"{name:<{width}} {len(curve):>5} steps   {curve[0][1]:.3f} → {curve[-1][1]:.3f}  {_spark(curve)}"
            for name, curve in self.lines()
        )


def _mean(ranks: Mapping[int, Curve], every: int) -> Curve:
    """The mean over ranks of their n-th losses; the step is the first one's, the time that of the last to get there."""
    places = _places(max(map(len, ranks.values()), default=0), every)
    means, count = np.zeros((len(places), 3)), np.zeros(len(places))
    for curve in ranks.values():
        there = curve[places[places < len(curve)]]
        steps, losses, times = means[: len(there)].T
        steps[:] = np.where(count[: len(there)] == 0, there[:, 0], steps)
        losses += there[:, 1]
        times[:] = np.maximum(times, there[:, 2])
        count[: len(there)] += 1
    means[:, 1] /= count
    return means


def _merge(ranks: Mapping[int, Curve], every: int) -> Curve:
    """The means of as many losses as there are ranks, in the order in which they were told, whoever told them."""
    rows = np.concatenate([curve[_places(len(curve), every)] for curve in ranks.values()] or [np.zeros((0, 3))])
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    starts = np.arange(0, len(rows), len(ranks) or 1)
    return np.add.reduceat(rows, starts) / np.diff(np.append(starts, len(rows)))[:, None] if len(rows) else rows


def _columns(curve: Curve) -> dict[str, Column]:
    return dict(zip(("step", "loss", "time"), curve.T.astype(np.float32), strict=True))


def _places(length: int, every: int) -> np.ndarray:
    """Every so many of a curve's points, and the last one in any case."""
    return np.append(np.arange(0, length - 1, every), length - 1) if length else np.arange(0)


def _running_mean(values: Column) -> Column:
    """The mean around each point, as far to the left as to the right: a mean of the last values would lag behind."""
    places, last = np.arange(len(values)), len(values) - 1
    reach = np.minimum(min(_SMOOTH, len(values) // 20), np.minimum(places, last - places))
    sums = np.append(0.0, np.cumsum(values))
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def _spark(curve: Curve) -> str:
    """A curve in block characters."""
    count = min(_WIDTH, len(curve))
    picked = [float(curve[index * len(curve) // count, 1]) for index in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_BARS[int((value - low) / (high - low or 1.0) * (len(_BARS) - 1))] for value in picked)
