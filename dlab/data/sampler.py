"""Decide which rank trains on which samples at which step. It depends only on the seed, so nothing has to be sent.

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
    """Splits every global batch of an epoch among the ranks, so that no sample is lost or counted twice.

    `order="shards"`: each rank owns a shard, made by `DataPartitioner`, and reshuffles it every epoch.
    `order="global"`: all samples are shuffled together and each global batch is cut, so that the number of ranks does
    not change the samples of a step. Where sizes do not divide, some ranks have one sample more; near the end of an
    epoch a rank may have fewer, or none.

    >>> sampler = EpochSampler(range(10), ranks=2, batch_size=4, order="global", seed=0)
    >>> [[len(sampler.positions(0, step, rank)) for rank in range(2)] for step in range(sampler.steps)]
    [[2, 2], [2, 2], [1, 1]]
    """

    def __init__(self, data: Samples, ranks: int, batch_size: int, order: str = "shards", seed: int = 1234) -> None:
        if order not in ORDERS:
            raise ValueError(f"there is no order {order!r}: use 'shards', one for each rank, or 'global'")
        if not isinstance(batch_size, int) or batch_size < ranks:
            raise ValueError(f"a global batch of {batch_size!r} cannot be cut for {ranks} workers: use {ranks} or more")
        if len(data) < ranks:
            raise ValueError(f"{len(data)} samples are too few for {ranks} workers: use fewer workers, or more data")
        self.ranks, self.batch_size, self.order = ranks, batch_size, order
        if order == "global":
            whole = Batches(data, batch_size, seed)
            self.steps = len(whole)
            self._rows = [_ShuffledSamples(torch.arange(len(data)), whole)]
        else:
            parts = DataPartitioner(data, [1 / ranks] * ranks, seed)
            sizes = [len(part) for part in torch.arange(batch_size).tensor_split(ranks)]
            shards = [Batches(parts.use(rank), sizes[rank], seed + rank) for rank in range(ranks)]
            self.steps = max(len(shard) for shard in shards)
            self._rows = [
                _ShuffledSamples(torch.tensor(index), shard)
                for index, shard in zip(parts.partitions, shards, strict=True)
            ]

    def positions(self, epoch: int, step: int, rank: int) -> Tensor:
        """Return the positions of this rank's samples at this step of this epoch; may be empty."""
        if self.order == "global":
            return self._rows[0].batch(epoch, step).tensor_split(self.ranks)[rank]
        return self._rows[rank].batch(epoch, step)

    def counts(self, step: int) -> list[int]:
        """Return how many samples each rank has at this step; it is the same in every epoch."""
        if self.order == "global":
            whole = self._rows[0].count(step)
            return [whole // self.ranks + (rank < whole % self.ranks) for rank in range(self.ranks)]
        return [row.count(step) for row in self._rows]

    def weight(self, step: int, rank: int) -> float:
        """Return the factor for a rank's mean loss that makes the plain mean over ranks the mean over all samples."""
        counts = self.counts(step)
        return counts[rank] * self.ranks / sum(counts)

    def rest(self, epoch: int, step: int) -> Tensor:
        """Return the samples of this epoch that no rank has had before this step."""
        parts: Sequence[Tensor] = [row.rest(epoch, step) for row in self._rows]
        return torch.cat(list(parts))


class _ShuffledSamples:
    """Samples in a new order each epoch, one batch after another."""

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
    """The sequence of samples of a training, over all epochs, also when the number of ranks changes during it.

    `resplit` splits the unused samples of the current epoch among the new ranks, and all samples from the next epoch
    on. `history` records every split: a sampler that is given the same history continues in the same way.
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
        self.history: list[tuple[int, int, int]] = []  # epoch, step, and the number of ranks from then on
        self._whole = EpochSampler(data, ranks, *self._how)
        self._rest: tuple[int, int, EpochSampler, Tensor] | None = None  # epoch, first step, sampler, its samples
        for epoch, step, number in history:
            self.resplit(epoch, step, number)

    @property
    def ranks(self) -> int:
        """The current number of ranks."""
        return self._whole.ranks

    def resplit(self, epoch: int, step: int, ranks: int) -> None:
        """Split the remaining samples among this number of ranks, from this step on."""
        self.history.append((epoch, step, ranks))
        batch_size, order, seed = self._how
        sampler, first, index = self._at(epoch)
        left = index[sampler.rest(epoch, step - first)] if index is not None else sampler.rest(epoch, step - first)
        self._whole = EpochSampler(self.data, ranks, batch_size, order, seed)
        if order == "global" or not len(left):  # each global batch is cut again for the present ranks
            return
        sampler = EpochSampler(range(len(left)), min(ranks, len(left)), batch_size, order, seed)
        self._rest = epoch, step, sampler, left

    def _at(self, epoch: int) -> tuple[EpochSampler, int, Tensor | None]:
        """Return the sampler of this epoch, the step from which it applies, and its samples; None for all."""
        if self._rest is not None and self._rest[0] == epoch:
            _, first, sampler, index = self._rest
            return sampler, first, index
        return self._whole, 0, None

    def steps(self, epoch: int) -> int:
        """Return the number of steps in this epoch."""
        sampler, first, _ = self._at(epoch)
        return first + sampler.steps

    def positions(self, epoch: int, step: int, rank: int) -> Tensor:
        """Return the positions of this rank's samples at this step; may be empty."""
        sampler, first, index = self._at(epoch)
        if rank >= sampler.ranks:  # fewer samples were left than there are ranks
            return torch.empty(0, dtype=torch.long)
        found = sampler.positions(epoch, step - first, rank)
        return found if index is None else index[found]

    def weight(self, epoch: int, step: int, rank: int) -> float:
        """Return the weight of a rank's loss at this step: see `EpochSampler.weight`."""
        sampler, first, _ = self._at(epoch)
        if rank >= sampler.ranks:
            return 0.0
        return sampler.weight(step - first, rank) * self._whole.ranks / sampler.ranks
