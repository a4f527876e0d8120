"""What all strategies have in common: they begin with equal models, and are asked after every backward pass.

A strategy knows a model, an optimizer and a transport, and nothing of processes: it works in a cluster, in a rehearsal
on threads, and under `torchrun`. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlab.collectives import broadcast
from dlab.transports import Transport

Told = dict[str, Any]  # what a step has to tell: the seconds that it waited, and more


class Strategy:
    """How workers that each train on a part of the data come to one model.

    A training loop calls `begin` once; then, for every batch, `clear`, the forward and backward pass of the module
    that `begin` gave, and `step`; and `end` after the last. Gradients are of the loss as weighted by
    `EpochSampler.weight`, so that a plain mean over ranks is the mean over all samples of the global batch.
    """

    survives: bool = False  # goes on by itself when a rank has died
    servers: int = 0  # that it needs

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """For each knob of its own, by name: what raises ValueError if a value makes no sense."""
        return {}

    @property
    def elastic(self) -> bool:
        """Can ranks that are left begin it anew? Only if each of them holds all of the weights and the optimizer."""
        return False

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make all models equal to rank 0's, and give the module to call."""
        self.model, self.optimizer, self.transport = model, optimizer, transport
        spread(model, transport)
        return model

    def clear(self) -> None:
        """Before the first backward pass of a step."""
        self.optimizer.zero_grad()

    def accumulating(self) -> AbstractContextManager[Any]:
        """Around all passes of a step but the last, where gradients are accumulated."""
        return nullcontext()

    def step(self) -> Told:
        """After the backward pass: bring the ranks together, as far as this strategy does, and update the weights."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last step, all ranks hold one model: that of rank 0, with its buffers."""
        spread_all(self.model.buffers(), self.transport)

    @property
    def has_lost_a_rank(self) -> bool:
        """Has one died that it takes for one of its own, and will go on without?"""
        return False

    @property
    def has_lost_a_server(self) -> bool:
        """Has one died that it has not yet begun anew without?"""
        return False

    def reconnect(self) -> Transport:
        """After a server was lost: wait until there is a new one. Gives a new transport, for `begin` to begin anew."""
        raise NotImplementedError

    def settle(self) -> None:
        """Bring to an end whatever is under way between ranks, before a checkpoint. Every rank must call it."""

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on and the common model and optimizer do not tell; for a checkpoint."""
        return {}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """The opposite, from the states of all ranks, which may have been more or fewer than now."""

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name in _arguments(type(self))}
        shown = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in given.items())
        return f"{type(self).__name__}({shown})"


def spread(model: nn.Module, transport: Transport) -> None:
    """Parameters and buffers as on rank 0."""
    spread_all([*model.parameters(), *model.buffers()], transport)


def spread_all(tensors: Iterable[torch.Tensor], transport: Transport) -> None:
    """Tensors as on rank 0: one broadcast each."""
    with torch.no_grad():
        for tensor in tensors:
            row = tensor.detach().contiguous()
            broadcast(row, transport)
            tensor.copy_(row)


class Stopwatch:
    """Seconds spent inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def _arguments(kind: type) -> Iterable[str]:
    return kind.__init__.__code__.co_varnames[1 : kind.__init__.__code__.co_argcount]  # type: ignore[misc]
