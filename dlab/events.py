"""What workers tell: small records that travel through a ring in shared memory and never make a worker wait.

Taught in `notebooks/00_tour.ipynb`. A worker writes, the parent reads; neither waits for the other.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from dlab.memory.ring import RecordRing

RING_BYTES = 4 << 20  # per rank; untouched pages cost nothing
_FORMAT = 2  # of marshal: later ones look for objects that occur twice, which takes half as long again
_LINES = 1000  # of a file that are read at once
_OPEN, _CLOSE = marshal.dumps({}, _FORMAT)[:1], marshal.dumps({}, _FORMAT)[1:]  # the braces of a dictionary


class Event(NamedTuple):
    """One thing that happened: when (seconds since 1970), on which rank, of what kind, and its data.

    `dlab.kinds` describes the kinds that dlab tells and what is in them; `dlab.views.event_kinds()` shows it.
    """

    time: float
    rank: int
    kind: str
    data: dict[str, Any]


class EventRing(RecordRing):
    """Events on their way from a worker to its parent.

    A record costs about 10 us, and up to 50 us in between training steps, which leave nothing of it in the caches.
    """

    def push(self, kind: str, data: dict[str, Any]) -> bool:
        """Write one record, or count it as dropped when the reader is too far behind."""
        moment, data = time.time(), plain(data)
        with self.turn:
            return self.append(encode(self._counters[0], moment, kind, data))

    def take(self, rank: int) -> Records | None:
        """Read all records that have been written so far; None if there are none."""
        written = self.take_all()
        return Records(rank, written) if written else None

    def drain(self, rank: int) -> list[Event]:
        """Take out what was pushed since the last time, as events of this rank."""
        records = self.take(rank)
        return records.events if records else []


def encode(place: int, moment: float, kind: str, data: dict[str, Any]) -> bytes:
    """A record: a key, which is different in each record of a ring because of its place, and the data.

    They are an entry of a dictionary, as marshal writes one. All records of a ring, one after another and in between
    braces, are a dictionary, which is read in one go: in half the time of reading them one by one.
    """
    return marshal.dumps((place, moment, kind), _FORMAT) + marshal.dumps(data, _FORMAT)


class Records(NamedTuple):
    """What a rank has told, as it wrote it: a seventh of the memory of the events that can be made of it."""

    rank: int
    written: bytes

    def read(self) -> dict[tuple[int, float, str], dict[str, Any]]:
        """By (place, time, kind), in their order, the data; costs half a microsecond each."""
        return marshal.loads(_OPEN + self.written + _CLOSE)

    @property
    def events(self) -> list[Event]:
        """The same, as events; costs a microsecond each."""
        return [Event(moment, self.rank, kind, data) for (_, moment, kind), data in self.read().items()]


def plain(value: Any) -> Any:
    """The same value in numbers, strings, lists and dictionaries: tensors and arrays become (lists of) numbers."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value)


def save_events(events: Iterable[Event], path: str | Path) -> None:
    """Write events as JSON lines, one event a line; the file appears whole or not at all.

    What is not finite is written as Python writes it (NaN, Infinity), and `load_events` reads it back.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for event in events:
                file.write(json.dumps(event._asdict()) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_events(path: str | Path) -> list[Event]:
    """Read back what `save_events` (or `run.save`) wrote; costs about 3 us and 600 bytes an event."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the file that run.save() wrote")
    events, place = list[Event](), 0  # how many are read
    with Path(path).open("rb") as file, _uncollected():
        while lines := list(islice(file, _LINES)):
            try:
                # All at once: a name that comes in many lines is then one object.
                records = json.loads(b"[" + b",".join(lines) + b"]")
                if len(records) != len(lines):
                    raise ValueError("not one record a line")
                events += map(_event, records)
            except (ValueError, RecursionError):  # look for the line
                del events[place:]
                events += [_read_line(path, number, line) for number, line in enumerate(lines, start=place + 1)]
            place = len(events)
    return events


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look at millions of new objects again and again, and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _event(record: Any) -> Event:
    """Of what a line has; raises ValueError if it is none."""
    try:
        event = Event(record["time"], record["rank"], intern(record["kind"]), record["data"])
    except (KeyError, TypeError):
        raise ValueError("there must be time, rank, kind and data") from None
    if type(event.time) not in (float, int) or type(event.rank) is not int or type(event.data) is not dict:
        raise ValueError("time must be a number, rank a whole number, and data an object")
    return event


def _read_line(path: str | Path, number: int, line: bytes) -> Event:
    """The event of one line, or the sentence that says where and why there is none."""
    try:
        return _event(json.loads(line.decode()))
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeDecodeError:
        problem = "it is no text in UTF-8"
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg}, at character {error.pos + 1}"
    except ValueError as error:
        problem = str(error)
    cut = "" if line.endswith(b"\n") else " The file ends in the middle of it: was it copied as a whole?"
    raise ValueError(
        f"{path}, line {number}, is not an event ({problem}): each line must be a JSON object "
        f"with time, rank, kind and data, as run.save() writes it.{cut}"
    )
