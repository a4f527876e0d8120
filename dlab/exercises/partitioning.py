"""The exercise of `01_data_partitioning.ipynb`: check a learner's equal shards and say what is still missing."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

CASES = [(list(range(12)), 4), (list(range(10)), 3), (list(range(100, 60_100)), 7), ([5, 8], 3), ([7, 3, 9, 4, 1], 1)]


def check_equal_shards(solve: Any) -> str:
    """Try `solve(indices, ranks)` on a few cases: "well done …", or "not yet: …" with the first thing to fix.

    There must be one shard per rank, all of the same length, without repeated indices, and with fewer indices left out
    than there are ranks. A shard may be anything that can be iterated: a list, a tuple, a tensor, an array, a
    generator.

    >>> check_equal_shards(lambda indices, ranks: [indices[rank::ranks] for rank in range(ranks)])
    'not yet: 10 indices for 3 ranks gave shards of 4, 3 and 3: all must have the same length.'
    """
    if not callable(solve):
        return f"not yet: {_short(solve)} is not a function: write def equal_shards(indices, ranks)."
    for indices, ranks in CASES:
        case = f"{_count(len(indices), 'index', 'indices')} for {_count(ranks, 'rank', 'ranks')}"
        given = list(indices)
        try:
            problem = _problem(solve(given, ranks), indices, ranks)
        except Exception as error:
            return f"not yet: {case} ended in {type(error).__name__}: {error}{_where(error, solve)}."
        if problem is None and given != indices:
            problem = (
                "gave the right shards, but the list of indices was changed on the way, and it is the caller's: "
                "take slices of it, or begin with indices = list(indices)"
            )
        if problem:
            return f"not yet: {case} {problem}."
    return "well done: every rank takes the same number of steps, and no image is seen twice."


def _wrong_kind(shards: Any) -> str | None:
    """Say what is wrong with the type of the returned value."""
    if shards is None:
        return "gave None: the function must return the shards"
    if isinstance(shards, dict):
        return "gave a dictionary: give a list of shards, in which the place of a shard is its rank"
    if isinstance(shards, set | frozenset):
        return "gave a set, which has no order: give a list of shards, in which the place of a shard is its rank"
    if isinstance(shards, str | bytes) or not isinstance(shards, Iterable):
        return f"gave {_short(shards)}: give a list of shards, one for each rank"
    return None


def _problem(returned: Any, indices: list[int], ranks: int) -> str | None:
    """Return what is wrong, in words that follow "10 indices for 3 ranks", or None."""
    if problem := _wrong_kind(returned):
        return problem
    most = len(indices) + ranks  # shards or indices: more than that is wrong, and may never end
    shards: list[list[int]] = []
    seen: list[Any] = []  # the shard objects themselves
    for rank, shard in enumerate(islice(iter(returned), most + 1)):
        if isinstance(shard, set | frozenset | dict):
            return (
                f"gave shard {rank} as a {type(shard).__name__}, which has no place 0, 1, 2, …: give a list of indices"
            )
        if isinstance(shard, str | bytes) or not _is_iterable(shard):
            return f"gave shard {rank} as {_short(shard)}: a shard is a list of indices"
        if isinstance(shard, list) and shard and any(shard is other for other in seen):
            return (
                f"gave one and the same list as shard {rank} and as another one, so that two ranks would train on the "
                "same images ([[]] * ranks, too, is one list with many names: write [[] for _ in range(ranks)])"
            )
        seen.append(shard)
        items = list(islice(shard.tolist() if hasattr(shard, "tolist") else shard, most + 1))
        for item in items:
            if not hasattr(item, "__index__") or isinstance(item, bool):
                return f"dealt {_short(item)} to rank {rank}: deal indices, which are whole numbers"
        shards.append([operator.index(item) for item in items])
    return _wrong_shards(shards, indices, ranks)


def _wrong_shards(shards: list[list[int]], indices: list[int], ranks: int) -> str | None:
    dealt = [index for shard in shards for index in shard]
    lengths = [len(shard) for shard in shards]
    length = len(indices) // ranks
    if len(shards) > len(indices) + ranks or any(each > len(indices) + ranks for each in lengths):
        return "gave more than there is to deal: look for a loop that does not end"
    if len(shards) != ranks:
        hint = ""
        if lengths == [ranks] * length:
            hint = f". It is the other way round: {ranks} shards of {length}"
        elif lengths == [length] * ranks + [len(indices) % ranks]:
            hint = f". The last one, of {lengths[-1]}, is what is left over: leave it out"
        return f"gave {_count(len(shards), 'shard', 'shards')}: there must be one per rank{hint}"
    if len(set(lengths)) > 1:
        words = ", ".join(map(str, lengths[:-1])) + f" and {lengths[-1]}"
        return f"gave shards of {words}: all must have the same length"
    if len(set(dealt)) < len(dealt):
        return "dealt an index more than once: two ranks would train on the same image"
    if strange := set(dealt) - set(indices):
        return f"dealt {min(strange)}, which was not among the indices: deal the indices, not their positions"
    if len(indices) - len(dealt) >= ranks:
        return f"left out {len(indices) - len(dealt)}: every rank could have had at least one more"
    return None


def _is_iterable(shard: Any) -> bool:
    try:
        iter(shard)
    except TypeError:  # a tensor with a single number has __iter__ but cannot be iterated
        return False
    return True


def _where(error: Exception, solve: Callable[..., Any]) -> str:
    lines = [
        each.line for each in traceback.extract_tb(error.__traceback__) if each.name == getattr(solve, "__name__", "")
    ]
    return f", in the line `{lines[-1]}`" if lines and lines[-1] else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:59] + "…"
