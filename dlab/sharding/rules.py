"""How each function of torch is cut: the subscripts of its dimensions, and what a rank computes of its parts.

A rule is called like the function itself, with sharded tensors among the arguments, and returns an `Operation`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from dlab.sharding import reshaping  # noqa: F401  (fills the table of rules)
from dlab.sharding.operation import UNCUT, Operation
from dlab.sharding.state import state
from dlab.sharding.subscripts import broadcast, dim_of, is_tensor, rule, shape_of, subscripts_of
from dlab.sharding.tensor import ShardedTensor

# products


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.Tensor.mm, torch.Tensor.bmm
)
def matmul(first: Any, second: Any, transpose_b: bool = False) -> Operation:
    """`ij,jk->ik`, with the subscripts of a batch in front; a cut of j leaves a partial sum."""
    a, b = len(shape_of(first)), len(shape_of(second))
    if a < 1 or b < 2:
        raise ValueError(f"dlab cuts products of matrices, not of tensors with {a} and {b} dimensions")
    batch = broadcast(shape_of(first)[:-2], shape_of(second)[:-2])
    row = "i" if a > 1 else ""
    subscripts = [batch[0] + row + "j", batch[1] + ("kj" if transpose_b else "jk")]

    def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
        return torch.matmul(parts[0], parts[1].mT if transpose_b else parts[1])

    return Operation("MatMul", [first, second], subscripts, batch[2] + row + "k", compute)


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


_LINEAR = {torch.neg, torch.detach}  # may be applied to the parts of a sum


def _unary(function: Any) -> Callable[..., Operation]:
    def rule_of_one(x: Any, *args: Any, **kwargs: Any) -> Operation:
        name = getattr(function, "__name__", "").title()
        if kwargs.pop("inplace", False):
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
    (torch.exp, torch.Tensor.exp),
    (torch.sqrt, torch.Tensor.sqrt),
    (torch.Tensor.float,),
    (torch.Tensor.double,),
    (torch.square, torch.Tensor.square),
    (torch.neg, torch.Tensor.neg, torch.Tensor.__neg__),
    (torch.abs, torch.Tensor.abs),
    (torch.log, torch.Tensor.log),
    (torch.rsqrt, torch.Tensor.rsqrt),
    (torch.reciprocal, torch.Tensor.reciprocal),
    (torch.clamp, torch.Tensor.clamp),
    (torch.detach, torch.Tensor.detach),
    (torch.zeros_like,),
    (torch.ones_like,),
):
    rule(*_functions)(_unary(_functions[0]))


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

        def compute(parts: list[Any], _: dict[str, int]) -> Any:
            return function(parts[0], dim=dim, dtype=dtype)

        return Operation(name, [x], [subscripts], subscripts, compute, uncut=subscripts[dim_of(dim, shape_of(x), name)])

    return rule_along


rule(torch.softmax, F.softmax, torch.Tensor.softmax)(_along("Softmax", torch.softmax))
rule(torch.log_softmax, F.log_softmax, torch.Tensor.log_softmax)(_along("LogSoftmax", torch.log_softmax))


@rule(F.layer_norm)
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Operation:
    """The dimensions that are normalised cannot be cut; all others can."""
    size = len(tuple(normalized_shape))
    subscripts = subscripts_of(len(shape_of(x)))
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
        subscripts = subscripts_of(len(shape))
        every = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
        gone = {dim_of(each, shape, name) for each in every} if shape else set()
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
def embedding(
    ids: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operation:
    """`…,ve->…e`. Where the rows v are cut, a rank looks up those that it has, zero for the others: a partial sum."""
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError(
            "dlab cuts embeddings without padding_idx, max_norm, scale_grad_by_freq and sparse: leave them out"
        )
    rows, (total, width) = subscripts_of(len(shape_of(ids))), shape_of(weight)

    def compute(parts: list[Any], lengths: dict[str, int]) -> Any:
        here, table = parts
        if lengths["v"] == total:
            return F.embedding(here, table)
        assert state.world is not None and state.found is not None
        if not here.is_meta and here.numel() and not 0 <= int(here.min()) <= int(here.max()) < total:
            raise IndexError(
                f"Embedding: the table has the rows 0 to {total - 1}, but row "
                f"{int(here.min() if here.min() < 0 else here.max())} is looked up"
            )
        shifted = here - state.found.inputs[1].slices_of(state.world.rank, (total, width))[0].start
        found = (shifted >= 0) & (shifted < lengths["v"])
        return F.embedding(shifted.where(found, 0), table) * found.unsqueeze(-1).to(table.dtype)

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
    function = partial(F.cross_entropy, label_smoothing=label_smoothing)
    plain = weight is size_average is reduce is None
    return _loss("CrossEntropy", function, scores, labels, plain, ignore_index, reduction)


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
    plain = weight is size_average is reduce is None
    return _loss("NLLLoss", F.nll_loss, scores, labels, plain, ignore_index, reduction)


def _loss(
    name: str, function: Any, scores: Any, labels: Any, plain: bool, ignore_index: int, reduction: str
) -> Operation:
    """The losses of a rank's samples, divided by the number of all samples whose label counts."""
    samples, by_class = shape_of(scores)[:1], len(shape_of(labels)) == 2  # labels are then probabilities
    if not plain or reduction not in ("mean", "sum") or len(shape_of(scores)) != 2 or len(shape_of(labels)) > 2:
        raise NotImplementedError(
            f"dlab cuts {name} of scores (samples, classes) with reduction='mean' or 'sum' and without weight: give "
            "it such scores, or compute it outside of the network"
        )
    number = 1 if reduction == "sum" else samples[0]
    mine = labels.local() if isinstance(labels, ShardedTensor) else labels
    whole = not isinstance(labels, ShardedTensor) or not labels.placed.used
    may_ignore = reduction == "mean" and not by_class and not mine.is_meta
    if whole and may_ignore:
        number = int((mine != ignore_index).sum())

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        if by_class:
            return function(parts[0], parts[1], reduction="sum") / number
        if may_ignore and not whole and bool((parts[1] == ignore_index).any()):
            raise ValueError(
                f"{name}: a label is {ignore_index}, which does not count, and the labels are cut, so that no rank "
                "knows how many do: use reduction='sum' and divide by that number"
            )
        return function(parts[0], parts[1], reduction="sum", ignore_index=ignore_index) / number

    return Operation(name, [scores, labels], ["bc", "bc" if by_class else "b"], "", compute, uncut="c")
