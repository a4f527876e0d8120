"""Ranks that work through their rows, each in its order: when every action begins and ends, and who gets stuck.

Nobody skips an action: a rank waits at the first one that cannot run yet. That is how a pipeline runs, and why a table
with the right actions in a wrong order stands still. Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlab.pipeline.actions import BACKWARD, FORWARD, INPUT, RECEIVE_BACKWARD, RECEIVE_FORWARD, WEIGHT, Action

Row = tuple[Action, ...]
Result = tuple[int, str, int]  # a stage, what it has done, and with which micro-batch


class TimeSlot(NamedTuple):
    """An action with its time: when its rank begins with it, and when it is done."""

    rank: int
    action: Action
    start: float
    end: float


class Needs:
    """What must be done before an action of these rows can run.

    F needs the F of the stage before. B needs its own F and the B of the next stage, or the next stage's I. I needs
    the same as B, and W needs its I. Between stages on one rank that is all. Rows with sends and receives say how
    results travel: there, a result of another rank has to be received first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.ranks = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        self.transfers = any(action.is_transfer for row in rows for action in row)
        self.last = max(self.ranks)

    def __call__(self, action: Action) -> list[Result]:
        """Return the results that the action needs, those of its own stage first."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == FORWARD:
            return [self._sent(stage, FORWARD, -1, microbatch)] if stage else []
        if kind in (BACKWARD, INPUT):
            own = (stage, FORWARD, microbatch)
            return [own, self._sent(stage, INPUT, 1, microbatch)] if stage < self.last else [own]
        if kind == WEIGHT:
            return [(stage, INPUT, microbatch)]
        if kind.startswith("SEND"):
            return [(stage, FORWARD if kind.endswith(FORWARD) else INPUT, microbatch)]
        return []

    def _sent(self, stage: int, kind: str, step: int, microbatch: int) -> Result:
        """The result of a neighbour; or its receipt, where there are messages and the neighbour is on another rank."""
        if self.transfers and self.ranks[stage] != self.ranks[stage + step]:
            return stage, RECEIVE_FORWARD if kind == FORWARD else RECEIVE_BACKWARD, microbatch
        return stage + step, kind, microbatch


def results(action: Action) -> tuple[Result, ...]:
    """Return what is there when the action is done: a whole backward is both halves of it."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind == BACKWARD:
        return (stage, INPUT, microbatch), (stage, WEIGHT, microbatch)
    return ((stage, kind, microbatch),)


class Execution:
    """The rows, carried out: `slots` in an order in which they can run, and how many actions each rank got `done`.

    A send waits until its receiver is there, and a receive for its sender. It costs a few microseconds per action.

    >>> rows = [(Action("0F0"), Action("0B0")), (Action("1F0"), Action("1B0"))]
    >>> [(slot.action, slot.end) for slot in Execution(rows, {"F": 1, "B": 2}).slots]
    [('0F0', 1), ('1F0', 2), ('1B0', 4), ('0B0', 6)]
    """

    def __init__(self, rows: Sequence[Row], lengths: Mapping[str, float]) -> None:
        self.rows, self.needs = rows, Needs(rows)
        self.done = [0] * len(rows)  # by rank: how many actions of its row are over
        self.slots: list[TimeSlot] = []
        self._lengths = lengths
        self._free = [0.0] * len(rows)  # by rank: since when it has nothing to do
        self._there: dict[Result, float] = {}  # results, and since when they are there
        self._waiting: dict[Result, list[int]] = {}  # ranks that wait for a result
        self._rendezvous: dict[str, int] = {}  # ranks that have come to a send or a receive
        ready = list(range(len(rows)))[::-1]
        while ready:
            self._advance(ready.pop(), ready)

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Carry out what the rank can do now; ranks that can go on because of it become ready."""
        row, there = self.rows[rank], self._there
        while self.done[rank] < len(row):
            action, start = row[self.done[rank]], self._free[rank]
            for need in self.needs(action):
                if need not in there:
                    self._waiting.setdefault(need, []).append(rank)
                    return
                start = max(start, there[need])
            if not action.is_transfer:
                self._end(rank, action, start, ready)
                continue
            other = self._rendezvous.pop(action.partner, None)
            if other is None:
                self._rendezvous[action] = rank
                return
            start = max(start, self._free[other])
            self._end(rank, action, start, ready)
            self._end(other, self.rows[other][self.done[other]], start, ready)
            ready.append(other)

    def _end(self, rank: int, action: Action, start: float, ready: list[int]) -> None:
        end = self._free[rank] = start + self._lengths.get(action.kind, 0)
        self.slots.append(TimeSlot(rank, action, start, end))
        self.done[rank] += 1
        for result in results(action):
            self._there[result] = end
            ready.extend(self._waiting.pop(result, ()))
