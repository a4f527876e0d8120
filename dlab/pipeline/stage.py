"""One stage of a pipeline on its rank: forward, backward, or backward in two halves, for one micro-batch at a time.

Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dlab.pipeline.halves import Halves
from dlab.pipeline.microbatches import Tensors

Finish = Callable[[Any], torch.Tensor]  # makes the loss of a micro-batch from the last stage's result

_random = threading.Lock()  # the ranks of a rehearsal are threads that share one random number generator


@dataclass
class Activation:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: Tensors
    finish: Finish | None
    edges: list[GradientEdge | None] = field(default_factory=list)  # where each output's gradient enters the graph
    random: list[torch.Tensor] | None = None  # the random numbers' state before the forward, if that is run again
    halves: Halves | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)  # of the outputs, for the second half


class Stage:
    """A module with the activations of the micro-batches that have gone forward, but not yet backward.

    With `recompute`, it keeps only the inputs, and runs the forward again when the backward needs it: about a third
    more computation for memory that no longer grows with the depth of the stage.
    """

    def __init__(self, number: int, module: nn.Module, recompute: bool = False) -> None:
        self.number, self.module, self.recompute = number, module, recompute
        self.activations: dict[int, Activation] = {}  # by micro-batch
        self.amp = False
        # a module that communicates must not keep the lock from the ranks that it waits for, and draws no numbers there
        self._drawing = nullcontext() if getattr(module, "communicates", False) else _random

    def run(self, inputs: Tensors) -> Any:
        """Compute the outputs without keeping anything for a backward."""
        with torch.no_grad(), self._autocast(inputs):
            return self.module(*inputs)

    def forward(self, microbatch: int, inputs: Tensors, finish: Finish | None = None) -> Tensors:
        """Compute the outputs, or, with `finish`, the loss, and keep what the backward needs."""
        if self.number:  # the gradients of the first stage's inputs are of no use
            inputs = tuple(_leaf(x) for x in inputs)
        activation = self.activations[microbatch] = Activation(inputs, finish)
        if not self.recompute:
            outputs = self._compute(activation)
            activation.edges = _edges(outputs)
            return outputs
        with torch.no_grad(), self._drawing:
            activation.random = _random_state(inputs)
            return self._compute(activation)

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> Tensors:
        """Add the gradients of the weights to `.grad`, and return those of the inputs."""
        activation, edges, found = self._begin(microbatch, gradients)
        if edges:
            torch.autograd.backward(edges, found)
        del self.activations[microbatch]
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in activation.inputs if x.requires_grad)

    def backward_input(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradients of the inputs only; `backward_weight` must follow."""
        activation, edges, found = self._begin(microbatch, gradients)
        inputs = [x for x in activation.inputs if x.requires_grad]
        activation.gradients = found
        if not inputs or not edges:
            return tuple(map(torch.zeros_like, inputs))
        activation.halves = Halves(edges, found, inputs)
        return tuple(activation.halves.input_gradients())

    def backward_weight(self, microbatch: int) -> None:
        """Add the gradients of the weights to `.grad`."""
        activation = self.activations.pop(microbatch)
        if activation.halves is not None:
            activation.halves.add_weight_gradients()
        elif edges := [edge for edge in activation.edges if edge is not None]:
            torch.autograd.backward(edges, activation.gradients)

    def _begin(
        self, microbatch: int, gradients: Sequence[torch.Tensor]
    ) -> tuple[Activation, list[GradientEdge], list[torch.Tensor]]:
        """Return the graph of a micro-batch, after running the forward again if it was not kept."""
        activation = self.activations[microbatch]
        if activation.random is not None:
            with self._drawing, _replaying(activation.random, activation.inputs), self._frozen_buffers():
                activation.edges = _edges(self._compute(activation))
        pairs = [(edge, grad) for edge, grad in zip(activation.edges, gradients, strict=True) if edge is not None]
        return activation, [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _compute(self, activation: Activation) -> Tensors:
        with self._autocast(activation.inputs):
            result = self.module(*activation.inputs)
            if activation.finish is not None:
                return (activation.finish(result),)
            return as_tuple(result, self.number)

    def _autocast(self, inputs: Tensors) -> AbstractContextManager[Any]:
        return torch.autocast(inputs[0].device.type, torch.bfloat16) if self.amp else nullcontext()

    @contextmanager
    def _frozen_buffers(self) -> Iterator[None]:
        """Undo what a second forward changes, such as running means, which the first has changed already."""
        before = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)  # .data: a graph may have saved the buffer, but does not need its value


def as_tuple(result: Any, number: int) -> Tensors:
    """Return a stage's result as a tuple of tensors, or raise an error."""
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if not outputs or not all(isinstance(each, torch.Tensor) for each in outputs):
        found = f"a {type(result).__name__}"
        if isinstance(result, (tuple, list)):
            found += f" of {', '.join(type(each).__name__ for each in outputs) or 'nothing'}"
        raise TypeError(
            f"stage {number} returned {found}, which cannot be sent: a stage must return a tensor or a tuple of tensors"
        )
    return outputs


def _edges(outputs: Tensors) -> list[GradientEdge | None]:
    """Return where the gradients enter; the graph stays, and the outputs need not."""
    return [get_gradient_edge(each) if each.requires_grad else None for each in outputs if has_gradient(each)]


def has_gradient(x: torch.Tensor) -> bool:
    """Whether a tensor between stages has a gradient: all but whole numbers and truth values do."""
    return x.is_floating_point() or x.is_complex()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if has_gradient(x) else x


def _random_state(inputs: Tensors) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + [torch.cuda.get_rng_state(x.device) for x in inputs[:1] if x.is_cuda]


@contextmanager
def _replaying(states: list[torch.Tensor], inputs: Tensors) -> Iterator[None]:
    """Draw the same random numbers as in the first forward, and continue afterwards where they stand now."""
    with torch.random.fork_rng([x.device.index for x in inputs[:1] if x.is_cuda]):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, inputs[0].device)
        yield
