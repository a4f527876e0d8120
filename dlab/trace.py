"""Write events in the Trace Event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Every rank is a process with three lanes: the parts of its steps, the messages that it sent, and the stages that its
gradients reached; and one lane for each sort of collective that went through shared memory, without messages. A message
is an arrow from its sender's lane to its receiver's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from dlab.events import Event
from dlab.kinds import COLLECTIVE, GRADIENT, LOG, MESSAGE, STATE

LANES = ("steps", "messages", "gradients")
_STEPS, _MESSAGES, _GRADIENTS = range(len(LANES))
_PARTS = ("delay", "compute", "wait")  # of a step, in order
_SHORTEST = 1e-6  # seconds, because viewers hide slices without a duration

Entry = dict[str, Any]


def save_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write events in the Trace Event format; the file appears complete or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps({"traceEvents": trace(events), "displayTimeUnit": "ms"}, allow_nan=False))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def trace(events: Iterable[Event]) -> list[Entry]:
    """Return the entries of a trace, with times in microseconds since the first of them."""
    numbers, lanes = count(1), {name: number for number, name in enumerate(LANES)}
    entries = [entry for event in events for entry in _entries(event, numbers, lanes)]
    begin = min((entry["ts"] for entry in entries), default=0.0)
    for entry in entries:
        entry["ts"] = round(1e6 * (entry["ts"] - begin), 3)
    entries.sort(key=lambda entry: entry["ts"])
    return [*_names({entry["pid"] for entry in entries}, lanes), *entries]


def _names(ranks: Iterable[int], lanes: dict[str, int]) -> Iterator[Entry]:
    """Yield the entries that name the processes and their lanes."""
    for rank in sorted(ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for lane, number in lanes.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}


def _entries(event: Event, numbers: Iterator[int], lanes: dict[str, int]) -> Iterator[Entry]:
    """Yield the entries of an event, if it has any; new lanes are added to `lanes`."""
    data, rank = event.data, event.rank
    if event.kind == LOG:
        yield from _step(event)
    elif event.kind == COLLECTIVE and _are_numbers(data, "start", "end"):
        name, times = str(data.get("name")), data.get("count", 1)
        lane = f"{name} within {data.get('axis') or _list(data['group'])}" if "group" in data else name
        number = lanes.setdefault(lane, len(lanes))
        title = name if times == 1 else f"{name} × {times}"
        yield _slice(rank, number, title, data["start"], data["end"], _arguments(data))
    elif event.kind == MESSAGE and _are_numbers(data, "start", "end", "source", "destination"):
        number, name = next(numbers), data.get("phase") or "message"
        source, destination = data["source"], data["destination"]
        yield _slice(source, _MESSAGES, name, data["start"], data["end"], _arguments(data))
        yield {
            "ph": "s",
            "id": number,
            "cat": "message",
            "name": name,
            "pid": source,
            "tid": _MESSAGES,
            "ts": data["start"],
        }
        arrow = {"ph": "f", "bp": "e", "id": number, "cat": "message", "name": name, "pid": destination}
        yield {**arrow, "tid": _MESSAGES, "ts": data["end"]}
    elif event.kind == GRADIENT:
        name = f"{data.get('layer')} {data.get('stage')}"
        yield {"ph": "i", "s": "t", "name": name, "pid": rank, "tid": _GRADIENTS, "ts": event.time}
    elif event.kind == STATE:
        name, why = str(data.get("state")), {"why": str(data["why"])} if data.get("why") else {}
        yield {"ph": "i", "s": "p", "name": name, "pid": rank, "tid": _STEPS, "ts": event.time, "args": why}


def _step(event: Event) -> Iterator[Entry]:
    """Yield a slice for each part of a step, which is logged at its end with the seconds that each part took."""
    data, end = event.data, event.time
    parts = [(name, data[name]) for name in _PARTS if _are_numbers(data, name) and data[name] > 0]
    start = end - sum(seconds for _, seconds in parts)
    for name, seconds in parts:
        yield _slice(event.rank, _STEPS, name, start, start + seconds, _arguments(data))
        start += seconds
    if _are_numbers(data, "loss"):
        yield {"ph": "C", "name": "loss", "pid": event.rank, "ts": end, "args": {"loss": data["loss"]}}


def _slice(rank: int, lane: int, name: str, start: float, end: float, arguments: Entry) -> Entry:
    seconds = max(end - start, _SHORTEST)
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": lane,
        "ts": start,
        "dur": round(1e6 * seconds, 3),
        "args": arguments,
    }


def _arguments(data: dict[str, Any]) -> Entry:
    """Return the numbers and texts that a viewer shows when an entry is selected."""
    shown = {
        name: value
        for name, value in data.items()
        if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    }
    return shown | {"group": _list(data["group"])} if "group" in data else shown


def _list(ranks: Any) -> str:
    """Write a list of ranks as `0, 2`, and anything else unchanged."""
    return ", ".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks)


def _are_numbers(data: dict[str, Any], *names: str) -> bool:
    return all(isinstance(data.get(name), int | float) and math.isfinite(data[name]) for name in names)
