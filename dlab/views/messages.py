"""Messages step by step: who sends how many bytes to whom, ranks on a circle. Taught in `02_allreduce.ipynb`.

`steps.py` puts the recorded messages in order; `browser/messages.js` lets them travel, at the pace of whoever watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, cos, hypot, pi, sin
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from dlab.events import Event
from dlab.views.columns import Arrivals
from dlab.views.steps import Step, Steps, Titled
from dlab.views.still import COLOURS, View

_SHOWN = 24  # steps in a strip and in the terminal; a longer run says how many more there are
_SENT, _MOST = 200, 4000  # steps, and messages, that go to the browser: the last ones
_COLUMNS = 4  # pictures side by side in a strip
_CROWD = 5  # more messages than this in a step, if all of one size, have it said once and not at every arrow
_BUSY, _IDLE, _INK = "#404040", "#D0D0D0", "#202020"  # ranks that take part in a step, the others, the text

_COUNTED = ("messages", "steps", "bytes_per_rank")


class Formula(Protocol):
    """What a run should cost, as `dlab.cost` says it."""

    @property
    def messages(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def bytes_per_rank(self) -> list[int]: ...


class Messages(View):
    """The messages of a run (`run.events`, or `.messages` of a rehearsal), a picture per step.

    `steps` are the (phase, step) pairs in the order of the run; `messages` and `bytes_per_rank` count as
    `dlab.cost.allreduce` does. Give its answer as `cost`, and it stands beside what was recorded.

    >>> Messages(rehearsal.messages)
    reduce-scatter 0   0→1 1→2 2→0   4 B each
    """

    script, title = "messages", "Messages"

    def __init__(self, events: Iterable[Event] = (), cost: Formula | None = None) -> None:
        self.cost = cost
        self.messages = 0
        self.bytes_per_rank: list[int] = []
        self._links = Counter[tuple[int, int]]()  # bytes by (source, destination)
        self._steps = Steps()
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Take in more events, each rank's own in their order; a few microseconds per message."""
        for event in Arrivals.of(events).others:
            if event.kind != "message":
                continue
            message = event.data
            source, destination = message["source"], message["destination"]
            self.bytes_per_rank += [0] * (1 + max(source, destination) - len(self.bytes_per_rank))
            self.bytes_per_rank[source] += message["bytes"]
            self._links[source, destination] += message["bytes"]
            self.messages += 1
            self._steps.add(message)

    @property
    def empty(self) -> bool:
        """Was no message recorded?"""
        return not self.messages

    @property
    def steps(self) -> list[tuple[str, int]]:
        """All (phase, step) pairs, in the order of the run."""
        return self._steps.pairs()

    def figure(self, step: int | None = None) -> Figure:
        """The picture of one step (its place in `.steps`), or a strip of all of them."""
        ranks = len(self.bytes_per_rank)
        if step is not None:
            if not 0 <= step < len(self._steps):
                raise IndexError(f"there is no step {step}: this run has {len(self._steps)}, counted from 0")
            figure = Figure(figsize=(4, 4.2), layout="constrained", facecolor="white")
            _draw(figure.add_subplot(), self._steps.first(step + 1)[step], ranks, size=11)
            return figure
        shown = self._steps.first(_SHOWN)
        rows = max(ceil(len(shown) / _COLUMNS), 1)
        columns = max(ceil(len(shown) / rows), 1)
        figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="constrained", facecolor="white")
        for place, picture in enumerate(shown, 1):
            _draw(figure.add_subplot(rows, columns, place), picture, ranks, size=8)
        if len(self._steps) > _SHOWN:
            figure.suptitle(f"the first {_SHOWN} of {len(self._steps)} steps", color=_INK)
        if self.cost and shown:
            figure.supxlabel(self._summary(), fontsize=9, color=_INK)
        return figure

    def data(self) -> dict[str, Any]:
        """The last steps with their messages, as far as they can be shown; totals of everything.

        What was sent before a step is the total without what came after it, so that the first steps are not needed.
        """
        shown = self._steps.last(_SENT)
        room = np.cumsum([len(titled.step) for titled in reversed(shown)]) <= _MOST
        shown = shown[-max(1, room.sum()) :]
        tables = [titled.step.table for titled in shown]
        rows = np.concatenate([np.empty((0, 5)), *tables])
        times = (rows[:, 3:] - rows[:, 3].min(initial=np.inf)).astype(np.float32)
        links = np.array([(*link, count) for link, count in self._links.items()], dtype=np.float64).reshape(-1, 3)
        complete = (place for place in reversed(range(len(shown))) if self._steps.is_complete(shown[place]))
        return {
            "messages": self.messages,
            "bytes_per_rank": self.bytes_per_rank,
            "links": {"source": links[:, 0].copy(), "destination": links[:, 1].copy(), "bytes": links[:, 2].copy()},
            "count": len(self._steps),
            "steps": [
                {"title": title, "colour": colour, "round": number, "phase": step.phase, "step": step.number}
                for title, colour, number, step in shown
            ],
            "begin": np.cumsum([0, *map(len, tables)], dtype=np.int32),  # where a step's messages are in what follows
            "source": rows[:, 0].astype(np.int32),
            "destination": rows[:, 1].astype(np.int32),
            "bytes": rows[:, 2].copy(),
            "start": times[:, 0].copy(),  # seconds since the first of these messages
            "end": times[:, 1].copy(),
            "complete": next(complete, 0),  # the last step of which every rank has told
            "formula": self.cost and {name: getattr(self.cost, name) for name in _COUNTED},
        }

    @property
    def alt(self) -> str:
        """What the strip shows."""
        if self.empty:
            return "Messages: none were recorded."
        steps = " ".join(
            f"{titled.title.capitalize()}: {_words(titled.step, ', ')}." for titled in self._steps.first(_SHOWN)
        )
        summary = self._summary().replace("\n", "; ")
        return f"Ranks 0 to {len(self.bytes_per_rank) - 1} on a circle, an arrow per message. {steps} {summary}."

    def _summary(self) -> str:
        """What was recorded, and below it what the formula says."""
        recorded = _totals(self.messages, len(self._steps), self.bytes_per_rank)
        if not self.cost:
            return recorded
        missing = [0] * (len(self.cost.bytes_per_rank) - len(self.bytes_per_rank))
        counted = (self.messages, len(self._steps), [*self.bytes_per_rank, *missing])
        expected = (self.cost.messages, self.cost.steps, list(self.cost.bytes_per_rank))
        verdict = "the same" if counted == expected else "not the same"
        return f"recorded: {recorded}\nformula: {_totals(*expected)}: {verdict}"

    def __str__(self) -> str:
        if self.empty:
            return "no messages were recorded"
        shown = [titled.step for titled in self._steps.first(_SHOWN)]
        names = [f"{step.phase} {step.number}".strip() for step in shown]
        width = max(map(len, names))
        lines = [f"{name:<{width}}   {_words(step, '   ')}" for name, step in zip(names, shown, strict=True)]
        more = [f"… {len(self._steps) - _SHOWN} more steps"] if len(self._steps) > _SHOWN else []
        return "\n".join([*lines, *more, self._summary()])


