"""A timeline of each rank: when it computes, sends and waits, and for whom it waits."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from textwrap import fill, shorten
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dlab.events import Event
from dlab.kinds import MESSAGE, STATE
from dlab.views.base import View
from dlab.views.columns import Arrivals, Column
from dlab.views.lanes import DOTTED, HATCHED, LOOK, Lane, LaneState

SECONDS, STEPS = 5.0, 30  # default extent: whichever is shorter
WAITS, SLOW = 0.3, 1.5  # more than this share of its time; at least this many times as long as the others
_SENT = 6000  # latest steps and messages that go to the browser, over all ranks
_STATES = 50  # changes of state of a rank that go to the browser
_LANES = 64  # ranks that are drawn
_ROOMY = 12  # with up to this many ranks, there is room for two lines of text


class Shares(NamedTuple):
    """The shares of a rank's time, which add up to 1."""

    compute: float
    wait: float
    delay: float


class Timeline(View):
    """A lane per rank, from its logged steps (`dlab.log(step=…, compute=…, wait=…)`), messages and states.

    It shows the last `seconds` before the last step ended; by default 5 s, or about 30 steps if they took less, and
    more if a rank finished long before the others, so that its last steps are visible. A step ends when it is logged:
    before that it waited, before that it computed, and before that it slept if `run.delay` had asked for it.

    >>> Timeline(run.events)
    rank 0  compute   5 %  delay   0 %  wait  95 %  waits for rank 1
    rank 1  compute   3 %  delay  95 %  wait   2 %  slow
    """

    script, title, awaited = "timeline", "Timeline", True
    reads = ("compute", "wait", "delay", MESSAGE, STATE)

    def __init__(self, events: Iterable[Event] = (), seconds: float | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r}: a timeline shows a number of seconds above 0")
        self._seconds = seconds
        self._begun: float | None = None
        self._told = 0.0  # time of the last event of any kind
        self._lanes: dict[int, Lane] = {}
        self._names: dict[int, str] = {}  # names of lanes that are not ranks
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; costs about a microsecond each."""
        if not (arrived := self.take(events)):
            return
        if self._begun is None:
            self._begun = arrived.first
        for rank, logged in arrived.logged.items():
            if steps := logged.having("compute", "wait"):
                self._lane(rank).add_steps(steps, self._begun)
        sent: dict[int, list[tuple[float, float, int]]] = {}
        for time, rank, kind, data in arrived.others:
            if kind == MESSAGE:
                start, end = data["start"] - self._begun, data["end"] - self._begun
                sent.setdefault(data["source"], []).append((start, end, data["destination"]))
            elif kind == STATE:
                moment = max(0.0, time - self._begun)
                self._told = max(self._told, moment)
                if "name" in data:
                    self._names[rank] = data["name"]
                self._lane(rank).states.append(LaneState(moment, data["state"], data.get("why", "")))
        for source, messages in sent.items():
            self._lane(source).add_messages(messages)

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    def _lane(self, rank: int) -> Lane:
        if rank not in self._lanes:
            self._lanes[rank] = Lane()
        return self._lanes[rank]

    @property
    def empty(self) -> bool:
        """Whether no rank has reported steps or messages."""
        return all(lane.end is None for lane in self._lanes.values())

    @property
    def lanes(self) -> dict[int, Lane]:
        """The lanes sorted by rank."""
        return dict(sorted(self._lanes.items()))

    @property
    def seconds(self) -> float:
        """The number of seconds shown; it is rounded, so that a live picture keeps its scale."""
        if self._seconds is not None:
            return self._seconds
        lasts = [lane.last() for lane in self._lanes.values() if len(lane.steps)]
        if not lasts:
            return min(SECONDS, self.end or SECONDS)
        wanted = STEPS * median(float(last[:, 1:].sum(axis=1).mean()) for last in lasts)
        return next((size for size in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if size >= wanted), SECONDS)

    @property
    def end(self) -> float:
        """When the last step or message of any rank ended; if there is none, the time of the last state."""
        return max((end for lane in self._lanes.values() if (end := lane.end) is not None), default=self._told)

    @property
    def window(self) -> tuple[float, float]:
        """Return the first and the last moment shown: `seconds` apart, or more to include every rank's last steps."""
        first = self.end - self.seconds
        if self._seconds is not None:
            return first, self.end
        done = [end for lane in self._lanes.values() if lane.alive and (end := lane.end) is not None and end <= first]
        return min([first, *(end - self.seconds for end in done)]), self.end

    def shares(self) -> dict[int, Shares]:
        """Return by rank the shares of computing, waiting and delay in what is shown; if idle, in its last steps."""
        shares, (first, _) = {}, self.window
        for rank, lane in self.lanes.items():
            shown = lane.since(first)
            seconds = (shown if len(shown) else lane.last())[:, 1:].sum(axis=0)
            if seconds.sum() > 0:
                shares[rank] = Shares(*(seconds / seconds.sum()).tolist())
        return shares

    def _lately(self) -> dict[int, Column]:
        """Return the last few steps of the active ranks: seconds of computing or delay, and seconds of waiting."""
        lasts = {rank: lane.last() for rank, lane in self.lanes.items() if lane.alive and len(lane.steps)}
        return {rank: np.stack([last[:, 1] + last[:, 3], last[:, 2]], axis=1) for rank, last in lasts.items()}

    def slow(self) -> list[int]:
        """Return the ranks whose median time of computing and delay is at least 1.5 times that of the others."""
        computing = {rank: median(last[:, 0].tolist()) for rank, last in self._lately().items()}
        slow = []
        for rank, own in computing.items():
            others = [seconds for other, seconds in computing.items() if other != rank]
            if others and own > 0 and own >= SLOW * median(others):
                slow.append(rank)
        return slow

    def waiting(self) -> dict[int, int]:
        """Return who waits for whom. No event says so: it is inferred from the last few steps.

        A rank that waits for more than 0.3 of its time waits for the rank that waits least, if that one computes at
        least 1.5 times as long; otherwise all of them wait for the transport.
        """
        sums = {rank: last.sum(axis=0) for rank, last in self._lately().items()}
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
        """Return remarks by rank: `waits for rank 1`, `slow`, `dead: killed`."""
        waiting, slow = self.waiting(), self.slow()
        notes = {}
        for rank, lane in self.lanes.items():
            words = [f"waits for rank {waiting[rank]}"] if rank in waiting else ["slow"] if rank in slow else []
            if lane.state not in ("running", "returned"):
                words.append(str(lane.states[-1]))
            notes[rank] = ", ".join(words)
        return notes

    def figure(self) -> Figure:
        """Draw a lane per rank: computing is plain, waiting hatched, delay dotted; messages are thin bars below."""
        lanes = dict(list(self.lanes.items())[:_LANES])
        roomy = len(lanes) <= _ROOMY
        figure = Figure(figsize=(7, 0.9 + (0.5 if roomy else 0.2) * max(len(lanes), 2)), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds since the run began")
        first, last = self.window
        axes.set(xlim=(max(0.0, first), max(last, 1e-6)), ylim=(max(len(lanes), 1) - 0.5, -0.5))
        shares, notes = self.shares(), self.notes()
        for place, lane in enumerate(lanes.values()):
            lane.draw(axes, place, first, last)
        waits = {rank: f"wait {_percent(shares[rank].wait)}" for rank in lanes if rank in shares}
        gap = "\n" if roomy else "  "
        names = [gap.join(filter(None, [self._name(rank), waits.get(rank)])) for rank in lanes]
        size = "medium" if roomy else "x-small"
        axes.set_yticks(range(len(lanes)), names, fontsize=size)
        axes.tick_params(axis="y", length=0)
        right = axes.secondary_yaxis("right")
        said = [shorten(notes[rank], 40 if roomy else 30, placeholder=" …") for rank in lanes]
        right.set_yticks(range(len(lanes)), [fill(words, 20) if roomy else words for words in said], fontsize=size)
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        if len(self._lanes) > _LANES:
            axes.set_title(f"the first {_LANES} of {len(self._lanes)} ranks", fontsize=10)
        if not self.empty:
            axes.broken_barh([], (0, 0), color=LOOK["compute"], label="compute")
            axes.broken_barh([], (0, 0), label="wait", **HATCHED)
            if any(share.delay for share in shares.values()):
                axes.broken_barh([], (0, 0), label="delay", **DOTTED)
            if any(len(lane.messages) for lane in lanes.values()):
                axes.broken_barh([], (0, 0), color=LOOK["send"], label="send")
            figure.legend(loc="outside upper center", ncols=4, frameon=False, handlelength=2.5)
        return figure

    def data(self) -> dict[str, Any]:
        """Return each lane's latest steps, messages and states, as many as a browser can handle ten times a second."""
        shown = list(self.lanes.items())[:_LANES]
        notes, keep = self.notes(), _SENT // max(1, len(shown))
        lanes = [
            {
                "name": self._name(rank),
                "steps": lane.steps[-keep:].astype(np.float32).ravel(),
                "messages": lane.messages[-keep:].astype(np.float32).ravel(),
                "states": [[state.time, state.state, str(state)] for state in lane.states[-_STATES:]],
                "note": notes[rank],
                "alive": lane.alive,
            }
            for rank, lane in shown
        ]
        return {"end": self.end, "seconds": self.seconds, "lanes": lanes, "ranks": len(self._lanes)}

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Timeline: no rank has reported its steps yet."
        lines = "; ".join(" ".join(line.split()) for line in self.text().splitlines())
        first, last = self.window
        return f"What each rank did in the last {last - max(0.0, first):.3g} s: {lines}."

    def text(self) -> str:
        """Return the shares and remarks as text for a terminal."""
        if self.empty:
            return "no rank has reported its steps yet: dlab.log(step=…, compute=…, wait=…)"
        shares, notes = self.shares(), self.notes()
        width = max(len(self._name(rank)) for rank in self._lanes)
        lines = []
        delayed = any(share.delay for share in shares.values())
        for rank, lane in self.lanes.items():
            parts = [f"{self._name(rank):<{width}}"]
            if rank in shares:
                parts.append(f"compute {_percent(shares[rank].compute):>5}")
                parts += [f"delay {_percent(shares[rank].delay):>5}"] * delayed
                parts.append(f"wait {_percent(shares[rank].wait):>5}")
            if count := len(lane.messages):
                parts.append(f"{count} message" + "s" * (count > 1))
            lines.append("  ".join([*parts, notes[rank]]).rstrip())
        return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
