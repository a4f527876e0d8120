"""Events in columns: what has just arrived is looked at once for all views, and each works on whole arrays of it.

Thousands of events may arrive between two frames. A loop over them in every view would cost microseconds for each
event; a vector operation costs nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np

from dlab.events import Event, Records

NAMES = ("step", "loss", "samples", "compute", "wait", "delay")  # of what is logged, those that a view draws

Column = np.ndarray[Any, np.dtype[np.float64]]


class Arrivals:
    """What came together, as events or as the records of ranks: columns of what each rank has logged, and the rest.

    The views of a panel share one. A view that is given plain events makes its own: `Arrivals.of(events)`.
    """

    def __init__(self, events: Iterable[Event] = (), records: Iterable[Records] = ()) -> None:
        self.others: list[Event] = []  # all that were not logged, in their order
        self._firsts: list[float] = []  # when the first one of each piece was told
        self._told: dict[int, tuple[list[float], list[dict[str, Any]]]] = {}  # by rank: when, and what
        self._take_events(list(events))
        for each in records:
            self._take_records(each)
        self.logged = {rank: Logged.of(times, data) for rank, (times, data) in self._told.items()}

    def _take_events(self, events: list[Event]) -> None:
        self._firsts += [event.time for event in events[:1]]
        for event in events:
            if event.kind == "log":
                self._log(event.rank, [event.time], [event.data])
            else:
                self.others.append(event)

    def _take_records(self, records: Records) -> None:
        """Without an event for each: to make objects, and to have the collector look at them, costs most of it."""
        told = records.read()
        self._firsts += [moment for _, moment, _ in islice(told, 1)]
        times, logged = [], []
        for (_, moment, kind), data in told.items():
            if kind == "log":
                times.append(moment)
                logged.append(data)
            else:
                self.others.append(Event(moment, records.rank, kind, data))
        if logged:
            self._log(records.rank, times, logged)

    def _log(self, rank: int, times: list[float], data: list[dict[str, Any]]) -> None:
        when, what = self._told.setdefault(rank, ([], []))
        when += times
        what += data

    @property
    def first(self) -> float:
        """When the one that was given first happened."""
        return self._firsts[0]

    @property
    def last(self) -> float:
        """When the latest one happened."""
        times = [float(logged.times.max()) for logged in self.logged.values()]
        return max([*times, *(event.time for event in self.others)])

    @classmethod
    def of(cls, events: Iterable[Event] | Arrivals) -> Arrivals:
        """These events, unless somebody has put them in order already."""
        return events if isinstance(events, Arrivals) else cls(events)

    def __bool__(self) -> bool:
        return bool(self.logged or self.others)


class Logged:
    """What one rank has logged (`dlab.log(step=…, loss=…)`): when, and a column of each name in `NAMES`.

    >>> logged.having("loss").column("loss")
    array([2.301, 2.254, 2.187])
    """

    def __init__(
        self, times: Column, numbers: np.ndarray, told: np.ndarray, step: Any, staleness: Sequence[int] = ()
    ) -> None:
        self.times = times
        self._numbers, self._told = numbers, told  # a row per name; nobody may have told what is in its column
        self.step = step  # the last one, as it was told
        self.staleness = staleness  # of the updates of all steps, one after another

    @classmethod
    def of(cls, times: Sequence[float], data: Sequence[dict[str, Any]]) -> Logged:
        """From what was given to `log`."""
        numbers = np.full((len(NAMES), len(data)), np.nan)
        told = np.zeros(numbers.shape, dtype=np.bool_)
        names = set[str]().union(*data)
        for row, name in enumerate(NAMES):
            if name not in names:
                continue
            try:
                numbers[row] = np.fromiter(map(itemgetter(name), data), np.float64, len(data))
                told[row] = True
            except (KeyError, TypeError, ValueError):  # not all tell it, or not as a number
                values = [each.get(name) for each in data]
                told[row] = [isinstance(value, int | float) for value in values]
                numbers[row, told[row]] = [value for value in values if isinstance(value, int | float)]
        step = next((each["step"] for each in reversed(data) if "step" in each), None)
        staleness = chain.from_iterable(each.get("staleness", ()) for each in data) if "staleness" in names else ()
        return cls(np.array(times), numbers, told, step, list(staleness))

    def __len__(self) -> int:
        return len(self.times)

    def having(self, *names: str) -> Logged:
        """Those in which at least one of these was told."""
        told = self._told[[NAMES.index(name) for name in names]].any(axis=0)
        return self if told.all() else Logged(self.times[told], self._numbers[:, told], self._told[:, told], self.step)

    def column(self, name: str, default: float | Column = np.nan) -> Column:
        """The numbers with this name, and the default where none was told."""
        row = NAMES.index(name)
        return np.where(self._told[row], self._numbers[row], default)


class Table:
    """Rows of numbers, to which more are added at the end; reading them copies nothing.

    >>> table = Table(2)
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
        """Add rows, given as their columns. Room is doubled when it ends, so that a row costs the same in any size."""
        begin, end = len(self), len(self) + len(columns[0])
        if end > self._room.shape[1]:
            self._room = np.empty((len(self._room), max(end, 2 * begin)))
            self._room[:, :begin] = self.rows.T
        self._room[:, begin:end] = columns
        self.rows = self._room[:, :end].T  # at once: whoever reads meanwhile sees whole rows
