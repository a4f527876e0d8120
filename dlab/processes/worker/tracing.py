"""Watching a model learn: how large each layer's gradient is, and the path that it takes from its loss to its weight.

A gradient is computed by the backward pass, perhaps put into a bucket with others, sent, reduced over all ranks, and
applied by the optimizer. Hooks hear of the first and of the last; whoever moves gradients in between says so with
`trace`, which costs next to nothing in passes that are not watched.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache, partial
from math import hypot
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlab.kinds import GRADIENT, GRADIENTS, STAGES, GradientData, GradientsData
from dlab.processes.worker.context import emit, is_worker


@dataclass
class _Path:
    """One gradient on its way."""

    parameter: weakref.ref[torch.Tensor]  # an id alone may have passed to another tensor
    layer: str
    step: int
    reached: int  # the last stage that was told


_paths: dict[int, _Path] = {}  # by the parameter's id; filled by a watched backward pass, emptied by the optimizer


def watch(model: torch.nn.Module, every: int = 10) -> None:
    """Stream what every `every`-th backward pass does: the gradient norm of each layer, and each gradient's path.

    Norms are those of this rank's own gradients, as an event of kind `gradients`: {step, norms by layer}. The path is
    an event of kind `gradient` for each stage that a layer gets to: {step, layer, stage}; it is that of the layer's
    largest parameter, mostly the weight. A step is a backward pass, counted from 0. On a GPU the time of an event is
    that of putting the work into its queue.

    A watched pass takes about 0.2 ms for the norms of eight layers and 10 to 50 us for each stage of each layer; one
    in between takes a counter per layer. Outside a worker there is nobody to trace, and it costs nothing.
    """
    if every < 1:
        raise ValueError(f"every={every}: give a whole number of backward passes, 1 or more")
    layers: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(parameter)
    if not layers:
        raise ValueError("this model has no parameters that require a gradient: there is nothing to watch")
    if is_worker():
        _listen_to_optimizers()
        _Watch(layers, every)


def trace(stage: str, *parameters: torch.Tensor) -> None:
    """Say that the gradients of these parameters have got to a stage; for whoever puts them into buckets or sends them.

    Told once, in the order of the stages, and only of gradients of a watched pass that are not applied yet; in all
    other cases it returns at once, in less than a microsecond.

    >>> trace("sent", parameter)
    >>> dist.all_reduce(parameter.grad)
    >>> trace("reduced", parameter)
    """
    if stage not in STAGES:
        raise ValueError(f"{stage!r} is no stage of a gradient: use {', '.join(STAGES)}")
    if not _paths:
        return
    number = STAGES.index(stage)
    for parameter in parameters:
        path = _paths.get(id(parameter))
        if path is None or path.reached >= number or path.parameter() is not parameter:
            continue
        path.reached = number
        told: GradientData = {"step": path.step, "layer": path.layer, "stage": stage}
        emit(GRADIENT, told)
        if stage == STAGES[-1]:
            del _paths[id(parameter)]


class _Watch:
    """Held by the hooks of all parameters, and gone with them."""

    def __init__(self, layers: dict[str, list[torch.nn.Parameter]], every: int) -> None:
        self.layers, self.every = list(layers), every
        self.step, self.backward = 0, -1
        self.norms: dict[str, list[torch.Tensor]] = {}  # of a watched pass, by layer
        for layer, of_layer in layers.items():
            largest = max(of_layer, key=torch.Tensor.numel)
            for parameter in of_layer:
                hook = partial(self.on_gradient, layer, parameter is largest)
                parameter.register_post_accumulate_grad_hook(hook)

    def on_gradient(self, layer: str, is_largest: bool, parameter: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:  # the first gradient of this pass: be called again when the pass is over
            self.backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        if self.step % self.every == 0 and parameter.grad is not None:
            # now: when the pass is over it may have been reduced already
            self.norms.setdefault(layer, []).append(torch.linalg.vector_norm(parameter.grad))
            if is_largest:
                _paths[id(parameter)] = _Path(weakref.ref(parameter), layer, self.step, reached=-1)
                trace("computed", parameter)

    def after_backward(self) -> None:
        if self.step % self.every == 0:
            norms = {layer: hypot(*(norm.item() for norm in self.norms.get(layer, ()))) for layer in self.layers}
            told: GradientsData = {"step": self.step, "norms": norms}
            emit(GRADIENTS, told)
            self.norms.clear()
        self.step += 1


@cache
def _listen_to_optimizers() -> None:
    """Once in a process: hear of the steps of all optimizers; one that holds none of the parameters tells nothing."""

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if _paths:
            trace("applied", *(parameter for group in optimizer.param_groups for parameter in group["params"]))

    register_optimizer_step_post_hook(after_step)
