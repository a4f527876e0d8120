"""The exercise of `01_data_partitioning.ipynb`: a check that says kindly what is still missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_equal_shards(solve: Callable[[list[int], int], Any]) -> str:
    """Try `solve(indices, ranks)` on a few cases: "well done …", or "not yet: …" with the first thing to mend.

    Asked for are as many shards as ranks, all of one length, no index twice, and fewer left out than there are ranks.

    >>> check_equal_shards(lambda indices, ranks: [indices[rank::ranks] for rank in range(ranks)])
    'not yet: 10 indices for 3 ranks gave shards of 4, 3 and 3: all must have the same length.'
    """
    for indices, ranks in [(list(range(12)), 4), (list(range(10)), 3), (list(range(100, 60_100)), 7), ([5, 8], 3)]:
        case = f"{len(indices)} indices for {ranks} ranks"
        try:
            shards = [list(shard) for shard in solve(list(indices), ranks)]
        except Exception as error:
            return f"not yet: {case} ended in {type(error).__name__}: {error}"
        if problem := _problem(shards, indices, ranks):
            return f"not yet: {case} {problem}."
    return "well done: every rank takes the same number of steps, and no image is seen twice."


def _problem(shards: list[list[int]], indices: list[int], ranks: int) -> str | None:
    dealt = [index for shard in shards for index in shard]
    lengths = [len(shard) for shard in shards]
    if len(shards) != ranks:
        return f"gave {len(shards)} shards: there must be one per rank"
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
