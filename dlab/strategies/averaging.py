"""Model averaging: every rank trains alone on its shard, and only the models are averaged, at intervals or at the end.

`every=k` is local SGD; `outer` is the outer step of DiLoCo. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from dlab.collectives import ring_allreduce
from dlab.strategies.base import Stopwatch, Strategy, Told
from dlab.transports import Transport

Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def nesterov(parameters: Iterable[torch.Tensor], lr: float = 0.7, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Make the outer optimizer of DiLoCo, SGD with Nesterov momentum, with the paper's hyperparameters."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


class ModelAveraging(Strategy):
    """Average parameters every `every` steps, or only at the end (None).

    Costs one all-reduce of the model each time, instead of one per step. With `outer`, a function that makes an
    optimizer, such as `nesterov`, the difference between the last common model and the average is that optimizer's
    gradient. With plain SGD and `every=1` it equals synchronous SGD.
    """

    def __init__(self, every: int | None = None, outer: Outer | None = None) -> None:
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: give a whole number of steps, 1 or more, or None for only at the end")
        if outer is not None and not callable(outer):
            raise TypeError(f"outer={outer!r}: give a function that makes an optimizer, such as strategies.nesterov")
        self.every, self.outer = every, outer

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Start with equal models, which are the first common model."""
        super().begin(model, optimizer, transport)
        self._steps = 0
        self._common = parameters_to_vector(model.parameters()).detach()
        self._optimizer = self.outer([self._common]) if self.outer else None
        return model

    def step(self) -> Told:
        """Update this rank's own model, and average the models every `every` steps."""
        self.optimizer.step()
        self._steps += 1
        watch = Stopwatch()
        if self.every and self._steps % self.every == 0:
            with watch:
                self._average()
        return {"wait": watch.seconds}

    def end(self) -> None:
        """Average the models if they have changed since the last time, and the running statistics in any case."""
        if not self.every or self._steps % self.every:
            self._average()
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                row = buffer.detach().contiguous()
                ring_allreduce(row, self.transport, op="mean")
                buffer.copy_(row)
        super().end()

    def _average(self) -> None:
        mean = parameters_to_vector(self.model.parameters()).detach()
        ring_allreduce(mean, self.transport, op="mean")
        if self._optimizer is None:
            self._common = mean
        else:
            self._common.grad = self._common - mean
            self._optimizer.step()
        self._fill(self._common)

    def _fill(self, vector: torch.Tensor) -> None:
        """Copy a vector to the parameters; torch's vector_to_parameters would make them views of it instead."""
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, part in zip(parameters, vector.split([each.numel() for each in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))

    def state(self) -> dict[str, Any]:
        """Return this rank's own model and optimizer, its steps, and the last common model, for a checkpoint."""
        outer = self._optimizer.state_dict() if self._optimizer else None
        parameters = parameters_to_vector(self.model.parameters()).detach()
        own = {"parameters": parameters, "optimizer": self.optimizer.state_dict()}
        return own | {"steps": self._steps, "common": self._common, "outer": outer}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore the state; with a different number of ranks, all start from the mean of the models."""
        state = states[self.transport.rank % len(states)]
        same = len(states) == self.transport.size
        self._fill(state["parameters"] if same else torch.stack([each["parameters"] for each in states]).mean(0))
        self.optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]
        with torch.no_grad():
            self._common.copy_(state["common"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["outer"])
