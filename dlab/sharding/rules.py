"""How each function of torch is cut: the subscripts of its dimensions, and what a rank computes of its parts.

A rule is called like the function itself, with sharded tensors among the arguments, and returns an `Operation`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from dlab.sharding import losses, reshaping  # noqa: F401  (they fill the table of rules)
from dlab.sharding.operation import UNCUT, Operation
from dlab.sharding.subscripts import broadcast, dim_of, is_tensor, rule, shape_of, subscripts_of

# products


@rule(
    *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm),
    *(torch.Tensor.bmm, torch.mv, torch.Tensor.mv, torch.dot, torch.Tensor.dot),
)
def matmul(first: Any, second: Any, transpose_b: bool = False) -> Operation:
    """`ij,jk->ik`, with the subscripts of a batch in front; a cut of j leaves a partial sum. A vector has only j."""
    a, b = len(shape_of(first)), len(shape_of(second))
    if min(a, b) < 1 or (transpose_b and b < 2):
        raise ValueError(
            f"dlab cuts products of vectors and matrices, not of tensors with {a} and {b} dimensions"
            f"{' of which the second is transposed' if transpose_b else ''}"
        )
    batch = broadcast(shape_of(first)[:-2], shape_of(second)[:-2])
    row, column = "i" * (a > 1), "k" * (b > 1)
    subscripts = [batch[0] + row + "j", batch[1] + (column + "j" if transpose_b else "j" + column)]

    def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
        return torch.matmul(parts[0], parts[1].mT if transpose_b else parts[1])

    return Operation("MatMul", [first, second], subscripts, batch[2] + row + column, compute)


@rule(torch.einsum)
def einsum(equation: str, *tensors: Any) -> Operation:
    """As it is written: what is not in the result is added up, and a cut of it leaves a partial sum."""
    given = list(tensors[0]) if len(tensors) == 1 and not is_tensor(tensors[0]) else list(tensors)
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if not all(word.isalpha() or not word for word in [*words, result]) or any(len(set(w)) < len(w) for w in words):
        raise NotImplementedError(
            f"Einsum: dlab cuts {equation!r} without ... and with each subscript once in a tensor"
        )
    if len(words) != len(given):
        raise ValueError(f"Einsum: {equation!r} is for {len(words)} tensors, not {len(given)}")
    if not arrow:  # as torch has it: the subscripts that stand once, in alphabetical order
        result = "".join(sorted(each for each in set(inputs) - {","} if inputs.count(each) == 1))

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return torch.einsum(f"{','.join(words)}->{result}", *parts)

    return Operation("Einsum", given, words, result, compute, linear=len(given) == 1)


@rule(F.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> Operation:
    """`…j,kj->…k`. The bias is added when the sum over j is complete."""
    rows = subscripts_of(len(shape_of(x)) - 1)
    subscripts, result = [rows + "j", "kj"], rows + "k"
    return Operation("Linear", [x, weight], subscripts, result, lambda parts, _: F.linear(*parts), bias=bias)


@rule(F.scaled_dot_product_attention)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Operation:
    """`…te,…se,…sv->…tv`: batch and heads can be cut, tokens and features cannot."""
    if attn_mask is not None or dropout_p:
        raise NotImplementedError("dlab cuts attention without a mask and without dropout: use is_causal, or none")
    rows = subscripts_of(len(shape_of(query)) - 2)

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=is_causal, scale=scale)

    return Operation(
        "Attention", [query, key, value], [rows + "te", rows + "se", rows + "sv"], rows + "tv", compute, "tesv"
    )


# numbers one by one


_LINEAR = {torch.neg, torch.detach, torch.clone}  # may be applied to the parts of a sum


def _unary(function: Any) -> Callable[..., Operation]:
    def rule_of_one(x: Any, *args: Any, **kwargs: Any) -> Operation:
        name = getattr(function, "__name__", "").title()
        if kwargs.pop("inplace", False) or any(each is True for each in args):  # nn.ELU gives it by its place
            raise NotImplementedError(f"{name}: dlab does not change sharded tensors in place: leave out inplace=True")
        if any(map(is_tensor, (*args, *kwargs.values()))):
            raise NotImplementedError(f"{name}: dlab cuts it with numbers as settings, not with tensors")
        subscripts = subscripts_of(len(shape_of(x)))
        linear = function in _LINEAR
        return Operation(
            name, [x], [subscripts], subscripts, lambda parts, _: function(parts[0], *args, **kwargs), linear=linear
        )

    return rule_of_one


for _functions in (
    (torch.relu, F.relu, torch.Tensor.relu),
    (F.gelu,),
    (torch.tanh, torch.Tensor.tanh, F.tanh),
    (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid),
    (F.silu,),
    (F.leaky_relu,),
    (F.elu,),
    (F.softplus,),
    (torch.sin, torch.Tensor.sin),
    (torch.cos, torch.Tensor.cos),
    (torch.exp, torch.Tensor.exp),
    (torch.sqrt, torch.Tensor.sqrt),
    (torch.Tensor.float,),
    (torch.Tensor.double,),
    (torch.Tensor.half,),
    (torch.Tensor.bfloat16,),
    (torch.square, torch.Tensor.square),
    (torch.neg, torch.Tensor.neg, torch.Tensor.__neg__),
    (torch.abs, torch.Tensor.abs),
    (torch.log, torch.Tensor.log),
    (torch.rsqrt, torch.Tensor.rsqrt),
    (torch.reciprocal, torch.Tensor.reciprocal),
    (torch.clamp, torch.Tensor.clamp),
    (torch.detach, torch.Tensor.detach),
    (torch.clone, torch.Tensor.clone),
    (torch.zeros_like,),
    (torch.ones_like,),
):
    rule(*_functions)(_unary(_functions[0]))


@rule(torch.Tensor.to)
def to(x: Any, dtype: Any) -> Operation:
    """Numbers of another type."""
    if not isinstance(dtype, torch.dtype):
        raise NotImplementedError(
            f"To: dlab changes the type of numbers, as in x.to(torch.float32), and cannot take {dtype!r}: move tensors "
            "to a device before the network gets them"
        )
    return _unary(torch.Tensor.to)(x, dtype)


def _binary(name: str, function: Callable[[Any, Any], Any], scales: bool) -> Callable[..., Operation]:
    """A rule for two tensors that are repeated along each other's missing dimensions, or a tensor and a number."""

    def rule_of_two(first: Any, second: Any, *, alpha: float = 1, rounding_mode: str | None = None) -> Operation:
        if alpha != 1 or rounding_mode is not None:
            raise NotImplementedError(f"{name}: dlab cuts it without alpha and rounding_mode: leave them out")
        if not is_tensor(first) or not is_tensor(second):
            tensor = first if is_tensor(first) else second
            subscripts = subscripts_of(len(shape_of(tensor)))

            def with_number(parts: list[Any], _: dict[str, int]) -> Any:
                return function(parts[0], second) if is_tensor(first) else function(first, parts[0])

            return Operation(name, [tensor], [subscripts], subscripts, with_number, linear=scales and is_tensor(first))
        a, b, result = broadcast(shape_of(first), shape_of(second))
        return Operation(name, [first, second], [a, b], result, lambda parts, _: function(*parts))

    return rule_of_two


