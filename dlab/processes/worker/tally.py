"""Collectives are added up before they are told: one event for many that follow each other.

A small all-reduce through shared memory takes 8 us, and an event for each would take as long again. To add it up takes
one: what is told is how many of a sort there were, with all their bytes and seconds, but not each by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dlab.kinds import COLLECTIVE

PERIOD = 0.01  # seconds: those that begin within it are told together, so that there are at most a hundred in a second


class Tally:
    """Adds up events of kind `collective` with the same name, algorithm and group, and pushes the sum now and then.

    `push(kind, data)` says whether there was room; if not, the sum is kept and pushed with what comes next.
    """

    def __init__(self, push: Callable[[str, dict[str, Any]], bool]) -> None:
        self._push = push
        self._sums: dict[tuple[Any, ...], dict[str, Any]] = {}  # by what they have in common
        self._turn = threading.Lock()  # a backend may work in a thread of its own

    def add(self, told: Mapping[str, Any]) -> None:
        """Take in one that has just ended; first tells of those before it, unless the first of them has just begun."""
        key = (told["name"], told["algorithm"], *told.get("group", ()))
        with self._turn:
            known = self._sums.get(key)
            if known is None or (told["start"] - known["start"] >= PERIOD and self._push(COLLECTIVE, known)):
                self._sums[key] = dict(told)
                return
            known["count"] += 1
            known["bytes"] += told["bytes"]
            known["seconds"] += told["seconds"]
            known["end"] = told["end"]
            if "buckets" in told:
                known["buckets"] += told["buckets"]

    def flush(self) -> None:
        """Tell of all that is left; at the end of a run."""
        with self._turn:
            for known in self._sums.values():
                self._push(COLLECTIVE, known)
            self._sums.clear()
