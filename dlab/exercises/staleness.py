"""The exercise of `04_async_sgd.ipynb`, "how stale is each update": compared with a count of weight versions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dlab.exercises.calling import Unfinished, call
from dlab.exercises.sandbox import count

Ends = list[tuple[float, int]]  # (time, rank) of the end of each step

# short cases that can be followed by hand, then longer ones; each lists the steps of all ranks in the order of time
EXAMPLE: Ends = [(1.0, 0), (1.2, 1), (2.1, 0), (3.0, 0), (3.1, 1), (3.3, 2), (4.0, 0)]


def check_staleness(my_staleness: Any) -> str:
    """Try `my_staleness(ends)` on a few lists: "well done …", or "not yet: …" with the first thing to fix.

    `ends` lists (time, rank) in the order of time: at that time the rank applies its gradient to the shared model and
    reads the weights for its next step. The function must return the staleness of each update, in the same order: the
    number of updates made between reading the weights and applying the gradient.

    >>> check_staleness(lambda ends: [0 for _ in ends])
    'not yet: with 7 updates of 3 ranks, every update got 0: that would be so if nobody else had updated …'
    """
    if not callable(my_staleness):
        return f"not yet: {my_staleness!r} is not a function: give the function itself, without calling it."
    for ends in (
        EXAMPLE,
        [(1.0, 0), (2.0, 0), (3.0, 0)],
        [(0.5, 3), (0.6, 0), (0.7, 3)],
        _random(4, 40),
        _random(7, 90),
        [],
    ):
        case = f"with {count(len(ends), 'update')} of {count(len({rank for _, rank in ends}), 'rank')}"
        try:
            if problem := _problem(my_staleness, ends):
                return f"not yet: {case}, {problem}."
        except Unfinished as reason:
            return f"not yet: {case}, {reason}."
    return "well done: each update is as stale as the updates that came between its reading and its applying."


def count_versions(ends: Sequence[tuple[float, int]]) -> list[int]:
    """Compute the staleness from a version number of the weights and the version that each rank has read."""
    read, staleness = dict[int, int](), []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version + 1
    return staleness


def _ask(my_staleness: Callable[[Ends], Any], ends: Ends) -> Any:
    return call(my_staleness, list(ends), own=(count_versions,), instead="count the updates yourself")


def _problem(my_staleness: Callable[[Ends], Any], ends: Ends) -> str | None:
    found, wanted = _ask(my_staleness, ends), count_versions(ends)
    if isinstance(found, str | bytes | dict | set) or not isinstance(found, Iterable) or not getattr(found, "ndim", 1):
        return f"it gave {_plain(found)!r}: give a list of whole numbers, one for each update"
    found = [_plain(each) for each in found]
    if len(found) != len(ends):
        return f"it gave {count(len(found), 'number')}: give one for each of the {count(len(ends), 'update')}"
    if ends and found == _seconds(ends):
        return _SENTENCES["time"]
    for update, each in enumerate(found):
        if not isinstance(each, int) or isinstance(each, bool):
            return f"update {update} got {each!r}: staleness is a count, so give whole numbers"
    if found == wanted:
        again = [_plain(each) for each in _ask(my_staleness, ends)]
        return None if again == wanted else _SENTENCES["memory"]
    if name := _mistake(found, ends, my_staleness):
        return _SENTENCES[name]
    if sorted(found) == sorted(wanted):
        return "the numbers are right, but in another order: give them in the order of the updates"
    update = next(place for place, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
    rank = ends[update][1]
    before = [place for place in range(update) if ends[place][1] == rank]
    read = f"read the weights after its update {before[-1]}" if before else "read the weights at the very beginning"
    return (
        f"update {update}, by rank {rank}, got {found[update]}, but its staleness is {wanted[update]}: "
        f"rank {rank} had {read}; count the updates since then"
    )


def _plain(number: Any) -> Any:
    """Convert a number of numpy or torch to a Python number, and leave anything else as it is."""
    return number.item() if hasattr(number, "item") and not getattr(number, "ndim", 1) else number


# ------------------------------------------------------------------------------------ typical mistakes


def _mistake(found: list[int], ends: Ends, my_staleness: Callable[[Ends], Any]) -> str | None:
    """Return the name of the mistake that gives these numbers, and also those for a longer list."""
    longer = _random(7, 90)
    likely = [name for name, wrong in _mistakes(ends).items() if _agree(found, wrong)]
    if not likely:
        return None
    try:
        more = [_plain(each) for each in _ask(my_staleness, longer)]
    except (Unfinished, TypeError):
        return likely[0]
    return next((name for name in likely if _agree(more, _mistakes(longer)[name])), None)


def _agree(found: list[int], wrong: Sequence[int | None]) -> bool:
    """Return whether the numbers agree; None in `wrong` matches any number."""
    return len(found) == len(wrong) and all(other in (None, one) for one, other in zip(found, wrong, strict=True))


def _mistakes(ends: Ends) -> dict[str, list[int] | list[int | None]]:
    """Return the numbers to which typical misunderstandings lead."""
    right, ranks = count_versions(ends), [rank for _, rank in ends]
    places = range(len(ends))
    is_first = [ranks.index(rank) == place for place, rank in enumerate(ranks)]
    between = [ranks[place - right[place] : place] for place in places]
    later = [ranks[place + 1 :] for place in places]
    return {
        "none": [0 for _ in ends],
        "own too": [each + 1 for each in right],
        "too small": [each - 1 for each in right],
        "own since": [each + (not first) for each, first in zip(right, is_first, strict=True)],
        "before the first": [each + first for each, first in zip(right, is_first, strict=True)],
        "distance": [0 if first else each + 1 for each, first in zip(right, is_first, strict=True)],
        "negative": [-each for each in right],
        "all before": list(places),
        "others before": [place - ranks[:place].count(ranks[place]) for place in places],
        "own before": [ranks[:place].count(ranks[place]) for place in places],
        "each once": [len(set(others)) for others in between],
        "most": [max(map(others.count, others), default=0) for others in between],
        "after": [each.index(rank) if rank in each else None for each, rank in zip(later, ranks, strict=True)],
        "first is fresh": [0 if first else each for each, first in zip(right, is_first, strict=True)],
        "time": [int(each) for each in _seconds(ends)],
        "everyone once": [len(set(ranks)) - 1 for _ in ends],
    }


def _seconds(ends: Ends) -> list[float]:
    last: dict[int, float] = {}
    elapsed = []
    for time, rank in ends:
        elapsed.append(time - last.get(rank, 0.0))
        last[rank] = time
    return elapsed


_ANEW = "a rank reads the weights again after each update of its own, so count from there"
_SENTENCES = {
    "none": "every update got 0: that would be so if nobody else had updated the weights in the meantime. Count the "
    "updates between a rank's reading and its next update",
    "own too": "every number is too large by 1: an update does not make itself stale. Count only those before it",
    "too small": "every number is too small by 1: where nobody else has updated the weights in between, it is 0",
    "own since": "every number is too large by 1, but for the first of each rank: a rank reads the weights after its "
    "own update, which is in them already",
    "before the first": "the first update of each rank is too large by 1: at the beginning there are 0 updates in the "
    "weights",
    "distance": "you have given the distance to the same rank's previous update: that update is in the weights that "
    "were read, so count only those in between; and before a rank's first update, count from the beginning",
    "negative": "the numbers are negative: take the updates made so far, minus those made when the rank read",
    "all before": f"you have counted all updates from the beginning: {_ANEW}",
    "others before": f"you have counted all updates of other ranks from the beginning: {_ANEW}",
    "own before": "you have counted the updates of the same rank: those of the others make a gradient stale, if they "
    "come between the rank's reading and its update",
    "each once": "you have counted each of the other ranks once: a fast one may have made several updates in between, "
    "and all of them count",
    "most": "you have given the updates of one other rank, the one that made most: add up those of all",
    "after": "you have counted the updates that come after each: they make the rank's next update stale, so give the "
    "number to that one",
    "first is fresh": "the first update of each rank got 0: it was computed on the weights of the very beginning, and "
    "other ranks may have updated them by then",
    "time": "you have measured seconds: staleness counts updates, however long they took",
    "everyone once": "every update got the number of the other ranks. That is the mean in the long run; count for each "
    "update how many there really were",
    "memory": "a second call with the same updates gives different numbers: start afresh in each call, and keep "
    "nothing outside it",
}


def _random(ranks: int, updates: int) -> Ends:
    """Make a list of updates by ranks of different speeds."""
    dice = random.Random(ranks)
    ends = []
    for rank in range(ranks):
        now = 0.0
        for _ in range(updates):
            now += (1 + rank % 3) * (0.5 + dice.random())
            ends.append((now, rank))
    return sorted(ends)[:updates]
