"""Check what a view can use of an event: fields of the right type, numbers in range, and printable names.

A log or a file can contain anything. What cannot be drawn is left out, and counted with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import Any

import numpy as np

from dlab.events import Event
from dlab.kinds import ACTION_FORM, KINDS, LOG, MESSAGE, SCHEDULE, SLICE

RANKS = 1 << 16  # higher ranks are not drawn
ROUNDS = 1 << 20  # maximal number of rounds of collectives
WHOLE = 1 << 53  # a float holds every whole number up to here
STEPS = 1 << 31  # the browser gets steps as 32 bits
LATEST = 1e12  # seconds: beyond this a float cannot resolve microseconds
LARGEST = float(np.finfo(np.float32).max)  # a larger loss counts as infinite: weights and browsers use 32 bits
_NAME, _SENTENCE = 80, 2000  # characters that are kept
_PLURAL = {"samples", "norms", "bytes", "ranks", "labels", "actions", "starts", "ends"}
_PHRASES = {noun: noun for noun in ("text", "numbers by layer")}  # others take "a"
_PHRASES |= {"other rank": "another rank", "action": "an action", "as long": "as many as its actions"}

# logged numbers: the range in which each can be drawn
LIMITS = {
    "step": (-WHOLE, WHOLE),
    "loss": (-inf, inf),
    "samples": (0, WHOLE),
    **dict.fromkeys(("compute", "wait", "delay"), (-LATEST, LATEST)),
}

Data = dict[str, Any]


class Unusable(Exception):
    """An event that cannot be drawn: `what` names the views concerned, `why` is the reason for the reader."""

    def __init__(self, what: str, field: str, noun: str) -> None:
        super().__init__(what, field)
        self.what, self.why = what, reason(field, noun)


def reason(field: str, noun: str) -> str:
    """Return the reason, as in `their loss is not a number`."""
    return f"their {field} {'are' if field in _PLURAL else 'is'} not {_PHRASES.get(noun, f'a {noun}')}"


def number(value: Any) -> float | None:
    """Return a number as a float, infinite if it is too large for one; None if it is not a number."""
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def text(value: Any, most: int = _NAME) -> str | None:
    """Return a text with printable characters, cut to a maximal length; None if it is not a text."""
    if not isinstance(value, str):
        return None
    if len(value) > most:
        value = f"{value[: most // 3]}…{value[1 + most // 3 - most :]}"
    if not value.isprintable():
        value = "".join(each if each.isprintable() else " " if each.isspace() else "\ufffd" for each in value)
    return value


def usable(event: Event) -> Event:
    """Return the event reduced to what can be used; raise `Unusable` if nothing can."""
    if _moment(event.time) is None:
        raise Unusable("", "time", "number of seconds")
    if _rank(event.rank) is None:
        raise Unusable("", "rank", "whole number from 0 on")
    if not isinstance(event.kind, str) or not isinstance(event.data, dict):
        raise Unusable("", "data", "dictionary")
    data = usable_data(event.kind, event.data)
    return event if data is event.data else event._replace(data=data)


def usable_data(kind: str, data: Data) -> Data:
    """Return the usable part of the data of an event of this kind; the same object if all of it is usable."""
    changed: Data = {}
    for (field, noun, _, needed), read in _FIELDS.get(kind, ()):
        value = data.get(field)
        if value is None and not needed:
            if field in data:
                data = {name: each for name, each in data.items() if name != field}
            continue
        found = read(value)
        if found is None:
            raise Unusable(kind, field, noun)
        if found is not value:
            changed[field] = found
    if changed:
        data = {**data, **changed}
    if kind == MESSAGE and data["source"] == data["destination"]:
        raise Unusable(kind, "destination", "other rank")
    if kind == SLICE and not _lies_in(data["slice"], data["shape"]):
        raise Unusable(kind, "slice", "part of the shape")
    if kind == SCHEDULE:
        for field in ("starts", "ends"):
            if len(data[field]) != len(data["actions"]):
                raise Unusable(kind, field, "as long")
    return data


def _moment(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < LATEST else None


def _rank(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < RANKS else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < WHOLE else None


def _step(value: Any) -> int | None:
    return value if type(value) is int and -STEPS <= value < STEPS else None


def _round(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < ROUNDS else None


def _finite(value: Any) -> float | None:
    found = number(value)
    return None if found is None else value if abs(found) <= LARGEST else float("nan")


def _sentence(value: Any) -> str | None:
    return text(value, _SENTENCE)


def _norms(value: Any) -> dict[str, float | None] | None:
    if not isinstance(value, dict):
        return None
    found = {text(layer): None if norm is None else number(norm) for layer, norm in value.items()}
    if None in found or any(found[text(layer)] is None for layer, norm in value.items() if norm is not None):
        return None
    return found  # type: ignore[return-value]


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], list[Any] | None]:
    def read_list(value: Any) -> list[Any] | None:
        found = [read(each) for each in value] if isinstance(value, list | tuple) else [None]
        return None if None in found else found

    return read_list


def _label(value: Any) -> int | str | None:
    return text(value) if isinstance(value, str) else _step(value)


def _span(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    start, stop = map(_count, value)
    return (start, stop) if start is not None and stop is not None and start <= stop else None


def _waiting(value: Any) -> Data | None:
    """Read one rank's part of a hang: what it waits for, in words."""
    if not isinstance(value, dict) or _rank(value.get("rank")) is None or not isinstance(value.get("words"), str):
        return None
    return {**value, "words": _sentence(value["words"])}


def _action(value: Any) -> str | None:
    return value if isinstance(value, str) and ACTION_FORM.fullmatch(value) else None


def _lies_in(spans: list[tuple[int, int]], shape: list[int]) -> bool:
    return len(spans) == len(shape) and all(stop <= size for (_, stop), size in zip(spans, shape, strict=True))


# how each thing that a field can be is read; knobs, which are no numbers of a picture, are taken as they are
_READ: dict[str, Callable[[Any], Any]] = {
    "text": text,
    "sentence": _sentence,
    "rank": _rank,
    "list of ranks": _list_of(_rank),
    "list of waiting ranks": _list_of(_waiting),
    "count": _count,
    "list of counts": _list_of(_count),
    "list of sizes": _list_of(_count),
    "list of labels": _list_of(_label),
    "list of starts and stops": _list_of(_span),
    "numbers by layer": _norms,
    "number": _finite,
    "whole number": _step,
    "whole number from 0 on": _round,
    "number of seconds": _moment,
    "action": _action,
    "list of actions": _list_of(_action),
    "list of times": _list_of(_moment),
}
_FIELDS = {
    kind.name: [(field, _READ[field.noun]) for field in kind.fields if field.noun in _READ]
    for kind in KINDS.values()
    if kind.name != LOG  # which is read in columns
}


def whole_number(value: Any) -> int | None:
    """Return a whole number, also if it is written as a float."""
    if isinstance(value, float) and isfinite(value) and value.is_integer():
        value = int(value)
    return _count(value)
