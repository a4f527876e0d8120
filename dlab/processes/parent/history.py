"""A run's history: what all ranks have told so far, kept as the bytes that they wrote.

Nobody may ever look, or only a panel, which wants numbers in columns. To collect bytes costs the notebook's process
next to nothing; events are made when somebody asks for them.
"""

from __future__ import annotations

import threading

from dlab.events import Event, Records


class EventHistory:
    """Grows while a run goes on; read as a whole (`events`), or piece by piece (`since`)."""

    def __init__(self) -> None:
        self._records: list[Records] = []
        self._events: list[Event] = []  # of the first records: those that somebody has asked for
        self._read = 0  # so many records
        self._turn = threading.Lock()

    def add(self, records: Records) -> None:
        """Keep what a rank has told."""
        self._records.append(records)

    def __len__(self) -> int:
        """Grows with what has come."""
        return len(self._records)

    def since(self, place: int) -> tuple[list[Records], int]:
        """What has come after this place, and the place to go on from; 0 is the beginning."""
        records = self._records[place:]
        return records, place + len(records)

    @property
    def events(self) -> list[Event]:
        """All of them, each rank's in order; made once and kept."""
        with self._turn:
            fresh, self._read = self.since(self._read)
            self._events += [event for records in fresh for event in records.events]
            return list(self._events)
