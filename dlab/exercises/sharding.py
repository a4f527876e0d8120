"""Two exercises of `07_operator_parallel.ipynb`: the strategy that sends nothing, and the bytes that a chain sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from numbers import Real
from typing import Any

import torch
from torch import nn

from dlab import ops
from dlab.exercises.calling import shorten
from dlab.sharding.communication import Transfer
from dlab.sharding.explanation import Explanation
from dlab.sharding.parallel import AutoParallel

RANKS, SAMPLES, FEATURES, HIDDEN = 8, 32, 784, 512  # of the first exercise: x[32, 784] times w[784, 512] on 8 ranks
CHAIN_RANKS, OUTPUTS = 16, 320
CHAIN: tuple[tuple[tuple[int, int], ...], ...] = (((4, 1), (1, 4)), ((4, 4),), ((4, 4), (4, 1)))
REAL = 4  # bytes of a float32


def check_strategy(strategy: Any) -> str:
    """Judge a strategy for x[32, 784] times w[784, 512] on 8 ranks: "well done …", or "not yet: …".

    Each rank must compute a part of its own, and the matmul must send nothing, forward and backward. w is a weight and
    gets a gradient, x are images and get none. What the result's own layout costs later is not counted.

    >>> check_strategy(((1, 8), (8, 1)))
    'not yet: the 784 columns of x and rows of w are cut into 8, …'
    """
    if isinstance(strategy, ops.Operator):
        if problem := _unsuitable(strategy):
            return f"not yet: {problem}."
        strategy = strategy.in_strategy
    if not isinstance(strategy, tuple | list) or not all(_is_cuts(each) for each in strategy):
        return (
            f"not yet: {shorten(strategy)} is not a strategy: give the cuts of x and those of w, as in "
            "((2, 4), (4, 1))."
        )
    try:
        plan = _explain([(strategy, (FEATURES, HIDDEN))], RANKS)
    except ValueError as problem:
        return f"not yet: {problem}."
    first, second = plan.rows[0].inputs
    rows, inner, columns = first.cuts(0), first.cuts(1), second.cuts(1)
    if rows * inner * columns < RANKS:
        return f"not yet: {_repeated(rows * inner * columns)}."
    sent = {direction: _own(plan, direction) for direction in ("forward", "backward")}
    if sent["forward"]:
        return (
            f"not yet: the {FEATURES} columns of x and rows of w are cut into {inner}, so each rank has only a partial "
            f"sum of its result, and the {_written(sent['forward'])} follows: leave the dimension that is summed over "
            "whole."
        )
    if sent["backward"]:
        return (
            f"not yet: forward nothing is sent, but the rows of x are cut into {rows}. Each rank gets the gradient of "
            f"w from its own {SAMPLES // rows} samples, and backward the {_written(sent['backward'])} follows: let all "
            "ranks see all rows."
        )
    return (
        f"well done: each rank holds {HIDDEN // columns} columns of w and computes as many columns of the result, with "
        "its own gradients: 0 bytes forward, 0 backward."
    )


def _unsuitable(operator: ops.Operator) -> str:
    """Return why an operator is not one of this exercise, or nothing: its strategy alone would not show it."""
    if type(operator).function not in (torch.matmul, torch.mm):
        return f"{shorten(operator)} is not a matmul: give the strategy of dlab.ops.MatMul()"
    if operator.settings.get("transpose_b"):
        return f"w is {FEATURES} × {HIDDEN} here and is not transposed: give the strategy without transpose_b"
    if operator.out_strategy is not None:
        return "the result may stay as it is cut: leave out_strategy away"
    return ""


def _is_cuts(entry: Any) -> bool:
    return hasattr(entry, "dims") or (isinstance(entry, tuple | list) and all(type(cut) is int for cut in entry))


def _repeated(parts: int) -> str:
    if parts == 1:
        return f"nothing is cut, so all {RANKS} ranks compute the same: give each rank a part of its own"
    return f"there are only {parts} parts, so {RANKS // parts} ranks at a time compute the same: make {RANKS} parts"


class _ExerciseChain(nn.Module):
    """Matmuls with their weights, which have no memory, and a ReLU where a strategy has one input."""

    def __init__(self, layers: Sequence[tuple[Any, tuple[int, int] | None]]) -> None:
        super().__init__()
        self.steps: list[tuple[ops.Operator, nn.Parameter | None]] = []
        for strategy, shape in layers:
            weight = None if shape is None else nn.Parameter(torch.empty(shape, device="meta"))
            operator = ops.ReLU() if weight is None else ops.MatMul()
            self.steps.append((operator.shard(tuple(strategy)), weight))
            self.register_parameter(f"w{len(self.steps)}", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply one operator after the other."""
        for operator, weight in self.steps:
            x = operator(x) if weight is None else operator(x, weight)
        return x


