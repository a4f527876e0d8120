"""Messages step by step: who sends how many bytes to whom, ranks on a circle. Taught in `02_allreduce.ipynb`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, cos, hypot, pi, sin
from typing import Any

import ipywidgets as widgets
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from dlab.events import Event
from dlab.views.still import COLOURS, View

_SHOWN = 24  # steps in a strip and in the terminal; a longer run says how many more there are
_COLUMNS = 4  # pictures side by side in a strip
_CROWD = 5  # more messages than this in a step, if all of one size, have it said once and not at every arrow
_BUSY, _IDLE, _INK = "#404040", "#D0D0D0", "#202020"  # ranks that take part in a step, the others, the text

Message = dict[str, Any]  # source, destination, bytes, start, phase, step, as a recorder tells them


class Messages(View):
    """The messages of a run (`run.events`, or `.messages` of a rehearsal), a picture per step.

    `steps` are the (phase, step) pairs in the order of the run; `messages` and `bytes_per_rank` count as
    `dlab.cost.allreduce` does.

    >>> Messages(rehearsal.messages)
    reduce-scatter 0   0→1 1→2 2→0   4 B each
    """

    def __init__(self, events: Iterable[Event]) -> None:
        told = [event.data for event in events if event.kind == "message"]
        self.messages = len(told)
        self.bytes_per_rank = [0] * max((1 + max(m["source"], m["destination"]) for m in told), default=0)
        for message in told:
            self.bytes_per_rank[message["source"]] += message["bytes"]
        self._pictures = [Step(self, *key, group) for key, group in _in_order(told)]
        self.steps = [(picture.phase, picture.step) for picture in self._pictures]

    def figure(self, step: int | None = None) -> Figure:
        """The picture of one step (its place in `.steps`), or a strip of all of them."""
        if step is not None:
            if not 0 <= step < len(self.steps):
                raise IndexError(f"there is no step {step}: this run has {len(self.steps)}, counted from 0")
            return self._pictures[step].figure()
        shown = self._pictures[:_SHOWN]
        rows = max(ceil(len(shown) / _COLUMNS), 1)
        columns = max(ceil(len(shown) / rows), 1)
        figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="constrained", facecolor="white")
        for place, picture in enumerate(shown, 1):
            picture.draw(figure.add_subplot(rows, columns, place), size=8)
        if len(self.steps) > _SHOWN:
            figure.suptitle(f"the first {_SHOWN} of {len(self.steps)} steps", color=_INK)
        return figure

    def replay(self) -> Any:
        """The still strip, and below it a slider and a play button that go through the steps, a picture each.

        The slider works in the browser alone; where no widget can be shown, the strip is what remains.
        """
        display(self)
        pictures = [widgets.HTML(picture.bundle()["text/html"]) for picture in self._pictures[:_SHOWN]]
        stack = widgets.Stack(pictures, selected_index=0 if pictures else None)
        last = max(len(pictures) - 1, 0)
        slider = widgets.IntSlider(max=last, description="step")
        play = widgets.Play(max=last, interval=1200)
        widgets.jslink((play, "value"), (slider, "value"))
        widgets.jslink((slider, "value"), (stack, "selected_index"))
        return Controls([widgets.HBox([play, slider]), stack])

    @property
    def alt(self) -> str:
        """What the strip shows."""
        if not self.steps:
            return "Messages: none were recorded."
        steps = " ".join(picture.alt for picture in self._pictures[:_SHOWN])
        return f"Ranks 0 to {len(self.bytes_per_rank) - 1} on a circle, an arrow per message. {steps} {self._totals()}."

    def _totals(self) -> str:
        least, most = _size(min(self.bytes_per_rank)), _size(max(self.bytes_per_rank))
        each = f"each rank sends {most}" if least == most else f"a rank sends {least} to {most}"
        return f"{self.messages} messages in {len(self.steps)} steps, {each}"

    def __str__(self) -> str:
        if not self.steps:
            return "no messages were recorded"
        names = [f"{phase} {step}".strip() for phase, step in self.steps]
        shown = list(zip(names, self._pictures, strict=True))[:_SHOWN]
        lines = [f"{name:<{max(map(len, names))}}   {picture}" for name, picture in shown]
        more = [f"… {len(names) - _SHOWN} more steps"] if len(names) > _SHOWN else []
        return "\n".join([*lines, *more, self._totals()])


class Controls(widgets.VBox):
    """A box of widgets that says in words what is missing where they cannot be shown."""

    def __repr__(self) -> str:
        return "(where a kernel runs, a slider here goes through the steps)"


class Step(View):
    """The messages of one step: ranks on a circle, an arrow per message, its bytes beside it."""

    def __init__(self, run: Messages, title: str, colour: str, phase: str, step: int, messages: list[Message]) -> None:
        self.title, self.phase, self.step, self.messages = title, phase, step, messages
        self._colour, self._ranks = colour, len(run.bytes_per_rank)
        self._sizes = sorted(message["bytes"] for message in messages)

    def figure(self) -> Figure:
        figure = Figure(figsize=(4, 4.2), layout="constrained", facecolor="white")
        self.draw(figure.add_subplot(), size=11)
        return figure

    def draw(self, axes: Axes, size: float) -> None:
        """Into a part of a figure, with text of about this size."""
        axes.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.3), aspect="equal")
        axes.set_axis_off()
        axes.set_title(self.title, fontsize=size + 1, color=self._colour)
        turn = -pi / 2 if self._ranks == 2 else 0.0  # rank 0 is on top, the others clockwise; two are side by side
        angles = [2 * pi * rank / self._ranks + turn for rank in range(self._ranks)]
        busy = {rank for message in self.messages for rank in (message["source"], message["destination"])}
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
        nodes = []
        for rank, angle in enumerate(angles):
            nodes.append(Circle((sin(angle), cos(angle)), 0.19, color=_BUSY if rank in busy else _IDLE))
            axes.add_patch(nodes[rank])
            axes.text(sin(angle), cos(angle), str(rank), color="white" if rank in busy else _BUSY, **text)
        line: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 1.4 * size, "linewidth": size / 5}
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        crowded = len(self.messages) > _CROWD and self._sizes[0] == self._sizes[-1]
        for message in self.messages:
            start, end = nodes[message["source"]], nodes[message["destination"]]
            bend = _bend(message["destination"] - message["source"], self._ranks)
            line |= {"patchA": start, "patchB": end, "connectionstyle": f"arc3,rad={bend}"}
            axes.add_patch(FancyArrowPatch(start.center, end.center, color=self._colour, **line))
            if not crowded:
                words = _size(message["bytes"])
                axes.text(*_beside(start.center, end.center, bend, len(words)), words, color=_INK, bbox=box, **text)
        if crowded:
            axes.text(0, -1.38, f"{_size(self._sizes[0])} each", color=_INK, **text)

    @property
    def alt(self) -> str:
        return f"{self.title.capitalize()}: {str(self).replace('   ', ', ')}."

    def __str__(self) -> str:
        """`0→1 1→2 2→0   4 B each`, or the bytes of each where they differ."""
        arrows = [f"{message['source']}→{message['destination']}" for message in self.messages]
        if self._sizes[0] == self._sizes[-1]:
            return f"{' '.join(arrows)}   {_size(self._sizes[0])}" + (" each" if len(arrows) > 1 else "")
        return " ".join(f"{a} ({_size(m['bytes'])})" for a, m in zip(arrows, self.messages, strict=True))


def _in_order(messages: list[Message]) -> list[tuple[tuple[str, str, str, int], list[Message]]]:
    """Title, colour, phase and number of each step, and its messages by source, in the order of the run.

    A rank that sends to the same rank in the same step again has begun a new round. In a round a phase comes after
    another if its last message began later: ranks may be a few steps ahead of each other, but not for a whole phase.
    """
    groups: dict[tuple[int, str, int], list[Message]] = {}  # by round, phase and step
    rounds: dict[int, int] = {}
    seen: set[tuple[Any, ...]] = set()
    last: dict[tuple[int, str], float] = {}
    for message in sorted(messages, key=lambda m: m["source"]):  # a rank's own messages stay in their order
        source, phase, step = message["source"], message["phase"], message["step"]
        address = (source, message["destination"], phase, step)
        if (*address, rounds.get(source, 0)) in seen:
            rounds[source] = rounds.get(source, 0) + 1
        number = rounds.get(source, 0)
        seen.add((*address, number))
        groups.setdefault((number, phase, step if phase else number), []).append(message)
        last[number, phase] = max(last.get((number, phase), 0.0), message["start"])
    keys = sorted(groups, key=lambda key: (key[0], last[key[:2]], key[2]))
    phases = list(dict.fromkeys(phase for _, phase, _ in keys))
    parts = [(number, phase) if phase else (0, "") for number, phase, _ in keys]
    total, done, ordered = Counter(parts), Counter[tuple[int, str]](), []
    for (number, phase, step), part in zip(keys, parts, strict=True):
        done[part] += 1
        words = [f"round {number + 1}"] if phase and keys[-1][0] else []
        title = ", ".join([*words, *filter(None, [phase]), f"step {done[part]} of {total[part]}"])
        colour = COLOURS[phases.index(phase) % len(COLOURS)]
        ordered.append(((title, colour, phase, step), groups[number, phase, step]))
    return ordered


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
