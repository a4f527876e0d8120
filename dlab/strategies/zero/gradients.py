"""ZeRO, stage 2: each rank holds the mean gradients of its shard only, besides the optimizer's state for it.

As soon as the gradients of a bucket are computed, the ranks exchange them: each gets the sum of its part of the bucket,
and the gradients' memory is free for the next ones. The same bytes are sent as in stage 1. Taught in
`09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dlab.collectives.shared_allreduce import SharedAllReduce
from dlab.processes.worker.tracing import trace
from dlab.sharding.recipe import Recipe
from dlab.strategies.base import Stopwatch, Strategy, Told, broadcast_all
from dlab.strategies.objective import Batch, Objective
from dlab.strategies.zero.buckets import Bucket, fill_buckets
from dlab.strategies.zero.exchange import Exchange
from dlab.strategies.zero.memory import HeldBytes, Meter, nbytes_of
from dlab.strategies.zero.mixed import Casting
from dlab.strategies.zero.sent import SentExchange
from dlab.strategies.zero.settings import Settings
from dlab.strategies.zero.shards import Piece, Shards, Span, places_of, restore_weights
from dlab.strategies.zero.shared import SharedExchange
from dlab.transports import Transport


class ShardedGradients(Strategy):
    """Gives gradients away bucket by bucket; holds all weights, and the optimizer's state and gradients of a shard.

    With gradient accumulation the gradients of every micro-batch are exchanged, since nobody can hold their sum: the
    bytes grow with the number of micro-batches. Gradients of a bucket wait until those of the buckets before it, which
    are of later layers, are computed.
    """

    whole = True  # whether a rank holds all weights

    def __init__(self, settings: Settings, recipes: dict[nn.Parameter, Recipe] | None = None) -> None:
        self._settings, self._recipes = settings, recipes or {}

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Lay out the weights in buckets, give the optimizer this rank's shard, and register hooks."""
        self.model, self.optimizer, self.transport, self.group = model, optimizer, transport, transport
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        everywhere = places_of(model)
        self._casting, self.meter = Casting(model, self._settings.parameters), Meter()
        self.buckets = self._fill_buckets()
        self.places = {each: everywhere[each] for bucket in self.buckets for each in bucket.parameters}
        broadcast_all((each for each in everywhere if each not in self.places), self.group)
        broadcast_all(model.buffers(), self.group)
        self.exchange = self._make_exchange()
        self.shards = Shards(optimizer, self._place_weights(), self.group, self._settings.clip)
        self._turns = self.exchange.trained  # the numbers of the buckets, in the order in which they are given
        self._turn_of = {id(each): turn for turn, n in enumerate(self._turns) for each in self.buckets[n].parameters}
        self._used: set[int] = set()
        self._begin_pass()
        self._hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._trained]
        return model

    def _fill_buckets(self) -> list[Bucket]:
        """Fill buckets in the order in which the backward pass reaches the parameters, the last one first."""
        if len({(each.dtype, each.device) for each in self._trained}) != 1:
            raise ValueError(
                "ZeRO needs at least one parameter to train, and all of them of one type and on one device"
            )
        return fill_buckets(([each] for each in reversed(self._trained)), self._settings.bucket_mb * 2**20)

    def _make_exchange(self) -> Exchange:
        """Choose shared memory on one host, else messages."""
        first = self._trained[0]
        stored = self._settings.parameters or first.dtype
        common = self.group, self.buckets, stored, first.dtype, len(self._trained)
        shared = SharedAllReduce.connect(self.group) if first.device.type == "cpu" else None
        if shared is None:
            return SentExchange(*common, whole=self.whole)
        longest = max(bucket.length for bucket in self.buckets if bucket.trained)
        room = max(longest, int(self._settings.bucket_mb * 2**20) // stored.itemsize)
        return SharedExchange(*common, 2 * room, shared)

    def _place_weights(self) -> dict[nn.Parameter, list[Piece]]:
        """Store this rank's part of rank 0's weights, and return the pieces of parameters that it consists of."""
        pieces: dict[nn.Parameter, list[Piece]] = {}
        for number, bucket in enumerate(self.buckets):
            values = self.exchange.share(torch.cat([self._values_of(each).reshape(-1) for each in bucket.parameters]))
            self.exchange.put(number, values)
            own, weights = values[slice(*self.exchange.parts[number])], self.exchange.weights[number]
            for parameter, span, cut in self._pieces_of(number) if bucket.trained else ():
                master = self._casting.master(own[cut])
                piece = Piece(span, weights[cut], self.exchange.gradients[number][cut], master)
                pieces.setdefault(parameter, []).append(piece)
            self._place(number)
        self.group.barrier()
        return pieces

    def _values_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return all values of a parameter, which are made now if it has none yet."""
        recipe = self._recipes.pop(parameter, None)
        return parameter.detach() if recipe is None else recipe.whole().to(parameter.dtype)

    def _pieces_of(self, number: int) -> Iterator[tuple[nn.Parameter, Span, slice]]:
        """Return the pieces of parameters in this rank's part of a bucket, and where they are in the part."""
        for parameter, (low, high), where in self.buckets[number].pieces(self.exchange.parts[number]):
            first, _ = self.places[parameter]
            yield parameter, (first + low, first + high), slice(*where)

    def _place(self, number: int) -> None:
        """Make a bucket's parameters views of the weights that this rank holds."""
        bucket = self.buckets[number]
        for parameter, view in zip(bucket.parameters, bucket.views(self.exchange.whole[number]), strict=True):
            parameter.data = view

    # one step

    def clear(self) -> None:
        """Drop the gradients of the last step, and begin to sum up new ones."""
        for parameter in self._trained:
            parameter.grad = None
        self._used.clear()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._arrived: set[int] = set()
        self._missing = [len(self.buckets[number].parameters) for number in self._turns]
        self._given = 0

    def backward(self, module: nn.Module, batch: Batch, objective: Objective) -> float | None:
        """Compute the gradients; a rank with fewer samples than micro-batches takes part in the others' exchanges."""
        for _ in range(objective.pieces - len(batch.labels)):
            with self.accumulating():
                pass
        return super().backward(module, batch, objective)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Exchange the gradients of a pass, and add them to those of the passes before."""
        yield
        self._end_pass()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Give away a bucket when its last gradient is computed, and those of the buckets before it are given."""
        turn = self._turn_of[id(parameter)]
        assert parameter.grad is not None
        if id(parameter) in self._arrived:
            if turn >= self._given:
                return  # added to the first
            raise RuntimeError(
                f"the gradient of a parameter of {tuple(parameter.shape)} was computed a second time in one backward "
                "pass, after ZeRO had given away the first: use overlap=False"
            )
        self._arrived.add(id(parameter))
        self._missing[turn] -= 1
        self.meter.waits(parameter.grad.nbytes)
        if self._settings.overlap:
            # the last bucket waits for the end of the pass: when all ranks have given it, all weights may change
            while self._given < len(self._turns) - 1 and not self._missing[self._given]:
                self._give()

    def _give(self) -> None:
        """Give away the next bucket: all ranks do so in one order, whatever the order in which they are computed."""
        number = self._turns[self._given]
        parameters = self.buckets[number].parameters
        trace("bucketed", *parameters)
        gradients = [parameter.grad for parameter in parameters]
        self._given += 1
        self.exchange.give(number, gradients)
        trace("sent", *parameters)
        self.meter.waits(-nbytes_of(each for each in gradients if each is not None))
        for parameter in parameters:
            parameter.grad = None

    def _end_pass(self) -> None:
        self._used |= self._arrived
        while self._given < len(self._turns):
            self._give()
        self.exchange.end_pass()
        self._begin_pass()

    def step(self) -> Told:
        """Complete the mean gradients of this rank's shard, update it, and let all ranks see it."""
        watch = Stopwatch()
        with watch:
            used = self._used | self._arrived
            self.exchange.skip([number for number, each in enumerate(self._trained) if id(each) not in used])
            self._end_pass()
            unused = [self._trained[number] for number in self.exchange.finish()]
        trace("reduced", *self._trained)
        self._unused = set(map(id, unused))
        norm = self.shards.update(unused)
        trace("applied", *self._trained)
        with watch:
            self.exchange.publish()
        return {"wait": watch.seconds} | ({} if norm is None else {"norm": norm})

    # the whole model, and checkpoints

    def held(self) -> HeldBytes:
        """Return the bytes that this rank holds."""
        placed = {id(each) for bucket in self.buckets for each in bucket.parameters}
        left = nbytes_of(each for each in self.model.parameters() if id(each) not in placed)
        parameters = left + nbytes_of(self.exchange.whole if self.whole else self.exchange.weights)
        gradients, optimizer = self.exchange.summed.nbytes, self.shards.nbytes
        most = parameters + gradients + optimizer + self.exchange.buffer_bytes + self.meter.most
        return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "most": most}

    def values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter with its whole values, bucket by bucket; every rank must call it and use all."""
        for number, bucket in enumerate(self.buckets):
            flat = self.exchange.collect(number, self._own(number))
            yield from zip(bucket.parameters, bucket.views(flat), strict=True)

    def _own(self, number: int) -> torch.Tensor:
        """Return this rank's part of a bucket, of the master copies if there are any."""
        part = self.exchange.weights[number]
        if self._settings.parameters is None or not self.buckets[number].trained:
            return part
        masters = {piece.span: piece.updated for piece in self.shards.pieces}
        return torch.cat([part.new_empty(0).float(), *(masters[span] for _, span, _ in self._pieces_of(number))])

    def load(self, values: dict[nn.Parameter, torch.Tensor]) -> None:
        """Take this rank's part of whole parameters; every rank must call it, with all that are in buckets."""
        for number, bucket in enumerate(self.buckets):
            if bucket.parameters[0] not in values:
                continue
            self.exchange.put(number, torch.cat([values[each].reshape(-1) for each in bucket.parameters]))
            for each in bucket.parameters:
                self.shards.load(values[each].reshape(-1), self.places[each])
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
        """Return all weights that this rank holds, flat, and where they belong."""
        for number, bucket in enumerate(self.buckets):
            for each, (begin, end) in zip(bucket.parameters, bucket.spans, strict=True):
                yield self.places[each], self.exchange.whole[number][begin:end]

    def end(self) -> None:
        """Make the model an ordinary one again, with its own whole weights."""
        for hook in self._hooks:
            hook.remove()
        self._casting.end()
        for parameter, value in self.values():
            parameter.data, parameter.grad = value.clone(), None
        super().end()
