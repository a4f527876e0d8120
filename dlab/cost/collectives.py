"""The exact cost of a collective: messages, steps and bytes, also for sizes that do not divide evenly."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True)
class Cost:
    """The number of messages of all ranks together, of consecutive steps, and of bytes that each rank sends."""

    messages: int
    steps: int
    bytes_per_rank: list[int]

    def __add__(self, other: Cost) -> Cost:
        together = [mine + theirs for mine, theirs in zip(self.bytes_per_rank, other.bytes_per_rank, strict=True)]
        return Cost(self.messages + other.messages, self.steps + other.steps, together)


def allreduce(algorithm: str, ranks: int, bytes: int, itemsize: int = 4) -> Cost:
    """Return the cost of an all-reduce of `bytes`, in items of `itemsize`, over `ranks`.

    >>> allreduce("ring", ranks=4, bytes=4000)
    Cost(messages=24, steps=6, bytes_per_rank=[6000, 6000, 6000, 6000])
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}: use {', '.join(_ALGORITHMS)}")
    if ranks < 1 or bytes < 0 or itemsize < 1 or bytes % itemsize:
        raise ValueError(f"{ranks} ranks, {bytes} bytes in items of {itemsize}: give 1 rank or more, and whole items")
    return _ALGORITHMS[algorithm](ranks, bytes, itemsize)


def _split(bytes: int, itemsize: int, parts: int) -> list[int]:
    """Return the sizes of the chunks: whole items, the first chunks one item larger."""
    least, more = divmod(bytes // itemsize, parts)
    return [itemsize * (least + (part < more)) for part in range(parts)]


def _rounds(ranks: int) -> int:
    """Return log2 of the number of ranks, rounded up."""
    return (ranks - 1).bit_length()


def _naive(ranks: int, bytes: int, itemsize: int) -> Cost:
    return Cost(ranks * (ranks - 1), ranks - 1, [(ranks - 1) * bytes] * ranks)


def _reduce(ranks: int, bytes: int) -> Cost:
    return Cost(ranks - 1, _rounds(ranks), [0] + [bytes] * (ranks - 1))


def _broadcast(ranks: int, bytes: int) -> Cost:
    """In a binomial tree rank r has a child at r + d for each power of two d below the lowest bit of r."""
    children = [
        sum(rank % (2 << bit) == 0 and rank + (1 << bit) < ranks for bit in range(_rounds(ranks)))
        for rank in range(ranks)
    ]
    return Cost(ranks - 1, _rounds(ranks), [count * bytes for count in children])


def _tree(ranks: int, bytes: int, itemsize: int) -> Cost:
    return _reduce(ranks, bytes) + _broadcast(ranks, bytes)


def _ring(ranks: int, bytes: int, itemsize: int) -> Cost:
    """Rank r sends every chunk twice, except chunk r in the first round and chunk r + 1 in the second."""
    chunks = _split(bytes, itemsize, ranks)
    sent = [2 * bytes - chunks[rank] - chunks[(rank + 1) % ranks] for rank in range(ranks)]
    return Cost(2 * ranks * (ranks - 1), 2 * (ranks - 1), sent)


def _halving_doubling(ranks: int, bytes: int, itemsize: int) -> Cost:
    """Each of 2**k ranks sends all but its own part while halving, and everything it has while doubling."""
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    parts = _split(bytes, itemsize, power)
    core = []
    for place in range(power):
        out = sum(sum(parts[place >> bit << bit :][: 1 << bit]) for bit in range(_rounds(power)))
        core.append(bytes - parts[place] + out)
    sent = []
    for rank in range(ranks):
        if rank >= 2 * extra:
            sent.append(core[rank - extra])
        elif rank % 2:  # sends everything to a neighbour, and receives the result
            sent.append(bytes)
        else:  # sends the result to the neighbour at the end
            sent.append(core[rank // 2] + bytes)
    return Cost(2 * power * _rounds(power) + 2 * extra, 2 * _rounds(power) + 2 * (extra > 0), sent)


def _hierarchical(ranks: int, bytes: int, itemsize: int) -> Cost:
    """Groups of about the square root of n: a reduction in each, a ring of their leaders, a broadcast in each."""
    width = isqrt(ranks)
    groups = [range(first, min(first + width, ranks)) for first in range(0, ranks, width)]
    leaders = _ring(len(groups), bytes, itemsize)
    sent, messages = [0] * ranks, leaders.messages
    for group, around in zip(groups, leaders.bytes_per_rank, strict=True):
        inside = _tree(len(group), bytes, itemsize)
        messages += inside.messages
        sent[group.start : group.stop] = inside.bytes_per_rank
        sent[group.start] += around
    return Cost(messages, 2 * _rounds(width) + leaders.steps, sent)


_ALGORITHMS = {
    "naive": _naive,
    "tree": _tree,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "hierarchical": _hierarchical,
}
