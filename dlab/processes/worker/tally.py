"""Collectives are added up before they are told: one event for many that follow each other.

A small all-reduce through shared memory takes a few microseconds, and an event for each would take longer than that. To
add it up takes a third of one: what is told is how many of a sort there were, with all their bytes and seconds, but not
each by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dlab.kinds import COLLECTIVE, CollectiveData

PERIOD = 0.01  # seconds: those that begin within it are told together, so that there are at most a hundred in a second

Push = Callable[[str, dict[str, Any]], bool]  # writes an event, if there is room for it


class CollectiveCounter:
    """Collectives of one sort: `add` one after another, and an event tells of all that began within a period."""

    __slots__ = ("_buckets", "_bytes", "_count", "_end", "_seconds", "_sort", "_start", "_tally", "_until")

    def __init__(self, tally: Tally, sort: Mapping[str, Any]) -> None:
        self._tally, self._sort = tally, sort
        self._clear()

    def _clear(self) -> None:
        self._count = self._bytes = self._buckets = 0
        self._seconds = self._start = self._until = self._end = 0.0

    def add(self, nbytes: int, start: float, end: float, seconds: float, buckets: int = 0) -> None:
        """One more has just ended."""
        if start >= self._until and self.flush():
            self._start, self._until = start, start + PERIOD
            self._tally.open.add(self)
        self._count += 1
        self._bytes += nbytes
        self._seconds += seconds
        self._end = end
        if buckets:
            self._buckets += buckets

    def flush(self) -> bool:
        """Tell of those that were added, if any; if there is no room, they are kept, to be told with later ones."""
        if not self._count:
            return True
        told: CollectiveData = {
            **self._sort,  # type: ignore[typeddict-item]
            "count": self._count,
            "bytes": self._bytes,
            "seconds": self._seconds,
            "start": self._start,
            "end": self._end,
        }
        if self._buckets:
            told["buckets"] = self._buckets
        if not self._tally.push(COLLECTIVE, told):  # type: ignore[arg-type]
            return False
        self._clear()
        return True


class Tally:
    """The counters of a worker."""

    def __init__(self, push: Push) -> None:
        self.push = push
        self.open = set[CollectiveCounter]()  # those with something that is not told yet
        self._by_sort: dict[tuple[Any, ...], CollectiveCounter] = {}
        self._turn = threading.Lock()  # a backend may work in a thread of its own

    def add(self, told: Mapping[str, Any]) -> None:
        """Take in an event of kind `collective` that tells of a single one."""
        key = (told["name"], told["algorithm"], *told.get("group", ()))
        with self._turn:
            if key not in self._by_sort:
                sort = {name: told[name] for name in ("name", "algorithm", "group", "axis") if name in told}
                self._by_sort[key] = CollectiveCounter(self, sort)
            numbers = (told["bytes"], told["start"], told["end"], told["seconds"])
            self._by_sort[key].add(*numbers, told.get("buckets", 0))

    def flush(self) -> None:
        """Tell of all that is left; at the end of a run."""
        with self._turn:
            for counter in list(self.open):  # a thread that the function has left behind may still add to it
                counter.flush()
            self.open.clear()
            self._by_sort.clear()
