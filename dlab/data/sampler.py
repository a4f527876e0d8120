"""Who trains on which samples at which step: it follows from the seed alone, so nothing need be sent.

Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlab.data.batches import Batches, Samples
from dlab.data.partition import DataPartitioner

ORDERS = ("shards", "global")


class EpochSampler:
    """Cuts every global batch of an epoch over the ranks; no sample is lost or counted twice.

    `order="shards"`: each rank owns a shard, dealt by `DataPartitioner`, and shuffles it anew every epoch.
    `order="global"`: all samples are shuffled together and each global batch is cut, so that the number of ranks does
    not change what a step learns from. Where sizes do not divide, some ranks have a sample more; near the end of an
    epoch a rank may have fewer, or none.

    >>> sampler = EpochSampler(range(10), ranks=2, batch_size=4, order="global", seed=0)
    >>> [[len(sampler.positions(0, step, rank)) for rank in range(2)] for step in range(sampler.steps)]
    [[2, 2], [2, 2], [1, 1]]
    """

    def __init__(self, data: Samples, ranks: int, batch_size: int, order: str = "shards", seed: int = 1234) -> None:
        if order not in ORDERS:
            raise ValueError(f"there is no order {order!r}: use 'shards', where every rank keeps its own, or 'global'")
        if not isinstance(batch_size, int) or batch_size < ranks:
            raise ValueError(f"a global batch of {batch_size!r} cannot be cut for {ranks} workers: use {ranks} or more")
        if len(data) < ranks:
            raise ValueError(f"{len(data)} samples cannot be dealt to {ranks} workers: use fewer workers, or more data")
        self.ranks, self.batch_size, self.order = ranks, batch_size, order
        if order == "global":
            whole = Batches(data, batch_size, seed)
            self.steps = len(whole)
            self._rows = [_Row(torch.arange(len(data)), whole)]
        else:
            parts = DataPartitioner(data, [1 / ranks] * ranks, seed)
            sizes = [len(part) for part in torch.arange(batch_size).tensor_split(ranks)]
            shards = [Batches(parts.use(rank), sizes[rank], seed + rank) for rank in range(ranks)]
            self.steps = max(len(shard) for shard in shards)
            self._rows = [
                _Row(torch.tensor(index), shard) for index, shard in zip(parts.partitions, shards, strict=True)
            ]

    def positions(self, epoch: int, step: int, rank: int) -> Tensor:
        """Which samples this rank has at this step of this epoch; perhaps none."""
        if self.order == "global":
            return self._rows[0].batch(epoch, step).tensor_split(self.ranks)[rank]
        return self._rows[rank].batch(epoch, step)

    def counts(self, step: int) -> list[int]:
        """How many samples each rank has at this step; in every epoch the same."""
        if self.order == "global":
            whole = self._rows[0].count(step)
            return [whole // self.ranks + (rank < whole % self.ranks) for rank in range(self.ranks)]
        return [row.count(step) for row in self._rows]

    def weight(self, step: int, rank: int) -> float:
        """By how much to multiply a rank's mean loss, so that the plain mean over ranks is that over all samples."""
        counts = self.counts(step)
        return counts[rank] * self.ranks / sum(counts)

    def rest(self, epoch: int, step: int) -> Tensor:
        """What nobody has had yet in this epoch, before this step."""
        parts: Sequence[Tensor] = [row.rest(epoch, step) for row in self._rows]
        return torch.cat(list(parts))


class _Row:
    """Samples in an order of their own each epoch, one batch after another."""

    def __init__(self, index: Tensor, batches: Batches) -> None:
        self._index, self._batches = index, batches
        self._epoch, self._order = -1, index

    def batch(self, epoch: int, step: int) -> Tensor:
        size = self._batches.batch_size
        return self._in_order(epoch)[step * size : (step + 1) * size]

    def count(self, step: int) -> int:
        size = self._batches.batch_size
        return min(size, max(0, len(self._index) - step * size))

    def rest(self, epoch: int, step: int) -> Tensor:
        return self._in_order(epoch)[step * self._batches.batch_size :]

    def _in_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._index[self._batches.order(epoch)]
        return self._order


class TrainingSampler:
    """The way of a training through its data, over all epochs, also when the number of ranks changes in between.

    `resplit` deals what nobody has had yet in the running epoch to other ranks, and everything anew from the next on.
    `history` tells it all: a sampler that is given the same history goes on in the same way.
    """

    def __init__(
        self,
        data: Samples,
        ranks: int,
        batch_size: int,
        order: str = "shards",
        seed: int = 1234,
        history: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self.data, self._how = data, (batch_size, order, seed)
        self.history: list[tuple[int, int, int]] = []  # epoch, step, and for how many ranks from there on
        self._whole = EpochSampler(data, ranks, *self._how)
        self._rest: tuple[int, int, EpochSampler, Tensor] | None = None  # epoch, first step, sampler, what it deals
        for epoch, step, number in history:
            self.resplit(epoch, step, number)

    @property
    def ranks(self) -> int:
        """How many there are now."""
        return self._whole.ranks

    def resplit(self, epoch: int, step: int, ranks: int) -> None:
        """From this step on there are so many ranks."""
        self.history.append((epoch, step, ranks))
        batch_size, order, seed = self._how
        sampler, first, index = self._at(epoch)
        left = index[sampler.rest(epoch, step - first)] if index is not None else sampler.rest(epoch, step - first)
        self._whole = EpochSampler(self.data, ranks, batch_size, order, seed)
        if order == "global" or not len(left):  # each global batch is cut anew, whoever is there
            return
        sampler = EpochSampler(range(len(left)), min(ranks, len(left)), batch_size, order, seed)
        self._rest = epoch, step, sampler, left

    def _at(self, epoch: int) -> tuple[EpochSampler, int, Tensor | None]:
        """Who deals in this epoch, from which step on, and which samples; None for all."""
        if self._rest is not None and self._rest[0] == epoch:
            _, first, sampler, index = self._rest
            return sampler, first, index
        return self._whole, 0, None

    def steps(self, epoch: int) -> int:
        """How many there are in this epoch."""
        sampler, first, _ = self._at(epoch)
        return first + sampler.steps

    def positions(self, epoch: int, step: int, rank: int) -> Tensor:
        """Which samples this rank has at this step; perhaps none."""
        sampler, first, index = self._at(epoch)
        if rank >= sampler.ranks:  # fewer samples were left than there are ranks
            return torch.empty(0, dtype=torch.long)
        found = sampler.positions(epoch, step - first, rank)
        return found if index is None else index[found]

    def weight(self, epoch: int, step: int, rank: int) -> float:
        """The weight of a rank's loss at this step: see `EpochSampler.weight`."""
        sampler, first, _ = self._at(epoch)
        if rank >= sampler.ranks:
            return 0.0
        return sampler.weight(step - first, rank) * self._whole.ranks / sampler.ranks
