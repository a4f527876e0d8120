"""Messages step by step: who sends how many bytes to whom, with ranks on a circle. Taught in `02_allreduce.ipynb`.

`steps.py` puts the recorded messages in order; `browser/messages.js` animates them at the reader's pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, cos, hypot, pi, sin
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path

from dlab.events import Event
from dlab.kinds import COLLECTIVE, MESSAGE, STATE, MessageData
from dlab.views.base import COLOURS, View
from dlab.views.columns import Arrivals
from dlab.views.steps import Step, Steps, TitledStep, find_chunks
from dlab.views.totals import CollectiveTotals, write_size

_SHOWN = 24  # steps in a strip and in the terminal; a longer run says how many more there are
_SENT, _MOST = 200, 3000  # numbers of latest steps and messages that go to the browser
_COLUMNS = 4  # pictures per row of a strip
_ABOVE, _BELOW = 0.35, 0.5  # inches for the text above and below the pictures
_NODE, _RIM = 0.19, 0.22  # radius of a rank, and where its arrows begin and end; the circle has radius 1
_CROWD = 5  # with more messages of one size than this in a step, the size is written only once
_BUSY, _IDLE, _INK = "#404040", "#D0D0D0", "#202020"  # ranks that take part in a step, other ranks, and text

_COUNTED = ("messages", "steps", "bytes_per_rank")


class Formula(Protocol):
    """The expected cost of a run, as `dlab.cost` computes it."""

    @property
    def messages(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def bytes_per_rank(self) -> list[int]: ...


class Messages(View):
    """The messages of a run (`run.events`, or `.messages` of a rehearsal), with a picture per step.

    Servers are numbered after the ranks; if it also gets `run.states`, it calls them by name.

    `steps` are the (phase, step) pairs in the order of the run; `messages` and `bytes_per_rank` count as
    `dlab.cost.allreduce` does. Pass its result as `cost` to show the formula beside what was recorded.

    >>> Messages(rehearsal.messages)
    reduce-scatter 0   0→1 1→2 2→0   4 B each
    """

    script, title = "messages", "Messages"
    reads = (MESSAGE, COLLECTIVE, STATE)

    def __init__(self, events: Iterable[Event] = (), cost: Formula | None = None) -> None:
        self.cost = cost
        self.messages = 0
        self.bytes_per_rank: list[int] = []
        self._links = Counter[tuple[int, int]]()  # bytes by (source, destination)
        self._names: dict[int, str] = {}  # names of servers, from their states
        self._steps, self._collectives = Steps(), CollectiveTotals()
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events, each rank's own in order; costs a few microseconds per message."""
        for event in self.take(events).others:
            if event.kind == STATE and "name" in event.data:
                self._names[event.rank] = event.data["name"]
            if event.kind == COLLECTIVE:
                self._collectives.add(event.rank, event.data)  # type: ignore[arg-type]
            if event.kind != MESSAGE:
                continue
            message: MessageData = event.data  # type: ignore[assignment]
            source, destination = message["source"], message["destination"]
            self.bytes_per_rank += [0] * (1 + max(source, destination) - len(self.bytes_per_rank))
            self.bytes_per_rank[source] += message["bytes"]
            self._links[source, destination] += message["bytes"]
            self.messages += 1
            self._steps.add(message)

    @property
    def empty(self) -> bool:
        """Whether no message was recorded."""
        return not self.messages

    @property
    def remark(self) -> str:
        """What went without messages, `all-reduce (shared memory): 50 times, 25.6 MiB, 12 ms on each rank`."""
        return "; ".join(self._collectives.lines())

    @property
    def steps(self) -> list[tuple[str, int]]:
        """All (phase, step) pairs in the order of the run."""
        return self._steps.pairs()

    def figure(self, step: int | None = None) -> Figure:
        """Draw one step (an index into `.steps`), or a strip of all steps."""
        nodes = [self._name(rank) for rank in range(len(self.bytes_per_rank))]
        if step is not None:
            if not 0 <= step < len(self._steps):
                raise IndexError(f"there is no step {step}: this run has {len(self._steps)}, counted from 0")
            titled = self._steps.first(step + 1)[step]
            figure = Figure(figsize=(4, 4.2), facecolor="white")
            _draw(figure.add_axes((0, 0, 1, 1)), titled, nodes, _reach([titled], len(nodes)), size=11)
            return figure
        shown = self._steps.first(_SHOWN)
        if not shown and self.remark:
            figure = Figure(figsize=(7, 0.4 + 0.2 * len(self._collectives.lines())), facecolor="white")
            figure.text(0.03, 0.5, self.text(), va="center", fontsize=9, color=_INK)
            return figure
        rows = max(ceil(len(shown) / _COLUMNS), 1)
        columns = max(ceil(len(shown) / rows), 1)
        above, below = _ABOVE * (len(self._steps) > _SHOWN), _BELOW * bool(self.cost and shown)
        height = 2.6 * rows + above + below
        figure = Figure(figsize=(2.4 * columns, height), facecolor="white")
        # all pictures get the same space, because a layout that measures each takes longer than drawing them
        figure.subplots_adjust(0, below / height, 1, 1 - above / height, wspace=0, hspace=0)
        reach = _reach(shown, len(nodes))
        for place, titled in enumerate(shown, 1):
            _draw(figure.add_subplot(rows, columns, place), titled, nodes, reach, size=8)
        if above:
            words = f"the first {_SHOWN} of {len(self._steps)} steps"
            figure.suptitle(words, y=1 - 0.1 / height, color=_INK)
        if below:
            figure.supxlabel(self._summary(), y=0.1 / height, fontsize=9, color=_INK)
        return figure

    def _name(self, rank: int) -> str:
        """`2`, or `server 0`."""
        return self._names.get(rank, str(rank))

    def data(self) -> dict[str, Any]:
        """Return the last steps with their messages, as many as can be shown, and totals of the whole run.

        What was sent before a step is the total minus what came after it, so that the first steps are not needed.
        """
        shown = self._steps.last(_SENT)
        room = np.cumsum([len(titled.step) for titled in reversed(shown)]) <= _MOST
        shown = shown[-max(1, room.sum()) :]
        tables = [titled.step.table for titled in shown]
        rows = np.concatenate([np.empty((0, 10)), *tables])
        times = (rows[:, 3:5] - rows[:, 3].min(initial=np.inf)).astype(np.float32)
        chunks = find_chunks(rows, len(self.bytes_per_rank)).astype(np.int32)
        links = np.array([(*link, count) for link, count in self._links.items()], dtype=np.float64).reshape(-1, 3)
        complete = (place for place in reversed(range(len(shown))) if self._steps.is_complete(shown[place]))
        return {
            "messages": self.messages,
            "names": self._names,
            "bytes_per_rank": self.bytes_per_rank,
            "links": {"source": links[:, 0].copy(), "destination": links[:, 1].copy(), "bytes": links[:, 2].copy()},
            "count": len(self._steps),
            "steps": [
                {"title": title, "colour": colour, "round": number, "phase": step.phase, "step": step.number}
                for title, colour, number, step in shown
            ],
            "begin": np.cumsum([0, *map(len, tables)], dtype=np.int32),  # index of each step's first message below
            "source": rows[:, 0].astype(np.int32),
            "destination": rows[:, 1].astype(np.int32),
            "bytes": rows[:, 2].copy(),
            "start": times[:, 0].copy(),  # seconds since the first of these messages
            "end": times[:, 1].copy(),
            "chunk": chunks[:, 0].copy(),  # index and number of chunks; -1 if it is not a chunk
            "chunks": chunks[:, 1].copy(),
            # index of the first element and number of elements; -1 if unknown
            **dict(
                zip(("first", "numbers", "of"), np.nan_to_num(rows[:, 5:8].T, nan=-1).astype(np.int32), strict=True)
            ),
            **dict(zip(("low", "high"), rows[:, 8:].T.astype(np.float32), strict=True)),
            "complete": next(complete, 0),  # the last step that every rank has reported
            "formula": self.cost and {name: getattr(self.cost, name) for name in _COUNTED},
        }

    def sentence(self) -> str:
        """Describe the strip in one sentence."""
        if self.empty:
            return " ".join(filter(None, ["Messages: none were recorded.", self.remark and f"{self.remark}."]))
        steps = " ".join(
            f"{titled.title.capitalize()}: {self._words(titled.step, ', ')}." for titled in self._steps.first(_SHOWN)
        )
        summary = self._summary().replace("\n", "; ")
        ranks, servers = self._by_role(self.bytes_per_rank)
        who = " and ".join([f"Ranks 0 to {len(ranks) - 1}" if len(ranks) > 1 else "Rank 0", *servers])
        more = f" Without messages, {self.remark}." if self.remark else ""
        return f"{who} on a circle, an arrow per message. {steps} {summary}.{more}"

    def _summary(self) -> str:
        """Return what was recorded, and below it what the formula says."""
        recorded = self._totals(self.messages, len(self._steps), self.bytes_per_rank)
        if not self.cost:
            return recorded
        missing = [0] * (len(self.cost.bytes_per_rank) - len(self.bytes_per_rank))
        counted = (self.messages, len(self._steps), [*self.bytes_per_rank, *missing])
        expected = (self.cost.messages, self.cost.steps, list(self.cost.bytes_per_rank))
        verdict = "the same" if counted == expected else "not the same"
        return f"recorded: {recorded}\nformula: {self._totals(*expected)}: {verdict}"

    def _totals(self, messages: int, steps: int, bytes_per_rank: list[int]) -> str:
        """Write the totals, as in `24 messages in 6 steps, each rank sends 36 B, server 0 sends 144 B`."""
        ranks, servers = self._by_role(bytes_per_rank)
        least, most = write_size(min(ranks)), write_size(max(ranks))
        sent = [f"each rank sends {most}" if least == most else f"a rank sends {least} to {most}"]
        sent += [f"{name} sends {write_size(count)}" for name, count in servers.items()]
        return f"{messages} messages in {steps} steps, {', '.join(sent)}"

    def _by_role(self, bytes_per_rank: list[int]) -> tuple[list[int], dict[str, int]]:
        """Return what the ranks send, and what each of the servers sends."""
        servers = {self._names[rank]: count for rank, count in enumerate(bytes_per_rank) if rank in self._names}
        return bytes_per_rank[: len(bytes_per_rank) - len(servers)], servers

    def _words(self, step: Step, gap: str) -> str:
        """Write a step as `0→1 1→2 2→0   4 B each`, or each size where they differ; with names, `0 → server 0, …`."""
        messages = step.messages
        ends = [(message["source"], message["destination"]) for message in messages]
        to, comma = (" → ", ", ") if self._names.keys() & {rank for pair in ends for rank in pair} else ("→", " ")
        arrows = [to.join(map(self._name, pair)) for pair in ends]
        sizes = [write_size(message["bytes"]) for message in messages]
        within = f"{gap}{step.groups}" if step.groups else ""
        if len({message["bytes"] for message in messages}) == 1:
            return f"{comma.join(arrows)}{gap}{sizes[0]}" + (" each" if len(arrows) > 1 else "") + within
        return comma.join(f"{arrow} ({size})" for arrow, size in zip(arrows, sizes, strict=True)) + within

    def text(self) -> str:
        """Return the steps as text for a terminal."""
        collectives = [f"without messages: {line}" for line in self._collectives.lines()]
        if self.empty:
            return "\n".join(["no messages were recorded", *collectives])
        shown = [titled.step for titled in self._steps.first(_SHOWN)]
        names = [step.name for step in shown]
        width = max(map(len, names))
        lines = [f"{name:<{width}}   {self._words(step, '   ')}" for name, step in zip(names, shown, strict=True)]
        more = [f"… {len(self._steps) - _SHOWN} more steps"] if len(self._steps) > _SHOWN else []
        return "\n".join([*lines, *more, self._summary(), *collectives])


