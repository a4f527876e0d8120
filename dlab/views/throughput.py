"""Throughput: the samples per second of each rank, and of all ranks together, in the course of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.base import COLOURS, View
from dlab.views.columns import Arrivals, GrowingTable

_POINTS = 400  # maximal number of points of a line; a screen has no more columns
_SHOWN = 12  # ranks with their own line
_DASHES = ("solid", "dashed", "dotted", "dashdot")  # lines of equally fast ranks overlap; gaps keep all visible
_BARS = "▁▂▃▄▅▆▇█"
_SPIKE = 1.5  # times the rates after it: then the peak at the start is cut off

Rates = np.ndarray[Any, np.dtype[np.float64]]  # per moment; NaN where a rank has not finished two steps yet


class Throughput(View):
    """Samples per second over the last `window` seconds, from `dlab.log(step=…, samples=…)`; without samples, steps.

    The work of a step is spread evenly over the time since the rank's previous step, so that slow steps do not make the
    line jump. The rate of a rank that has logged nothing for longer than the window falls to 0.

    >>> Throughput(run.events)
    rank 0    4012 samples/s   mean 3987   ▆▇▇▇█▇▇▇
    """

    script, title, awaited = "throughput", "Throughput", True
    reads = ("samples",)

    def __init__(self, events: Iterable[Event] = (), window: float = 1.0) -> None:
        if not window > 0:
            raise ValueError(f"window={window!r}: throughput is counted over a number of seconds above 0")
        self.window = window
        self.unit = "steps"  # until samples are logged
        self._begun: float | None = None
        self._end = 0.0
        self._steps: dict[int, GrowingTable] = {}  # by rank, a row per step: its end, and the samples up to then
        self._lines: tuple[Rates, list[tuple[str, Rates]]] | None = None  # cached until more events arrive
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; costs less than a microsecond each."""
        if not (arrived := self.take(events)):
            return
        self._lines = None
        if self._begun is None:
            self._begun = arrived.first
        self._end = max(self._end, arrived.last - self._begun)
        for rank, logged in arrived.logged.items():
            if done := logged.having("step", "samples"):
                steps, samples = self._steps.setdefault(rank, GrowingTable(2)), done.column("samples")
                if not np.isnan(samples).all():
                    self.unit = "samples"
                before = steps.rows[-1, 1] if steps else 0.0
                steps.extend(np.maximum(0.0, done.times - self._begun), before + np.nancumsum(samples))

    @property
    def empty(self) -> bool:
        """Whether no rank has logged two steps yet; the time of a step is measured between two logs."""
        return all(len(steps) < 2 for steps in self._steps.values())

    def rates(self) -> tuple[Rates, dict[int, Rates]]:
        """Return moments, in seconds since the first event, and each rank's rate in the window before each moment."""
        begun = min((steps.rows[0, 0] for steps in self._steps.values()), default=0.0)
        pace = self.window / 50
        while (self._end - begun) / pace > _POINTS - 1:
            pace *= 2  # moments stay where they are while a run grows, so that a live line does not flicker
        moments = np.append(np.arange(begun + pace, self._end, pace), self._end)
        return moments, {rank: self._rates_of(steps.rows, moments) for rank, steps in sorted(self._steps.items())}

    def _rates_of(self, steps: Rates, moments: Rates) -> Rates:
        ends, done = steps[:, 0], steps[:, 1] if self.unit == "samples" else np.arange(len(steps))
        last_step = ends[-1] - ends[-2] if len(ends) > 1 else 0.0
        if self._end - ends[-1] <= max(self.window, 2 * last_step):
            moments = np.minimum(moments, ends[-1])  # the rank is in the middle of a step, not idle
        since = np.maximum(moments - self.window, ends[0])
        seconds = np.where(moments > ends[0], moments - since, np.nan)
        return (np.interp(moments, ends, done) - np.interp(since, ends, done)) / seconds

    def top(self) -> tuple[float, float | None]:
        """Return the highest rate that is drawn, and the peak at the start if that is higher.

        In the first moments few steps are divided by a short time: such a peak means little, and would flatten
        everything else.
        """
        moments, lines = self.lines()
        rates = np.nan_to_num(np.array([rates for _, rates in lines]).reshape(len(lines), len(moments)))
        begun = moments[0] if len(moments) else 0.0
        settled = moments >= begun + min(self.window, (self._end - begun) / 2)
        late, highest = (float(np.max(each, initial=0.0)) for each in (rates[:, settled], rates))
        return (late, highest) if 0 < _SPIKE * late < highest else (highest, None)

    def lines(self) -> tuple[Rates, list[tuple[str, Rates]]]:
        """Return the lines to draw: moments and (name, rates), of the first ranks and of all together."""
        if self.empty:
            return np.zeros(0), []
        if self._lines is None:
            moments, ranks = self.rates()
            lines = [(f"rank {rank}", rates) for rank, rates in list(ranks.items())[:_SHOWN]]
            if len(ranks) > 1:
                lines.append(("all", np.sum([np.nan_to_num(rates) for rates in ranks.values()], axis=0)))
            self._lines = moments, lines
        return self._lines

    def figure(self) -> Figure:
        """Draw a line per rank, told apart by colour and dashes, and a strong line for all ranks."""
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        moments, lines = self.lines()
        highest, _ = self.top()
        unit, ylabel = (1000, f"thousand {self.unit} per second") if highest >= 5000 else (1, f"{self.unit} per second")
        axes = figure.add_subplot(xlabel="seconds since the run began", ylabel=ylabel)
        for (name, rates), rank in zip(lines, self._ranks(), strict=True):
            style = {"color": "#404040", "linewidth": 2.2} if rank < 0 else _style(rank)
            axes.plot(moments, rates / unit, label=name, **style)
        if lines:
            handles, names = axes.get_legend_handles_labels()
            outside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 3.5}
            axes.legend(handles[::-1], names[::-1], frameon=False, **outside)
            axes.set_ylim(0, 1.08 * highest / unit or None)
        axes.set_title(self.note(), fontsize=10, loc="right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        return figure

    def note(self) -> str:
        """Say what the picture does not show: a peak at the start, and ranks for which there is no room."""
        _, peak = self.top()
        words = [f"▲ {_number(peak)} in the first moment"] if peak is not None else []
        return ", ".join([*words, *[f"{_SHOWN} of {len(self._steps)} ranks"] * (len(self._steps) > _SHOWN)])

    def _ranks(self) -> list[int]:
        """Return the rank of each line, -1 for all together."""
        ranks, count = sorted(self._steps)[:_SHOWN], len(self.lines()[1])
        return [*ranks, -1][:count] if count > 1 else ranks[:count]

    def data(self) -> dict[str, Any]:
        """Return the moments once, and the rates of every line."""
        moments, lines = self.lines()
        named = [
            {"name": name, "rank": rank, "rates": rates.astype(np.float32)}
            for (name, rates), rank in zip(lines, self._ranks(), strict=True)
        ]
        told = {"unit": self.unit, "top": self.top()[0], "note": self.note()}
        return {**told, "time": moments.astype(np.float32), "lines": named}

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Throughput: no rank has logged two steps yet."
        latest = ", ".join(f"{name} {_number(rates[-1])}" for name, rates in self.lines()[1])
        return f"{self.unit.capitalize()} per second over time; the last are: {latest}."

    def text(self) -> str:
        """Return the rates as text for a terminal."""
        if self.empty:
            return "no rank has logged two steps yet"
        lines = self.lines()[1]
        rows = [(name, _number(rates[-1]), _number(_mean(rates)), _spark(rates)) for name, rates in lines]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        text = [
            f"{name:<{widths[0]}}  {now:>{widths[1]}} {self.unit}/s   mean {mean:>{widths[2]}}   {bars}"
            for name, now, mean, bars in rows
        ]
        if len(self._steps) > _SHOWN:
            text.insert(-1, f"… {len(self._steps) - _SHOWN} more ranks")
        return "\n".join(text)


def _style(rank: int) -> dict[str, Any]:
    return {"color": COLOURS[rank % len(COLOURS)], "linestyle": _DASHES[rank % len(_DASHES)], "linewidth": 1.6}


def _mean(rates: Rates) -> float:
    return float(np.mean(rates[~np.isnan(rates)])) if not np.isnan(rates).all() else float("nan")


def _number(value: float) -> str:
    """Write three significant digits, or a dash for an unknown value."""
    if np.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _spark(rates: Rates) -> str:
    """Draw a line in 30 block characters, from 0 to its highest value."""
    known = np.nan_to_num(rates)
    picked = known[np.linspace(0, len(known) - 1, min(30, len(known))).astype(int)]
    heights = picked / (picked.max() or 1.0) * (len(_BARS) - 1)
    return "".join(_BARS[round(height)] for height in heights)
