"""ZeRO, stage 1: each rank holds the optimizer's state for its shard of the weights only.

After an all-reduce all ranks would make the same update, with the same momentum in memory. Instead a reduce-scatter
gives each rank the mean gradient of its shard of the weights, the rank updates that shard, and an all-gather collects
the shards: the same bytes, 2(n-1)/n of the weights per rank and step, and 1/n of the optimizer's work and memory.
Taught in `03_sync_sgd.ipynb` and `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlab.collectives import ring_allreduce
from dlab.processes.worker.tracing import trace
from dlab.strategies.base import Stopwatch, Told, broadcast_all
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.reducers import Pieces
from dlab.strategies.zero.memory import HeldBytes, Meter, nbytes_of
from dlab.strategies.zero.mixed import Casting
from dlab.strategies.zero.settings import Settings
from dlab.strategies.zero.shards import Piece, Shards, Span, places_of, restore_weights
from dlab.transports import Transport


class ShardedOptimizer(AllReduceSGD):
    """`AllReduceSGD` in which each rank averages and updates a shard of the weights, and holds its optimizer state."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.bucket_mb, settings.overlap)
        self._settings = settings
        self._norm: float | None = None
        self.meter = Meter()  # nothing is there only for a while

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Cast the parameters if that is asked for, and lay out gradients, weights and the optimizer's shard."""
        everywhere = places_of(model)
        self.places = {each: place for each, place in everywhere.items() if each.requires_grad}
        self._casting = Casting(model, self._settings.parameters)
        self._wide: dict[nn.Parameter, torch.Tensor] = {}  # float32 values, until their pieces have been copied
        if self._settings.parameters is not None:
            broadcast_all(model.parameters(), transport)
            for parameter in self.places:
                self._wide[parameter] = parameter.data
                parameter.data = parameter.data.to(self._settings.parameters)
        super().begin(model, optimizer, transport)
        self._wide.clear()
        return model

    def _cut(self, pieces: Pieces) -> None:
        """Put the weights into a flat buffer, too, and give the optimizer this rank's shard of it."""
        weights = self._share_weights()
        self._reducer.cut(self._flat, weights, pieces, spread=False)
        self.shards = self._shard_optimizer(weights)

    def _share_weights(self) -> torch.Tensor:
        """Return one tensor that holds all weights, and make each parameter a view of it."""
        weights = self._reducer.common(len(self._flat), self._flat.dtype)
        for parameter, (begin, end) in self._spans.items():
            weights[begin:end].copy_(parameter.detach().view(-1))  # every rank writes the same numbers
            parameter.data = weights[begin:end].view_as(parameter)
        self.group.barrier()
        return weights

    def _shard_optimizer(self, weights: torch.Tensor) -> Shards:
        """Replace each parameter in the optimizer by views of the parts of it that belong to this rank."""
        parts = [self._reducer.part(number) for number in range(len(self._buckets))]
        starts = [int(part.storage_offset() - self._flat.storage_offset()) for part in parts]
        mine = [(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]

        def pieces(parameter: nn.Parameter) -> Iterator[Piece]:
            first, last = self._spans[parameter]
            for begin, end in mine:
                begin, end = max(begin, first), min(end, last)
                if begin < end:
                    wide = self._wide.get(parameter)
                    master = None if wide is None else wide.view(-1)[begin - first : end - first].clone()
                    yield Piece((begin, end), weights[begin:end], self._flat[begin:end], master)

        cut = {parameter: list(pieces(parameter)) for parameter in self._parameters}
        return Shards(self.optimizer, cut, self.group, self._settings.clip)

    # one step

    def step(self) -> Told:
        """Reduce and update this rank's shard, then gather the shards of all ranks."""
        waited = super().step()["wait"]
        trace("applied", *self._parameters)  # the optimizer only has parts of them
        watch = Stopwatch()
        with watch:
            self._reducer.publish()
        return {"wait": waited + watch.seconds} | ({} if self._norm is None else {"norm": self._norm})

    def _update(self, unused: list[int]) -> None:
        """Update the weights; shards of a parameter that no rank has used get no gradient in this step."""
        for number in unused:
            self._parameters[number].grad = None
        self._norm = self.shards.update([self._parameters[number] for number in unused])

    # the whole model, and checkpoints

    def held(self) -> HeldBytes:
        """Return the bytes that this rank holds; it reads all weights, which lie in shared memory on one host."""
        parameters, gradients = nbytes_of(self.model.parameters()), self._flat.nbytes
        optimizer = self.shards.nbytes
        most = parameters + gradients + optimizer
        return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "most": most}

    def values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter with its whole values, from the master copies if there are any; by all ranks."""
        if self._settings.parameters is None:
            yield from ((each, each.detach()) for each in self._parameters)
            return
        wide = torch.zeros(len(self._flat), device=self._flat.device)
        for piece in self.shards.pieces:
            wide[slice(*piece.span)] = piece.updated
        ring_allreduce(wide, self.group)
        yield from ((each, wide[slice(*self._spans[each])].view_as(each)) for each in self._parameters)

    def load(self, values: dict[nn.Parameter, torch.Tensor]) -> None:
        """Take whole parameters; every rank must call it."""
        for parameter, value in values.items():
            parameter.data.copy_(value)  # every rank writes the same numbers
            self.shards.load(value.reshape(-1), self.places[parameter])
        self.group.barrier()

    def state(self) -> dict[str, Any]:
        """Return this rank's shard of the optimizer's state, and where it belongs."""
        return self.shards.state()

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's shard from the shards of all ranks."""
        restore_weights(states, self._stored(), self.shards)
        self.shards.restore(states)
        self.group.barrier()

    def _stored(self) -> Iterator[tuple[Span, torch.Tensor]]:
        yield from ((place, parameter.data.view(-1)) for parameter, place in places_of(self.model).items())

    def end(self) -> None:
        """Make the model an ordinary one again, with its own weights."""
        self._casting.end()
        for parameter, value in self.values():
            parameter.data = value.clone()
        super().end()
