"""The ranks at a glance: running, waiting for whom, slow, paused, finished or dead; their steps; and why all hang."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dlab.events import Event
from dlab.kinds import HANG, STATE
from dlab.views.base import View
from dlab.views.columns import Arrivals
from dlab.views.timeline import Timeline

# the appearance of a state: its colour, and a symbol for readers who do not see colours
LOOKS = {
    "running": ("#009E73", "▶"),
    "waiting": ("#56B4E9", "…"),
    "slow": ("#E69F00", "!"),
    "delayed": ("#E69F00", "!"),
    "paused": ("#8a8a8a", "❚❚"),
    "finished": ("#0072B2", "✓"),
    "stopped": ("#8a8a8a", "■"),
    "failed": ("#D55E00", "✗"),
    "dead": ("#D55E00", "✗"),
}
_UNKNOWN = ("#8a8a8a", "?")
_COLUMN = 8  # ranks in one column; more than these are shown in three columns
_CHARACTERS, _SHORT = 88, 26  # in a line, and in one of three columns


_ON = {"running", "delayed", "paused"}  # states of a rank that has not ended


class Ranks(View):
    """A box per rank, from events of kind `state` (what happened to it) and `log` (its step and whom it waits for). If
    no rank makes progress, events of kind `hang` say what each waits for, and why that will not end.

    >>> Ranks([*run.states, *run.events])
    rank 0   waiting for rank 2   step 41
    """

    script, title, awaited = "ranks", "Workers", True
    reads = (STATE, HANG)

    def __init__(self, events: Iterable[Event] = (), timeline: Timeline | None = None) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self._steps: dict[int, int | float | str] = {}
        self._hangs: dict[int, str] = {}  # what each rank waits for, in words, while none makes progress
        self._why = ""  # the reason of the hang
        self._timeline = timeline or Timeline()
        self._shares_it = timeline is not None  # another owner adds its events
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; the last state and the last step of each rank are shown."""
        arrived = self.take(events)
        if not self._shares_it:
            self._timeline.add(arrived)
        self._states.update({event.rank: event.data for event in arrived.others if event.kind == STATE})
        for event in arrived.others:
            if event.kind == HANG:
                self._hangs = {row["rank"]: row["words"] for row in event.data["ranks"]}
                self._why = event.data["why"]
        for rank, logged in arrived.logged.items():
            if logged.step is not None:
                self._steps[rank] = logged.step

    @property
    def hang(self) -> str:
        """Why no rank makes progress, or made progress when the run was ended; empty if there is no hang."""
        if not self._why:
            return ""
        on = any(self._states.get(rank, {"state": "running"})["state"] in _ON for rank in self._hangs)
        return f"no rank {'makes' if on else 'made'} progress: {self._why}"

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any rank."""
        return not self._states

    def name(self, rank: int) -> str:
        """Return `rank 2`, or the name that its states give, such as a server's."""
        return self._states[rank].get("name", f"rank {rank}")

    def rows(self) -> list[tuple[int, str, str, int | float | str | None]]:
        """Return the number, the state, the state in words and the last step of each rank."""
        waiting, slow = self._timeline.waiting(), self._timeline.slow()
        rows = []
        for rank, last in sorted(self._states.items()):
            state = "finished" if last["state"] == "returned" else last["state"]
            words = " ".join(filter(None, [state, last.get("why", "")]))
            if state == "dead":
                words = f"dead: {last.get('why', '')}"
            elif state in ("running", "delayed") and rank in self._hangs:
                state, words = "waiting", self._hangs[rank]
            elif state == "running" and rank in waiting:
                state, words = "waiting", f"waiting for rank {waiting[rank]}"
            elif state == "running" and rank in slow:
                state = words = "slow"
            rows.append((rank, state, words, self._steps.get(rank)))
        return rows

    def figure(self) -> Figure:
        """Draw a coloured box per rank, side by side if there are many; a long sentence is wrapped."""
        rows = self.rows()
        across = 1 if len(rows) <= _COLUMN else 3
        cells, x, y = [], 0, 0.0  # column, line, text
        for rank, state, words, step in rows:
            text = fill(f"{_look(state)[1]} {words}{_at(step)}", _CHARACTERS)
            if across > 1 and len(text) > _SHORT and x:
                x, y = 0, y + 1
            cells.append((x, y, rank, state, text))
            x = x + 1 if len(text) <= _SHORT and x + 1 < across else 0
            y += 0 if x else 1 + 0.62 * text.count("\n")  # wrapped lines are closer together than boxes
        hang = fill(self.hang, _CHARACTERS)
        under = y + bool(x)  # the line below all boxes
        lines = max(1, under + bool(hang) + 0.62 * hang.count("\n"))
        figure = Figure(figsize=(7, 0.34 * lines + 0.1))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(lines, 0))
        axes.set_axis_off()
        for column, line, rank, state, text in cells:
            left = 0.02 + column / across
            rounded = "round,pad=0,rounding_size=0.01"
            axes.add_patch(FancyBboxPatch((left, line + 0.2), 0.09, 0.6, rounded, color=_look(state)[0]))
            axes.text(left + 0.045, line + 0.5, self.name(rank), ha="center", va="center", color="white", fontsize=9)
            axes.text(left + 0.105, line + 0.28, text, va="top", fontsize=9, linespacing=1.6)
        axes.text(0.02, under + 0.28, hang, va="top", fontsize=9, linespacing=1.6, color=LOOKS["failed"][0])
        return figure

    def data(self) -> dict[str, Any]:
        """Return what the browser draws: a box for each rank."""
        rows = []
        for rank, state, words, step in self.rows():
            colour, sign = _look(state)
            told = {"name": self.name(rank), "state": state, "words": words + _at(step)}
            rows.append({**told, "colour": colour, "sign": sign})
        return {"ranks": rows, "hang": self.hang}

    def sentence(self) -> str:
        """List all states in words."""
        told = [f"{self.name(rank)} {words}{_at(step)}" for rank, _, words, step in self.rows()]
        return "; ".join([*told, self.hang] if self.hang else told) + "."

    def text(self) -> str:
        """Return the states as text for a terminal."""
        rows = [(self.name(rank), words, _at(step).strip(", ")) for rank, _, words, step in self.rows()]
        width = max((len(words) for _, words, _ in rows), default=0)
        lines = [f"{name:<8} {words:<{width}}  {step}" for name, words, step in rows]
        return "\n".join(line.rstrip() for line in ([*lines, self.hang] if self.hang else lines))


def _look(state: str) -> tuple[str, str]:
    return LOOKS.get(state, _UNKNOWN)


def _at(step: int | float | str | None) -> str:
    return "" if step is None else f", step {step}"
