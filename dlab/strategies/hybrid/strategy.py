"""Data, tensor and pipeline parallelism in one training: lines of a mesh along dp, tp and pp.

Along pp the ranks hold stages of the network, along tp slices of the layers of a stage, and along dp copies of both,
which have other samples and average their gradients. Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from dlab.mesh import Mesh
from dlab.pipeline import Pipeline, Schedule
from dlab.sharding.parameters import WHOLE
from dlab.strategies.base import Strategy, Told
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.hybrid.axes import check_axes, grid_of
from dlab.strategies.hybrid.parts import ModelParts, OptimizedPart
from dlab.strategies.hybrid.plan import HybridPlan, MakeLayouts, Split, plan_schedule
from dlab.strategies.hybrid.stage import keep_own_part
from dlab.strategies.objective import Batch, Objective
from dlab.strategies.zero.optimizer import ShardedOptimizer
from dlab.strategies.zero.settings import Settings
from dlab.transports import Transport


class Hybrid(Strategy):
    """Trains on a mesh: copies of the network along "dp", layers in parts along "tp", stages along "pp".

    `axes` has the number of ranks along each axis, slowest first; an axis may be missing. Their product is the number
    of workers. `schedule`, `virtual`, `recompute` and `split` are for pp, as in `PipelineSGD`, and so is the number of
    `microbatches`, by default 8, or 1 without stages. `layouts` is for tp, as in `TensorParallel`. With `zero=1` each
    rank updates a shard of its part, and has the optimizer's state of that shard only, as in `ZeRO`.

    It sends activations along pp, partial sums along tp, and gradients of a rank's own part along dp: let the ranks of
    a tp line be neighbours, with "tp" last, since it sends most, and most often.

    >>> dlab.train(dlab.MLP, strategy=dlab.Hybrid({"dp": 2, "pp": 2, "tp": 2}), workers=8)
    """

    sharded = True

    def __init__(
        self,
        axes: Mapping[str, int],
        schedule: str | Schedule | Sequence[Sequence[str]] = "1f1b",
        microbatches: int | None = None,
        zero: int = 0,
        virtual: int = 1,
        recompute: bool = False,
        layouts: MakeLayouts | None = None,
        split: Split | None = None,
        bucket_mb: float = 1.0,
        overlap: bool = True,
    ) -> None:
        self.axes = check_axes(axes)
        if type(zero) is not int or zero not in (0, 1):
            raise ValueError(f"zero={zero!r}: use 1, to shard the optimizer's state along dp, or 0")
        if type(virtual) is not int or virtual < 1:
            raise ValueError(f"virtual={virtual!r}: give the number of stages on each rank, 1 or more")
        _check_function("layouts", layouts, "layouts(model, layout), as dlab.megatron_layouts is")
        _check_function("split", split, "split(model, n), as dlab.split is")
        self.schedule, self.microbatches, self.zero, self.virtual = schedule, microbatches, zero, virtual
        self.recompute, self.layouts, self.split = recompute, layouts, split
        self.bucket_mb, self.overlap = bucket_mb, overlap
        stages = self.axes.get("pp", 1)
        count = microbatches if microbatches is not None else 8 if stages > 1 else 1
        self._schedule = plan_schedule(schedule, stages, count, virtual)
        self._update = self._make_update()
        self._waited = 0.0

    def _make_update(self) -> AllReduceSGD:
        """Return what averages the gradients along dp, and updates the weights."""
        # a gradient is complete before the end only if there is one pass through one stage
        overlap = self.overlap and self._schedule.stages == self._schedule.microbatches == 1
        if self.zero:
            return ShardedOptimizer(Settings(self.bucket_mb, overlap, None, None))
        return AllReduceSGD(self.bucket_mb, overlap)

    # before the first step

    def data_group(self, transport: Transport) -> Transport:
        """Return the ranks that hold the same part of the network as this one."""
        if prod(self.axes.values()) != transport.size:
            product = " × ".join(f"{name} {length}" for name, length in self.axes.items())
            raise ValueError(
                f"{product} needs {prod(self.axes.values())} workers, but there are {transport.size}: the product of "
                "the axes must be their number"
            )
        grid = grid_of(self.axes)
        self._mesh = Mesh(grid.shape, grid.names, transport)
        return self._mesh["dp"]

    def plan(self, model: nn.Module) -> HybridPlan:
        """Return which part of a model each rank is to hold."""
        return HybridPlan(model, grid_of(self.axes), self._schedule, self.layouts, self.split)

    def build(self, make_model: Callable[[], nn.Module], transport: Transport) -> nn.Module:
        """Make the network, and keep this rank's slices of its stages, by the names that they have in the network."""
        model = make_model()
        plan = self.plan(model)
        self._stages = keep_own_part(plan, self._mesh, model)
        self._parts = ModelParts(plan, self._mesh, model)
        return model

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Make the copies of each part equal, and return the pipeline that runs it."""
        kind = type(optimizer).__name__
        if self.zero and kind in WHOLE:
            raise ValueError(f"{kind} updates a whole layer at a time, but zero=1 splits layers: use zero=0")
        self.model, self.optimizer, self.transport = model, optimizer, transport
        line = self._mesh["pp"]
        if transport.processes:  # stages draw different numbers for dropout, and ranks of a line along tp the same
            torch.manual_seed(torch.initial_seed() + transport.size * line.rank)
        self._pipe = Pipeline(self._stages, self._schedule, loss=self._loss, transport=line, recompute=self.recompute)
        self._update.begin(model, optimizer, self._mesh["dp"])
        return self._pipe

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._objective.loss(outputs, labels)

    # one step

    def clear(self) -> None:
        """Clear the gradients of this rank's part."""
        self._update.clear()

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Run the schedule; of all ranks that hold one copy of the network, the first reports the loss."""
        self._objective, self._pipe.amp = objective, objective.amp
        pieces = min(objective.pieces, len(batch.labels))
        total = 0.0
        for number, piece in enumerate(batch.split(pieces), start=1):
            with self._update.accumulating() if number < pieces else nullcontext():
                loss = self._pipe.step(piece.inputs, piece.labels, piece.weight, fewer=True)
            total += loss.item() * (len(piece.labels) / len(batch.labels))
            self._waited += self._pipe.waited
        return None if self._mesh["pp"].rank or self._mesh["tp"].rank else total

    def step(self) -> Told:
        """Average the gradients along dp, and update the weights; the time in which the pipeline waited counts."""
        told = self._update.step()
        waited, self._waited = self._waited, 0.0
        return {**told, "wait": told["wait"] + waited}

    def end(self) -> None:
        """Make the parts ordinary tensors again, and buffers equal along dp."""
        self._update.end()
        del self._pipe  # it refers to this strategy, and its shared memory should be free as soon as both are

    # the whole model, and checkpoints

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Gather the whole model's state along tp and pp; every rank must call it."""
        return self._parts.whole_state()

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's part of the state of a whole model."""
        self._parts.load_whole_state(state)

    def state(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer, where each part of it belongs, and the axes."""
        parts = self._parts.describe(self._optimized())
        return {"optimizer": self.optimizer.state_dict(), "parts": parts, "axes": _listed(self.axes)}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's optimizer from those of all ranks, on whatever mesh they were."""
        mine = self._parts.restored(self._optimized(), states)
        groups = self.optimizer.state_dict()["param_groups"]
        before = states[0]["optimizer"]["param_groups"]
        hyper = [{**theirs, "params": own["params"]} for theirs, own in zip(before, groups, strict=True)]
        self.optimizer.load_state_dict({"state": mine, "param_groups": hyper})

    def held_by(self, state: dict[str, Any]) -> bool:
        """Whether this rank is at the place in the mesh that the rank had which saved this state."""
        return bool(state["axes"] == _listed(self.axes))

    def _optimized(self) -> list[OptimizedPart]:
        """Return what the optimizer updates, in its order."""
        if not isinstance(self._update, ShardedOptimizer):
            updated = [each for group in self.optimizer.param_groups for each in group["params"]]
            return [OptimizedPart(self._parts.name_of(each), (0, each.numel()), tuple(each.shape)) for each in updated]
        found = []
        for piece in self._update.shards.pieces:
            begin, end = piece.span
            parameter, first = next(
                (each, first) for each, (first, last) in self._update.places.items() if first <= begin < last
            )
            name = self._parts.name_of(parameter)
            found.append(OptimizedPart(name, (begin - first, end - first), tuple(piece.updated.shape)))
        return found


def _listed(axes: Mapping[str, int]) -> list[list[Any]]:
    return [[name, length] for name, length in axes.items() if length > 1]


def _check_function(name: str, given: Any, example: str) -> None:
    if given is not None and not callable(given):
        raise TypeError(f"{name}={given!r}: give a function {example}")
