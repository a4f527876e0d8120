"""Messages step by step: who sends how many bytes to whom, ranks on a circle. Taught in `02_allreduce.ipynb`.

The recorded messages are put in order here; `browser/messages.js` lets them travel, at the pace of whoever watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, cos, hypot, pi, sin
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from dlab.events import Event
from dlab.views.still import COLOURS, View

_SHOWN = 24  # steps in a strip and in the terminal; a longer run says how many more there are
_SENT, _MOST = 200, 4000  # steps, and messages, that go to the browser: the last ones
_COLUMNS = 4  # pictures side by side in a strip
_CROWD = 5  # more messages than this in a step, if all of one size, have it said once and not at every arrow
_BUSY, _IDLE, _INK = "#404040", "#D0D0D0", "#202020"  # ranks that take part in a step, the others, the text

_COUNTED = ("messages", "steps", "bytes_per_rank")

Message = dict[str, Any]  # source, destination, bytes, start, end, phase, step, as a recorder tells them


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
        self._rounds: list[dict[tuple[str, int], Step]] = []
        self._count = 0  # of steps
        self._unlabelled = 0  # of them
        self._at = Counter[int]()  # the round that each rank is in
        self._done: dict[int, set[tuple[int, str, int]]] = {}  # what it has sent in that round
        self._phases: dict[str, int] = {}  # the first round with this phase
        super().__init__(events)

    def add(self, events: Iterable[Event]) -> None:
        """Take in more events, each rank's own in their order; a few microseconds per message.

        A rank that sends to the same rank in the same step again has begun a new round.
        """
        for event in events:
            if event.kind != "message":
                continue
            message = event.data
            source, destination, phase = message["source"], message["destination"], message["phase"]
            self.bytes_per_rank += [0] * (1 + max(source, destination) - len(self.bytes_per_rank))
            self.bytes_per_rank[source] += message["bytes"]
            self._links[source, destination] += message["bytes"]
            self.messages += 1
            done, address = self._done.setdefault(source, set()), (destination, phase, message["step"])
            if address in done:
                done.clear()
                self._at[source] += 1
            done.add(address)
            self._step(self._at[source], phase, message["step"]).add(message)

    def _step(self, number: int, phase: str, step: int) -> Step:
        """The step of this round, made if it is new. Without labels every round is a step."""
        if number == len(self._rounds):
            self._rounds.append({})
        key = (phase, step if phase else number)
        if key not in self._rounds[number]:
            self._rounds[number][key] = Step(*key)
            self._count += 1
            self._unlabelled += not phase
            self._phases[phase] = min(number, self._phases.get(phase, number))
        return self._rounds[number][key]

    @property
    def empty(self) -> bool:
        """Was no message recorded?"""
        return not self.messages

    @property
    def steps(self) -> list[tuple[str, int]]:
        """All (phase, step) pairs, in the order of the run."""
        return [(step.phase, step.number) for steps in self._rounds for step in _in_order(steps)]

    def _titled(self, rounds: range) -> list[Titled]:
        """The steps of these rounds, in their order."""
        begun = {phase: _began(self._rounds[first])[phase] for phase, first in self._phases.items()}
        colours = sorted(begun, key=lambda phase: (self._phases[phase], begun[phase]))
        found = []
        for number in rounds:
            done, total = Counter[str](), Counter(phase for phase, _ in self._rounds[number])
            for step in _in_order(self._rounds[number]):
                done[step.phase] += 1
                words = [f"round {number + 1}"] if step.phase and len(self._rounds) > 1 else []
                place, of = (done[step.phase], total[step.phase]) if step.phase else (number + 1, self._unlabelled)
                title = ", ".join([*words, *filter(None, [step.phase]), f"step {place} of {of}"])
                found.append(Titled(title, colours.index(step.phase), number, step))
        return found

    def _first(self, count: int) -> list[Titled]:
        """The first steps, so many or fewer."""
        end = steps = 0
        while end < len(self._rounds) and steps < count:
            steps += len(self._rounds[end])
            end += 1
        return self._titled(range(end))[:count]

    def _last(self, count: int) -> list[Titled]:
        """The last steps, so many or fewer."""
        start, steps = len(self._rounds), 0
        while start and steps < count:
            start -= 1
            steps += len(self._rounds[start])
        return self._titled(range(start, len(self._rounds)))[-count:]

    def figure(self, step: int | None = None) -> Figure:
        """The picture of one step (its place in `.steps`), or a strip of all of them."""
        ranks = len(self.bytes_per_rank)
        if step is not None:
            if not 0 <= step < self._count:
                raise IndexError(f"there is no step {step}: this run has {self._count}, counted from 0")
            figure = Figure(figsize=(4, 4.2), layout="constrained", facecolor="white")
            self._first(step + 1)[step].draw(figure.add_subplot(), ranks, size=11)
            return figure
        shown = self._first(_SHOWN)
        rows = max(ceil(len(shown) / _COLUMNS), 1)
        columns = max(ceil(len(shown) / rows), 1)
        figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="constrained", facecolor="white")
        for place, picture in enumerate(shown, 1):
            picture.draw(figure.add_subplot(rows, columns, place), ranks, size=8)
        if self._count > _SHOWN:
            figure.suptitle(f"the first {_SHOWN} of {self._count} steps", color=_INK)
        if self.cost and shown:
            figure.supxlabel(self._summary(), fontsize=9, color=_INK)
        return figure

    def data(self) -> dict[str, Any]:
        """The last steps with their messages, as far as they can be shown; totals of everything.

        What was sent before a step is the total without what came after it, so that the first steps are not needed.
        """
        shown = self._last(_SENT)
        room = np.cumsum([len(titled.step) for titled in reversed(shown)]) <= _MOST
        shown = shown[-max(1, room.sum()) :]
        tables = [titled.step.table for titled in shown]
        rows = np.concatenate([np.empty((0, 5)), *tables])
        times = (rows[:, 3:] - rows[:, 3].min(initial=np.inf)).astype(np.float32)
        links = np.array([(*link, count) for link, count in self._links.items()], dtype=np.float64).reshape(-1, 3)
        complete = (place for place in reversed(range(len(shown))) if self._complete(shown[place]))
        return {
            "messages": self.messages,
            "bytes_per_rank": self.bytes_per_rank,
            "links": {"source": links[:, 0].copy(), "destination": links[:, 1].copy(), "bytes": links[:, 2].copy()},
            "count": self._count,
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

    def _complete(self, titled: Titled) -> bool:
        """Has every rank told of its part? In a live run some are ahead; what is known is the round before."""
        _, _, number, step = titled
        before = self._rounds[number - 1].get((step.phase, step.number if step.phase else number - 1))
        return number == 0 or before is None or len(step) >= len(before)

    @property
    def alt(self) -> str:
        """What the strip shows."""
        if self.empty:
            return "Messages: none were recorded."
        steps = " ".join(f"{titled.title.capitalize()}: {titled.step.words(', ')}." for titled in self._first(_SHOWN))
        summary = self._summary().replace("\n", "; ")
        return f"Ranks 0 to {len(self.bytes_per_rank) - 1} on a circle, an arrow per message. {steps} {summary}."

    def _summary(self) -> str:
        """What was recorded, and below it what the formula says."""
        recorded = _totals(self.messages, self._count, self.bytes_per_rank)
        if not self.cost:
            return recorded
        missing = [0] * (len(self.cost.bytes_per_rank) - len(self.bytes_per_rank))
        counted = (self.messages, self._count, [*self.bytes_per_rank, *missing])
        expected = (self.cost.messages, self.cost.steps, list(self.cost.bytes_per_rank))
        verdict = "the same" if counted == expected else "not the same"
        return f"recorded: {recorded}\nformula: {_totals(*expected)}: {verdict}"

    def __str__(self) -> str:
        if self.empty:
            return "no messages were recorded"
        shown = [titled.step for titled in self._first(_SHOWN)]
        names = [f"{step.phase} {step.number}".strip() for step in shown]
        width = max(map(len, names))
        lines = [f"{name:<{width}}   {step.words('   ')}" for name, step in zip(names, shown, strict=True)]
        more = [f"… {self._count - _SHOWN} more steps"] if self._count > _SHOWN else []
        return "\n".join([*lines, *more, self._summary()])


class Step:
    """The messages of one step of one round."""

    def __init__(self, phase: str, number: int) -> None:
        self.phase, self.number = phase, number
        self.began = 0.0  # when the last of its messages did
        self._messages: list[Message] = []
        self._table = np.empty((0, 5))

    def add(self, message: Message) -> None:
        """One more, in any order of the ranks."""
        self._messages.append(message)
        self.began = max(self.began, message["start"])

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> list[Message]:
        """By source; a rank's own in their order."""
        return sorted(self._messages, key=lambda message: message["source"])

    @property
    def table(self) -> np.ndarray:
        """A row per message: source, destination, bytes, start, end. Made once, unless more have come."""
        if len(self._table) < len(self):
            columns = ("source", "destination", "bytes", "start", "end")
            self._table = np.array([[message[name] for name in columns] for message in self.messages], dtype=np.float64)
        return self._table

    def words(self, gap: str) -> str:
        """`0→1 1→2 2→0   4 B each`, or the bytes of each where they differ."""
        arrows = [f"{message['source']}→{message['destination']}" for message in self.messages]
        sizes = [_size(message["bytes"]) for message in self.messages]
        if len({message["bytes"] for message in self.messages}) == 1:
            return f"{' '.join(arrows)}{gap}{sizes[0]}" + (" each" if len(arrows) > 1 else "")
        return " ".join(f"{arrow} ({size})" for arrow, size in zip(arrows, sizes, strict=True))


class Titled(NamedTuple):
    """A step with what the whole run says about it: title, number of its colour, round."""

    title: str
    colour: int
    round: int
    step: Step

    def draw(self, axes: Axes, ranks: int, size: float) -> None:
        """Ranks on a circle, an arrow per message, its bytes beside it, in text of about this size."""
        messages, colour = self.step.messages, COLOURS[self.colour % len(COLOURS)]
        axes.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.3), aspect="equal")
        axes.set_axis_off()
        axes.set_title(self.title, fontsize=size + 1, color=colour)
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


def _began(steps: dict[tuple[str, int], Step]) -> dict[str, float]:
    """When the last message of each phase of a round began."""
    began: dict[str, float] = {}
    for step in steps.values():
        began[step.phase] = max(began.get(step.phase, 0.0), step.began)
    return began


def _in_order(steps: dict[tuple[str, int], Step]) -> list[Step]:
    """The steps of a round. A phase comes after another if its last message began later: ranks may be a few steps
    ahead of each other, but not for a whole phase.
    """
    began = _began(steps)
    places = {phase: place for place, phase in enumerate(sorted(began, key=began.__getitem__))}
    return sorted(steps.values(), key=lambda step: (places[step.phase], step.number))


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
