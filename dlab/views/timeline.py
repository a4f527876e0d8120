"""A timeline: what each rank did when. It computes, it sends, it waits; and by whom it was kept waiting."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from textwrap import fill, shorten
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.views.columns import Arrivals, Column, Table
from dlab.views.still import View

SECONDS, STEPS = 5.0, 30  # shown unless asked otherwise: whichever is less
FEW = 5  # the last steps, from which it is told who is slow and who waits
WAITS, SLOW = 0.3, 1.5  # more than this share of its time; at least so many times as long as others compute
_SENT = 6000  # steps, and messages, that go to the browser, over all ranks; the latest of each
_STATES = 50  # changes of state of a rank that go to the browser
_LANES = 32  # ranks that are drawn
_COMPUTE, _WAIT, _SEND, _TROUBLE, _QUIET = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#808080"


class Lane:
    """What is known of one rank. Times are in seconds since the first event."""

    def __init__(self) -> None:
        self._steps, self._messages = Table(3), Table(3)
        self.states: list[State] = []

    @property
    def steps(self) -> Column:
        """A row per step: its end, the seconds it computed first, and those it waited then."""
        return self._steps.rows

    @property
    def messages(self) -> Column:
        """A row per message that it sent: start, end, destination."""
        return self._messages.rows

    @property
    def state(self) -> str:
        """The last that was told."""
        return self.states[-1].state if self.states else "running"

    def last(self) -> Column:
        """The last few steps."""
        return self.steps[-FEW:]

    def since(self, moment: float) -> Column:
        """The steps that ended after this moment."""
        return (steps := self.steps)[np.flatnonzero(steps[:, 0] > moment)]


class State(NamedTuple):
    """What became of a rank, when and why."""

    time: float
    state: str
    why: str


class Timeline(View):
    """A lane per rank, from what its steps tell (`dlab.log(step=…, compute=…, wait=…)`), messages and states.

    Shows the last `seconds`; by default the last 5 s, or about the last 30 steps if they took less. A step ends when
    it is logged: before that it waited, and before that it computed.

    >>> Timeline(run.events)
    rank 0  compute   5 %  wait  95 %  waits for rank 1
    rank 1  compute  98 %  wait   2 %  slow
    """

    script, title = "timeline", "Timeline"

    def __init__(self, events: Iterable[Event] = (), seconds: float | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r}: a timeline shows a number of seconds above 0")
        self._seconds = seconds
        self._begun: float | None = None
        self._end = 0.0
        self._lanes: dict[int, Lane] = {}
        self._names: dict[int, str] = {}  # of those that are no ranks
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Take in more events; costs about a microsecond each."""
        if not (arrived := Arrivals.of(events)):
            return
        if self._begun is None:
            self._begun = arrived.first
        ends = [self._end]
        for rank, logged in arrived.logged.items():
            if steps := logged.having("compute", "wait"):
                moments = np.maximum(0.0, steps.times - self._begun)
                self._lane(rank)._steps.extend(moments, steps.column("compute", 0.0), steps.column("wait", 0.0))
                ends.append(float(moments.max()))
        sent: dict[int, list[tuple[float, float, int]]] = {}
        for time, rank, kind, data in arrived.others:
            if kind == "message":
                start, end = data["start"] - self._begun, data["end"] - self._begun
                sent.setdefault(data["source"], []).append((start, end, data["destination"]))
            elif kind == "state":
                moment = max(0.0, time - self._begun)
                if "name" in data:
                    self._names[rank] = data["name"]
                self._lane(rank).states.append(State(moment, data["state"], data.get("why", "")))
            else:
                continue
            ends.append(time - self._begun)
        for source, messages in sent.items():
            self._lane(source)._messages.extend(*np.array(messages).T)
        self._end = max(ends)

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    def _lane(self, rank: int) -> Lane:
        if rank not in self._lanes:
            self._lanes[rank] = Lane()
        return self._lanes[rank]

    @property
    def empty(self) -> bool:
        """Has no rank told of its steps or messages?"""
        return not any(lane._steps or lane._messages for lane in self._lanes.values())

    @property
    def lanes(self) -> dict[int, Lane]:
        """By rank, in order."""
        return dict(sorted(self._lanes.items()))

    @property
    def seconds(self) -> float:
        """How many seconds are shown. A round number of them, so that a live picture keeps its scale."""
        if self._seconds is not None:
            return self._seconds
        lasts = [lane.last() for lane in self._lanes.values() if lane._steps]
        if not lasts:
            return min(SECONDS, self._end or SECONDS)
        wanted = STEPS * median(float(last[:, 1:].sum(axis=1).mean()) for last in lasts)
        return next((size for size in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if size >= wanted), SECONDS)

    def shares(self) -> dict[int, tuple[float, float]]:
        """By rank the shares of computing and waiting in what is shown; of a silent rank, in its last steps."""
        shares, first = {}, self._end - self.seconds
        for rank, lane in self.lanes.items():
            shown = lane.since(first)
            compute, wait = (shown if len(shown) else lane.last())[:, 1:].sum(axis=0)
            if compute + wait > 0:
                shares[rank] = (float(compute / (compute + wait)), float(wait / (compute + wait)))
        return shares

    def _lately(self) -> dict[int, Column]:
        """The last few steps of the ranks that still take part."""
        alive = {rank: lane for rank, lane in self.lanes.items() if lane.state not in ("dead", "failed")}
        return {rank: lane.last() for rank, lane in alive.items() if lane._steps}

    def slow(self) -> list[int]:
        """Ranks that compute at least 1.5 times as long as the others do, in the median of their last few steps."""
        computing = {rank: median(last[:, 1].tolist()) for rank, last in self._lately().items()}
        slow = []
        for rank, own in computing.items():
            others = [seconds for other, seconds in computing.items() if other != rank]
            if others and own > 0 and own >= SLOW * median(others):
                slow.append(rank)
        return slow

    def waiting(self) -> dict[int, int]:
        """Who waits for whom. Nobody says so: it follows from the last few steps.

        A rank that waits for more than 0.3 of its time waits for the one that waits least, if that one computes
        at least 1.5 times as long as itself; else all of them wait for the wire.
        """
        sums = {rank: last[:, 1:].sum(axis=0) for rank, last in self._lately().items()}
        share = {rank: float(wait / (compute + wait or 1.0)) for rank, (compute, wait) in sums.items()}
        waiting = {}
        for rank, own in share.items():
            others = [other for other in share if other != rank]
            if others and own > WAITS:
                busiest = min(others, key=lambda other: share[other])
                if share[busiest] < own and sums[busiest][0] >= SLOW * sums[rank][0]:
                    waiting[rank] = busiest
        return waiting

    def notes(self) -> dict[int, str]:
        """What is worth saying of a rank: `waits for rank 1`, `slow`, `dead: killed`."""
        waiting, slow = self.waiting(), self.slow()
        notes = {}
        for rank, lane in self.lanes.items():
            words = [f"waits for rank {waiting[rank]}"] if rank in waiting else ["slow"] if rank in slow else []
            if lane.state not in ("running", "returned"):
                words.append(_words(lane.states[-1]))
            notes[rank] = ", ".join(words)
        return notes

    def figure(self) -> Figure:
        """A lane per rank: computing is plain, waiting hatched, messages lie as thin bars on it."""
        lanes = dict(list(self.lanes.items())[:_LANES])
        figure = Figure(figsize=(7, 0.9 + 0.5 * max(len(lanes), 2)), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds since the run began")
        first = self._end - self.seconds
        axes.set(xlim=(max(0.0, first), max(self._end, 1e-6)), ylim=(max(len(lanes), 1) - 0.5, -0.5))
        shares, notes = self.shares(), self.notes()
        for place, lane in enumerate(lanes.values()):
            _draw_steps(axes, place, lane.since(first))
            sent = lane.messages[lane.messages[:, 1] > first]
            axes.broken_barh(_spans(sent[:, 0], sent[:, 1]), (place + 0.12, 0.24), color=_SEND, linewidth=0)
            _draw_states(axes, place, lane.states, self._end)
        names = [self._name(rank) + (f"\nwait {_percent(shares[rank][1])}" if rank in shares else "") for rank in lanes]
        axes.set_yticks(range(len(lanes)), names)
        axes.tick_params(axis="y", length=0)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(lanes)), [fill(shorten(notes[rank], 40, placeholder=" …"), 20) for rank in lanes])
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        if not self.empty:
            axes.broken_barh([], (0, 0), color=_COMPUTE, label="compute")
            axes.broken_barh([], (0, 0), label="wait", **_HATCHED)
            if any(lane._messages for lane in lanes.values()):
                axes.broken_barh([], (0, 0), color=_SEND, label="send")
            figure.legend(loc="outside upper center", ncols=3, frameon=False, handlelength=2.5)
        return figure

    def data(self) -> dict[str, Any]:
        """Per lane the latest steps, messages and states, as many as a browser can take in ten times a second."""
        shown = list(self.lanes.items())[:_LANES]
        notes, keep = self.notes(), _SENT // max(1, len(shown))
        lanes = [
            {
                "name": self._name(rank),
                "steps": lane.steps[-keep:].astype(np.float32).ravel(),
                "messages": lane.messages[-keep:].astype(np.float32).ravel(),
                "states": [[state.time, state.state, _words(state)] for state in lane.states[-_STATES:]],
                "note": notes[rank],
            }
            for rank, lane in shown
        ]
        return {"end": self._end, "seconds": self.seconds, "lanes": lanes}

    @property
    def alt(self) -> str:
        """What the picture shows."""
        if self.empty:
            return "Timeline: no rank has told of its steps yet."
        lines = str(self).splitlines()
        return (
            f"What each rank did in the last {self.seconds:g} s: " + "; ".join(" ".join(s.split()) for s in lines) + "."
        )

    def __str__(self) -> str:
        if self.empty:
            return "no rank has told of its steps yet: dlab.log(step=…, compute=…, wait=…)"
        shares, notes = self.shares(), self.notes()
        width = max(len(self._name(rank)) for rank in self._lanes)
        lines = []
        for rank, lane in self.lanes.items():
            parts = [f"{self._name(rank):<{width}}"]
            if rank in shares:
                parts += [f"compute {_percent(shares[rank][0]):>5}", f"wait {_percent(shares[rank][1]):>5}"]
            if lane._messages:
                count = len(lane.messages)
                parts.append(f"{count} message" + "s" * (count > 1))
            lines.append("  ".join([*parts, notes[rank]]).rstrip())
        return "\n".join(lines)


