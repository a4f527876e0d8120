"""Loss curves: what every rank's loss did, step by step, and how several runs compare. Taught in `00_tour.ipynb`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.still import COLOURS, View

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30  # characters of a curve in the terminal
_SMOOTH = 20  # steps in the running mean that is drawn over the raw loss
_POINTS = 600  # of a curve that go to the browser; a screen has no more columns for it

Curve = list[tuple[float, float, float]]  # (step, loss, seconds since the first event of its run)


class LossCurves(View):
    """The losses that ranks have logged (`dlab.log(step=…, loss=…)`), a line per rank and one for their mean.

    Given runs by name, `LossCurves({"sync": run.events, …})`, one line for the mean of each. `by="time"` draws against
    the seconds since the run began instead of steps.

    >>> LossCurves(run.events)
    rank 0   59 steps   2.301 → 0.412  █▇▆▅▃▂▂▁
    """

    script, title = "curves", "Loss"

    def __init__(self, events: Iterable[Event] | Mapping[str, Iterable[Event]] = (), by: str = "step") -> None:
        if by not in ("step", "time"):
            raise ValueError(f"by={by!r}: loss curves are drawn by 'step' or by 'time'")
        self.by = by
        self.runs: dict[str, dict[int, Curve]] = {}  # by name of the run and rank
        self._begun: dict[str, float] = {}
        if isinstance(events, Mapping):
            for name, of_run in events.items():
                self.add(of_run, name)
        else:
            self.add(events)

    def add(self, events: Iterable[Event], run: str = "") -> None:
        """Take in more events, of the run with this name if there are several."""
        ranks = self.runs.setdefault(run, {})
        for event in events:
            begun = self._begun.setdefault(run, event.time)
            if event.kind == "log" and "loss" in event.data:
                curve = ranks.setdefault(event.rank, [])
                curve.append((event.data.get("step", len(curve)), event.data["loss"], max(0.0, event.time - begun)))

    @property
    def empty(self) -> bool:
        """Has no rank logged a loss?"""
        return not any(self.runs.values())

    @property
    def losses(self) -> dict[int, Curve]:
        """By rank, of the only run or the first one."""
        return next(iter(self.runs.values()), {})

    def lines(self, every: int = 1) -> list[tuple[str, Curve]]:
        """What is drawn: (name, curve); ranks of a single run and their mean, or the means of several runs."""
        if len(self.runs) > 1:
            return [(name, _mean(of_run, every)) for name, of_run in self.runs.items() if of_run]
        ranks = sorted(self.losses.items())
        lines = [(f"rank {rank}", [curve[at] for at in _places(len(curve), every)]) for rank, curve in ranks]
        return [*lines, ("mean", _mean(self.losses, every))] if len(lines) > 1 else lines

    def figure(self) -> Figure:
        """Each rank's own loss, faint, and its running mean, strong: after an all-reduce only the batches differ."""
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        xlabel, column = ("step", 0) if self.by == "step" else ("seconds since the run began", 2)
        axes = figure.add_subplot(xlabel=xlabel, ylabel="loss of the rank's own batch")
        for number, (name, curve) in enumerate(self.lines()):
            points = list(zip(*curve, strict=True))
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
        """Every curve as three arrays, thinned out to what a screen can show."""
        several = len(self.runs) > 1
        longest = max((len(curve) for ranks in self.runs.values() for curve in ranks.values()), default=0)
        curves = []
        for number, (name, curve) in enumerate(self.lines(every=longest // _POINTS + 1)):
            thin = np.asarray(curve, dtype=np.float32)
            strong = several or name == "mean" or len(self.losses) == 1
            columns = {"step": thin[:, 0].copy(), "loss": thin[:, 1].copy(), "time": thin[:, 2].copy()}
            curves.append({"name": name, "colour": -1 if name == "mean" else number, "strong": strong, **columns})
        return {"curves": curves}

    @property
    def alt(self) -> str:
        """What the picture shows."""
        if self.empty:
            return "Loss curves: no rank has logged a loss yet."
        last = {name: [curve[-1][1] for curve in ranks.values()] for name, ranks in self.runs.items() if ranks}
        if len(self.runs) == 1:
            last = {f"rank {rank}": [curve[-1][1]] for rank, curve in sorted(self.losses.items())}
        ends = ", ".join(f"{name} {sum(losses) / len(losses):.2f}" for name, losses in list(last.items())[:8])
        count = f"{len(self.runs)} runs" if len(self.runs) > 1 else f"{len(self.losses)} ranks"
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
    means = []
    for place in _places(max(map(len, ranks.values()), default=0), every):
        there = [curve[place] for curve in ranks.values() if place < len(curve)]
        losses = sum(loss for _, loss, _ in there) / len(there)
        means.append((there[0][0], losses, max(time for _, _, time in there)))
    return means


def _places(length: int, every: int) -> list[int]:
    """Every so many of a curve's points, and the last one in any case."""
    return [*range(0, length - 1, every), length - 1] if length else []


def _running_mean(values: tuple[float, ...]) -> list[float]:
    """The mean of the last `_SMOOTH` values at each point."""
    sums = [0.0, *accumulate(values)]
    starts = (max(0, end - _SMOOTH) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def _spark(curve: Curve) -> str:
    """A curve in block characters."""
    count = min(_WIDTH, len(curve))
    picked = [curve[index * len(curve) // count][1] for index in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_BARS[int((value - low) / (high - low or 1.0) * (len(_BARS) - 1))] for value in picked)
