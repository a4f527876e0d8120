"""Weights that several stages share, such as an embedding that is also the last layer: their gradients are added up.

Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dlab.collectives import ring_allreduce
from dlab.transports import Group, Transport


class TiedWeights:
    """The weights of this rank that stages on other ranks have, too; each rank holds a copy.

    Each copy gets the sum of the gradients of all copies, the same bits on every rank, so that equal optimizers keep
    them equal. That costs an all-reduce per weight among the ranks that have it.
    """

    def __init__(self, stages: Sequence[nn.Module], rank_of: Mapping[int, int], transport: Transport) -> None:
        holders: dict[nn.Parameter, set[int]] = {}
        for number, stage in enumerate(stages):
            for parameter in stage.parameters():
                holders.setdefault(parameter, set()).add(rank_of[number])
        self.weights: list[tuple[nn.Parameter, Transport]] = [
            (parameter, Group(transport, sorted(ranks)))
            for parameter, ranks in holders.items()
            if len(ranks) > 1 and transport.rank in ranks and parameter.requires_grad
        ]

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add up the gradients that are computed meanwhile, without what was in `.grad` before."""
        before = [None if each.grad is None else each.grad.clone() for each, _ in self.weights]
        for parameter, _ in self.weights:
            parameter.grad = None
        yield
        for (parameter, ranks), earlier in zip(self.weights, before, strict=True):
            if parameter.grad is None:  # unused on this rank
                parameter.grad = torch.zeros_like(parameter)
            ring_allreduce(parameter.grad, ranks)
            if earlier is not None:
                parameter.grad += earlier
