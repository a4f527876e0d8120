"""The order of recorded messages: rounds, in each of them phases, in each of these steps. Nobody tells it; it follows.

Ranks run ahead of each other, so that what comes first is not always what belongs before.
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
        self.began = 0.0  # when the last of its messages did
        self._messages: list[MessageData] = []
        self._table = np.empty((0, len(_COLUMNS)))

    @property
    def name(self) -> str:
        """As the algorithm calls it: `reduce-scatter 0`; without a label only its number."""
        return f"{self.phase} {self.number}".strip()

    def add(self, message: MessageData) -> None:
        """One more, in any order of the ranks."""
        self._messages.append(message)
        self.began = max(self.began, message["start"])

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> list[MessageData]:
        """By source; a rank's own in their order."""
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
        """A row per message, with its `_COLUMNS`; NaN is not known. Made once, unless more have come."""
        if len(self._table) < len(self):
            rows = [[message.get(name, np.nan) for name in _COLUMNS] for message in self.messages]
            self._table = np.array(rows, dtype=np.float64)
        return self._table


class Titled(NamedTuple):
    """A step with what the whole run says about it: title, number of its colour, round."""

    title: str
    colour: int
    round: int
    step: Step


class Steps:
    """All steps of a run, in their order. A recorder tells the round of a message that has a label. Without one, a rank
    that sends to the same rank again has begun a new round, and every round is a step.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, int], Step]] = []
        self._count = 0
        self._unlabelled = 0  # of them
        self._at = Counter[int]()  # the round that each rank is in
        self._done: dict[int, set[tuple[int, str, int]]] = {}  # what it has sent in that round
        self._phases: dict[str, int] = {}  # the first round with this phase

    def __len__(self) -> int:
        return self._count

    def add(self, message: MessageData) -> None:
        """One more, a rank's own in their order."""
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
        """The step of this round, made if it is new."""
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
        """(phase, step) of all of them."""
        return [(step.phase, step.number) for steps in self._rounds for step in _in_order(steps)]

    def first(self, count: int) -> list[Titled]:
        """The first ones, so many or fewer."""
        end = steps = 0
        while end < len(self._rounds) and steps < count:
            steps += len(self._rounds[end])
            end += 1
        return self._titled(range(end))[:count]

    def last(self, count: int) -> list[Titled]:
        """The last ones, so many or fewer."""
        start, steps = len(self._rounds), 0
        while start and steps < count:
            start -= 1
            steps += len(self._rounds[start])
        return self._titled(range(start, len(self._rounds)))[-count:]

    def _titled(self, rounds: range) -> list[Titled]:
        """The steps of these rounds."""
        begun = {phase: _began(self._rounds[first])[phase] for phase, first in self._phases.items()}
        colours = sorted(begun, key=lambda phase: (self._phases[phase], begun[phase]))
        found = []
        for number in rounds:
            for step in _in_order(self._rounds[number]):
                name = step.name if step.phase else f"step {number + 1} of {self._unlabelled}"
                name += f" within {step.axes}" if step.axes else ""
                title = f"round {number + 1}, {name}" if step.phase and len(self._rounds) > 1 else name
                found.append(Titled(title, colours.index(step.phase), number, step))
        return found

    def is_complete(self, titled: Titled) -> bool:
        """Has every rank told of its part? In a live run some are ahead; what is known is the round before."""
        _, _, number, step = titled
        before = self._rounds[number - 1].get((step.phase, step.number if step.phase else number - 1))
        return number == 0 or before is None or len(step) >= len(before)


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


def find_chunks(table: np.ndarray, ranks: int) -> np.ndarray:
    """For each row of a table: which chunk it is, of how many equal ones that its tensor was cut into; (-1, 0) if none.

    As many as there are ranks, if that fits, else as few fewer as possible.
    """
    begin, count, of = table[:, 5:8].T
    found = np.full((len(table), 2), (-1, 0))
    for parts in range(2, ranks + 1):  # the last that fits is kept
        least, more = np.maximum(of // parts, 1), of % parts
        number = np.where(
            begin < more * (least + 1), begin // (least + 1), more + (begin - more * (least + 1)) // least
        )
        fits = (begin == number * least + np.minimum(number, more)) & (count == least + (number < more)) & (parts <= of)
        found[fits] = np.stack([number, np.full(len(table), parts)], 1)[fits]
    return found
