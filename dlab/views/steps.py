"""Recover the order of recorded messages: rounds, the phases of each round, and the steps of each phase.

Ranks run ahead of each other, so the order in which messages were recorded is not always the order of the steps.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from dlab.kinds import MessageData
from dlab.views.totals import name_group

_GROUPS = 4  # that are listed
_COLUMNS = ("source", "destination", "bytes", "start", "end", "begin", "count", "of", "low", "high")


class Step:
    """The messages of one step of one round."""

    def __init__(self, phase: str, number: int) -> None:
        self.phase, self.number = phase, number
        self.began = 0.0  # when the last of its messages began
        self._messages: list[MessageData] = []
        self._table = np.empty((0, len(_COLUMNS)))

    @property
    def name(self) -> str:
        """Its name in the algorithm, such as `reduce-scatter 0`; without a label only its number."""
        return f"{self.phase} {self.number}".strip()

    def add(self, message: MessageData) -> None:
        """Add a message; the order of the ranks does not matter."""
        self._messages.append(message)
        self.began = max(self.began, message["start"])

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> list[MessageData]:
        """The messages sorted by source, those of one rank in their order."""
        return sorted(self._messages, key=lambda message: message["source"])

    @property
    def axes(self) -> str:
        """`tp`, the axis of the mesh along which they went; nothing if they went between all ranks."""
        return " and ".join(dict.fromkeys(filter(None, map(name_group, self.messages))))

    @property
    def groups(self) -> str:
        """`within tp [0, 1] [2, 3]`: also the ranks of each group; of many groups only the first ones."""
        found = list(dict.fromkeys(str(message["group"]) for message in self.messages if "group" in message))
        return " ".join(["within", self.axes, *found[:_GROUPS], *["…"] * (len(found) > _GROUPS)]) if found else ""

    @property
    def table(self) -> np.ndarray:
        """Return a row per message with its `_COLUMNS`; NaN means unknown. Cached until more messages arrive."""
        if len(self._table) < len(self):
            rows = [[message.get(name, np.nan) for name in _COLUMNS] for message in self.messages]
            self._table = np.array(rows, dtype=np.float64)
        return self._table


class TitledStep(NamedTuple):
    """A step with its title, the number of its colour, and its round in the whole run."""

    title: str
    colour: int
    round: int
    step: Step


class Steps:
    """All steps of a run in order. A recorder gives the round of a message that has a label. Without labels, a rank
    that sends to the same rank again has begun a new round, and every round is one step.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, int], Step]] = []
        self._count = 0
        self._unlabelled = 0  # number of steps without a label
        self._at = Counter[int]()  # the current round of each rank
        self._done: dict[int, set[tuple[int, str, int]]] = {}  # what the rank has sent in that round
        self._phases: dict[str, int] = {}  # the first round with this phase

    def __len__(self) -> int:
        return self._count

    def add(self, message: MessageData) -> None:
        """Add a message; the messages of one rank must come in order."""
        if message["phase"] and "round" in message:
            self._step(message["round"], message["phase"], message["step"]).add(message)
            return
        source, address = message["source"], (message["destination"], message["phase"], message["step"])
        done = self._done.setdefault(source, set())
        if address in done:
            done.clear()
            self._at[source] += 1
        done.add(address)
        self._step(self._at[source], message["phase"], message["step"]).add(message)

    def _step(self, number: int, phase: str, step: int) -> Step:
        """Return the step of this round, and create it if it is new."""
        while number >= len(self._rounds):
            self._rounds.append({})
        key = (phase, step if phase else number)
        if key not in self._rounds[number]:
            self._rounds[number][key] = Step(*key)
            self._count += 1
            self._unlabelled += not phase
            self._phases[phase] = min(number, self._phases.get(phase, number))
        return self._rounds[number][key]

    def pairs(self) -> list[tuple[str, int]]:
        """Return (phase, step) of all steps."""
        return [(step.phase, step.number) for steps in self._rounds for step in _in_order(steps)]

    def first(self, count: int) -> list[TitledStep]:
        """Return the first `count` steps, or fewer."""
        end = steps = 0
        while end < len(self._rounds) and steps < count:
            steps += len(self._rounds[end])
            end += 1
        return self._titled(range(end))[:count]

    def last(self, count: int) -> list[TitledStep]:
        """Return the last `count` steps, or fewer."""
        start, steps = len(self._rounds), 0
        while start and steps < count:
            start -= 1
            steps += len(self._rounds[start])
        return self._titled(range(start, len(self._rounds)))[-count:]

    def _titled(self, rounds: range) -> list[TitledStep]:
        """Return the steps of these rounds."""
        begun = {phase: _began(self._rounds[first])[phase] for phase, first in self._phases.items()}
        colours = sorted(begun, key=lambda phase: (self._phases[phase], begun[phase]))
        found = []
        for number in rounds:
            for step in _in_order(self._rounds[number]):
                name = step.name if step.phase else f"step {number + 1} of {self._unlabelled}"
                name += f" within {step.axes}" if step.axes else ""
                title = f"round {number + 1}, {name}" if step.phase and len(self._rounds) > 1 else name
                found.append(TitledStep(title, colours.index(step.phase), number, step))
        return found

    def is_complete(self, titled: TitledStep) -> bool:
        """Return whether every rank has reported its part; in a live run, some ranks are a round ahead."""
        _, _, number, step = titled
        before = self._rounds[number - 1].get((step.phase, step.number if step.phase else number - 1))
        return number == 0 or before is None or len(step) >= len(before)


def _began(steps: dict[tuple[str, int], Step]) -> dict[str, float]:
    """Return when the last message of each phase of a round began."""
    began: dict[str, float] = {}
    for step in steps.values():
        began[step.phase] = max(began.get(step.phase, 0.0), step.began)
    return began


def _in_order(steps: dict[tuple[str, int], Step]) -> list[Step]:
    """Return the steps of a round in order. A phase comes after another if its last message began later: ranks may be a
    few steps ahead of each other, but not a whole phase.
    """
    began = _began(steps)
    places = {phase: place for place, phase in enumerate(sorted(began, key=began.__getitem__))}
    return sorted(steps.values(), key=lambda step: (places[step.phase], step.number))


def find_chunks(table: np.ndarray, ranks: int) -> np.ndarray:
    """Return, for each row of a table, which chunk it is and of how many equal chunks of its tensor; (-1, 0) if none.

    The number of chunks is the number of ranks if that fits, and otherwise the largest smaller one that fits.
    """
    begin, count, of = table[:, 5:8].T
    found = np.full((len(table), 2), (-1, 0))
    for parts in range(2, ranks + 1):  # the last number that fits is kept
        least, more = np.maximum(of // parts, 1), of % parts
        number = np.where(
            begin < more * (least + 1), begin // (least + 1), more + (begin - more * (least + 1)) // least
        )
        fits = (begin == number * least + np.minimum(number, more)) & (count == least + (number < more)) & (parts <= of)
        found[fits] = np.stack([number, np.full(len(table), parts)], 1)[fits]
    return found
