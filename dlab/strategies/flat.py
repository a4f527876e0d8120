"""All-reduce SGD: the sums of `SyncSGD`, fast: one flat gradient, reduced in buckets while the backward pass goes on.

Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dlab.models import flatten_gradients
from dlab.processes.worker.tracing import trace
from dlab.strategies.base import Stopwatch, Strategy, Told
from dlab.strategies.reducers import reducer_for
from dlab.transports import Transport

# what they do to a weight depends on its neighbours, so a part of the weights cannot be updated alone
_WHOLE = ("LBFGS", "Muon", "Adafactor")


class AllReduceSGD(Strategy):
    """Gradients lie one after another in one tensor, in shared memory on one host, and are averaged in buckets.

    A bucket holds at least `bucket_mb` megabytes. With `overlap` it is reduced as soon as its last gradient is there,
    and those before it are sent, while the backward pass goes on; without, when the pass is over. A parameter that
    some ranks have not used counts as zeros there; one that no rank has used gets no gradient, as in DDP.
    `sharded_update=True`: each rank averages and updates only its own part of the weights, which on one host live in
    shared memory too: the least work, for optimizers that treat every weight by itself. All ranks hold the same bits.
    """

    def __init__(self, bucket_mb: float = 1.0, overlap: bool = True, sharded_update: bool = False) -> None:
        if not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb!r}: give a size in megabytes, larger than 0")
        self.bucket_mb, self.overlap, self.sharded_update = bucket_mb, overlap, sharded_update

    @property
    def elastic(self) -> bool:
        """Unless the optimizer's state is in parts."""
        return not self.sharded_update

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Lay out the gradients, and with `sharded_update` the weights; listen to the backward pass."""
        super().begin(model, optimizer, transport)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reducer = reducer_for(transport, self._parameters[0].device)
        flags = len(self._parameters)
        self._flat = flatten_gradients(model, lambda count, dtype: self._reducer.empty(count, dtype, flags))
        views = [parameter.grad for parameter in self._parameters]
        self._places: dict[torch.Tensor, torch.Tensor] = dict(zip(self._parameters, views, strict=True))  # type: ignore[arg-type]
        self._buckets = self._fill_buckets()
        spans = self._spans()
        pieces = [(spans[bucket[-1]][0], spans[bucket[0]][1]) for bucket in self._buckets]
        self._shards: dict[nn.Parameter, list[torch.Tensor]] = {}  # what the optimizer updates in place of each
        weights = self._share_weights(spans) if self.sharded_update else None
        self._reducer.cut(self._flat, weights, pieces, spread=not self.sharded_update)
        if weights is not None:
            self._shard_optimizer(weights, spans)
        self._bucket_of = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        self._listening = True
        self._hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._parameters]
        self._forget_round()
        return model

    def _fill_buckets(self) -> list[list[nn.Parameter]]:
        """Parameters in the order in which the backward pass comes to them: the last one first."""
        buckets: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed(self._parameters):
            if size >= self.bucket_mb * 2**20:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
        return buckets

    def _spans(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Where each parameter's gradient is in the flat one."""
        spans, begin = {}, 0
        for parameter in self._parameters:
            spans[parameter] = begin, begin + parameter.numel()
            begin += parameter.numel()
        return spans

    # one step

    def clear(self) -> None:
        """The backward pass makes new gradients and we copy them: cheaper than to add them to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients grow, and no bucket is sent."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """It is new, or, where gradients are accumulated, has grown in its place."""
        place = self._places[parameter]
        if parameter.grad is not None and parameter.grad is not place:
            place.copy_(parameter.grad)
            parameter.grad = place
        if self._listening and self.overlap:
            self._missing[self._bucket_of[id(parameter)]] -= 1
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._send()

    def _send(self) -> None:
        """The next bucket: all ranks send them in one order, whatever order they get complete in."""
        bucket = self._buckets[self._sent]
        trace("bucketed", *bucket)
        trace("sent", *bucket)
        self._reducer.ready(self._sent)
        self._sent += 1

    def step(self) -> Told:
        """What the backward pass has not sent, then the rest of the reduction, then the update."""
        unused = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        if unused:
            self._fill_with_zeros(unused)
        while self._sent < len(self._buckets):  # without overlap, or with a parameter that this batch did not use
            self._send()
        watch = Stopwatch()
        with watch:
            unused = self._reducer.finish()  # by all ranks
        trace("reduced", *self._parameters)
        self._forget_round()
        self._update(unused)
        if self.sharded_update:
            trace("applied", *self._parameters)  # the optimizer knows only parts of them
            with watch:
                self._reducer.publish()
        return {"wait": watch.seconds}

    def _fill_with_zeros(self, unused: list[int]) -> None:
        for number in unused:
            parameter = self._parameters[number]
            parameter.grad = self._places[parameter].zero_()
        self._reducer.skip(unused)

    def _update(self, unused: list[int]) -> None:
        """What no rank has used has no gradient, so that neither momentum nor weight decay moves it."""
        shards = [shard for number in unused for shard in self._shards.get(self._parameters[number], ())]
        for each in (*(self._parameters[number] for number in unused), *shards):
            each.grad = None
        self.optimizer.step()
        for shard in shards:
            shard.grad = self._places[shard]

    def _forget_round(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent = 0

    def end(self) -> None:
        """The model is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
            if self.sharded_update:
                parameter.data = parameter.data.clone()
        super().end()

    # the sharded update

    def _share_weights(self, spans: dict[nn.Parameter, tuple[int, int]]) -> torch.Tensor:
        """One tensor that holds all weights, of which each parameter is a view."""
        weights = self._reducer.common(len(self._flat), self._flat.dtype)
        for parameter, (begin, end) in spans.items():
            weights[begin:end].copy_(parameter.detach().view(-1))  # the same numbers from every rank
            parameter.data = weights[begin:end].view_as(parameter)
        self.transport.barrier()
        return weights

    def _shard_optimizer(self, weights: torch.Tensor, spans: dict[nn.Parameter, tuple[int, int]]) -> None:
        """Give the optimizer, in place of whole parameters, the stretches of them that are this rank's."""
        kind = type(self.optimizer).__name__
        if kind in _WHOLE:
            raise ValueError(f"{kind} looks at a whole layer at a time: use it without sharded_update")
        parts = [self._reducer.part(number) for number in range(len(self._buckets))]
        starts = [int(part.storage_offset() - self._flat.storage_offset()) for part in parts]
        mine = [(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]

        self._stretches: list[tuple[int, int]] = []  # in the order in which the optimizer numbers them

        def stretches(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
            for begin, end in mine:
                begin, end = max(begin, spans[parameter][0]), min(end, spans[parameter][1])
                if begin < end:
                    self._stretches.append((begin, end))
                    stretch = weights[begin:end]
                    stretch.grad = self._places[stretch] = self._flat[begin:end]
                    yield stretch

        for group in self.optimizer.param_groups:
            whole = [parameter for parameter in group["params"] if parameter in spans]
            self._shards |= {parameter: list(stretches(parameter)) for parameter in whole}
            group["params"] = [stretch for parameter in whole for stretch in self._shards[parameter]]

    def state(self) -> dict[str, Any]:
        """With the sharded update each rank has a part of the optimizer's state, of these stretches of the weights."""
        return {"optimizer": self.optimizer.state_dict(), "spans": self._stretches} if self.sharded_update else {}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """This rank's part, put together from the parts of all, who may have been more or fewer."""
        if not self.sharded_update:
            return
        groups = self.optimizer.state_dict()["param_groups"]
        mine: dict[int, dict[str, Any]] = {number: {} for number in range(len(self._stretches))}
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
        """Copy what is known of weights begin to end into the state of those of my stretches that they meet."""
        for number, (first, last) in enumerate(self._stretches):
            low, high = max(begin, first), min(end, last)
            if low >= high:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() == 0:  # a number of steps, the same for all
                mine[number][name] = value
            else:
                whole = mine[number].setdefault(name, torch.empty(last - first, dtype=value.dtype))
                whole[low - first : high - first] = value[low - begin : high - begin]
