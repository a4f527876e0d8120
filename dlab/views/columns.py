"""Arriving events as columns of numbers: they are read once for all views, and each view works on whole arrays.

Thousands of events may arrive between two frames. A loop over them in every view would cost microseconds per event; a
vector operation costs nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np

from dlab.events import Event, Records
from dlab.kinds import LOG
from dlab.views.usable import LARGEST, LIMITS, WHOLE, Unusable, number, reason, text, usable, usable_data, whole_number

NAMES = tuple(LIMITS)  # the logged values that a view draws

Column = np.ndarray[Any, np.dtype[np.float64]]


class Arrivals:
    """Events that arrived together, or the records of ranks: columns of logged values by rank, and all other events.

    The views of a panel share one. A view that is given plain events makes its own with `Arrivals.of(events)`.
    """

    def __init__(self, events: Iterable[Event] = (), records: Iterable[Records] = ()) -> None:
        self.others: list[Event] = []  # all events other than logs, in their order
        self._firsts: list[float] = []  # the time of the first event of each piece
        self._told: dict[int, tuple[list[float], list[dict[str, Any]]]] = {}  # by rank: the times and the logged data
        self.left_out = Counter[tuple[str, str]]()  # by what a view reads (a name, a kind, or "" for all) and by reason
        self._take_events(events)
        for each in records:
            self._take_records(each)
        self.logged = {rank: Logged.of(times, data) for rank, (times, data) in self._told.items()}
        for logged in self.logged.values():
            self.left_out.update(logged.left_out)

    def _take_events(self, events: Iterable[Event]) -> None:
        for each in events:
            try:
                event = usable(each)
            except Unusable as problem:
                self.left_out[problem.what, problem.why] += 1
                continue
            if not self._firsts:
                self._firsts.append(event.time)
            if event.kind == LOG:
                self._log(event.rank, [event.time], [event.data])
            else:
                self.others.append(event)

    def _take_records(self, records: Records) -> None:
        """Read records without making an event of each: creating and collecting objects would cost most of the time."""
        told = records.read()
        self._firsts += [moment for _, moment, _ in islice(told, 1)]
        times, logged = [], []
        for (_, moment, kind), data in told.items():
            if kind == LOG:
                times.append(moment)
                logged.append(data)
                continue
            try:
                self.others.append(Event(moment, records.rank, kind, usable_data(kind, data)))
            except Unusable as problem:
                self.left_out[problem.what, problem.why] += 1
        if logged:
            self._log(records.rank, times, logged)

    def _log(self, rank: int, times: list[float], data: list[dict[str, Any]]) -> None:
        when, what = self._told.setdefault(rank, ([], []))
        when += times
        what += data

    @property
    def first(self) -> float:
        """The time of the first event."""
        return self._firsts[0]

    @property
    def last(self) -> float:
        """The time of the latest event."""
        times = [float(logged.times.max()) for logged in self.logged.values()]
        return max([*times, *(event.time for event in self.others)])

    @classmethod
    def of(cls, events: Iterable[Event] | Arrivals) -> Arrivals:
        """Return the arrivals of these events, or the argument itself if it is one already."""
        return events if isinstance(events, Arrivals) else cls(events)

    def __bool__(self) -> bool:
        return bool(self.logged or self.others)


class Logged:
    """The values that one rank logged (`dlab.log(step=…, loss=…)`): the times, and a column for each name in `NAMES`.

    >>> logged.having("loss").column("loss")
    array([2.301, 2.254, 2.187])
    """

    def __init__(self, times: Column, numbers: np.ndarray, told: np.ndarray) -> None:
        self.times = times
        self._numbers, self._told = numbers, told  # a row per name; `_told` marks the values that were logged
        self.step: int | float | str | None = None  # the last step, as it was logged
        self.staleness: Sequence[int] = ()  # of all updates, in order
        self.left_out = Counter[tuple[str, str]]()  # by name and reason: values that were logged and cannot be drawn

    @classmethod
    def of(cls, times: Sequence[float], data: Sequence[dict[str, Any]]) -> Logged:
        """Read the columns from the arguments of `log`."""
        numbers = np.full((len(NAMES), len(data)), np.nan)
        told = np.zeros(numbers.shape, dtype=np.bool_)
        logged = cls(np.array(times, dtype=np.float64), numbers, told)
        names = set[str]().union(*data)
        for row, name in enumerate(NAMES):
            if name in names:
                logged._read(row, name, data)
        if "step" in names:
            logged.step = next((step for each in reversed(data) if (step := _step(each)) is not None), None)
        if "staleness" in names:
            logged._read_staleness(data)
        return logged

    def _read(self, row: int, name: str, data: Sequence[dict[str, Any]]) -> None:
        """Read the column with this name."""
        try:
            values = list(map(itemgetter(name), data))
            self._told[row] = there = set(map(type, values)) <= {int, float, bool}
            if there:
                self._numbers[row] = values
        except (KeyError, OverflowError):  # some logs lack it, or have a value that does not fit into a float
            there = False
        if not there:
            found = [number(each.get(name)) for each in data]
            self._told[row] = [value is not None for value in found]
            self._numbers[row] = [np.nan if value is None else value for value in found]
        column, (low, high) = self._numbers[row], LIMITS[name]
        if name == "loss":
            column[np.abs(column) > LARGEST] *= np.inf
        else:
            self._told[row] &= (low <= column) & (column <= high)
        if left := sum(name in each for each in data) - int(self._told[row].sum()) if not self._told[row].all() else 0:
            self.left_out[name, reason(name, "number")] += left

    def _read_staleness(self, data: Sequence[dict[str, Any]]) -> None:
        """Read staleness, which is a list of whole numbers or a single one."""
        told = [each["staleness"] for each in data if "staleness" in each]
        if set(map(type, told)) == {list}:
            values = list(chain.from_iterable(told))
            if set(map(type, values)) <= {int} and min(values, default=0) >= 0 and max(values, default=0) < WHOLE:
                self.staleness = values
                return
        fine = []
        for each in told:
            found = [whole_number(value) for value in (each if isinstance(each, list) else [each])]
            if None in found:
                self.left_out["staleness", reason("staleness", "whole number from 0 on")] += 1
            else:
                fine += found
        self.staleness = fine  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.times)

    def having(self, *names: str) -> Logged:
        """Select the logs that contain at least one of these names."""
        told = self._told[[NAMES.index(name) for name in names]].any(axis=0)
        return self if told.all() else Logged(self.times[told], self._numbers[:, told], self._told[:, told])

    def column(self, name: str, default: float | Column = np.nan) -> Column:
        """Return the values with this name, and the default where it was not logged."""
        row = NAMES.index(name)
        return np.where(self._told[row], self._numbers[row], default)


def _step(data: dict[str, Any]) -> int | float | str | None:
    """Return the step as it was logged, if it can be shown."""
    step = data.get("step")
    return step if type(step) is int and abs(step) <= WHOLE else step if type(step) is float else text(step)


class GrowingTable:
    """Rows of numbers that grow at the end; reading them copies nothing.

    >>> table = GrowingTable(2)
    >>> table.extend(times, losses)
    >>> table.rows[-1]
    array([3.5, 2.187])
    """

    def __init__(self, columns: int) -> None:
        self._room = np.empty((columns, 16))
        self.rows: Column = self._room[:, :0].T

    def __len__(self) -> int:
        return len(self.rows)

    def extend(self, *columns: Column) -> None:
        """Append rows, given as columns. The capacity doubles when used up, so that a row's cost does not grow."""
        begin, end = len(self), len(self) + len(columns[0])
        if end > self._room.shape[1]:
            self._room = np.empty((len(self._room), max(end, 2 * begin)))
            self._room[:, :begin] = self.rows.T
        self._room[:, begin:end] = columns
        self.rows = self._room[:, :end].T  # one assignment, so that a concurrent reader sees whole rows
