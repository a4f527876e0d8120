"""Split a data set among workers: shuffle the indices once with a shared seed, cut them, give each rank a piece.

Every rank shuffles with the same seed and so knows all pieces without any communication. Taught in
`01_data_partitioning.ipynb`.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from .batches import Batches, Index, Samples, as_positions, names_many, out_of_range, take
from .digits import MNIST
from .table import ShardRow, ShardTable

_EXACT = 1e-9  # sums of fractions within this distance of 1 are meant to be 1
_GLOBAL_BATCH = 128
_FIRST = 5  # number of indices shown per shard


class Partition(Dataset[Any]):
    """The samples `data[i] for i in index` as a data set; no sample is copied.

    >>> part = Partition("abcdef", [4, 0, 2])
    >>> len(part), part[0], list(part)
    (3, 'e', ['e', 'a', 'c'])
    """

    def __init__(self, data: Samples, index: Index) -> None:
        self.data = data
        self._positions = as_positions(index, len(data))
        self.index: list[int] = self._positions.tolist()

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Any) -> Any:
        if names_many(index):
            return self.take(index)
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise out_of_range(position, len(self))
        return self.data[self.index[position]]

    def take(self, index: Index) -> Any:
        """Return many samples as one batch; costs a single `take` of the data if it has one."""
        return take(self.data, self._positions[as_positions(index, len(self))])

    @property
    def targets(self) -> Any:
        """The labels of this part, if the data has `targets`."""
        targets = self.data.targets  # type: ignore[attr-defined]  # an AttributeError is right if there are none
        return targets[self._positions] if isinstance(targets, torch.Tensor) else [targets[i] for i in self.index]

    def __repr__(self) -> str:
        return f"Partition: {len(self)} of {len(self.data)} samples"


class DataPartitioner:
    """Splits the indices of `data` into shards of the given sizes (fractions of the whole), at random but reproducibly.

    If the sizes sum to 1, every sample is in exactly one shard, also when they do not divide (largest remainder); a
    smaller sum leaves the rest out. `skew` splits unevenly by label: for each class the shares of the shards are drawn
    from a Dirichlet distribution around `sizes`; 100 is nearly even, 0.1 leaves a shard only a few classes. Costs one
    shuffle, about 30 ms for 60,000 samples.

    >>> parts = DataPartitioner(range(1, 11))
    >>> [list(parts.use(rank)) for rank in range(3)]
    [[3, 9, 4, 6, 7, 5, 10], [1, 2], [8]]
    """

    def __init__(
        self,
        data: Samples,
        sizes: Iterable[float] = (0.7, 0.2, 0.1),
        seed: int = 1234,
        skew: float | None = None,
    ) -> None:
        self.data = data
        self.sizes = _checked(sizes)
        self.partitions: list[list[int]]  # the indices into data, for each shard
        rng = random.Random(seed)
        order = list(range(len(data)))
        rng.shuffle(order)
        if skew is None:
            self.partitions = _cut(order, apportion(len(order), self.sizes))
        else:
            self.partitions = _deal_by_label(order, data, self.sizes, skew, rng)

    def __len__(self) -> int:
        return len(self.partitions)

    def use(self, rank: int) -> Partition:
        """Return the shard of this rank as a data set."""
        if not 0 <= rank < len(self):
            raise IndexError(
                f"rank {rank} has no shard: there are {len(self)}, for ranks 0 to {len(self) - 1}; "
                "give DataPartitioner one size per rank."
            )
        return Partition(self.data, self.partitions[rank])

    def table(self) -> ShardTable:
        """Return a table with a row per shard: rank, count, first indices and, for data with labels, a histogram of
        them.

        Reads every label: at once if the data has `targets`, otherwise through all samples.
        """
        labels = _labels(self.data)
        classes = sorted(set(labels)) if labels else []
        rows = []
        for rank, index in enumerate(self.partitions):
            counts = Counter(labels[i] for i in index) if labels else {}
            histogram = {label: counts[label] for label in classes} if labels else None
            rows.append(ShardRow(rank, len(index), tuple(index[:_FIRST]), histogram))
        return ShardTable(rows)

    def __repr__(self) -> str:
        return f"DataPartitioner: {len(self.data)} samples in {len(self)} shards"


def partition_dataset(rank: int, size: int, seed: int = 1234, skew: float | None = None) -> tuple[Batches, int]:
    """Return (batches, batch size) of this rank's part of MNIST, split among `size` ranks with batches of 128 // size.

    Together the ranks take 128 images per step (a few less if `size` does not divide 128), whatever their number.

    >>> batches, batch_size = partition_dataset(rank=0, size=4)
    >>> batch_size, len(batches)
    (32, 469)
    """
    if not 1 <= size <= _GLOBAL_BATCH:
        raise ValueError(
            f"cannot cut a batch of {_GLOBAL_BATCH} for {size} ranks: use 1 to {_GLOBAL_BATCH}, "
            "or DataPartitioner and Batches with a batch size of your own."
        )
    parts = DataPartitioner(MNIST(), [1 / size] * size, seed, skew)
    batch_size = _GLOBAL_BATCH // size
    return Batches(parts.use(rank), batch_size, seed), batch_size


def apportion(count: int, sizes: Sequence[float]) -> list[int]:
    """Return whole numbers closest to `size * count`: rounded down, then one more for the largest remainders.

    What the sizes lack to 1 counts as another shard, which is not returned and comes first among equal remainders.

    >>> apportion(10, [1 / 3] * 3), apportion(10, [0.5, 0.25])
    ([4, 3, 3], [5, 2])
    """
    rest = 1 - math.fsum(sizes)
    every = [rest if rest > _EXACT else 0.0, *sizes]
    shares = [round(size * count, 6) for size in every]  # so that 0.29 * 100 is 29, and equal shares stay equal
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(every)), key=lambda i: counts[i] - shares[i])  # stable: ties go to the first
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts[1:]


def _checked(sizes: Iterable[float]) -> list[float]:
    if not isinstance(sizes, Iterable):
        raise TypeError(f"sizes is {sizes!r}: give a list with one fraction per shard, such as [1 / 4] * 4.")
    fractions = [float(size) for size in sizes]
    if not fractions:
        raise ValueError("sizes is empty: give one fraction per shard, such as [0.7, 0.2, 0.1].")
    for size in fractions:
        if not 0 <= size <= 1 + _EXACT:  # NaN fails both comparisons
            raise ValueError(
                f"size {size} is not a fraction of the data: use numbers from 0 to 1 that sum to at most 1."
            )
    total = math.fsum(fractions)
    if total > 1 + _EXACT:
        raise ValueError(f"sizes sum to {total:g}, more than 1: divide each by {total:g}, or make some smaller.")
    if total == 0:
        raise ValueError("all sizes are 0: make at least one of them larger, or every sample is left out.")
    return fractions


def _cut(indices: list[int], counts: list[int]) -> list[list[int]]:
    """Cut indices into consecutive pieces of the given lengths."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(indices[start : start + count])
        start += count
    return pieces


