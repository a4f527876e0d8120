"""How each function of torch is cut: the subscripts of its dimensions, and what a rank computes of its parts.

A rule is called like the function itself, with sharded tensors among the arguments, and returns a `Operation`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F

from dlab.sharding.operation import UNCUT, Operation
from dlab.sharding.tensor import RULES, ShardedTensor, _getter, state


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
    home = state.homes.get(id(tensor))
    return home.shape if home is not None else tuple(tensor.shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# products


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.Tensor.mm, torch.Tensor.bmm
)
def matmul(first: Any, second: Any, transpose_b: bool = False) -> Operation:
    """`ij,jk->ik`, with the subscripts of a batch in front; a cut of j leaves a partial sum."""
    a, b = len(shape_of(first)), len(shape_of(second))
    if a < 1 or b < 2:
        raise ValueError(f"dlab cuts products of matrices, not of tensors with {a} and {b} dimensions")
    batch = _broadcast(shape_of(first)[:-2], shape_of(second)[:-2])
    row = "i" if a > 1 else ""
    subscripts = [batch[0] + row + "j", batch[1] + ("kj" if transpose_b else "jk")]

    def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
        return torch.matmul(parts[0], parts[1].mT if transpose_b else parts[1])

    return Operation("MatMul", [first, second], subscripts, batch[2] + row + "k", compute)


@rule(F.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> Operation:
    """`…j,kj->…k`. The bias is added when the sum over j is complete."""
    rows = _subscripts(len(shape_of(x)) - 1)
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
    rows = _subscripts(len(shape_of(query)) - 2)

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=is_causal, scale=scale)

    return Operation(
        "Attention", [query, key, value], [rows + "te", rows + "se", rows + "sv"], rows + "tv", compute, "tesv"
    )


# numbers one by one


def _unary(function: Any) -> Callable[..., Operation]:
    def rule_of_one(x: Any, *args: Any, **kwargs: Any) -> Operation:
        kwargs.pop("inplace", None)
        subscripts = _subscripts(len(shape_of(x)))
        name = getattr(function, "__name__", "").title()
        return Operation(name, [x], [subscripts], subscripts, lambda parts, _: function(parts[0], *args, **kwargs))

    return rule_of_one


for _functions in (
    (torch.relu, F.relu, torch.Tensor.relu),
    (F.gelu,),
    (torch.tanh, torch.Tensor.tanh, F.tanh),
    (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid),
    (F.silu,),
    (torch.exp, torch.Tensor.exp),
    (torch.sqrt, torch.Tensor.sqrt),
    (torch.Tensor.float,),
    (torch.Tensor.double,),
    (torch.square, torch.Tensor.square),
):
    rule(*_functions)(_unary(_functions[0]))


def _binary(name: str, function: Callable[[Any, Any], Any], scales: bool) -> Callable[..., Operation]:
    """A rule for two tensors that are repeated along each other's missing dimensions, or a tensor and a number."""

    def rule_of_two(first: Any, second: Any) -> Operation:
        if not is_tensor(first) or not is_tensor(second):
            tensor = first if is_tensor(first) else second
            subscripts = _subscripts(len(shape_of(tensor)))

            def with_number(parts: list[Any], _: dict[str, int]) -> Any:
                return function(parts[0], second) if is_tensor(first) else function(first, parts[0])

            return Operation(name, [tensor], [subscripts], subscripts, with_number, linear=scales and is_tensor(first))
        a, b, result = _broadcast(shape_of(first), shape_of(second))
        return Operation(name, [first, second], [a, b], result, lambda parts, _: function(*parts))

    return rule_of_two


