"""All-reduce SGD: `SyncSGD` made fast, with one flat gradient that is reduced in buckets during the backward pass.

Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dlab.models import flatten_gradients
from dlab.processes.worker.tracing import trace
from dlab.strategies.base import Stopwatch, Strategy, Told
from dlab.strategies.reducers import Pieces, reducer_for
from dlab.transports import Transport


class AllReduceSGD(Strategy):
    """Keeps all gradients in one flat tensor, in shared memory on one host, and averages them in buckets.

    A bucket holds at least `bucket_mb` megabytes. With `overlap` it is reduced during the backward pass, as soon as its
    last gradient is computed and the buckets before it are sent; without, after the pass. On a rank that has not used a
    parameter its gradient counts as zeros; one that no rank has used gets no gradient, as in DDP. All ranks hold the
    same bits.
    """

    def __init__(self, bucket_mb: float = 1.0, overlap: bool = True) -> None:
        if not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb!r}: give a size in megabytes, larger than 0")
        self.bucket_mb, self.overlap = bucket_mb, overlap

    @property
    def elastic(self) -> bool:
        """Yes: every rank holds the whole model and the whole optimizer."""
        return True

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Lay out the gradients in a flat tensor, and register hooks on the backward pass."""
        super().begin(model, optimizer, transport)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reducer = reducer_for(self.group, self._parameters[0].device)
        flags = len(self._parameters)
        self._flat = flatten_gradients(model, lambda count, dtype: self._reducer.empty(count, dtype, flags))
        views = [parameter.grad for parameter in self._parameters]
        self._places: dict[torch.Tensor, torch.Tensor] = dict(zip(self._parameters, views, strict=True))  # type: ignore[arg-type]
        self._buckets = self._fill_buckets()
        self._spans = self._find_spans()
        self._cut([(self._spans[bucket[-1]][0], self._spans[bucket[0]][1]) for bucket in self._buckets])
        self._bucket_of = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        self._listening = True
        self._hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._parameters]
        self._forget_round()
        return model

    def _fill_buckets(self) -> list[list[nn.Parameter]]:
        """Fill buckets with parameters in the order in which the backward pass reaches them, the last one first."""
        buckets: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed(self._parameters):
            if size >= self.bucket_mb * 2**20:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
        return buckets

    def _find_spans(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Return where each parameter's gradient begins and ends in the flat tensor."""
        spans, begin = {}, 0
        for parameter in self._parameters:
            spans[parameter] = begin, begin + parameter.numel()
            begin += parameter.numel()
        return spans

    def _cut(self, pieces: Pieces) -> None:
        """Tell the reducer where the buckets are."""
        self._reducer.cut(self._flat, None, pieces, spread=True)

    # one step

    def clear(self) -> None:
        """Drop the gradients: to copy new ones is cheaper than to add them to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add up gradients without sending any bucket."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Copy a new gradient to the flat tensor, and send complete buckets."""
        self._put_in_place(parameter)
        if self._listening and self.overlap:
            self._missing[self._bucket_of[id(parameter)]] -= 1
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._send()

    def _put_in_place(self, parameter: torch.Tensor) -> None:
        """Copy a gradient to the flat tensor; one to which others were added is already there."""
        place = self._places[parameter]
        if parameter.grad is not None and parameter.grad is not place:
            place.copy_(parameter.grad)
            parameter.grad = place

    def _send(self) -> None:
        """Send the next bucket: all ranks send them in one order, whatever the order in which they are completed."""
        bucket = self._buckets[self._sent]
        trace("bucketed", *bucket)
        trace("sent", *bucket)
        self._reducer.ready(self._sent)
        self._sent += 1

    def step(self) -> Told:
        """Send the buckets that the backward pass has not sent, finish the reduction, and update the weights."""
        for parameter in self._parameters:  # those whose gradient was not computed here, such as of a tied weight
            self._put_in_place(parameter)
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
        return {"wait": watch.seconds}

    def _fill_with_zeros(self, unused: list[int]) -> None:
        for number in unused:
            parameter = self._parameters[number]
            parameter.grad = self._places[parameter].zero_()
        self._reducer.skip(unused)

    def _update(self, unused: list[int]) -> None:
        """Update the weights; what no rank has used gets no gradient, so momentum and weight decay do not move it."""
        for number in unused:
            self._parameters[number].grad = None
        self.optimizer.step()

    def _forget_round(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent = 0

    def end(self) -> None:
        """Remove the hooks and the flat gradients, so that the model is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        super().end()