def _deal_by_label(
    order: list[int], data: Samples, sizes: list[float], skew: float, rng: random.Random
) -> list[list[int]]:
    """Split each class by its own Dirichlet shares; inside a shard the samples stay in the order of the shuffle."""
    if not (math.isfinite(skew) and skew > 0):
        raise ValueError(f"skew is {skew}: use a number above 0, such as 0.5; 100 is nearly even, 0.1 very uneven.")
    labels = _labels(data)
    if labels is None:
        raise ValueError(
            "a skewed split needs whole-number labels: give the data a `targets` list, make its samples "
            "(input, label) pairs, or leave skew out."
        )
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(labels[i], []).append(i)
    owner: dict[int, int] = {}
    for label in sorted(members):
        kept = apportion(len(members[label]), [min(math.fsum(sizes), 1.0)])[0]
        shares = _dirichlet([skew * len(sizes) * size for size in sizes], rng)
        for rank, piece in enumerate(_cut(members[label], apportion(kept, shares))):
            owner.update(dict.fromkeys(piece, rank))
    shards: list[list[int]] = [[] for _ in sizes]
    for i in order:
        if i in owner:
            shards[owner[i]].append(i)
    return shards


def _dirichlet(alphas: list[float], rng: random.Random) -> list[float]:
    """Draw random shares that sum to 1: gamma variates, normalised.

    They are drawn as gamma(a + 1) * u ** (1 / a) and kept as logarithms, because a variate for a small `a` underflows
    to 0.
    """
    logs = [
        math.log(rng.gammavariate(a + 1, 1)) + math.log(1 - rng.random()) / a if a > 0 else -math.inf for a in alphas
    ]
    weights = [math.exp(log - max(logs)) for log in logs]
    return [weight / math.fsum(weights) for weight in weights]


def _labels(data: Samples) -> list[int] | None:
    """Return the label of every sample as a whole number; None if the data has no such labels."""
    targets = getattr(data, "targets", None)
    if targets is None:
        if not len(data) or _second(data[0]) is None:
            return None
        targets = [_second(data[i]) for i in range(len(data))]
    try:
        return [operator.index(label) for label in (targets.tolist() if hasattr(targets, "tolist") else targets)]
    except TypeError:
        return None


def _second(sample: Any) -> Any:
    return sample[1] if isinstance(sample, (tuple, list)) and len(sample) > 1 else None
