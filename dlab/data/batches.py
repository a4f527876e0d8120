"""Read whole batches at once: a data set that can `take` many samples is asked once per batch, not once per sample.

Taught in `01_data_partitioning.ipynb`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

Index = Sequence[int] | slice | Tensor  # a way to name many samples


class Samples(Protocol):
    """A data set that can be partitioned and batched: it has a length, and a sample at each position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class Batches:
    """Batches of a data set, reshuffled every time they are iterated; the order depends only on seed and epoch.

    Each `iter()` is the next epoch (`.epoch` counts them and may be set, to resume). A data set with `take` is asked
    once per batch, any other once per sample. The last batch is smaller when the sizes do not divide, unless
    `drop_last`.

    >>> data = torch.utils.data.TensorDataset(torch.arange(10))
    >>> [len(batch) for (batch,) in Batches(data, batch_size=4)]
    [4, 4, 2]
    """

    def __init__(
        self, dataset: Samples, batch_size: int, seed: int = 1234, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample.")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        whole, left = divmod(len(self.dataset), self.batch_size)
        return whole if self.drop_last or not left else whole + 1

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)
        self.epoch += 1  # here, because a generator would count only when its first batch is requested
        return (take(self.dataset, order[i * self.batch_size :][: self.batch_size]) for i in range(len(self)))

    def order(self, epoch: int) -> Tensor:
        """Return the shuffled positions of that epoch."""
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        # Random hashes the text, so that (seed 1, epoch 2) and (seed 2, epoch 1) are unrelated.
        mixed = random.Random(f"{self.seed} {epoch}").getrandbits(63)
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(mixed))


def take(data: Samples, index: Index) -> Any:
    """Return the samples at these positions as one batch, by `data.take` if a Dataset has it, else one by one.

    >>> take([(0.5, 1), (1.5, 0)], [1, 0])
    [tensor([1.5000, 0.5000], dtype=torch.float64), tensor([0, 1])]
    """
    # Tensors and arrays have a `take` too, but theirs indexes the flattened values.
    if isinstance(data, Dataset) and hasattr(data, "take"):
        return data.take(index)
    return default_collate([data[i] for i in as_positions(index, len(data)).tolist()])


def as_positions(index: Index, length: int) -> Tensor:
    """Convert a list, slice, tensor or boolean mask to int64 positions; negative ones count from the end.

    >>> as_positions([0, -1], length=10)
    tensor([0, 9])
    """
    if isinstance(index, slice):
        span = range(length)[index]
        return torch.arange(len(span)) * span.step + span.start
    positions = torch.as_tensor(index)
    if positions.dtype == torch.bool and positions.shape == (length,):
        return positions.nonzero().flatten()
    if positions.numel() == 0:
        return positions.flatten().long()
    if positions.ndim != 1 or positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise TypeError(
            f"cannot index with {positions.dtype} of shape {tuple(positions.shape)}: "
            f"use whole numbers in one dimension, or a boolean mask with {length} values."
        )
    low, high = (int(end) for end in positions.aminmax())
    if low < -length or high >= length:
        raise out_of_range(low if low < -length else high, length)
    positions = positions.long()
    return torch.where(positions < 0, positions + length, positions) if low < 0 else positions


def names_many(index: Any) -> bool:
    """Return whether this index names a batch (list, slice, tensor) rather than one sample."""
    return isinstance(index, (slice, list, tuple, range)) or getattr(index, "ndim", 0) > 0


def out_of_range(index: int, length: int) -> IndexError:
    """Return the error for a position outside the data set."""
    if length == 0:
        return IndexError(f"index {index} is out of range: there are no samples here; check len() before indexing.")
    return IndexError(f"index {index} is out of range: there are {length} samples, use 0 to {length - 1}.")
