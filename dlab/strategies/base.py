"""The interface of all strategies: they start from equal models, and are called before and after every backward pass.

A strategy knows a model, an optimizer and a transport, but no processes: it works in a cluster, in a rehearsal on
threads, and under `torchrun`. One that only averages gradients defines `step`; one that shards the model overrides
more of these methods. Taught in `03_sync_sgd.ipynb`.
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

Told = dict[str, Any]  # what a step reports: the seconds that it waited, and more


class Strategy:
    """How ranks that train together, each on a part of the data or of the model, arrive at one result.

    A training loop asks for the `data_group` and calls `build` and `begin` once; then, for every batch, `clear`,
    `backward` and `step`; and `end` after the last. A strategy of your own needs only `step`: the other methods work
    for ranks that each hold the whole model and have their own samples.
    """

    survives: bool = False  # whether it continues when a rank dies, without a restart
    servers: int = 0  # number of servers that it needs
    sharded: bool = False  # whether a rank holds only a part of the model

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """For each of its knobs, by name, a function that raises ValueError for a bad value."""
        return {}

    @property
    def elastic(self) -> bool:
        """Whether the surviving ranks can restart it: only if each holds all of the weights and of the optimizer."""
        return False

    # before the first step

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same part of the model as this one; the data are divided among them.

        By default these are all ranks; on a mesh, a line `mesh["dp"]`. Peers along the other axes have the same rank in
        their data groups, and so the same samples and the same random numbers for dropout. Sends nothing.
        """
        return transport

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the part of the model that this rank holds, by default all of it.

        `make_model()` makes the same weights on every rank. Under `torch.device("meta")` it makes a model without
        weights, so that no rank ever has to hold them all. The optimizer gets the parameters of the returned module.
        """
        return make_model()

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the models of a data group equal to that of its first rank, and return the module to call."""
        self.model, self.optimizer, self.transport = model, optimizer, transport
        self.group = self.data_group(transport)
        broadcast_all([*model.parameters(), *model.buffers()], self.group)
        return model

    # one step

    def clear(self) -> None:
        """Clear the gradients before the first backward pass of a step."""
        self.optimizer.zero_grad()

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Compute the gradient of the weighted mean loss, in one pass or several, and return the mean loss.

        Returns None if another rank reports the loss of these samples, like the last stage of a pipeline.
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
        """Return the context for all backward passes of a step but the last, when gradients are accumulated."""
        return nullcontext()

    def step(self) -> Told:
        """Combine the gradients or the models of the ranks after the backward pass, and update the weights."""
        raise NotImplementedError

    # after the last step, and for checkpoints

    def end(self) -> None:
        """Make the models of a data group equal after the last step: by default the buffers, from its first rank."""
        broadcast_all(self.model.buffers(), self.data_group(self.transport))

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the whole model, under its own parameter names; every rank must call it.

        Sends nothing where each rank holds the whole model; a strategy that is `sharded` gathers the parts.
        """
        return self.model.state_dict()

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's part of the state of a whole model."""
        self.model.load_state_dict(state)

    def saved_state(self) -> dict[str, Any]:
        """Return what rank 0 saves of the model: by default all of it; every rank must call it."""
        return self.whole_state()

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Load this rank's part of what `saved_state` has returned."""
        self.load_whole_state(state)

    def settle(self) -> None:
        """Complete all communication between ranks before a checkpoint; every rank must call it."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must store of this rank besides the whole model's state.

        If ranks have different optimizer states, it includes this rank's under "optimizer", for `restore` to load;
        otherwise rank 0 saves its own for all.
        """
        return {}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank from the saved states of all ranks, which may have been more or fewer than now."""

    def held_by(self, state: dict[str, Any]) -> bool:
        """Whether this rank has the part of the model that the rank had which saved this state, its own.

        Then it continues with that rank's random numbers and buffers, too, if there are as many ranks as before.
        """
        return True

    # when a rank or a server has died

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a rank of this strategy has died, and the strategy continues without it."""
        return False

    @property
    def has_lost_a_server(self) -> bool:
        """Whether a server has died since the strategy last began."""
        return False

    def reconnect(self) -> Transport:
        """Wait until a lost server has been replaced, and return a new transport with which to call `begin` again."""
        raise NotImplementedError

    def __repr__(self) -> str:
        given = {name: vars(self)[name] for name in _arguments(type(self)) if name in vars(self)}
        shown = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in given.items())
        return f"{type(self).__name__}({shown})"


def broadcast_all(tensors: Iterable[torch.Tensor], transport: Transport) -> None:
    """Replace tensors by those of rank 0; costs one broadcast per tensor."""
    with torch.no_grad():
        for tensor in tensors:
            row = tensor.detach().contiguous()
            broadcast(row, transport)
            tensor.copy_(row)


class Stopwatch:
    """Adds up the seconds spent inside `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def _arguments(kind: type) -> Iterable[str]:
    code = getattr(kind.__init__, "__code__", None)  # type: ignore[misc]  # None of a class without an __init__ of its own
    return code.co_varnames[1 : code.co_argcount] if code else ()