def _draw(axes: Axes, titled: Titled, ranks: int, size: float) -> None:
    """Ranks on a circle, an arrow per message, its bytes beside it, in text of about this size."""
    messages, colour = titled.step.messages, COLOURS[titled.colour % len(COLOURS)]
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.3), aspect="equal")
    axes.set_axis_off()
    axes.set_title(titled.title, fontsize=size + 1, color=colour)
    turn = -pi / 2 if ranks == 2 else 0.0  # rank 0 is on top, the others clockwise; two are side by side
    angles = [2 * pi * rank / ranks + turn for rank in range(ranks)]
    busy = {rank for message in messages for rank in (message["source"], message["destination"])}
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
    nodes = []
    for rank, angle in enumerate(angles):
        nodes.append(Circle((sin(angle), cos(angle)), 0.19, color=_BUSY if rank in busy else _IDLE))
        axes.add_patch(nodes[rank])
        axes.text(sin(angle), cos(angle), str(rank), color="white" if rank in busy else _BUSY, **text)
    line: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 1.4 * size, "linewidth": size / 5}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    crowded = len(messages) > _CROWD and len({message["bytes"] for message in messages}) == 1
    for message in messages:
        start, end = nodes[message["source"]], nodes[message["destination"]]
        bend = _bend(message["destination"] - message["source"], ranks)
        line |= {"patchA": start, "patchB": end, "connectionstyle": f"arc3,rad={bend}"}
        axes.add_patch(FancyArrowPatch(start.center, end.center, color=colour, **line))
        if not crowded:
            words = _size(message["bytes"])
            axes.text(*_beside(start.center, end.center, bend, len(words)), words, color=_INK, bbox=box, **text)
    if crowded:
        axes.text(0, -1.38, f"{_size(messages[0]['bytes'])} each", color=_INK, **text)


def _words(step: Step, gap: str) -> str:
    """`0→1 1→2 2→0   4 B each`, or the bytes of each where they differ."""
    arrows = [f"{message['source']}→{message['destination']}" for message in step.messages]
    sizes = [_size(message["bytes"]) for message in step.messages]
    if len({message["bytes"] for message in step.messages}) == 1:
        return f"{' '.join(arrows)}{gap}{sizes[0]}" + (" each" if len(arrows) > 1 else "")
    return " ".join(f"{arrow} ({size})" for arrow, size in zip(arrows, sizes, strict=True))


def _totals(messages: int, steps: int, bytes_per_rank: list[int]) -> str:
    least, most = _size(min(bytes_per_rank)), _size(max(bytes_per_rank))
    each = f"each rank sends {most}" if least == most else f"a rank sends {least} to {most}"
    return f"{messages} messages in {steps} steps, {each}"


def _size(count: int) -> str:
    """`16 B`, `1.5 KiB`, `20 MiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{round(count / 1024**power, 1):g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _bend(hop: int, ranks: int) -> float:
    """How far an arrow swings, so that it meets neither the one that comes back nor the ranks between."""
    hop %= ranks
    if hop in (1, ranks - 1) or 2 * hop == ranks:
        return -0.16  # to its left: outside the circle, if it goes clockwise
    return 0.06 if 2 * hop < ranks else -0.26  # inside, and one inside the other


def _beside(start: tuple[float, float], end: tuple[float, float], bend: float, length: int) -> tuple[float, float]:
    """Where the text of an arrow stands: beside its middle, or nearer to its start where long arrows cross."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    distance = hypot(dx, dy)
    along = 0.5 if distance < 1.45 else 0.6 / distance
    away = 0.1 + 0.036 * length * abs(dy) / distance  # text is wider than high
    aside = 2 * bend * along * (1 - along) + (away if bend > 0 else -away) / distance
    return start[0] + along * dx + aside * dy, start[1] + along * dy - aside * dx
