"""The exercise of `04_async_sgd.ipynb`, "how stale is each update": compared with a plain count of versions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Ends = list[tuple[float, int]]  # (time, rank) of the end of each step

# easy to follow by hand, then longer ones; in each the steps of all ranks are in one list, in the order of their ends
EXAMPLE: Ends = [(1.0, 0), (1.2, 1), (2.1, 0), (3.0, 0), (3.1, 1), (3.3, 2), (4.0, 0)]


def check_staleness(my_staleness: Callable[[Ends], Any]) -> str:
    """Try `my_staleness(ends)` on a few lists: "well done …", or "not yet: …" with the first thing to mend.

    `ends` are (time, rank), in the order of time: that rank applies its gradient to the one model that all share, and
    reads the weights for its next. Asked for is the staleness of each update, in the same order: how many updates were
    made between the reading and the applying.

    >>> check_staleness(lambda ends: [0 for _ in ends])
    'not yet: with 7 updates of 3 ranks, update 1, by rank 1, got 0, but its staleness is 1 …'
    """
    for ends in (
        EXAMPLE,
        [(1.0, 0), (2.0, 0), (3.0, 0)],
        [(0.5, 3), (0.6, 0), (0.7, 3)],
        _random(4, 40),
        _random(7, 90),
        [],
    ):
        ranks = len({rank for _, rank in ends})
        case = f"with {len(ends)} update{'s' * (len(ends) != 1)} of {ranks} rank{'s' * (ranks != 1)}"
        try:
            found = my_staleness(list(ends))
        except Exception as error:
            return f"not yet: {case}, it ended in {type(error).__name__}: {error}."
        if problem := _problem(found, ends):
            return f"not yet: {case}, {problem}."
    return "well done: each update is as stale as the updates that came between its reading and its applying."


def count_versions(ends: Sequence[tuple[float, int]]) -> list[int]:
    """The weights have a version number, and each rank remembers the version that it has read."""
    read, staleness = dict[int, int](), []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version + 1
    return staleness


def _problem(found: Any, ends: Ends) -> str | None:
    wanted = count_versions(ends)
    try:
        found = [int(each) for each in found]
    except (TypeError, ValueError):
        return f"it gave {found!r}: give a list of whole numbers, one for each update"
    if len(found) != len(ends):
        return f"it gave {len(found)} numbers: give one for each update"
    if found == wanted:
        return None
    for name, wrong in _mistakes(ends).items():
        if found == wrong:
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


def _mistakes(ends: Ends) -> dict[str, list[int]]:
    """What would come of typical misunderstandings."""
    right, places = count_versions(ends), list(range(len(ends)))
    last: dict[int, float] = {}
    elapsed = []
    for time, rank in ends:
        elapsed.append(int(time - last.get(rank, 0.0)))
        last[rank] = time
    first = {rank: next(place for place in places if ends[place][1] == rank) for _, rank in ends}
    return {
        "none": [0 for _ in ends],
        "own too": [each + 1 for each in right],
        "all before": places,
        "first is fresh": [0 if first[rank] == place else right[place] for place, (_, rank) in enumerate(ends)],
        "time": elapsed,
        "everyone once": [len({rank for _, rank in ends}) - 1 for _ in ends],
    }


_SENTENCES = {
    "none": "every update got 0: that would be so if nobody else had updated the weights in the meantime. Count the "
    "updates between a rank's reading and its next update",
    "own too": "every number is too large by 1: an update does not make itself stale. Count only those before it",
    "all before": "you have counted all updates from the beginning: a rank reads the weights anew after each update of "
    "its own, so count from there",
    "first is fresh": "the first update of each rank got 0: it was computed on the weights of the very beginning, and "
    "other ranks may have updated them by then",
    "time": "you have measured seconds: staleness counts updates, however long they took",
    "everyone once": "every update got the number of the other ranks. That is the mean in the long run; count for each "
    "update how many there really were",
}


def _random(ranks: int, updates: int) -> Ends:
    """Ranks of different speeds."""
    dice = random.Random(ranks)
    ends = []
    for rank in range(ranks):
        now = 0.0
        for _ in range(updates):
            now += (1 + rank % 3) * (0.5 + dice.random())
            ends.append((now, rank))
    return sorted(ends)[:updates]
