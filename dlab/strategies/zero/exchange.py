"""How ranks exchange parts of weights and gradients, whatever joins them; `SharedExchange` and `SentExchange` do it.

Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from dlab.collectives import broadcast
from dlab.collectives.ring import pass_chunks
from dlab.strategies.zero.buckets import Bucket
from dlab.transports import Transport


class Exchange(ABC):
    """Holds this rank's part of every bucket: `weights`, and for buckets that are trained the sum of `gradients`.

    A pass is one backward pass of all ranks. In it a rank gives its gradients of every bucket that is trained, in the
    same order on all ranks. Sums are made in the order of the ranks, so they have the same bits over any transport.
    """

    weights: list[torch.Tensor]
    whole: list[torch.Tensor]  # whole buckets, where a rank can read all of them
    gradients: dict[int, torch.Tensor]  # by the number of the bucket

    def __init__(self, group: Transport, buckets: Sequence[Bucket], gradient: torch.dtype) -> None:
        self.group, self.buckets = group, buckets
        self.parts = [bucket.part(group.rank, group.size) for bucket in buckets]
        self.trained = [number for number, bucket in enumerate(buckets) if bucket.trained]
        device = buckets[0].parameters[0].device
        lengths = [self.parts[number][1] - self.parts[number][0] for number in self.trained]
        self.summed = torch.zeros(sum(lengths), dtype=gradient, device=device)
        self.gradients = dict(zip(self.trained, self.summed.split(lengths), strict=True))
        self.moved = {"gather": 0, "reduce": 0}  # bytes that this rank has read or received from others

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """Return a bucket's values as rank 0 has them."""
        broadcast(values, self.group)
        return values

    def put(self, number: int, values: torch.Tensor) -> None:
        """Store this rank's part of a bucket's values; where each rank holds all, store all."""
        self.weights[number].copy_(values[slice(*self.parts[number])])

    def collect(self, number: int, part: torch.Tensor) -> torch.Tensor:
        """Return a whole bucket made of the given parts of all ranks; every rank must call it."""
        whole = part.new_empty(self.buckets[number].length)
        chunks = whole.tensor_split(self.group.size)
        chunks[self.group.rank].copy_(part)
        pass_chunks(chunks, self.group)
        return whole

    @abstractmethod
    def gather(self, number: int, after: int | None) -> torch.Tensor:
        """Return a whole bucket of weights as a new tensor; `after` is the one that will probably be needed next."""

    @abstractmethod
    def give(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give this rank's gradients of a bucket, None for zeros; when it returns they need not be kept."""

    @abstractmethod
    def end_pass(self) -> None:
        """End a pass, in which this rank has given the gradients of all buckets that are trained, or of none."""

    def leave(self) -> None:  # noqa: B027  (where ranks need not meet, there is nothing to do)
        """End a forward pass that no backward pass follows, as in an evaluation."""

    @abstractmethod
    def skip(self, skipped: Sequence[int]) -> None:
        """Say which parameters this rank has not used in this step, before it gives the last bucket of it."""

    @abstractmethod
    def finish(self) -> list[int]:
        """Complete the mean gradients after the last pass of a step; return which parameters all ranks have skipped."""

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks see the weights that each has updated."""

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """The bytes of the buffers through which gradients go."""
