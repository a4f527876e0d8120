"""The subscripts that dimensions get, and the table in which each function of torch has its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dlab.sharding.operation import UNCUT, Operation
from dlab.sharding.state import state
from dlab.sharding.tensor import RULES, ShardedTensor


def rule(*functions: Any) -> Callable[[Callable[..., Operation]], Callable[..., Operation]]:
    """Register a rule for some functions of torch."""

    def register(made: Callable[..., Operation]) -> Callable[..., Operation]:
        for function in functions:
            RULES[function] = made
        return made

    return register


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the whole shape of a sharded tensor, a parameter of which this rank holds a part, or a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.whole_shape
    if not is_tensor(tensor):
        raise TypeError(f"dlab cuts tensors, not {tensor!r}: give a tensor there")
    home = state.homes.get(id(tensor))
    return home.shape if home is not None else tuple(tensor.shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def subscripts_of(number: int) -> str:
    """Return subscripts for dimensions that no product uses: a, b, c, d, then m, n, …"""
    characters = "abcdmnopqruwxyz"
    if number > len(characters):
        raise ValueError(f"dlab cuts tensors of up to {len(characters)} dimensions, not {number}")
    return characters[:number]


def dim_of(dim: int, shape: tuple[int, ...], name: str) -> int:
    """Return the number of a dimension that may be counted from the end."""
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"{name}: there is no dimension {dim} in a tensor of shape {shape}")
    return dim % len(shape)


def broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[str, str, str]:
    """Return the subscripts of two shapes that are repeated along each other, and of the result."""
    number = max(len(first), len(second))
    subscripts = subscripts_of(number)
    sides = []
    for shape in (first, second):
        own = subscripts[number - len(shape) :]
        other = dict(zip(subscripts[::-1], (first if shape is second else second)[::-1], strict=False))
        sides.append(
            "".join(
                UNCUT if length == 1 and other.get(subscript, 1) != 1 else subscript
                for subscript, length in zip(own, shape, strict=True)
            )
        )
    return sides[0], sides[1], subscripts
