"""A lane of the timeline: what one rank did when, and the bars that show it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from dlab.views.columns import Column, GrowingTable, Logged

FEW = 5  # the last steps, from which it is told who is slow and who waits
MARKED = 1 / 90  # of what is shown: steps that take longer are told apart by a line between them
# what a lane shows, each with a colour: the same in browser/timeline.js
LOOK = {"delay": "#CC79A7", "compute": "#0072B2", "wait": "#E69F00", "send": "#009E73"}
HATCHED: dict[str, Any] = {"facecolor": "#FFF3D6", "edgecolor": LOOK["wait"], "hatch": "/////", "linewidth": 0.0}
DOTTED: dict[str, Any] = {"facecolor": LOOK["delay"], "edgecolor": "white", "hatch": "..", "linewidth": 0.0}
_TROUBLE, _QUIET = "#D55E00", "#808080"
_BAR, _SENT = (-0.36, 0.56), (0.22, 0.14)  # from where, and how high: messages lie below and hide nothing


class State(NamedTuple):
    """What became of a rank, when and why."""

    time: float
    state: str
    why: str

    def __str__(self) -> str:
        separator = ": " if self.state in ("dead", "failed") else " "
        return separator.join(filter(None, [self.state, self.why]))


class Lane:
    """What is known of one rank. Times are in seconds since the first event."""

    def __init__(self) -> None:
        self._steps, self._messages = GrowingTable(4), GrowingTable(3)
        self.states: list[State] = []

    def add_steps(self, logged: Logged, begun: float) -> None:
        """What its steps tell. A delay is slept between two of them, and most loops count it as computing: as much of
        it as there was no time for besides is taken out of that.
        """
        ends = np.maximum(0.0, logged.times - begun)
        compute, wait, delay = (logged.column(name, 0.0) for name in ("compute", "wait", "delay"))
        before = self.steps[-1, 0] if self._steps else -np.inf
        counted_twice = compute + wait + delay - np.diff(ends, prepend=before)
        self._steps.extend(ends, compute - np.clip(counted_twice, 0.0, np.minimum(compute, delay)), wait, delay)

    def add_messages(self, sent: list[tuple[float, float, int]]) -> None:
        """Start, end and destination of each that it sent."""
        self._messages.extend(*np.array(sent).T)

    @property
    def steps(self) -> Column:
        """A row per step: its end, and the seconds it computed, waited and, before both, was delayed."""
        return self._steps.rows

    @property
    def messages(self) -> Column:
        """A row per message that it sent: start, end, destination."""
        return self._messages.rows

    @property
    def end(self) -> float | None:
        """When the last step or message ended; None if there was none."""
        ends = [rows[-1, place] for rows, place in ((self.steps, 0), (self.messages, 1)) if len(rows)]
        return float(max(ends)) if ends else None

    @property
    def state(self) -> str:
        """The last that was told."""
        return self.states[-1].state if self.states else "running"

    @property
    def alive(self) -> bool:
        """Does it still take part, or has it done so to the end?"""
        return self.state not in ("dead", "failed")

    def last(self) -> Column:
        """The last few steps."""
        return self.steps[-FEW:]

    def since(self, moment: float) -> Column:
        """The steps that ended after this moment."""
        return (steps := self.steps)[np.flatnonzero(steps[:, 0] > moment)]

    def draw(self, axes: Axes, place: int, first: float, last: float) -> None:
        """Its bars, messages and states between these moments."""
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
        """A line below the lane while it is delayed or paused; a cross where it ended badly."""
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
    """(start, length) of each, as matplotlib wants them."""
    return [(float(start), float(end - start)) for start, end in zip(starts, ends, strict=True)]
