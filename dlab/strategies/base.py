"""What all strategies have in common: they begin with equal models, and are asked after every backward pass.

A strategy knows a model, an optimizer and a transport, and nothing of processes: it works in a cluster, in a rehearsal
on threads, and under `torchrun`. One that only averages gradients defines `step`; one that cuts the model over the
ranks defines more of what is here. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlab.collectives import broadcast
from dlab.strategies.objective import Batch, Objective
from dlab.transports import Transport

Told = dict[str, Any]  # what a step has to tell: the seconds that it waited, and more


class Strategy:
    """How ranks that train together, each on a part of the data or of the model, come to one result.

    A training loop asks for the `data_group`, calls `build` and `begin` once; then, for every batch, `clear`,
    `backward` and `step`; and `end` after the last. A strategy of your own needs `step` alone: the rest is written
    here for ranks that each hold the whole model and have samples of their own.
    """

    survives: bool = False  # goes on by itself when a rank has died
    servers: int = 0  # that it needs
    sharded: bool = False  # does a rank hold a part of the model only?

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """For each knob of its own, by name: what raises ValueError if a value makes no sense."""
        return {}

    @property
    def elastic(self) -> bool:
        """Can ranks that are left begin it anew? Only if each of them holds all of the weights and the optimizer."""
        return False

    # before the first step

    def data_group(self, transport: Transport) -> Transport:
        """The ranks that hold the same part of the model as this one: the data are dealt among them.

        By default all ranks. On a mesh it is a line, `mesh["dp"]`. Peers along the other axes have the same rank in
        their data groups, and so the same samples and the same random numbers, for dropout. Sends nothing.
        """
        return transport

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make what this rank is to hold: by default the whole model.

        `make_model()` gives the same weights on every rank. Under `torch.device("meta")` it gives a model without any,
        so that no rank need ever hold them all. The optimizer is made from the parameters of what is given back.
        """
        return make_model()

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the models of a data group equal to that of its first rank, and give the module to call."""
        self.model, self.optimizer, self.transport = model, optimizer, transport
        self.group = self.data_group(transport)
        spread_all([*model.parameters(), *model.buffers()], self.group)
        return model

    # one step

    def clear(self) -> None:
        """Before the first backward pass of a step."""
        self.optimizer.zero_grad()

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Leave the gradient of the weighted mean loss in the model, in one pass or several; gives the mean loss.

        None where another rank tells the loss of the same samples, as the last stage of a pipeline does for all.
        """
        pieces = min(objective.pieces, len(batch.labels))
        total = 0.0
        for number, piece in enumerate(batch.split(pieces), start=1):
            with self.accumulating() if number < pieces else nullcontext():
                with objective.autocast(piece.inputs.device):
                    loss = objective.loss(module(piece.inputs), piece.labels)
                (loss * piece.weight).backward()
                total += loss.item() * (len(piece.labels) / len(batch.labels))
        return total

    def accumulating(self) -> AbstractContextManager[Any]:
        """Around all passes of a step but the last, where gradients are accumulated."""
        return nullcontext()

    def step(self) -> Told:
        """After the backward pass: bring the ranks together, as far as this strategy does, and update the weights."""
        raise NotImplementedError

    # after the last step, and for checkpoints

    def end(self) -> None:
        """After the last step, all ranks of a data group hold one model: that of its first rank, with its buffers."""
        spread_all(self.model.buffers(), self.data_group(self.transport))

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The state of the whole model under its own names; every rank must call it, and every rank gets all of it.

        Sends nothing where each rank holds the whole model; a strategy that is `sharded` gathers the parts.
        """
        return self.model.state_dict()

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """The opposite: take this rank's part of the state of a whole model."""
        self.model.load_state_dict(state)

    def settle(self) -> None:
        """Bring to an end whatever is under way between ranks, before a checkpoint. Every rank must call it."""

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on and the whole model's state does not tell; for a checkpoint.

        Where ranks hold different states of their optimizers it has one, under "optimizer", for `restore` to load;
        else rank 0 saves that of its own for all.
        """
        return {}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """The opposite, from the states of all ranks, which may have been more or fewer than now."""

    # when somebody has died

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

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name in _arguments(type(self))}
        shown = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in given.items())
        return f"{type(self).__name__}({shown})"


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