def _draw(axes: Axes, titled: TitledStep, nodes: list[str], reach: float, size: float) -> None:
    """Draw ranks and servers on a circle, and an arrow per message with its bytes, in text of about this size."""
    colour = COLOURS[titled.colour % len(COLOURS)]
    axes.set(xlim=(-reach, reach), ylim=(-reach, 1.15 * reach), aspect="equal")
    axes.set_axis_off()
    axes.set_title(titled.title, fontsize=size + 1, color=colour, y=0.93, pad=0)
    messages, places = titled.step.messages, _places(len(nodes))
    clockwise = _goes_clockwise(messages, len(nodes))
    busy = {rank for message in messages for rank in (message["source"], message["destination"])}
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
    for rank, (name, place) in enumerate(zip(nodes, places, strict=True)):
        axes.add_artist(_node(name, place, _BUSY if rank in busy else _IDLE))
        small = {} if name.isdecimal() else {"fontsize": 0.8 * size}
        axes.text(*place, name.replace(" ", "\n"), color="white" if rank in busy else _BUSY, **text | small)
    line: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 1.4 * size, "linewidth": size / 5}
    for message in messages:
        start, end = places[message["source"]], places[message["destination"]]
        bend = _bend(message["destination"] - message["source"], len(nodes), clockwise)
        axes.add_artist(FancyArrowPatch(path=_way(start, end, bend), color=colour, **line))
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    for x, y, words in _labels(titled.step, len(nodes)):
        axes.text(x, y, words, color=_INK, bbox=box, **text)


