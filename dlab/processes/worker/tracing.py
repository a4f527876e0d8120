"""Watch a model learn: the size of each layer's gradient, and the path of a gradient from the loss to the weight.

A gradient is computed by the backward pass, perhaps put into a bucket with others, sent, reduced over all ranks, and
applied by the optimizer. Hooks notice the first and the last stage; code that moves gradients in between reports it
with `trace`, which costs next to nothing in passes that are not watched.
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
    """The progress of one gradient."""

    parameter: weakref.ref[torch.Tensor]  # an id alone could belong to a newer tensor
    layer: str
    step: int
    reached: int  # the last stage that was reported


_paths: dict[int, _Path] = {}  # by the parameter's id; filled by a watched backward pass, emptied by the optimizer


def watch(model: torch.nn.Module, every: int = 10) -> None:
    """Record every `every`-th backward pass: the gradient norm of each layer, and the path of each gradient.

    Norms are those of this rank's own gradients, in an event of kind `gradients`: {step, norms by layer}. The path is
    an event of kind `gradient` for each stage that a layer reaches: {step, layer, stage}; it follows the layer's
    largest parameter, usually the weight. A step is a backward pass, counted from 0. On a GPU the time of an event is
    the time at which the work was queued.

    A watched pass takes about 0.2 ms for the norms of eight layers and 10 to 50 us for each stage of each layer; other
    passes update one counter per layer. Outside a worker nothing is recorded, and it costs nothing.
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
        _GradientWatch(layers, every)


def trace(stage: str, *parameters: torch.Tensor) -> None:
    """Report that the gradients of these parameters have reached a stage; for code that moves gradients.

    Each stage is recorded once, in order, and only for gradients of a watched pass that have not been applied yet; in
    all other cases it returns at once, in less than a microsecond.

    >>> trace("sent", parameter)
    >>> dist.all_reduce(parameter.grad)
    >>> trace("reduced", parameter)
    """
    if stage not in STAGES:
        raise ValueError(f"{stage!r} is not a stage of a gradient: use {', '.join(STAGES)}")
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


class _GradientWatch:
    """The state of one `watch`; the hooks of all parameters hold it, and it ends with them."""

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
        if backward != self.backward:  # the first gradient of this pass: register a callback for its end
            self.backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        if self.step % self.every == 0 and parameter.grad is not None:
            # computed now, because at the end of the pass the gradient may have been reduced already
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
    """Hook into the steps of all optimizers, once per process; only those with watched parameters record anything."""

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if _paths:
            trace("applied", *(parameter for group in optimizer.param_groups for parameter in group["params"]))

    register_optimizer_step_post_hook(after_step)
