"""A lane of the timeline: what one rank did at which time, and the bars that show it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from dlab.views.columns import Column, GrowingTable, Logged

FEW = 5  # number of last steps that decide who is slow and who waits
MARKED = 1 / 90  # share of the time shown: longer steps are separated by a line
# what a lane shows, each with a colour; browser/timeline.js has the same colours
LOOK = {"delay": "#CC79A7", "compute": "#0072B2", "wait": "#E69F00", "send": "#009E73"}
HATCHED: dict[str, Any] = {"facecolor": "#FFF3D6", "edgecolor": LOOK["wait"], "hatch": "/////", "linewidth": 0.0}
DOTTED: dict[str, Any] = {"facecolor": LOOK["delay"], "edgecolor": "white", "hatch": "..", "linewidth": 0.0}
_TROUBLE, _QUIET = "#D55E00", "#808080"
_BAR, _SENT = (-0.36, 0.56), (0.22, 0.14)  # offset and height: messages lie below the bar and hide nothing


class LaneState(NamedTuple):
    """What happened to a rank, when and why."""

    time: float
    state: str
    why: str

    def __str__(self) -> str:
        separator = ": " if self.state in ("dead", "failed") else " "
        return separator.join(filter(None, [self.state, self.why]))


class Lane:
    """The steps, messages and states of one rank. Times are in seconds since the first event."""

    def __init__(self) -> None:
        self._steps, self._messages = GrowingTable(4), GrowingTable(3)
        self.states: list[LaneState] = []

    def add_steps(self, logged: Logged, begun: float) -> None:
        """Add logged steps. A delay is slept between two steps, and most loops count it as computing: the part of it
        for which there was no other time is subtracted from the computing time.
        """
        ends = np.maximum(0.0, logged.times - begun)
        compute, wait, delay = (logged.column(name, 0.0) for name in ("compute", "wait", "delay"))
        before = self.steps[-1, 0] if self._steps else -np.inf
        counted_twice = compute + wait + delay - np.diff(ends, prepend=before)
        self._steps.extend(ends, compute - np.clip(counted_twice, 0.0, np.minimum(compute, delay)), wait, delay)

    def add_messages(self, sent: list[tuple[float, float, int]]) -> None:
        """Add the start, end and destination of each message that the rank sent."""
        self._messages.extend(*np.array(sent).T)

    @property
    def steps(self) -> Column:
        """A row per step: its end, and the seconds of computing, of waiting and of the delay before both."""
        return self._steps.rows

    @property
    def messages(self) -> Column:
        """A row per message that the rank sent: start, end, destination."""
        return self._messages.rows

    @property
    def end(self) -> float | None:
        """When the last step or message ended; None if there was none."""
        ends = [rows[-1, place] for rows, place in ((self.steps, 0), (self.messages, 1)) if len(rows)]
        return float(max(ends)) if ends else None

    @property
    def state(self) -> str:
        """The last reported state."""
        return self.states[-1].state if self.states else "running"

    @property
    def alive(self) -> bool:
        """Whether the rank still takes part, or took part to the end."""
        return self.state not in ("dead", "failed")

    def last(self) -> Column:
        """Return the last few steps."""
        return self.steps[-FEW:]

    def since(self, moment: float) -> Column:
        """Return the steps that ended after this moment."""
        return (steps := self.steps)[np.flatnonzero(steps[:, 0] > moment)]

    def draw(self, axes: Axes, place: int, first: float, last: float) -> None:
        """Draw the bars, messages and states between these moments."""
        ends, compute, wait, delay = (steps := self.since(first)).T
        computed = ends - wait
        axes.broken_barh(_spans(computed, ends), _bar(place, _BAR), **HATCHED)
        axes.broken_barh(_spans(computed - compute, computed), _bar(place, _BAR), color=LOOK["compute"], linewidth=0)
        if delay.any():
            axes.broken_barh(_spans(computed - compute - delay, computed - compute), _bar(place, _BAR), **DOTTED)
        if len(steps) and np.median(steps[:, 1:].sum(axis=1)) > MARKED * (last - first):
            axes.vlines(ends, place + _BAR[0], place + sum(_BAR), color="white", linewidth=1)
        sent = self.messages[self.messages[:, 1] > first]
        axes.broken_barh(_spans(sent[:, 0], sent[:, 1]), _bar(place, _SENT), color=LOOK["send"], linewidth=0)
        self._draw_states(axes, place, last)

    def _draw_states(self, axes: Axes, place: int, last: float) -> None:
        """Draw a line below the lane while it is delayed or paused, and a cross where it ended badly."""
        ends = [*(state.time for state in self.states), max(last, *(state.time for state in self.states), 0.0)][1:]
        for state, after in zip(self.states, ends, strict=True):
            if state.state in ("delayed", "paused"):
                colour = LOOK["delay"] if state.state == "delayed" else _QUIET
                axes.hlines(place + 0.42, state.time, after, color=colour, linewidth=3)
            elif state.state in ("dead", "failed"):
                look: dict[str, Any] = {"markersize": 11, "markeredgecolor": "white", "clip_on": False}
                axes.plot(min(state.time, last), place, "X", color=_TROUBLE, **look)


def _bar(place: int, span: tuple[float, float]) -> tuple[float, float]:
    return place + span[0], span[1]


def _spans(starts: Column, ends: Column) -> list[tuple[float, float]]:
    """Return (start, length) of each bar, as matplotlib needs them."""
    return [(float(start), float(end - start)) for start, end in zip(starts, ends, strict=True)]
