"""ZeRO, stage 3: each rank holds only its shard of the weights; a layer is whole only while it is used.

Before a layer computes, its weights are gathered, and afterwards they are let go; the backward pass gathers them again
where it needs them. That is half as much again as in data parallelism: (n-1)/n of the weights are sent for the forward
pass, for the backward pass, and for the gradients. Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dlab.strategies.base import Told
from dlab.strategies.zero.buckets import Bucket, fill_buckets
from dlab.strategies.zero.gradients import ShardedGradients
from dlab.strategies.zero.layers import StrayUses, layers_of
from dlab.strategies.zero.shards import Span
from dlab.transports import Transport


class SavedWeight(NamedTuple):
    """What a graph keeps instead of a gathered weight: how to get it again."""

    number: int  # of its bucket
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    steps: int  # how often the weights had been updated


class ShardedParameters(ShardedGradients):
    """Holds a shard of the weights, the gradients and the optimizer's state. A bucket is a layer, by `layers_of`.

    Between steps a parameter is this rank's piece of it, in one dimension, and so is its gradient after a step. In a
    step, while its layer is not in use, it has its shape but no memory, and each of its numbers is NaN. A function
    outside of the layer that needs it gathers it until the end of the forward pass. The layer that was used last stays
    until the next is gathered. Frozen parameters are in parts, too.
    """

    whole = False

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Shard the weights, and register hooks on all layers."""
        super().begin(model, optimizer, transport)
        stored = self.exchange.weights[0]
        self._nothing = torch.full((), float("nan"), dtype=stored.dtype, device=stored.device)
        self._uses = [0] * len(self.buckets)  # by how many modules, now
        self._in_use: dict[int, torch.Tensor] = {}  # gathered buckets, by number
        self._numbers_at: dict[int, int] = {}  # their numbers, by the address of their memory
        self._away = {id(each): number for number, bucket in enumerate(self.buckets) for each in bucket.parameters}
        self._recent: tuple[int, torch.Tensor] | None = None  # what was gathered last
        self._next: dict[tuple[bool, int], int] = {}  # what was gathered after which, forward and backward
        self._last: tuple[bool, int] | None = None
        self._is_backward = self._has_graph = False
        self._steps = 0
        self._strays: list[int] = []  # buckets that functions outside of their layers have needed
        self._hook_model()
        return model

    def _fill_buckets(self) -> list[Bucket]:
        """Make a bucket of each layer, the last one first; a weight that several share belongs to the first."""
        super()._fill_buckets()
        first, is_cast = self._trained[0], self._settings.parameters is not None
        groups, taken = list[list[nn.Parameter]](), set[int]()
        for _, parameters in layers_of(self.model):
            new = [each for each in parameters if id(each) not in taken]
            taken.update(map(id, new))
            groups.append([each for each in new if each.requires_grad])
            frozen = [each for each in new if not each.requires_grad and not is_cast]  # with a cast they stay whole
            groups.append([each for each in frozen if (each.dtype, each.device) == (first.dtype, first.device)])
        return fill_buckets([group for group in reversed(groups) if group], least=0)

    def _place(self, number: int) -> None:
        """Make a bucket's parameters this rank's pieces of them."""
        with torch._C.DisableTorchFunction():
            for parameter, piece in zip(self.buckets[number].parameters, self._cut(number), strict=True):
                parameter.data = piece

    def _cut(self, number: int, of: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return this rank's pieces of a bucket's parameters, of the weights or of the gradients."""
        part = self.exchange.weights[number] if of is None else of
        cuts = {id(each): slice(*where) for each, _, where in self.buckets[number].pieces(self.exchange.parts[number])}
        return [part[cuts.get(id(each), slice(0, 0))] for each in self.buckets[number].parameters]

    # while the model computes

    def _hook_model(self) -> None:
        """Gather a layer before each call of its module, and let it go afterwards, even if the call fails."""
        watched: list[Any] = []  # of the forward pass that is running

        def enter(*_: Any) -> None:
            self._is_backward = False
            watched.extend([saved_tensors_hooks(self._pack, self._unpack), StrayUses(self._away, self._stray)])
            for each in watched:
                each.__enter__()

        def leave(*_: Any) -> None:
            while watched:
                watched.pop().__exit__(None, None, None)
            self._leave()

        hooks = [self.model.register_forward_pre_hook(enter, prepend=True)]
        for module, parameters in layers_of(self.model):
            numbers = list(dict.fromkeys(self._away[id(each)] for each in parameters if id(each) in self._away))
            hooks.append(module.register_forward_pre_hook(_ignoring(partial(self._use, numbers))))
            hooks.append(module.register_forward_hook(_ignoring(partial(self._let_go, numbers)), always_call=True))
        hooks.append(self.model.register_forward_hook(leave, always_call=True))
        self._hooks += hooks

    def _use(self, numbers: list[int]) -> None:
        self._has_graph = self._has_graph or torch.is_grad_enabled()
        for number in numbers:
            self._uses[number] += 1
            if self._uses[number] == 1:
                whole, bucket = self._gather(number), self.buckets[number]
                self._in_use[number] = whole
                self._numbers_at[whole.data_ptr()] = number
                with torch._C.DisableTorchFunction():
                    for parameter, view in zip(bucket.parameters, bucket.views(whole), strict=True):
                        parameter.data = view
                        self._away.pop(id(parameter), None)

    def _let_go(self, numbers: list[int]) -> None:
        for number in numbers:
            self._uses[number] -= 1
            if not self._uses[number] and (whole := self._in_use.pop(number, None)) is not None:
                del self._numbers_at[whole.data_ptr()]
                self._away |= {id(each): number for each in self.buckets[number].parameters}
                self._hide(number)

    def _hide(self, number: int) -> None:
        """Leave the parameters their shapes only, as a backward pass needs them, or show this rank's pieces of them."""
        if not self._has_graph:
            return self._place(number)
        bucket = self.buckets[number]
        with torch._C.DisableTorchFunction():
            for parameter, shape in zip(bucket.parameters, bucket.shapes, strict=True):
                parameter.data = self._nothing.expand(shape)
        return None

    def _stray(self, number: int) -> None:
        self._strays.append(number)
        self._use([number])

    def _leave(self) -> None:
        """End a forward pass; without a graph it was an evaluation, and the ranks must leave it together."""
        self._let_go(self._strays)
        self._strays.clear()
        if not torch.is_grad_enabled():
            self._recent = None
            self.exchange.leave()

    def _gather(self, number: int) -> torch.Tensor:
        """Return a whole bucket; the one before it is let go first, and the next is announced."""
        if self._recent is not None and self._recent[0] == number:
            return self._recent[1]
        self._recent = None
        if (whole := self._in_use.get(number)) is not None:
            return whole
        here = self._is_backward, number
        whole = self.exchange.gather(number, self._next.get(here))
        self.meter.gathered(whole)
        if self._last is not None:
            self._next[self._last] = number
        self._last, self._recent = here, (number, whole)
        return whole

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return what a graph keeps of a tensor: of a gathered weight, how to gather it again."""
        number = self._numbers_at.get(tensor.untyped_storage().data_ptr())
        if number is None or tensor.dtype != self._nothing.dtype:
            return tensor.detach(), tensor._version
        return SavedWeight(number, tensor.shape, tensor.stride(), int(tensor.storage_offset()), self._steps)

    def _unpack(self, kept: Any) -> torch.Tensor:
        """Return a tensor that a graph has kept, in the backward pass."""
        if not isinstance(kept, SavedWeight):
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of {tuple(tensor.shape)} that the backward pass needs was changed in place after the "
                    "forward pass had used it: write x = x + y instead of x += y"
                )
            return tensor
        if kept.steps != self._steps:
            raise RuntimeError(
                "a backward pass needs weights that a step has changed since its forward pass: compute the loss again"
            )
        self._is_backward = True
        return self._gather(kept.number).as_strided(kept.shape, kept.stride, kept.offset)

    # one step

    def clear(self) -> None:
        """Drop the gradients of the last step, and begin to sum up new ones."""
        super().clear()
        self._last = None

    def step(self) -> Told:
        """Complete the mean gradients of this rank's shard, and update it."""
        told = super().step()
        self._recent, self._has_graph = None, False
        self._steps += 1
        for number, bucket in enumerate(self.buckets):
            self._place(number)
            if bucket.trained:
                for parameter, piece in zip(
                    bucket.parameters, self._cut(number, self.exchange.gradients[number]), strict=True
                ):
                    parameter.grad = piece.to(parameter.dtype) if id(parameter) not in self._unused else None
        return told

    # checkpoints

    def state(self) -> dict[str, Any]:
        """Return this rank's shard of the optimizer's state and of the weights, and where they belong."""
        weights = []
        for number in range(len(self.buckets)):
            own = self._own(number)
            weights += [(span, own[cut].clone()) for _, span, cut in self._pieces_of(number)]
        return super().state() | {"weights": weights}

    def _stored(self) -> Iterator[tuple[Span, torch.Tensor]]:
        for number in range(len(self.buckets)):
            yield from ((span, self.exchange.weights[number][cut]) for _, span, cut in self._pieces_of(number))


def _ignoring(call: Callable[[], object]) -> Callable[..., None]:
    """Return a hook that calls a function without a module's arguments and outputs."""

    def hook(*_: Any) -> None:
        call()

    return hook
