"""ZeRO: data-parallel ranks shard the state that they would otherwise replicate; each updates only its own shard.

Stage 1 shards the optimizer: after an all-reduce all ranks would make the same update, with the same momentum in
memory. Instead a reduce-scatter gives each rank the mean gradient of its shard of the weights, the rank updates that
shard, and an all-gather collects the shards: the same bytes, 2(n-1)/n of the weights per rank and step, and 1/n of the
optimizer's work and memory. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlab.processes.worker.tracing import trace
from dlab.sharding.parameters import WHOLE
from dlab.strategies.base import Stopwatch, Told
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.reducers import Pieces


class ZeRO(AllReduceSGD):
    """`AllReduceSGD` in which each rank averages and updates a shard of the weights, and holds its optimizer state.

    `stage=1` shards the optimizer's state, for optimizers that treat every weight separately. On one host the weights
    are in shared memory, so that all ranks see a shard as soon as it is updated. All ranks hold the same bits.

    >>> dlab.train(dlab.MLP, strategy=dlab.ZeRO(stage=1), optimizer=torch.optim.Adam)
    """

    def __init__(self, stage: int = 1, bucket_mb: float = 1.0, overlap: bool = True) -> None:
        super().__init__(bucket_mb, overlap)
        if type(stage) is int and stage in (2, 3):
            raise ValueError(f"stage {stage} of ZeRO is not implemented yet: use stage=1, which shards optimizer state")
        if type(stage) is not int or stage != 1:
            raise ValueError(f"ZeRO has no stage {stage!r}: use stage=1, which shards optimizer state")
        self.stage = stage

    @property
    def elastic(self) -> bool:
        """No: a rank that dies takes its shard of the optimizer's state with it."""
        return False

    def _cut(self, pieces: Pieces) -> None:
        """Put the weights into a flat buffer, too, and give the optimizer this rank's shard of it."""
        kind = type(self.optimizer).__name__
        if kind in WHOLE:
            raise ValueError(f"{kind} updates a whole layer at a time, but ZeRO splits layers: use AllReduceSGD")
        weights = self._share_weights()
        self._reducer.cut(self._flat, weights, pieces, spread=False)
        self._shard_optimizer(weights)

    def _share_weights(self) -> torch.Tensor:
        """Return one tensor that holds all weights, and make each parameter a view of it."""
        weights = self._reducer.common(len(self._flat), self._flat.dtype)
        for parameter, (begin, end) in self._spans.items():
            weights[begin:end].copy_(parameter.detach().view(-1))  # every rank writes the same numbers
            parameter.data = weights[begin:end].view_as(parameter)
        self.group.barrier()
        return weights

    def _shard_optimizer(self, weights: torch.Tensor) -> None:
        """Replace each parameter in the optimizer by views of the parts of it that belong to this rank."""
        parts = [self._reducer.part(number) for number in range(len(self._buckets))]
        starts = [int(part.storage_offset() - self._flat.storage_offset()) for part in parts]
        mine = [(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]
        self._own_spans: list[tuple[int, int]] = []  # in the optimizer's order
        self._shards: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # weights, and their gradients

        def shards(parameter: nn.Parameter) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            first, last = self._spans[parameter]
            for begin, end in mine:
                begin, end = max(begin, first), min(end, last)
                if begin < end:
                    self._own_spans.append((begin, end))
                    yield weights[begin:end], self._flat[begin:end]

        for group in self.optimizer.param_groups:
            whole = [parameter for parameter in group["params"] if parameter in self._spans]
            self._shards |= {parameter: list(shards(parameter)) for parameter in whole}
            group["params"] = [shard for parameter in whole for shard, _ in self._shards[parameter]]
        for shard, gradient in (pair for pairs in self._shards.values() for pair in pairs):
            shard.grad = gradient

    # one step

    def step(self) -> Told:
        """Reduce and update this rank's shard, then gather the shards of all ranks."""
        waited = super().step()["wait"]
        trace("applied", *self._parameters)  # the optimizer only has parts of them
        watch = Stopwatch()
        with watch:
            self._reducer.publish()
        return {"wait": waited + watch.seconds}

    def _update(self, unused: list[int]) -> None:
        """Update the weights; shards of a parameter that no rank has used get no gradient in this step."""
        without = [pair for number in unused for pair in self._shards.get(self._parameters[number], ())]
        for shard, _ in without:
            shard.grad = None
        super()._update(unused)
        for shard, gradient in without:
            shard.grad = gradient

    def end(self) -> None:
        """Make the model an ordinary one again, with its own weights."""
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
        super().end()

    # checkpoints

    def state(self) -> dict[str, Any]:
        """Return this rank's shard of the optimizer's state, and the spans of the weights that it belongs to."""
        return {"optimizer": self.optimizer.state_dict(), "spans": self._own_spans}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's shard from the shards of all ranks, which may have been more or fewer than now."""
        groups = self.optimizer.state_dict()["param_groups"]
        mine: dict[int, dict[str, Any]] = {number: {} for number in range(len(self._own_spans))}
        for state in states:
            for number, (begin, end) in enumerate(state["spans"]):
                for name, value in state["optimizer"]["state"].get(number, {}).items():
                    self._put(mine, name, value, begin, end)
        hyper = [
            {**theirs, "params": own["params"]}
            for theirs, own in zip(states[0]["optimizer"]["param_groups"], groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": {n: each for n, each in mine.items() if each}, "param_groups": hyper})

    def _put(self, mine: dict[int, dict[str, Any]], name: str, value: Any, begin: int, end: int) -> None:
        """Copy the saved state of weights `begin` to `end` to the places where it overlaps this rank's spans."""
        for number, (first, last) in enumerate(self._own_spans):
            low, high = max(begin, first), min(end, last)
            if low >= high:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() == 0:  # the number of steps, the same for all
                mine[number][name] = value
            else:
                whole = mine[number].setdefault(name, torch.empty(last - first, dtype=value.dtype))
                whole[low - first : high - first] = value[low - begin : high - begin]
