"""A run's history: everything that the ranks have logged so far, kept as the bytes that they wrote.

Often nobody reads it, or only a panel, which needs columns of numbers. Collecting bytes costs the notebook's process
next to nothing; events are made when they are requested.
"""

from __future__ import annotations

import threading

from dlab.events import Event, Records


class EventHistory:
    """Grows during a run; it can be read as a whole (`events`) or piece by piece (`since`)."""

    def __init__(self) -> None:
        self._records: list[Records] = []
        self._events: list[Event] = []  # of the first records, which have been requested
        self._read = 0  # number of records that these events were made from
        self._turn = threading.Lock()

    def add(self, records: Records) -> None:
        """Keep a rank's new records."""
        self._records.append(records)

    def __len__(self) -> int:
        """Return a number that grows with every addition."""
        return len(self._records)

    def since(self, place: int) -> tuple[list[Records], int]:
        """Return the records after this place, and the place to continue from; 0 is the beginning."""
        records = self._records[place:]
        return records, place + len(records)

    @property
    def events(self) -> list[Event]:
        """Return all events, each rank's in order; they are made once and kept."""
        with self._turn:
            fresh, self._read = self.since(self._read)
            self._events += [event for records in fresh for event in records.events]
            return list(self._events)