def _places(ranks: int) -> list[tuple[float, float]]:
    """Return positions on the circle: rank 0 at the top, the others clockwise; two ranks are side by side."""
    angles = [2 * pi * rank / ranks - (pi / 2 if ranks == 2 else 0) for rank in range(ranks)]
    return [(sin(angle), cos(angle)) for angle in angles]


def _labels(step: Step, ranks: int) -> list[tuple[float, float, str]]:
    """Return where and how the sizes of messages are written: beside each arrow, or once below crossing arrows."""
    messages, places = step.messages, _places(ranks)
    # arrows from one rank to many, or from many to one, meet and would cross each other's text
    ends = [{message[end] for message in messages} for end in ("source", "destination")]
    fan = min(map(len, ends)) < len(messages)
    if (fan or len(messages) > _CROWD) and len({message["bytes"] for message in messages}) == 1:
        return [(0, -1.38, f"{write_size(messages[0]['bytes'])} each")]
    labels, clockwise = [], _goes_clockwise(messages, ranks)
    for message, chunk in zip(messages, _chunk_names(step, ranks), strict=True):
        source, destination, words = message["source"], message["destination"], chunk + write_size(message["bytes"])
        bend = _bend(destination - source, ranks, clockwise)
        labels.append((*_beside(places[source], places[destination], bend, words), words))
    return labels