def _explain(layers: Sequence[tuple[Any, tuple[int, int] | None]], ranks: int) -> Explanation:
    return AutoParallel(_ExerciseChain(layers), ranks=ranks).explain(torch.empty(SAMPLES, FEATURES, device="meta"))


def _own(plan: Explanation, direction: str) -> list[Transfer]:
    """Return what the operators themselves send, without joining the result of the last one."""
    return [each for each in plan.messages if each.direction == direction and each.operator != "the result"]


def _written(transfers: list[Transfer]) -> str:
    names = " and the ".join(f"{each.collective} over {len(each.group)} ranks" for each in transfers)
    return f"{names}, {sum(each.bytes for each in transfers):,} bytes per rank,"


# ------------------------------------------------------------------------------ the bytes of a chain


def check_bytes(forward: Any, backward: Any) -> str:
    """Judge the bytes that a rank sends in a chain of three operators: "well done …", or "not yet: …".

    On 16 ranks: `matmul(x, w1)` with ((4, 1), (1, 4)), ReLU with ((4, 4),), `matmul(…, w2)` with ((4, 4), (4, 1)). x is
    32 × 784 and needs no gradient, w1 is 784 × 512, w2 is 512 × 320; all are float32. The result stays cut.

    >>> check_bytes(20480, 0)
    'not yet: forward it is not 20,480 bytes: …'
    """
    w1, w2 = (FEATURES, HIDDEN), (HIDDEN, OUTPUTS)
    plan = _explain([(CHAIN[0], w1), (CHAIN[1], None), (CHAIN[2], w2)], CHAIN_RANKS)
    right = {direction: sum(each.bytes for each in _own(plan, direction)) for direction in ("forward", "backward")}
    given = {"forward": forward, "backward": backward}
    for direction, value in given.items():
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"not yet: {direction} it is {shorten(value)}: give a number of bytes."
        given[direction] = float(value)
    if tuple(given.values()) == (right["backward"], right["forward"]):
        return "not yet: the two numbers have changed places: give forward first."
    for direction, value in given.items():
        if value != right[direction]:
            said = f"{value:,.10g}"
            return f"not yet: {direction} it is not {said} bytes: {_mistake(direction, value, right)}."
    return (
        f"well done: {right['forward']:,} bytes forward for the partial sums of the result, {right['backward']:,} "
        "backward for the gradients of both weights."
    )


@dataclass(frozen=True)
class _Sum:
    """One all-reduce: the numbers that a rank brings along, and of how many ranks."""

    local: int
    whole: int
    ranks: int = 4

    def bytes(self, wrong: Sequence[str] = ()) -> float:
        """Return the bytes that a rank sends, or what one gets by some mistakes."""
        ranks = CHAIN_RANKS if "ranks" in wrong else self.ranks
        sent = float(self.whole if "whole" in wrong else self.local)
        sent *= 1 if "twice" in wrong else 2
        sent *= 1 if "share" in wrong else (ranks - 1) / ranks
        sent *= 1 if "real" in wrong else REAL
        return sent * (CHAIN_RANKS if "all" in wrong else 1)


