"""`ZeRO`: one name for three stages, each of which shards more of what data-parallel ranks would otherwise replicate.

Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from dlab.sharding.initial import Postponed, no_init_parameters, put
from dlab.sharding.parameters import WHOLE
from dlab.sharding.recipe import Recipe
from dlab.strategies.base import Strategy, Told
from dlab.strategies.objective import Batch, Objective
from dlab.strategies.zero.gradients import ShardedGradients
from dlab.strategies.zero.memory import MemoryTable, nbytes_of, table_of
from dlab.strategies.zero.optimizer import ShardedOptimizer
from dlab.strategies.zero.parameters import ShardedParameters
from dlab.strategies.zero.settings import Settings
from dlab.transports import Transport

LARGE = 64 << 20  # bytes of a model from which on it is worth a second to learn how to make it without its weights


class ZeRO(Strategy):
    """Data parallelism in which each rank averages and updates a shard of the weights, and holds its optimizer state.

    `stage=1` shards the optimizer's state, `stage=2` also the gradients, `stage=3` also the weights, which are gathered
    layer by layer while they are used. On one host the shards are in shared memory, where all ranks see them as soon as
    they are updated. The results are those of `SyncSGD`, and all ranks hold the same bits. It is for optimizers that
    treat every weight separately. Sends, in bytes of the weights, (n-1)/n times 2, 2 or 3 per rank and step.

    Gradients are exchanged in buckets of at least `bucket_mb` megabytes, in stage 3 layer by layer, and with `overlap`
    during the backward pass. `parameters=torch.bfloat16` computes with weights of 16 bits, and updates float32 copies
    of them, of which a rank holds a shard. `clip` limits the norm of the whole gradient, which is then logged.
    `memory()` measures what the ranks hold; `dlab.strategies.MemoryTable.of(run.events)` shows it for a run, and
    `dlab.cost.zero_memory` has the formula.

    >>> dlab.train(dlab.MLP, strategy=dlab.ZeRO(stage=3), optimizer=torch.optim.Adam)
    """

    def __init__(
        self,
        stage: int = 1,
        bucket_mb: float = 1.0,
        overlap: bool = True,
        parameters: torch.dtype | None = None,
        clip: float | None = None,
    ) -> None:
        if type(stage) is not int or stage not in (1, 2, 3):
            raise ValueError(
                f"ZeRO has no stage {stage!r}: use stage=1, which shards the optimizer's state, 2, which also shards "
                "the gradients, or 3, which also shards the weights"
            )
        self._settings = Settings(bucket_mb, overlap, parameters, clip)
        self._recipes: dict[nn.Parameter, Recipe] = {}  # of parameters that have no values yet
        self.stage, self.bucket_mb, self.overlap, self.parameters, self.clip = (
            stage,
            bucket_mb,
            overlap,
            parameters,
            clip,
        )

    @property
    def elastic(self) -> bool:
        """No: a rank that dies takes its shard of the optimizer's state with it."""
        return False

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the model; a large one for stage 3 without values, where `begin` can make them layer by layer."""
        if self.stage < 3 or torch.cuda.is_available() or _size_of(make_model) < LARGE:
            return super().build(make_model, transport)
        try:
            with no_init_parameters():
                model = make_model()
        except NotImplementedError:  # an initialiser needs all values of a weight
            return super().build(make_model, transport)
        for parameter in model.parameters():
            if isinstance(parameter, Postponed):
                recipe, nothing = parameter.recipe, torch.full((), float("nan"), dtype=parameter.dtype)
                put(parameter, nothing.expand(parameter.shape))
                self._recipes[parameter] = recipe
        return model

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the models equal to that of the first rank, and shard what the stage shards."""
        kind = type(optimizer).__name__
        if kind in WHOLE:
            raise ValueError(f"{kind} updates a whole layer at a time, but ZeRO splits layers: use AllReduceSGD")
        self.model, self.optimizer, self.transport = model, optimizer, transport
        self.group = self.data_group(transport)
        self._sizes = {id(each): each.shape for each in model.parameters()}
        self._seen = (-1, -1)
        self._sharded = self._make_stage()
        return self._sharded.begin(model, optimizer, self.group)

    def _make_stage(self) -> ShardedOptimizer | ShardedGradients:
        if self.stage == 1:
            return ShardedOptimizer(self._settings)
        return (ShardedGradients if self.stage == 2 else ShardedParameters)(self._settings, self._recipes)

    # one step

    def clear(self) -> None:
        """Drop the gradients of the last step."""
        self._sharded.clear()

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Compute the gradient, in one pass or several, and return the mean loss."""
        return self._sharded.backward(module, batch, objective)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context for all backward passes of a step but the last; all ranks need as many of them."""
        return self._sharded.accumulating()

    def step(self) -> Told:
        """Complete this rank's mean gradients, update its shard, and report what it holds, if that has changed."""
        told = self._sharded.step()
        seen = len(self.optimizer.state), self._sharded.meter.most
        if seen == self._seen:  # to count all bytes takes longer than to see that nothing has been added
            return told
        self._seen = seen
        return told | {"held": self._sharded.held()}

    def end(self) -> None:
        """Make the model an ordinary one again, with its own whole weights."""
        self._sharded.end()

    def memory(self) -> MemoryTable:
        """Return a table of what the ranks hold; every rank must call it, after `begin`."""
        return table_of(self._sharded.held(), self.group)

    # the whole model, and checkpoints

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the whole model; every rank must call it. Of float32 copies, it has their values."""
        if self.stage == 1 and self.parameters is None:
            return self.model.state_dict()
        return self._named({id(each): value.clone() for each, value in self._sharded.values()})

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's part of the state of a whole model."""
        self.load_saved_state(state)

    def saved_state(self) -> dict[str, Any]:
        """Return the whole model's state; in stage 3 with the shapes only of what the ranks save in parts."""
        if self.stage < 3:
            return self.whole_state()
        return self._named({id(each): tuple(self._sizes[id(each)]) for each in self._sharded.places})

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a saved state; `restore` loads what was saved in parts."""
        values: dict[nn.Parameter, torch.Tensor] = {}
        own = self.model.state_dict(keep_vars=True)
        if names := sorted(set(own) ^ set(state)):
            raise RuntimeError(f"the state of another model: {', '.join(names)} is in one of them only")
        for name, each in own.items():
            there, here = state[name], tuple(self._sizes.get(id(each), each.shape))
            size = there if isinstance(there, tuple) else tuple(there.shape)
            if size != here:
                raise RuntimeError(f"size mismatch for {name}: {size} was saved, and the model here has {here}")
            if isinstance(there, tuple):
                continue
            if isinstance(each, nn.Parameter) and each in self._sharded.places:
                values[each] = there
            else:
                each.data.copy_(there)
        if values:
            self._sharded.load(values)

    def _named(self, known: dict[int, Any]) -> dict[str, Any]:
        """Return the model's state with these values of parameters; a tied weight has several names."""
        state = self.model.state_dict(keep_vars=True)
        return {name: known[id(each)] if id(each) in known else each.detach() for name, each in state.items()}

    def state(self) -> dict[str, Any]:
        """Return this rank's shard of the optimizer's state, in stage 3 also of the weights, and where they belong."""
        return self._sharded.state()

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's shard from the shards of all ranks, which may have been more or fewer than now."""
        self._sharded.restore(states)


def _size_of(make_model: Callable[[], nn.Module]) -> int:
    """Return the bytes of a model's parameters without making them; 0 for a model that cannot be made so."""
    try:
        with torch.device("meta"):
            return nbytes_of(make_model().parameters())
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # it computes with values
        return 0
