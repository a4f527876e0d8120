"""Loss curves: the loss of every rank, step by step, and a comparison of several runs. Taught in `00_tour.ipynb`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlab.events import Event
from dlab.views.base import COLOURS, View, places_of
from dlab.views.columns import Arrivals, Column, GrowingTable
from dlab.views.usable import text

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30  # characters of a curve in the terminal
_SMOOTH = 10  # steps on either side in the running mean drawn over the raw loss; fewer in a short run
_POINTS = 600  # points of a curve sent to the browser; a screen has no more columns for it
_NAMED = 8  # ranks named in the legend; with more there is neither room nor a colour for each
_EXPLODED, _TOP = 8.0, 2.5  # multiples of the first loss: one above _EXPLODED cuts the picture off at _TOP
_TOLD = 2  # sentences about losses that are not finite; another one says how many more there are
_CHARACTERS = 90  # length of a line of a note

Curve = Column  # a row per point: step, loss, seconds since the first event of its run


class LossCurves(View):
    """The losses that ranks have logged (`dlab.log(step=…, loss=…)`), with a line per rank and one for their mean.

    Given runs by name, `LossCurves({"sync": run.events, …})`, it draws one line for the mean of each. `by="time"` draws
    against the seconds since the run began; the mean is then taken over all losses logged at about the same time.

    >>> LossCurves(run.events)
    rank 0   59 steps   2.301 → 0.412  █▇▆▅▃▂▂▁
    """

    script, title, awaited = "curves", "Loss", True
    reads = ("loss",)

    def __init__(self, events: Iterable[Event] | Mapping[str, Iterable[Event]] = (), by: str = "step") -> None:
        if by not in ("step", "time"):
            raise ValueError(f"by={by!r}: loss curves are drawn by 'step' or by 'time'")
        self.by = by
        self._curves: dict[str, dict[int, GrowingTable]] = {}  # by name of the run and by rank
        self._begun: dict[str, float] = {}
        self.left_out = Counter[str]()
        if isinstance(events, Mapping):
            for name, of_run in events.items():
                self.add(of_run, name)
        else:
            self.add(events)

    def add(self, events: Iterable[Event] | Arrivals, run: str = "") -> None:
        """Add more events, of the run with this name if there are several."""
        run = text(str(run)) or ""
        arrived, ranks = self.take(events), self._curves.setdefault(run, {})
        if not arrived:
            return
        begun = self._begun.setdefault(run, arrived.first)
        for rank, logged in arrived.logged.items():
            if points := logged.having("loss"):
                curve = ranks.setdefault(rank, GrowingTable(3))
                counted = np.arange(len(curve), len(curve) + len(points), dtype=np.float64)  # if no step is logged
                seconds = np.maximum(0.0, points.times - begun)
                curve.extend(points.column("step", counted), points.column("loss"), seconds)

    @property
    def empty(self) -> bool:
        """Whether no rank has logged a loss."""
        return not any(self._curves.values())

    @property
    def runs(self) -> dict[str, dict[int, Curve]]:
        """The curves by name of the run and by rank."""
        return {name: {rank: curve.rows for rank, curve in ranks.items()} for name, ranks in self._curves.items()}

    @property
    def losses(self) -> dict[int, Curve]:
        """The curves by rank, of the only run or the first one."""
        return next(iter(self.runs.values()), {})

    def lines(self, every: int = 1, by: str | None = None) -> list[tuple[str, Curve]]:
        """Return the lines as (name, curve): the ranks of a single run and their mean, or the means of several runs."""
        mean = _mean if (by or self.by) == "step" else _merge
        if len(runs := self.runs) > 1:
            return [(name, mean(of_run, every)) for name, of_run in runs.items() if of_run]
        ranks = sorted(self.losses.items())
        lines = [(f"rank {rank}", curve[_places(len(curve), every)]) for rank, curve in ranks]
        return [*lines, ("mean", mean(self.losses, every))] if len(lines) > 1 else lines

    def _colours(self, names: list[str]) -> list[int]:
        """Return an index into COLOURS for each line, -1 for the mean."""
        if len(self.runs) > 1:
            return places_of(names)
        return [*sorted(self.losses), *[-1] * (len(names) - len(self.losses))]

    def top(self) -> float | None:
        """The loss at which the picture is cut off because one has exploded, so that the others stay readable."""
        finite = [
            losses[np.isfinite(losses)] for ranks in self.runs.values() for losses in (c[:, 1] for c in ranks.values())
        ]
        first = max((float(losses[0]) for losses in finite if len(losses)), default=0.0)
        exploded = any(len(losses) and losses.max() > _EXPLODED * first for losses in finite)
        return _TOP * first if exploded and first > 0 else None

    def _lowest(self) -> float:
        losses = [curve[np.isfinite(curve[:, 1]), 1] for ranks in self.runs.values() for curve in ranks.values()]
        return min((float(each.min()) for each in losses if len(each)), default=0.0)

    def lost(self) -> dict[int, list[tuple[str, Column]]]:
        """Return, by number of the line, where it leaves the picture and how: `▲` above the top, `✕` no longer finite.

        A cross is drawn at the height of the last finite loss of its curve.
        """
        top, found = self.top() or np.inf, dict[int, list[tuple[str, Column]]]()
        for number, (_, curves) in enumerate(self._groups()):
            marks: dict[str, list[Column]] = {"▲": [], "✕": []}
            for curve in curves:
                finite = np.isfinite(curve[:, 1])
                marks["▲"] += list(curve[finite & (curve[:, 1] > top)][:1])
                for first in np.flatnonzero(~finite)[:1]:
                    step, _, time = curve[first]
                    marks["✕"].append(np.array([step, curve[first - 1, 1] if first else np.inf, time]))
            firsts = [(sign, min(ends, key=lambda end: end[2])) for sign, ends in marks.items() if ends]
            if firsts:
                found[number] = firsts
        return found

    def _groups(self) -> list[tuple[str, list[Curve]]]:
        """Return the owner of each line, except the mean of a single run, and the curves it is made of."""
        if len(self.runs) > 1:
            return [(name, list(ranks.values())) for name, ranks in self.runs.items() if ranks]
        return [(f"rank {rank}", [curve]) for rank, curve in sorted(self.losses.items())]

    def broken(self) -> dict[tuple[str, float], list[str]]:
        """Return whose losses are not finite, by what they have (`not been a number`, `been infinite`) since when."""
        found: dict[tuple[str, float], list[str]] = {}
        for name, curves in self._groups():
            firsts = [curve[~np.isfinite(curve[:, 1])][0] for curve in curves if not np.isfinite(curve[:, 1]).all()]
            if firsts:
                step, loss, _ = min(firsts, key=lambda point: point[2])
                what = "not been a number" if np.isnan(loss) else "been infinite" if loss > 0 else "been minus infinity"
                found.setdefault((what, float(step)), []).append(name)
        return found

    def note(self) -> str:
        """Say what the picture cannot show: how high a loss went, and since when one is not finite."""
        curves = [curve for ranks in self.runs.values() for curve in ranks.values()]
        words = []
        if self.top() is not None:
            highest = max(float(losses.max()) for c in curves if len(losses := c[np.isfinite(c[:, 1]), 1]))
            words.append(f"▲ up to {highest:.2g}")
        broken = [
            f"the loss of {_some(names, len(self._groups()))} has {what} since step {_number(step)}"
            for (what, step), names in self.broken().items()
        ]
        if len(broken) > _TOLD:
            broken[_TOLD:] = [f"and {len(broken) - _TOLD} more"]
        if broken:
            words.append(f"✕ {', '.join(broken)}: is the learning rate too large?")
        return "; ".join(words)

    def figure(self) -> Figure:
        """Draw each rank's loss faintly and its running mean strongly; after an all-reduce only the batches differ."""
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        xlabel, column = ("step", 0) if self.by == "step" else ("seconds since the run began", 2)
        axes = figure.add_subplot(xlabel=xlabel, ylabel="loss of the rank's own batch")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=self.by == "step", steps=[1, 2, 2.5, 5, 10]))
        lines, lost, top = self.lines(), self.lost(), self.top() or np.inf
        crowd = len(self.runs) == 1 and len(self.losses) > _NAMED
        for number, ((name, curve), place) in enumerate(zip(lines, self._colours([n for n, _ in lines]), strict=True)):
            x, losses = curve[:, column], np.where(np.isfinite(curve[:, 1]), curve[:, 1], np.nan)
            colour = "#404040" if place < 0 else COLOURS[place % len(COLOURS)]
            label = f"{len(self.losses)} ranks" if crowd and number == 0 else "" if crowd and place >= 0 else name
            if place >= 0:
                axes.plot(x, losses, color=colour, alpha=0.4, linewidth=1)
            axes.plot(
                x, _running_mean(losses, top), color=colour, linewidth=1 if crowd and place >= 0 else 1.8, label=label
            )
            axes.update_datalim(np.stack([x, x], axis=1), updatey=False)  # also where nothing can be drawn
            for sign, end in lost.get(number, ()):
                look: dict[str, Any] = {
                    "color": colour,
                    "markersize": 9,
                    "markeredgecolor": "white",
                    "clip_on": False,
                    "zorder": 5,
                }
                if sign == "✕" and end[1] <= top and np.isfinite(end[1]):
                    axes.plot(end[column], end[1], "X", **look)
                else:
                    mark = "^" if sign == "▲" else "X"
                    axes.plot(end[column], 1, mark, transform=axes.get_xaxis_transform(), **look)
        if not self.empty:
            axes.legend(ncols=2, frameon=False)
            axes.set_ylim(bottom=min(0.0, self._lowest()), top=self.top())
            axes.set_title(fill(self.note(), _CHARACTERS), fontsize=10, loc="right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        return figure

    def data(self) -> dict[str, Any]:
        """Return every curve as arrays, by step and by time, thinned out to what a screen can show."""
        several, alone = len(self.runs) > 1, len(self.losses) == 1
        longest = max((len(curve) for ranks in self.runs.values() for curve in ranks.values()), default=0)
        every = longest // _POINTS + 1
        lines, lost = self.lines(every, "step"), self.lost()
        colours = self._colours([name for name, _ in lines])
        curves = []
        for number, ((name, by_step), (_, by_time)) in enumerate(zip(lines, self.lines(every, "time"), strict=True)):
            mean = several or colours[number] < 0
            curve: dict[str, Any] = {"name": name, "colour": colours[number], "strong": mean or alone}
            curve["lost"] = [
                {"sign": sign, "step": step, "loss": loss, "time": time}
                for sign, (step, loss, time) in lost.get(number, ())
            ]
            curves.append(curve | _columns(by_step) | ({"timely": _columns(by_time)} if mean else {}))
        return {"curves": curves, "by": self.by, "top": self.top(), "note": self.note(), "named": _NAMED}

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Loss curves: no rank has logged a loss yet."
        runs = self.runs
        last = {name: [curve[-1, 1] for curve in ranks.values()] for name, ranks in runs.items() if ranks}
        if len(runs) == 1:
            last = {f"rank {rank}": [curve[-1, 1]] for rank, curve in sorted(self.losses.items())}
        ends = ", ".join(f"{name} {_short(sum(losses) / len(losses), 2)}" for name, losses in list(last.items())[:8])
        count = f"{len(runs)} runs" if len(runs) > 1 else f"{len(self.losses)} ranks"
        return f"Loss by {self.by} of {count}; the last losses are {ends}." + f" {self.note()}." * bool(self.note())

    def text(self) -> str:
        """Return the curves as text for a terminal."""
        if self.empty:
            return "no rank has logged a loss yet"
        width = max(len(name) for name, _ in self.lines()) + 2
        lines = [
            f"{name:<{width}} {len(curve):>5} steps   {_short(curve[0][1])} → {_short(curve[-1][1])}  {_spark(curve)}"
            for name, curve in self.lines()
        ]
        return "\n".join([*lines, *filter(None, [self.note()])])


def _mean(ranks: Mapping[int, Curve], every: int) -> Curve:
    """Return the mean over ranks of their n-th losses, with the step of the first rank and the time of the last."""
    places = _places(max(map(len, ranks.values()), default=0), every)
    means, count = np.zeros((len(places), 3)), np.zeros(len(places))
    for curve in ranks.values():
        there = curve[places[places < len(curve)]]
        steps, losses, times = means[: len(there)].T
        steps[:] = np.where(count[: len(there)] == 0, there[:, 0], steps)
        with np.errstate(invalid="ignore"):  # inf - inf is nan
            losses += there[:, 1]
        times[:] = np.maximum(times, there[:, 2])
        count[: len(there)] += 1
    means[:, 1] /= count
    return means


def _merge(ranks: Mapping[int, Curve], every: int) -> Curve:
    """Return the means of groups of as many losses as there are ranks, in the order in which they were logged."""
    rows = np.concatenate([curve[_places(len(curve), every)] for curve in ranks.values()] or [np.zeros((0, 3))])
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    starts = np.arange(0, len(rows), len(ranks) or 1)
    with np.errstate(invalid="ignore"):  # inf - inf is nan
        return np.add.reduceat(rows, starts) / np.diff(np.append(starts, len(rows)))[:, None] if len(rows) else rows


def _columns(curve: Curve) -> dict[str, Column]:
    return dict(zip(("step", "loss", "time"), curve.T.astype(np.float32), strict=True))


def _places(length: int, every: int) -> np.ndarray:
    """Return the indices of every n-th point of a curve, and of the last one."""
    return np.append(np.arange(0, length - 1, every), length - 1) if length else np.arange(0)


def _running_mean(values: Column, top: float = np.inf) -> Column:
    """Return the mean around each point, over as many points before it as after it; a trailing mean would lag behind.

    Values above `top` and values that are not finite stay as they are and do not raise their neighbours.
    """
    values, (places, last) = np.asarray(values), (np.arange(len(values)), len(values) - 1)
    reach = np.minimum(min(_SMOOTH, len(values) // 20), np.minimum(places, last - places))
    calm = values <= top
    totals, counts = np.zeros(len(values)), np.zeros(len(values))
    for shift in range(-_SMOOTH, _SMOOTH + 1):
        near = places[abs(shift) <= reach]
        near = near[calm[near + shift]]
        totals[near] += values[near + shift]
        counts[near] += 1
    return np.where(calm, totals / np.maximum(counts, 1), values)


def _short(loss: float, digits: int = 3) -> str:
    return f"{loss:.{digits}f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def _number(step: float) -> str:
    """Write a step with all its digits: `12`, `2.5`."""
    return str(int(step)) if step.is_integer() else str(step)


def _some(names: list[str], of: int) -> str:
    """Name ranks as `rank 2`, `rank 0 and rank 2` or `every rank`, or count them if there is no room for the names."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} of {of}" if len(names) < of else f"all {of}"


def _spark(curve: Curve) -> str:
    """Draw a curve in block characters, with `✕` where it is not finite."""
    picked = curve[np.arange(count := min(_WIDTH, len(curve))) * len(curve) // count, 1]
    finite = np.isfinite(picked)
    low, high = (picked[finite].min(), picked[finite].max()) if finite.any() else (0.0, 0.0)
    heights = np.where(finite, picked - low, 0.0) / (high - low or 1.0) * (len(_BARS) - 1)
    return "".join(_BARS[int(height)] if shown else "✕" for height, shown in zip(heights, finite, strict=True))
