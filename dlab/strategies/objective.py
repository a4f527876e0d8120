"""What a strategy computes gradients of: the samples of a batch, their weight, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Batch(NamedTuple):
    """The samples of one rank in one step, with their weight.

    `weight` multiplies their mean loss, so that the plain mean over the ranks of a data group is the mean over all
    samples of the global batch: see `EpochSampler.weight`.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weight: float

    def split(self, pieces: int) -> Iterator[Batch]:
        """Split the batch into micro-batches whose weighted mean losses add up to that of the whole."""
        for inputs, labels in zip(self.inputs.tensor_split(pieces), self.labels.tensor_split(pieces), strict=True):
            yield Batch(inputs, labels, self.weight * (len(labels) / len(self.labels)))


@dataclass(frozen=True)
class Objective:
    """The loss, a mean over samples; the number of micro-batches in a batch; and whether to autocast to bfloat16."""

    function: Loss
    pieces: int = 1
    amp: bool = False

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context for a forward pass and its loss."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.amp)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss; if a label is too large for the model's outputs, say so, since torch's error does not."""
        try:
            return self.function(outputs, labels)
        except IndexError as problem:
            if outputs.ndim != 2 or not len(labels) or labels.is_floating_point() or labels.max() < outputs.shape[1]:
                raise
            raise ValueError(
                f"there is a label {labels.max().item()}, but the model has outputs only for labels below "
                f"{outputs.shape[1]}: give its last layer as many outputs as there are classes"
            ) from problem