_MISTAKES = {
    "share": "an all-reduce over n ranks sends 2(n-1)/n of a tensor, and this is without (n-1)/n",
    "twice": "an all-reduce is a reduce-scatter and an all-gather, so there is a factor of 2",
    "real": "that is how many numbers are sent, and each of them has 4 bytes",
    "whole": "that is for whole tensors, or for 4 ranks together, and each rank sends of its own part only",
    "ranks": "that is for a group of all 16 ranks, and each all-reduce is among 4",
    "all": "that is what all 16 ranks send together, and the question is for one",
}
_RESULT = _Sum(prod((SAMPLES // 4, OUTPUTS)), prod((SAMPLES, OUTPUTS)))
_HIDDEN = _Sum(prod((SAMPLES // 4, HIDDEN // 4)), prod((SAMPLES, HIDDEN)))
_IMAGES = _Sum(prod((SAMPLES // 4, FEATURES)), prod((SAMPLES, FEATURES)))
_FIRST = _Sum(prod((FEATURES, HIDDEN // 4)), prod((FEATURES, HIDDEN)))
_SECOND = _Sum(prod((HIDDEN // 4, OUTPUTS)), prod((HIDDEN, OUTPUTS)))


def _mistake(direction: str, value: float, right: dict[str, int]) -> str:
    """Explain a wrong number by the mistake, or the two mistakes, that lead to it."""
    if direction == "forward":
        sums, special = {"the result": _RESULT}, _wrong_forward(right)
    else:
        sums, special = {"w1": _FIRST, "w2": _SECOND}, _wrong_backward(right)
    special[right[direction] / 1024] = "that is right in KiB, and the question is for bytes"
    special[2 * right[direction]] = "that is twice as much as a rank sends: what it receives is not counted again"
    for number in (1, 2):  # how many mistakes
        for wrong in combinations(_MISTAKES, number):
            if sum(each.bytes(wrong) for each in sums.values()) == value:
                return "; and ".join(_MISTAKES[each] for each in wrong)
        if value in special:
            return special[value]
    for which, one in sums.items():
        if any(one.bytes(wrong) == value for number in (0, 1) for wrong in combinations(_MISTAKES, number)):
            return f"that has the gradient of {which} alone in it, and both weights get one"
    hint = {
        "forward": "find the operator whose ranks hold partial sums, the shape of a rank's part of them, and the group",
        "backward": "find the weights of which several ranks hold copies, the shape of a rank's part, and the group",
    }
    return hint[direction]


def _wrong_forward(right: dict[str, int]) -> dict[float, str]:
    gathered = 3 * _RESULT.local * REAL
    return {
        0: "the second matmul's inner dimension is cut into 4, so its ranks hold partial sums that must be added up",
        right["forward"] + right["backward"]: "that is forward and backward together",
        right["forward"] + gathered: "that has the joining of the result in it, and the result stays cut",
        right["forward"] + _HIDDEN.bytes(): (
            "that has an all-reduce after the first matmul in it, whose inner dimension is not cut"
        ),
        _HIDDEN.bytes(): "the first matmul's inner dimension is not cut; look at the second",
    }


def _wrong_backward(right: dict[str, int]) -> dict[float, str]:
    return {
        0: "4 ranks hold the same part of w1, and each has its gradient from other rows of x, so they must be added up",
        right["forward"]: (
            "the gradient of a sum is the gradient of each summand, so the all-reduce has nothing to send backward; "
            "look at the weights, of which several ranks hold copies"
        ),
        right["forward"] + right["backward"]: (
            "that is forward and backward together, or an all-reduce that sends in both directions; it sends forward "
            "only"
        ),
        right["backward"] + _IMAGES.bytes(): (
            "that has the gradient of x in it, and x are images, which need no gradient"
        ),
        right["backward"] + _HIDDEN.bytes(): (
            "that has the gradient of what ReLU gives in it, and each rank has all of it for its own part"
        ),
    }
