"""ZeRO: a training step of each stage against PyTorch's FSDP2 on gloo, in the same loop.

Global batch 128, float32, SGD with momentum, on MNIST; the strategies take turns, a few steps at a time. FSDP2 shards
every linear layer of the MLP, and every linear layer and the block of the transformer, as its tutorial does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import nn

import dlab
from dlab.bench.rows import Row, faster, number, row
from dlab.bench.stepping import milliseconds
from dlab.models import TransformerBlock
from dlab.strategies import Strategy, ZeRO
from dlab.strategies.base import Told
from dlab.training.plan import Training
from dlab.transports import Transport

RANKS = (2, 4)
MODELS: dict[str, Callable[[], nn.Module]] = {"MLP": dlab.MLP, "RowTransformer": dlab.RowTransformer}
TARGETS = {1: 5.0, 2: 5.0, 3: 3.0}
STEPS, ROUNDS = 20, 12


class FullySharded(Strategy):
    """FSDP2: every linear layer, every block, and the whole model are sharded by `fully_shard`."""

    sharded = True

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the model, and shard it before the optimizer gets its parameters."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, mesh = make_model(), init_device_mesh("cpu", (transport.size,))
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        for layer in model.modules():
            if isinstance(layer, TransformerBlock):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Take the model as it is: the same seed has made the same weights on all ranks."""
        self.model, self.optimizer, self.transport = model, optimizer, transport
        return model

    def step(self) -> Told:
        """Update this rank's shard; FSDP2 has averaged the gradients in the backward pass."""
        self.optimizer.step()
        return {"wait": 0.0}


class NoCommunication(Strategy):
    """Every rank trains alone: no strategy can be faster."""

    def step(self) -> Told:
        """Update this rank's model."""
        self.optimizer.step()
        return {"wait": 0.0}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, in PyTorch's fastest form that knows sharded parameters."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.5, foreach=True)


@cache
def measured(ranks: int, model: str, quick: bool) -> list[list[float]]:
    """Return the milliseconds per step of stages 1 to 3, of FSDP2 and of ranks alone, a number for each round."""
    strategies: list[Strategy] = [*map(ZeRO, TARGETS), FullySharded(), NoCommunication()]
    plans = [Training(model=MODELS[model], strategy=each, lr=0.01, optimizer=momentum) for each in strategies]
    return milliseconds(ranks, plans, [True] * len(plans), *((3, 1) if quick else (STEPS, ROUNDS)))


def against_fsdp(ranks: int, model: str, stage: int, name: str, quick: bool) -> Row:
    """Make a row: how many times faster a step is than FSDP2's."""
    *stages, theirs, alone = measured(ranks, model, quick)
    note = f"batch {128 // ranks} on each of {ranks} ranks; without any communication {number(median(alone))} ms"
    return faster(name, stages[stage - 1], theirs, TARGETS[stage], "ms", note)


for _ranks in RANKS:
    for _model in MODELS:
        for _stage in TARGETS:
            row(f"a step of {_model}, {_ranks} ranks, ZeRO stage {_stage}, against FSDP2")(
                partial(against_fsdp, _ranks, _model, _stage)
            )