_TWO: list[tuple[tuple[Any, ...], Any]] = [
    ((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _binary("Add", operator.add, False)),
    ((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _binary("Mul", operator.mul, True)),
    ((torch.sub, torch.Tensor.sub, torch.Tensor.__sub__), _binary("Sub", operator.sub, False)),
    ((torch.div, torch.Tensor.div, torch.Tensor.__truediv__), _binary("Div", operator.truediv, True)),
    ((torch.Tensor.__rsub__,), _binary("Sub", lambda first, second: second - first, False)),
]
for _named, _made in _TWO:
    rule(*_named)(_made)


# along one dimension


def _along(name: str, function: Any) -> Callable[..., Operation]:
    def rule_along(x: Any, dim: int | None = None, *_: Any, **kwargs: Any) -> Operation:
        if dim is None:
            raise ValueError(f"{name}: say along which dimension, as in dim=-1")
        kwargs.pop("_stacklevel", None)
        subscripts = _subscripts(len(shape_of(x)))

        def compute(parts: list[Any], _: dict[str, int]) -> Any:
            return function(parts[0], dim=dim, **kwargs)

        return Operation(name, [x], [subscripts], subscripts, compute, uncut=subscripts[dim])

    return rule_along


rule(torch.softmax, F.softmax, torch.Tensor.softmax)(_along("Softmax", torch.softmax))
rule(torch.log_softmax, F.log_softmax, torch.Tensor.log_softmax)(_along("LogSoftmax", torch.log_softmax))


@rule(F.layer_norm)
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Operation:
    """The dimensions that are normalised cannot be cut; all others can."""
    size = len(tuple(normalized_shape))
    subscripts = _subscripts(len(shape_of(x)))
    last = subscripts[len(subscripts) - size :]
    given = [each for each in (weight, bias) if each is not None]

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        others = iter(parts[1:])
        w, b = (next(others) if each is not None else None for each in (weight, bias))
        return F.layer_norm(parts[0], normalized_shape, w, b, eps)

    return Operation("LayerNorm", [x, *given], [subscripts, *[last] * len(given)], subscripts, compute, uncut=last)


def _reduced(name: str, mean: bool) -> Callable[..., Operation]:
    def rule_of_sum(x: Any, dim: Any = None, keepdim: bool = False) -> Operation:
        shape = shape_of(x)
        subscripts = _subscripts(len(shape))
        every = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
        gone = {each % len(shape) for each in every} if shape else set()
        number = prod(shape[each] for each in gone) if mean else 1
        result = "".join(
            UNCUT if keepdim and each in gone else subscript
            for each, subscript in enumerate(subscripts)
            if keepdim or each not in gone
        )

        def compute(parts: list[Any], _: dict[str, int]) -> Any:
            total = parts[0].sum(dim=tuple(gone), keepdim=keepdim) if gone else parts[0]
            return total / number if mean else total

        return Operation(name, [x], [subscripts], result, compute, linear=True)

    return rule_of_sum


rule(torch.sum, torch.Tensor.sum)(_reduced("ReduceSum", mean=False))
rule(torch.mean, torch.Tensor.mean)(_reduced("ReduceMean", mean=True))


# looking up, and the loss


@rule(F.embedding)
def embedding(ids: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Operation:
    """`…,ve->…e`. Where the rows v are cut, a rank looks up those that it has, zero for the others: a partial sum."""
    if padding_idx is not None:
        raise NotImplementedError("dlab cuts embeddings without padding_idx: leave it out")
    rows, (total, width) = _subscripts(len(shape_of(ids))), shape_of(weight)

    def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
        here, table = parts
        if lengths["v"] == total:
            return F.embedding(here, table)
        assert state.world is not None and state.found is not None
        shifted = here - state.found.inputs[1].slices_of(state.world.rank, (total, width))[0].start
        mine = (shifted >= 0) & (shifted < lengths["v"])
        return F.embedding(shifted.where(mine, 0), table) * mine.unsqueeze(-1).to(table.dtype)

    return Operation("Embedding", [ids, weight], [rows, "ve"], rows + "e", compute)


@rule(F.cross_entropy)
def cross_entropy(
    scores: Any,
    labels: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Operation:
    """`bc,b->`: the samples can be cut, which leaves a partial sum of the loss; the classes cannot."""
    if weight is not None or reduction not in ("mean", "sum") or len(shape_of(scores)) != 2 or ignore_index >= 0:
        raise NotImplementedError(
            "dlab cuts cross_entropy of scores (samples, classes) with reduction 'mean' or 'sum' and no weights"
        )
    number = shape_of(scores)[0] if reduction == "mean" else 1

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return F.cross_entropy(parts[0], parts[1], reduction="sum", label_smoothing=label_smoothing) / number

    label = "b" if len(shape_of(labels)) == 1 else "bc"
    return Operation("CrossEntropy", [scores, labels], ["bc", label], "", compute, uncut="c")


@rule(F.nll_loss)
def nll_loss(
    scores: Any,
    labels: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Operation:
    """`bc,b->`, like `cross_entropy`, of scores that are logarithms of probabilities."""
    if weight is not None or reduction not in ("mean", "sum") or len(shape_of(scores)) != 2 or ignore_index >= 0:
        raise NotImplementedError("dlab cuts nll_loss of scores (samples, classes) with reduction 'mean' or 'sum'")
    number = shape_of(scores)[0] if reduction == "mean" else 1

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        return F.nll_loss(parts[0], parts[1], reduction="sum") / number

    return Operation("NLLLoss", [scores, labels], ["bc", "b"], "", compute, uncut="c")


# other shapes


@rule(torch.transpose, torch.Tensor.transpose)
def transpose(x: Any, first: int, second: int) -> Operation:
    """The subscripts change places."""
    order = list(range(len(shape_of(x))))
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


@rule(torch.permute, torch.Tensor.permute)
def permute(x: Any, *dims: Any) -> Operation:
    """The subscripts change places."""
    order = list(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else list(dims)
    subscripts = _subscripts(len(shape_of(x)))
    result = "".join(subscripts[dim] for dim in order)
    return Operation("Transpose", [x], [subscripts], result, lambda parts, _: parts[0].permute(order), linear=True)


@rule(torch.t, torch.Tensor.t, _getter("T"), _getter("mT"))
def swap_last(x: Any) -> Operation:
    """The last two subscripts change places."""
    return transpose(x, -2, -1)


@rule(torch.flatten, torch.Tensor.flatten)
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Operation:
    """Several dimensions become one; of these only the first can be cut."""
    shape = list(shape_of(x))
    end = end_dim % len(shape)
    start = start_dim % len(shape)
    return _reshaped("Flatten", x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def reshape(x: Any, *shape: Any) -> Operation:
    """Dimensions are joined or split; of those that belong together only the first can be cut."""
    wanted = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    total = prod(shape_of(x))
    if -1 in wanted:
        wanted[wanted.index(-1)] = total // max(1, -prod(wanted))
    if prod(wanted) != total:
        raise ValueError(f"a tensor of shape {shape_of(x)} cannot get the shape {tuple(shape)}: the sizes differ")
    return _reshaped("Reshape", x, wanted)


def _reshaped(name: str, x: Any, wanted: list[int]) -> Operation:
    old, subscripts, result, uncut = shape_of(x), "", "", ""
    names = iter(ascii_lowercase)
    lengths: dict[str, int] = {}
    shared: dict[str, tuple[int, int]] = {}
    i = j = 0
    while i < len(old) or j < len(wanted):  # the smallest runs of dimensions with the same product
        first_old, first_new, a, b = i, j, 1, 1
        while i < len(old) and (a < b or first_old == i):
            a, i = a * old[i], i + 1
        while j < len(wanted) and (b < a or first_new == j):
            b, j = b * wanted[j], j + 1
            if a < b:
                while i < len(old) and a < b:
                    a, i = a * old[i], i + 1
        if i == len(old) or j == len(wanted):  # what is left has length 1
            i, j = (len(old), len(wanted)) if prod(old[i:]) == prod(wanted[j:]) == 1 else (i, j)
        run_old, run_new = old[first_old:i], wanted[first_new:j]
        leading = next(names)
        same = run_old and run_new
        for number, length in enumerate(run_old):
            subscript = leading if number == 0 and same else next(names)
            subscripts += subscript
            lengths[subscript] = length
            uncut += "" if subscript == leading else subscript
        for number, length in enumerate(run_new):
            subscript = leading if number == 0 and same else next(names)
            result += subscript
            if subscript == leading:
                shared[subscript] = (lengths[subscript], length)
            else:
                lengths[subscript] = length
                uncut += subscript
    placed = x.placed if isinstance(x, ShardedTensor) else None
    for subscript, (_, after) in shared.items():  # it is cut only where both lengths can be
        if placed is not None and after % placed.cuts(subscripts.index(subscript)):
            uncut += subscript

    def compute(parts: list[Any], local: dict[str, int]) -> Any:
        shape = [
            length * local[subscript] // shared[subscript][0] if subscript in shared else length
            for subscript, length in zip(result, wanted, strict=True)
        ]
        return parts[0].reshape(shape)

    new = {subscript: lengths[subscript] for subscript in result if subscript not in shared}
    return Operation(
        name, [x], [subscripts], result, compute, uncut=uncut, linear=True, lengths=new, shape=tuple(wanted)
    )


def _subscripts(number: int) -> str:
    """Return subscripts for dimensions that no product uses: a, b, c, d, then m, n, …"""
    return ("abcdmnopqruwxyz")[:number]


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[str, str, str]:
    """Return the subscripts of two shapes that are repeated along each other, and of the result."""
    number = max(len(first), len(second))
    subscripts = _subscripts(number)
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
