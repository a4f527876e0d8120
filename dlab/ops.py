"""Operators that take a strategy: as classes, `MatMul().shard(((2, 4), (4, 1)))`, or around functions of torch.

A strategy says for each input into how many parts each dimension is cut, or gives its layout. Outside of `AutoParallel`
an operator computes what the function of torch does. Taught in `07_operator_parallel.ipynb`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dlab.sharding import rules  # noqa: F401  (fills the table of rules)
from dlab.sharding.state import state
from dlab.sharding.tensor import RULES, call, functions


class Operator:
    """A function of torch, together with how its inputs and its result are cut."""

    function: Any

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.in_strategy: tuple[Any, ...] | None = None
        self.out_strategy: Any = None

    def shard(self, in_strategy: tuple[Any, ...] | None = None, out_strategy: Any = None) -> Operator:
        """Say how the inputs are cut, and how the result is to be; returns the operator itself."""
        if in_strategy is not None and not isinstance(in_strategy, (tuple, list)):
            raise ValueError(f"in_strategy={in_strategy!r}: give a tuple with the cuts, or the layout, of each input")
        self.in_strategy = None if in_strategy is None else tuple(in_strategy)
        self.out_strategy = out_strategy
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**self.settings, **kwargs}
        if state.world is None:
            return self.compute(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(type(self).function, args, kwargs, self.in_strategy, self.out_strategy)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the whole result in this process."""
        return type(self).function(*args, **kwargs)

    def __repr__(self) -> str:
        given = self.in_strategy is not None or self.out_strategy is not None
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        strategy = f".shard({self.in_strategy!r}, {self.out_strategy!r})" if given else ""
        return f"{type(self).__name__}({settings}){strategy}"


class MatMul(Operator):
    """The product of two matrices, or of batches of them; with `transpose_b` the second one is transposed."""

    function = staticmethod(torch.matmul)

    def __init__(self, transpose_b: bool = False) -> None:
        super().__init__(transpose_b=transpose_b)

    def compute(self, first: torch.Tensor, second: torch.Tensor, transpose_b: bool = False) -> torch.Tensor:
        """Compute the whole product in this process."""
        return torch.matmul(first, second.mT if transpose_b else second)


class ReLU(Operator):
    """Replaces negative elements by 0."""

    function = staticmethod(torch.relu)


class Gelu(Operator):
    """A smooth ReLU, the usual activation of transformers."""

    function = staticmethod(F.gelu)


class Add(Operator):
    """The sum of two tensors, element by element."""

    function = staticmethod(torch.add)


class Mul(Operator):
    """The product of two tensors, element by element."""

    function = staticmethod(torch.mul)


class Softmax(Operator):
    """Exponentials divided by their sum along one dimension, which cannot be cut."""

    function = staticmethod(torch.softmax)

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim=dim)


class LayerNorm(Operator):
    """Normalises the last dimensions, which cannot be cut: `LayerNorm((512,))(x, weight, bias)`."""

    function = staticmethod(F.layer_norm)

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        super().__init__(normalized_shape=shape, eps=eps)

    def __call__(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        return super().__call__(x, weight=weight, bias=bias)


class Embedding(Operator):
    """Looks up rows of a table: `Embedding()(ids, table)`; where rows are cut, a rank looks up those that it holds."""

    function = staticmethod(F.embedding)


class ReduceSum(Operator):
    """The sum over some dimensions; if one of them is cut, each rank has a partial sum."""

    function = staticmethod(torch.sum)

    def __init__(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> None:
        super().__init__(dim=dim, keepdim=keepdim)

    def __call__(self, x: Any, dim: int | tuple[int, ...] | None = None) -> Any:
        return super().__call__(x, **({} if dim is None else {"dim": dim}))


class Flatten(Operator):
    """Joins the dimensions `start_dim` to `end_dim` into one, by default all but the first."""

    function = staticmethod(torch.flatten)

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__(start_dim=start_dim, end_dim=end_dim)


class Transpose(Operator):
    """Puts the dimensions into another order: `Transpose((1, 0))` transposes a matrix."""

    function = staticmethod(torch.permute)

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = tuple(order)

    def __call__(self, x: Any) -> Any:
        return super().__call__(x, self.order)


class CrossEntropy(Operator):
    """The mean loss of scores (samples, classes), given the labels; the classes cannot be cut."""

    function = staticmethod(F.cross_entropy)


def shard(function: Any, in_strategy: tuple[Any, ...] | None = None, out_strategy: Any = None) -> Operator:
    """Return an operator that calls a function of torch, cut by a strategy inside of `AutoParallel`.

    >>> matmul = dlab.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))
    """
    if isinstance(function, Operator):
        return function.shard(in_strategy, out_strategy)
    if not callable(function) or function not in RULES:
        raise ValueError(
            f"dlab does not know how to cut {getattr(function, '__name__', function)!r}: it can cut "
            f"{', '.join(functions())}; write it with these, or call it outside of the network"
        )

    class Function(Operator):
        """A function of torch with a strategy."""

    Function.__name__ = getattr(function, "__name__", "Function")
    Function.function = staticmethod(function)
    return Function().shard(in_strategy, out_strategy)
