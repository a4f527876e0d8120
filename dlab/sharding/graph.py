"""A network as a graph of operators, found by running it once on tensors without values, on one imaginary rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dlab.layout import Placed
from dlab.sharding.home import Home
from dlab.sharding.operation import Operation, Strategy
from dlab.sharding.state import state
from dlab.sharding.tensor import ShardedTensor

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Operand:
    """A tensor that an operator takes: which operator made it, or which parameter it is, or else where it is.

    `tensor` is the number of the tensor object: it is moved to a layout only once, however many operators need it.
    `gradient` says whether a gradient goes back through it.
    """

    tensor: int
    shape: tuple[int, ...]
    itemsize: int
    gradient: bool
    producer: int | None = None
    parameter: Home | None = None
    placed: Placed | None = None


@dataclass
class Node:
    """One call of an operator, with the strategy that it was given by hand, if any."""

    operation: Operation
    shapes: Shapes
    operands: list[Operand]
    strategy: Strategy | None = None
    out_strategy: Any = None
    shape: tuple[int, ...] = ()
    itemsize: int = 4
    gradient: bool = False
    whole: bool = False  # whether the network makes its result whole, as it does at the end

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the candidates depend on: calls with the same signature have the same candidates."""
        operation = self.operation
        kind = operation.name, *operation.subscripts, operation.result, operation.uncut, operation.linear
        rest = self.shape, self.itemsize, self.gradient, self.whole, repr(self.strategy), repr(self.out_strategy)
        return kind, self.shapes, rest, tuple(each.itemsize for each in self.operands)


@dataclass
class Tracer:
    """A `Chooser` that records every operator that a network calls, and changes no strategy."""

    nodes: list[Node] = field(default_factory=list)
    _made: dict[int, tuple[ShardedTensor, int | None, Placed | None]] = field(default_factory=dict)
    _seen: dict[int, tuple[Any, int]] = field(default_factory=dict)  # with the object, so that no other gets its id

    def begin(self, tensor: ShardedTensor, placed: Placed) -> ShardedTensor:
        """Note an input of the network, and where it will be."""
        self._made[id(tensor)] = tensor, None, placed
        return tensor

    def choose(self, operation: Operation, shapes: Shapes, strategy: Any, out: Any) -> tuple[Any, Any]:
        """Note that an operator is called; its strategy stays as it was given."""
        self.nodes.append(Node(operation, shapes, [], strategy, out))
        for each, shape in zip(operation.tensors, shapes, strict=True):
            self.nodes[-1].operands.append(self._operand(each, shape))
        return strategy, out

    def made(self, tensor: ShardedTensor) -> None:
        """Note the result of the operator that was called last."""
        node = self.nodes[-1]
        node.shape, node.itemsize, node.gradient = tensor.whole_shape, tensor.element_size(), tensor.requires_grad
        self._made[id(tensor)] = tensor, len(self.nodes) - 1, None

    def whole(self, tensor: ShardedTensor) -> None:
        """Note that the network needs a whole tensor: its result, or the loss of a step."""
        producer = self._origin(tensor)[0]
        if producer is not None:
            self.nodes[producer].whole = True

    def _operand(self, tensor: Any, shape: tuple[int, ...]) -> Operand:
        number = self._seen.setdefault(id(tensor), (tensor, len(self._seen)))[1]
        gradient = tensor.requires_grad and torch.is_grad_enabled()
        found = Operand(number, shape, tensor.element_size(), gradient)
        if isinstance(tensor, ShardedTensor):
            found.producer, found.placed = self._origin(tensor)
        else:
            found.parameter = state.homes.get(id(tensor))
        return found

    def _origin(self, tensor: ShardedTensor) -> tuple[int | None, Placed | None]:
        if id(tensor) in self._made:
            return self._made[id(tensor)][1:]
        for other, producer, placed in reversed(self._made.values()):  # `detach` makes another object of one tensor
            if _storage(other) == _storage(tensor) and other.whole_shape == tensor.whole_shape:
                return producer, placed
        return None, None

    def finish(self) -> list[Node]:
        """Return the operators; a gradient goes back only from what becomes whole."""
        reached = [node.whole and node.gradient for node in self.nodes]
        for number in reversed(range(len(self.nodes))):
            for operand in self.nodes[number].operands:
                operand.gradient &= reached[number]
                if operand.producer is not None and operand.gradient:
                    reached[operand.producer] = True
        for node, found in zip(self.nodes, reached, strict=True):
            node.gradient &= found
        return self.nodes


def _storage(tensor: ShardedTensor) -> int:
    return tensor.local().untyped_storage()._cdata