_TWO: list[tuple[tuple[Any, ...], Any]] = [
    ((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _binary("Add", operator.add, False)),
    ((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _binary("Mul", operator.mul, True)),
    ((torch.sub, torch.Tensor.sub, torch.Tensor.__sub__), _binary("Sub", operator.sub, False)),
    ((torch.div, torch.Tensor.div, torch.Tensor.__truediv__), _binary("Div", operator.truediv, True)),
    ((torch.Tensor.__rsub__,), _binary("Sub", lambda first, second: second - first, False)),
    ((torch.Tensor.__rtruediv__,), _binary("Div", lambda first, second: second / first, False)),
    ((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__), _binary("Pow", operator.pow, False)),
]
for _named, _made in _TWO:
    rule(*_named)(_made)


# along one dimension


def _along(name: str, function: Any) -> Callable[..., Operation]:
    def rule_along(x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Operation:
        if dim is None:
            raise ValueError(f"{name}: say along which dimension, as in dim=-1")
        subscripts = subscripts_of(len(shape_of(x)))
        place = dim_of(dim, shape_of(x) or (1,), name)  # as in torch, a number has a dimension 0 here

        def compute(parts: list[Any], _: dict[str, int]) -> Any:
            return function(parts[0], dim=dim, dtype=dtype)

        return Operation(name, [x], [subscripts], subscripts, compute, uncut=subscripts[place : place + 1])

    return rule_along


rule(torch.softmax, F.softmax, torch.Tensor.softmax)(_along("Softmax", torch.softmax))
rule(torch.log_softmax, F.log_softmax, torch.Tensor.log_softmax)(_along("LogSoftmax", torch.log_softmax))


@rule(F.layer_norm)
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Operation:
    """The dimensions that are normalised cannot be cut; all others can."""
    size = len(tuple(normalized_shape))
    if not size or shape_of(x)[-size:] != tuple(normalized_shape):
        raise ValueError(
            f"LayerNorm: the last dimensions of a tensor of shape {shape_of(x)} are not {tuple(normalized_shape)}"
        )
    subscripts = subscripts_of(len(shape_of(x)))
    last = subscripts[len(subscripts) - size :]
    given = [each for each in (weight, bias) if each is not None]

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        others = iter(parts[1:])
        w, b = (next(others) if each is not None else None for each in (weight, bias))
        return F.layer_norm(parts[0], normalized_shape, w, b, eps)

    return Operation("LayerNorm", [x, *given], [subscripts, *[last] * len(given)], subscripts, compute, uncut=last)


def _reduced(name: str, mean: bool) -> Callable[..., Operation]:
    def rule_of_sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Operation:
        shape = shape_of(x)
        subscripts = subscripts_of(len(shape))
        dims = (dim,) if isinstance(dim, int) else tuple(dim or range(len(shape)))  # as in torch, () means all
        gone = {dim_of(each, shape or (1,), name) for each in dims}
        lost = [subscripts[each] for each in gone] if shape else []
        number = prod(shape[each] for each in gone) if shape else 1
        result = "".join(UNCUT if subscript in lost else subscript for subscript in subscripts)
        result = result if keepdim else result.replace(UNCUT, "")

        def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
            if not mean:
                return parts[0].sum(dim=tuple(gone), keepdim=keepdim, dtype=dtype)
            found = parts[0].mean(dim=tuple(gone), keepdim=keepdim, dtype=dtype)  # a sum of halves could overflow
            here = prod(lengths[subscript] for subscript in lost)
            return found if here == number else found * (here / number)

        return Operation(name, [x], [subscripts], result, compute, linear=True)

    return rule_of_sum


rule(torch.sum, torch.Tensor.sum)(_reduced("ReduceSum", mean=False))
rule(torch.mean, torch.Tensor.mean)(_reduced("ReduceMean", mean=True))
