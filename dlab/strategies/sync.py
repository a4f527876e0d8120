"""Synchronous SGD: after every backward pass all ranks average their gradients, parameter by parameter.

It is slow but reads like the definition; `AllReduceSGD` computes the same sums fast. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

from dlab.collectives import ring_allreduce
from dlab.reduction import average_gradients
from dlab.strategies.base import Stopwatch, Strategy, Told
from dlab.transports import Transport


class SyncSGD(Strategy):
    """Averages the gradients in every step with a collective of `dlab.collectives`, or with your own.

    Costs one all-reduce per parameter and step. All ranks apply the same gradient, so their models stay equal to the
    last bit. A parameter that no rank has used gets no gradient, as in DDP.
    """

    def __init__(self, allreduce: Callable[..., Any] = ring_allreduce) -> None:
        if not callable(allreduce):
            raise TypeError(f"SyncSGD takes a function allreduce(tensor, transport), not {allreduce!r}")
        self.allreduce = allreduce

    @property
    def elastic(self) -> bool:
        """Yes: every rank holds the whole model and the whole optimizer."""
        return True

    def step(self) -> Told:
        """Average the gradients over all ranks, then update the weights."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        unused = {parameter for parameter in trained if parameter.grad is None}
        for parameter in unused:  # other ranks may have used it
            parameter.grad = torch.zeros_like(parameter)
        watch = Stopwatch()
        with watch:
            average_gradients(self.model, self.allreduce, self.group)
            drop_unused_by_all(trained, unused, self.group)
        self.optimizer.step()
        return {"wait": watch.seconds}


def drop_unused_by_all(trained: Iterable[nn.Parameter], unused: Container[nn.Parameter], transport: Transport) -> None:
    """Drop the gradients of parameters that no rank has used, so that momentum and weight decay do not move them.

    All ranks hold the same means, so they know without a message which of them are all zeros. Only if there are any do
    they ask each other whether a rank has used those parameters: one all-reduce, with a byte for each.
    """
    zero = [each for each in trained if each.grad is not None and _is_zero(each.grad)]
    if zero:
        used = torch.tensor([each not in unused for each in zero], dtype=torch.uint8, device=zero[0].device)
        ring_allreduce(used, transport, op="max")
        for parameter, somewhere in zip(zero, used.tolist(), strict=True):
            if not somewhere:
                parameter.grad = None


def _is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements are zero; the first one usually decides, in a hundredth of the time."""
    return not gradient.flatten()[:1].any() and not gradient.any()
