"""Synchronous SGD: after every backward pass all ranks average their gradients, parameter by parameter.

The slow one that reads like the definition; `AllReduceSGD` does the same sums fast. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dlab.collectives import ring_allreduce
from dlab.reduction import average_gradients
from dlab.strategies.base import Stopwatch, Strategy, Told


class SyncSGD(Strategy):
    """Gradients are averaged every step by a collective of `dlab.collectives`, or by your own.

    Costs one all-reduce per parameter and step. All ranks apply the same gradient and stay equal to the last bit.
    """

    def __init__(self, allreduce: Callable[..., Any] = ring_allreduce) -> None:
        if not callable(allreduce):
            raise TypeError(f"SyncSGD takes a function allreduce(tensor, transport), not {allreduce!r}")
        self.allreduce = allreduce

    @property
    def elastic(self) -> bool:
        """Every rank holds all."""
        return True

    def step(self) -> Told:
        """Average, then update."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:  # not used on this rank: others may have used it
                parameter.grad = torch.zeros_like(parameter)
        watch = Stopwatch()
        with watch:
            average_gradients(self.model, self.allreduce, self.wire)
        self.optimizer.step()
        return {"wait": watch.seconds}