_HATCHED: dict[str, Any] = {"facecolor": "#FFF3D6", "edgecolor": _WAIT, "hatch": "/////", "linewidth": 0.0}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _words(state: State) -> str:
    separator = ": " if state.state in ("dead", "failed") else " "
    return separator.join(filter(None, [state.state, state.why]))


def _spans(starts: Column, ends: Column) -> list[tuple[float, float]]:
    """(start, length) of each, as matplotlib wants them."""
    return [(float(start), float(end - start)) for start, end in zip(starts, ends, strict=True)]


def _draw_steps(axes: Axes, place: int, steps: Column) -> None:
    ends, compute, wait = steps.T
    axes.broken_barh(_spans(ends - wait, ends), (place - 0.36, 0.72), **_HATCHED)
    axes.broken_barh(_spans(ends - wait - compute, ends - wait), (place - 0.36, 0.72), color=_COMPUTE, linewidth=0)
    if len(steps) <= 3 * STEPS:
        axes.vlines(ends, place - 0.36, place + 0.36, color="white", linewidth=1)


def _draw_states(axes: Axes, place: int, states: list[State], end: float) -> None:
    """A line below the lane while a rank is delayed or paused; a cross where it ended badly."""
    ends = [*(state.time for state in states), end][1:]
    for state, after in zip(states, ends, strict=True):
        if state.state in ("delayed", "paused"):
            colour = _TROUBLE if state.state == "delayed" else _QUIET
            axes.hlines(place + 0.42, state.time, after, color=colour, linewidth=3)
        elif state.state in ("dead", "failed"):
            axes.plot(state.time, place, "X", color=_TROUBLE, markersize=11, markeredgecolor="white", clip_on=False)