def _chunk_names(step: Step, ranks: int) -> list[str]:
    """Return a line for each message: `chunk 2`, `chunk 0/2` if the number of chunks is not that of ranks, or ""."""
    found = find_chunks(step.table, ranks).tolist()
    return [f"chunk {chunk}" + f"/{of}" * (of != ranks) + "\n" if of else "" for chunk, of in found]


def _width(words: str) -> int:
    """Return the length of the longest line."""
    return max(map(len, words.split("\n")))


def _reach(shown: list[TitledStep], ranks: int) -> float:
    """Return how far pictures must extend sideways so that no text is cut off; a character takes 1/38 of the width."""
    labels = [label for titled in shown for label in _labels(titled.step, ranks)]
    return max([1.45, *(abs(x) / (1 - _width(words) / 38) for x, _, words in labels)])


def _node(name: str, place: tuple[float, float], colour: str) -> Patch:
    """Return a disc for a rank, a square for a server."""
    if name.isdecimal():
        return Circle(place, _NODE, color=colour)
    corner = (place[0] - _NODE, place[1] - _NODE)
    return FancyBboxPatch(corner, 2 * _NODE, 2 * _NODE, "round,pad=0,rounding_size=0.08", color=colour)


def _goes_clockwise(messages: Sequence[MessageData], ranks: int) -> bool:
    """Return whether a message goes to the next rank, outside of the circle."""
    return any((message["destination"] - message["source"]) % ranks == 1 for message in messages)


def _bend(hop: int, ranks: int, clockwise: bool = True) -> float:
    """Return how far an arrow bends, so that it meets neither the arrow back nor the ranks between."""
    hop %= ranks
    if hop == ranks - 1 and not clockwise:
        return 0.16  # to its right: outside the circle, where no arrow goes the other way
    if hop in (1, ranks - 1) or 2 * hop == ranks:
        return -0.16  # to its left: outside the circle if it goes clockwise
    return 0.06 if 2 * hop < ranks else -0.26  # inside the circle, one inside the other


def _way(start: tuple[float, float], end: tuple[float, float], bend: float) -> Path:
    """Return a curve from the rim of one rank to the rim of the other, with its middle bent to the side.

    A part of a quadratic curve is again quadratic, and a formula for it is quicker than a search for the rim.
    """
    (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
    corners = np.array([start, (x + dx / 2 + bend * dy, y + dy / 2 - bend * dx), end])
    cut = min(0.4, _RIM / hypot(dx, dy))  # some length remains where ranks overlap
    shares = ((cut, cut), (cut, 1 - cut), (1 - cut, 1 - cut))
    weights = np.array([((1 - s) * (1 - t), s * (1 - t) + t * (1 - s), s * t) for s, t in shares])
    return Path(weights @ corners, [Path.MOVETO, Path.CURVE3, Path.CURVE3])


def _beside(start: tuple[float, float], end: tuple[float, float], bend: float, words: str) -> tuple[float, float]:
    """Return the position of an arrow's text: beside its middle, or nearer to its start where long arrows cross."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    distance = hypot(dx, dy)
    along = 0.5 if distance < 1.45 else 0.6 / distance
    wide, high = 0.036 * _width(words), 0.07 * words.count("\n")
    away = 0.1 + (wide * abs(dy) + high * abs(dx)) / distance
    aside = 2 * bend * along * (1 - along) + (away if bend > 0 else -away) / distance
    return start[0] + along * dx + aside * dy, start[1] + along * dy - aside * dx
