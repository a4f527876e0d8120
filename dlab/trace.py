"""Write events in the Trace Event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Every rank is a process with four lanes: the parts of its steps, the messages that it sent, those that it received, and
the stages that its gradients reached; and one lane for each sort of collective that went through shared memory, without
messages. A message is an arrow from its slice on the sender's lane to its slice on the receiver's.

Perfetto drops a slice that partly overlaps another one on its lane, and an arrow that has no slice at one of its ends.
So the slices of a lane follow each other, and what overlaps goes to further lanes: messages, messages 2, messages 3, …
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from dlab.events import Event, write_whole
from dlab.kinds import COLLECTIVE, GRADIENT, LOG, MESSAGE, STATE

LANES = ("steps", "messages", "received", "gradients")
_STEPS, _MESSAGES, _RECEIVED, _GRADIENTS = LANES
_PARTS = ("delay", "compute", "wait")  # of a step, in order
_TICKS = 4  # per microsecond; the clock is no finer, and quarters are exact, so that an end equals the next start
_NOISE = 10_000 * _TICKS  # by how much a step may seem to begin before the end of the last one, on a busy machine

Entry = dict[str, Any]
Lane = tuple[str, int]  # its name, and how many lanes of this name come before it


class _Item(NamedTuple):
    """What is drawn on a lane: a slice, which may have one end of an arrow; or, without an end, a single moment."""

    rank: int
    lane: str
    start: int  # in ticks since 1970, and so is the end
    end: int | None
    entry: Entry
    arrow: Entry | None = None


def save_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write events in the Trace Event format; the file appears complete or not at all."""
    write_whole([json.dumps({"traceEvents": trace(events), "displayTimeUnit": "ms"}, allow_nan=False)], path)


def trace(events: Iterable[Event]) -> list[Entry]:
    """Return the entries of a trace, with times in microseconds since the first of them."""
    events, numbers, ended = list(events), count(1), dict[int, int]()
    items = sorted((item for event in events for item in _items(event, numbers, ended)), key=lambda item: item.start)
    placed = list(zip(items, _lanes(items), strict=True))
    names = [*LANES, *(item.lane for item in items)]
    lanes = {(name, 0) for name in LANES} | {lane for _, lane in placed}
    tids = {lane: tid for tid, lane in enumerate(sorted(lanes, key=lambda lane: (names.index(lane[0]), lane[1])))}
    entries = []
    for item, lane in placed:
        place = {"pid": item.rank, "tid": tids[lane], "ts": (item.start - items[0].start) / _TICKS}
        duration = {} if item.end is None else {"dur": (item.end - item.start) / _TICKS}
        entries.append(item.entry | place | duration)
        if item.arrow:  # after its slice, since a viewer looks for one that is open
            entries.append(item.arrow | place)
    servers = {event.rank: event.data["name"] for event in events if event.kind == STATE and event.data.get("name")}
    ranks = {item.rank: str(servers.get(item.rank, f"rank {item.rank}")) for item in items}
    return [*_names(ranks, tids, {(item.rank, lane) for item, lane in placed}), *entries]


def _lanes(items: Iterable[_Item]) -> list[Lane]:
    """Return the lane of each item, the first of its name that is free; the items must be sorted by their start."""
    found, ends = list[Lane](), defaultdict[tuple[int, str], list[int]](list)
    for item in items:
        before = 0
        if item.end is not None:
            busy = ends[item.rank, item.lane]
            before = next((number for number, end in enumerate(busy) if end <= item.start), len(busy))
            busy[before : before + 1] = [item.end]
        found.append((item.lane, before))
    return found


def _names(ranks: dict[int, str], tids: dict[Lane, int], used: set[tuple[int, Lane]]) -> Iterator[Entry]:
    """Yield the entries that name the processes, and the lanes that each of them uses or that all have."""
    for rank, title in sorted(ranks.items()):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for lane, tid in tids.items():
            name, before = lane
            if (rank, lane) in used or (name in LANES and not before):
                label = f"{name} {before + 1}" if before else name
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": label}}


def _items(event: Event, numbers: Iterator[int], ended: dict[int, int]) -> Iterator[_Item]:
    """Yield what is drawn of an event, if anything; `ended` keeps when the last step of each rank ended, in ticks."""
    data, rank = event.data, event.rank
    if event.kind == LOG:
        yield from _step(event, ended)
    elif event.kind == COLLECTIVE and _are_numbers(data, "start", "end"):
        name, times = str(data.get("name")), data.get("count", 1)
        lane = f"{name} within {data.get('axis') or _list(data['group'])}" if "group" in data else name
        title = name if times == 1 else f"{name} × {times}"
        yield _slice(rank, lane, title, _ticks(data["start"]), _ticks(data["end"]), data)
    elif event.kind == MESSAGE and _are_numbers(data, "start", "end", "source", "destination"):
        name, start, end = data.get("phase") or "message", _ticks(data["start"]), _ticks(data["end"])
        arrow = {"id": next(numbers), "cat": "message", "name": name}
        yield _slice(data["source"], _MESSAGES, name, start, end, data, arrow | {"ph": "s"})
        # When the receiver began to wait is not known: its slice marks the moment when it had the message.
        arrow |= {"ph": "f", "bp": "e"}
        yield _slice(data["destination"], _RECEIVED, f"receive {name}", max(start, end), end, data, arrow)
    elif event.kind == GRADIENT:
        name = f"{data.get('layer')} {data.get('stage')}"
        yield _Item(rank, _GRADIENTS, _ticks(event.time), None, {"ph": "i", "s": "t", "name": name})
    elif event.kind == STATE:
        name, why = str(data.get("state")), {"why": str(data["why"])} if data.get("why") else {}
        yield _Item(rank, _STEPS, _ticks(event.time), None, {"ph": "i", "s": "p", "name": name, "args": why})


def _step(event: Event, ended: dict[int, int]) -> Iterator[_Item]:
    """Yield a slice for each part of a step, which is logged at its end with the seconds that each part took."""
    data, rank = event.data, event.rank
    parts = [(name, data[name]) for name in _PARTS if _are_numbers(data, name) and data[name] > 0]
    moment = event.time - sum(seconds for _, seconds in parts)
    start = _ticks(moment)
    last = ended.get(rank, start)
    if start < last <= min(start + _NOISE, _ticks(event.time)):
        start = last
    for name, seconds in parts:
        moment += seconds
        end = max(_ticks(moment), start + 1)
        yield _slice(rank, _STEPS, name, start, end, data)
        ended[rank] = start = end
    if _are_numbers(data, "loss"):
        counter = {"ph": "C", "name": "loss", "args": {"loss": data["loss"]}}
        yield _Item(rank, _STEPS, _ticks(event.time), None, counter)


def _slice(
    rank: int, lane: str, name: str, start: int, end: int, data: dict[str, Any], arrow: Entry | None = None
) -> _Item:
    """Return a slice of one tick at least, because viewers hide those without a duration."""
    entry = {"ph": "X", "name": name, "args": _arguments(data)}
    return _Item(rank, lane, start, max(end, start + 1), entry, arrow)


def _ticks(seconds: float) -> int:
    return round(1e6 * _TICKS * seconds)


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
