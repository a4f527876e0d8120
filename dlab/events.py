"""Events of workers: small records that go to the parent through a ring buffer in shared memory.

The worker writes and the parent reads; neither waits for the other. Taught in `notebooks/00_tour.ipynb`.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from dlab.memory.ring import RecordRing

RING_BYTES = 4 << 20  # per rank; untouched pages cost nothing
_FORMAT = 2  # of marshal: later ones look for objects that occur twice, which takes 50 % longer
_LINES = 1000  # lines of a file that are read at once
_OPEN, _CLOSE = marshal.dumps({}, _FORMAT)[:1], marshal.dumps({}, _FORMAT)[1:]  # the braces of a dictionary


class Event(NamedTuple):
    """An event: its time (seconds since 1970), its rank, its kind, and its data.

    `dlab.kinds` describes the kinds that dlab emits, with their fields; `dlab.views.event_kinds()` shows them.
    """

    time: float
    rank: int
    kind: str
    data: dict[str, Any]


class EventRing(RecordRing):
    """Events on their way from a worker to its parent.

    A record costs about 10 us, and up to 50 us between training steps, which evict its code and memory from the caches.
    """

    def push(self, kind: str, data: dict[str, Any]) -> bool:
        """Write one record, or count it as dropped if the reader is too far behind."""
        moment, data = time.time(), plain(data)
        with self.turn:
            return self.append(encode(self._counters[0], moment, kind, data))

    def take(self, rank: int) -> Records | None:
        """Read all records that have been written so far; None if there are none."""
        written = self.take_all()
        return Records(rank, written) if written else None

    def drain(self, rank: int) -> list[Event]:
        """Take all records that were pushed since the last call, as events of this rank."""
        records = self.take(rank)
        return records.events if records else []


def encode(place: int, moment: float, kind: str, data: dict[str, Any]) -> bytes:
    """Encode a record: a key, which its place makes unique in the ring, and the data.

    A record is an entry of a dictionary in marshal's format. All records of a ring, one after another and between
    braces, are one dictionary, which is read in half the time of reading them one by one.
    """
    return marshal.dumps((place, moment, kind), _FORMAT) + marshal.dumps(data, _FORMAT)


class Records(NamedTuple):
    """Events of a rank in the bytes that it wrote, which take a seventh of the memory of `Event` objects."""

    rank: int
    written: bytes

    def read(self) -> dict[tuple[int, float, str], dict[str, Any]]:
        """Return the data by (place, time, kind), in order; costs half a microsecond per event."""
        return marshal.loads(_OPEN + self.written + _CLOSE)

    @property
    def events(self) -> list[Event]:
        """The records as events; costs a microsecond per event."""
        return [Event(moment, self.rank, kind, data) for (_, moment, kind), data in self.read().items()]


def plain(value: Any) -> Any:
    """Convert a value to numbers, strings, lists and dictionaries; tensors and arrays become (lists of) numbers."""
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
    """Write events as JSON lines, one event per line; the file appears complete or not at all.

    Numbers that are not finite are written as Python does (NaN, Infinity), and `load_events` reads them back.
    """
    write_whole((json.dumps(event._asdict()) + "\n" for event in events), path)


def write_whole(texts: Iterable[str], path: str | Path) -> None:
    """Write texts to a file, which appears complete or not at all."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the path of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written, as {path.parent} is not a folder: make it, or give another")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(texts)
        partial.replace(path)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise type(problem)(f"{path} cannot be written ({reason}): make room, or give another path") from None
    finally:
        with suppress(OSError):  # it has been renamed, or could not be made
            partial.unlink()


def load_events(path: str | Path) -> list[Event]:
    """Read events that `save_events` or `run.save` wrote; costs about 3 us and 600 bytes per event."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the file that run.save() wrote")
    events, place = list[Event](), 0  # number of events read so far
    with Path(path).open("rb") as file, _uncollected():
        while lines := list(islice(file, _LINES)):
            try:
                # All lines at once, so that a name that occurs in many of them becomes one object.
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
    """Turn off the garbage collector, which would scan millions of new objects repeatedly and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _event(record: Any) -> Event:
    """Make an event from the JSON value of a line; raises ValueError if it is not one."""
    try:
        event = Event(record["time"], record["rank"], intern(record["kind"]), record["data"])
    except (KeyError, TypeError):
        raise ValueError("there must be time, rank, kind and data") from None
    if type(event.time) not in (float, int) or type(event.rank) is not int or type(event.data) is not dict:
        raise ValueError("time must be a number, rank a whole number, and data an object")
    return event


def _read_line(path: str | Path, number: int, line: bytes) -> Event:
    """Read the event of one line, or raise an error that says where it is and what is wrong with it."""
    is_cut = not line.endswith(b"\n")
    try:
        return _event(json.loads(line.decode()))
    except RecursionError:
        problem = "it is nested too deeply"
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg}, at character {error.pos + 1}"
    except ValueError as error:  # the line is JSON, so nothing of it is missing
        problem, is_cut = str(error), False
    if number == 1 and _is_json(path):
        raise ValueError(
            f"{path} is not a file of events but another JSON document: give the file that run.save() wrote"
        )
    cut = " The file ends in the middle of it: was it copied as a whole?" if is_cut else ""
    raise ValueError(
        f"{path}, line {number}, is not an event ({problem}): each line must be a JSON object "
        f"with time, rank, kind and data, as run.save() writes it.{cut}"
    )


def _is_json(path: str | Path) -> bool:
    """Whether a file as a whole is one JSON document."""
    try:
        json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        return False
    return True
