"""Find out which gradient a step of plain SGD applied: the mean over the ranks, or the result of a typical mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dlab.exercises.sandbox import join, name_ranks

Weights = dict[str, torch.Tensor]  # by parameter name; also used for gradients


class Applied(NamedTuple):
    """The gradient that a rank applied to a parameter: `times` the `sum` over the ranks, the gradient of `rank 0`, …"""

    what: str
    times: float = 1.0


def find_applied(own: list[Weights], steps: list[Weights]) -> dict[tuple[int, str], Applied]:
    """Find which gradient was applied, for each rank and parameter, by comparing it with the gradients of all ranks."""
    return {
        (rank, name): _find(torch.stack([each[name] for each in own]), applied[name], rank)
        for rank, applied in enumerate(steps)
        for name in applied
    }


def _find(parts: torch.Tensor, applied: torch.Tensor, rank: int) -> Applied:
    known = {
        "sum": parts.sum(0),
        "own": parts[rank],
        "rank 0": parts[0],
        "the largest": parts.amax(0),
        "the smallest": parts.amin(0),
        "the product": parts.prod(0),
    }
    if close_tensor(applied, torch.zeros_like(applied)):
        return Applied("nothing")
    for what, gradient in known.items():
        times = float((applied * gradient).sum() / (gradient * gradient).sum())
        if close_tensor(applied, times * gradient):
            return Applied(what, float(f"{times:.6g}"))
    return Applied("other")


def explain_applied(
    applied: dict[tuple[int, str], Applied], ranks: int, talked: bool, late: bool, divisor: Callable[[], float]
) -> str:
    """Return a sentence that says what was wrong with the applied gradients and what to do about it.

    `talked`: messages were sent; `late`: the gradients hold the mean, but only after the step; `divisor()` returns the
    number by which the sum is divided when the number of ranks is different.
    """
    kinds = set(applied.values())
    if {kind.what for kind in kinds} == {"own", "rank 0"} and len({kind.times for kind in kinds}) == 1:
        kinds = {kind for kind in kinds if kind.what == "rank 0"}  # rank 0's own gradient is the gradient of rank 0
    if len(kinds) > 1:
        return _explain_unequal(applied, ranks)
    kind = kinds.pop()
    if kind.times < 0:
        return "the step goes uphill: optimizer.step() subtracts the gradient, so leave its sign as it is"
    if kind.what == "sum":
        return _explain_sum(kind.times, ranks, divisor)
    if kind == ("own", 1.0):
        return _explain_own_step(talked, late)
    if kind.what == "own":
        scaled = f"divided by {1 / kind.times:.4g}" if kind.times < 1 else f"multiplied by {kind.times:.4g}"
        return f"every rank applies its own gradient, {scaled}: the sum over all ranks must be in parameter.grad"
    if kind == ("rank 0", 1.0):
        return "every rank applies the gradient of rank 0: what the others have learned is lost. A mean needs them all"
    if kind.what.startswith("the "):
        return f"of the ranks' gradients, {kind.what} is applied: add them up, op='sum', and divide by their number"
    return (
        "the applied gradient is not the mean over ranks: for each parameter, sum parameter.grad over all ranks, "
        f"divide by {ranks}, and leave the result in parameter.grad"
    )


def _explain_sum(times: float, ranks: int, divisor: Callable[[], float]) -> str:
    if times == 1:
        return (
            f"the step is {ranks} times too long: the gradients are summed over {ranks} ranks and not divided by their "
            "number; parameter.grad /= self.transport.size does it in place"
        )
    if times > 1:
        return f"the step is too long: the sum over {ranks} ranks is multiplied by {times:.4g}; divide it by {ranks}"
    found = 1 / times
    if abs(found - ranks**2) < 1e-3 and abs(divisor() - found) > 1e-3:  # a plain 4 would also be 4 with 3 ranks
        return (
            f"the step is {ranks} times too short: the sum over {ranks} ranks was divided by {ranks**2}. Divide only "
            "once; op='mean' divides already"
        )
    return (
        f"you divide by {found:.4g}, but there are {ranks} ranks: divide by self.transport.size, which is right for "
        "any number of them"
    )


def _explain_own_step(talked: bool, late: bool) -> str:
    if late:
        return (
            "every rank takes a step along its own gradient, and averages afterwards: call optimizer.step() last, when "
            "the mean is in parameter.grad"
        )
    if talked:
        return (
            "every rank takes a step along its own gradient, although numbers were exchanged: the mean must be in "
            "parameter.grad before optimizer.step(), as parameter.grad.copy_(mean) puts it there"
        )
    return (
        "every rank takes a step along its own gradient: nothing is averaged, so sum the gradients over all ranks, "
        "divide by their number, and then call optimizer.step()"
    )


def _explain_unequal(applied: dict[tuple[int, str], Applied], ranks: int) -> str:
    """Explain gradients that differ: does the difference lie between parameters or between ranks?"""
    mean = {key: kind.what == "sum" and abs(kind.times * ranks - 1) < 1e-4 for key, kind in applied.items()}
    names = list(dict.fromkeys(name for _, name in applied))
    right = [name for name in names if all(mean[rank, name] for rank in range(ranks))]
    wrong = [name for name in names if name not in right]
    if right:
        return (
            f"{join(right)} {_are(right)} averaged, but {join(wrong)} {_are(wrong)} not: "
            "go through all parameters of the model, whatever their shape"
        )
    done = [rank for rank in range(ranks) if all(mean[rank, name] for name in names)]
    others = [rank for rank in range(ranks) if rank not in done]
    if done:
        return (
            f"{name_ranks(done)} applied the mean of all gradients, but {name_ranks(others)} did not: "
            "every rank needs it, to stay equal to the others"
        )
    return "the ranks applied different gradients: each must end with the mean of all ranks' gradients"


def close(one: Weights, other: Weights) -> bool:
    """Return whether all weights are equal up to rounding."""
    return all(close_tensor(one[name], other[name]) for name in other)


def close_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
