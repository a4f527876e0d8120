"""Rules of look-ups in a table and of losses: which part of the table, or of the samples, a rank computes with."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch.nn.functional as F

from dlab.sharding.operation import Operation
from dlab.sharding.state import state
from dlab.sharding.subscripts import rule, shape_of, subscripts_of
from dlab.sharding.tensor import ShardedTensor


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


@rule(F.mse_loss)
def mse_loss(
    guess: Any, truth: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Operation:
    """`…,…->`: every dimension can be cut, which leaves a partial sum of the loss."""
    shape = shape_of(guess)
    if not (weight is size_average is reduce is None) or reduction not in ("mean", "sum") or shape != shape_of(truth):
        raise NotImplementedError(
            "dlab cuts MSELoss of two tensors of the same shape with reduction='mean' or 'sum' and without weight, not "
            f"of {shape} and {shape_of(truth)} with reduction={reduction!r}: write it as (a - b).square()"
        )
    subscripts, number = subscripts_of(len(shape)), prod(shape)

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        found = F.mse_loss(parts[0], parts[1], reduction=reduction)
        here = parts[0].numel()
        return found if reduction == "sum" or here == number else found * (here / number)

    return Operation("MSELoss", [guess, truth], [subscripts, subscripts], "", compute)
