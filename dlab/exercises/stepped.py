"""Recognise what a learner's sharded step made of the weights, for the exercise of `09_sharded_optimizers.ipynb`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlab.exercises.sandbox import join, name_ranks

RATE, MOMENTUM = 0.1, 0.9
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # from velocity and gradient to the velocity and the step


def explain_first_step(found: Sequence[Tensor], start: Tensor, gradients: Tensor, talked: bool, returned: bool) -> str:
    """Say what is wrong with the weights after the first step; `gradients` has a row for each rank.

    `talked`: messages were sent; `returned`: the function returned a tensor.
    """
    ranks = len(found)
    cuts = [chunk.tolist() for chunk in torch.arange(len(start)).tensor_split(ranks)]
    kinds = {
        (rank, part): _kind((start - weights)[cut], gradients[:, cut], rank, part)
        for rank, weights in enumerate(found)
        for part, cut in enumerate(cuts)
        if cut
    }
    alike = set(kinds.values())
    if alike == {"nothing"}:
        return _unchanged(returned, talked)
    if ranks > 1 and all(_close(start - weights, RATE * gradients[0]) for weights in found):
        return "all ranks step along the gradient of rank 0: what the others have learned is lost, so take the mean"
    if problem := _misplaced(found, start, gradients, cuts):
        return problem
    if len(alike) == 1:
        return _everywhere(alike.pop(), ranks, talked)
    own = {kind for (rank, part), kind in kinds.items() if rank == part}
    others = {kind for (rank, part), kind in kinds.items() if rank != part}
    if others == {"nothing"} and len(own) == 1:
        return _own_part_only(own.pop(), ranks, talked)
    if len(own) == 1 and all(kind in ("own", "of its owner") for kind in alike):
        return (
            "every part is updated by one rank and has come to all, but along the gradient of that rank alone: "
            "reduce-scatter the gradients first, which gives each rank the mean of its part over all ranks"
        )
    done = [rank for rank in range(ranks) if all(kinds[key] == "mean" for key in kinds if key[0] == rank)]
    if done:
        rest = [rank for rank in range(ranks) if rank not in done]
        return (
            f"{name_ranks(done)} {'has' if len(done) == 1 else 'have'} the right weights, but {name_ranks(rest)} "
            f"{'has' if len(rest) == 1 else 'have'} not: all ranks must end with the same ones"
        )
    if own == {"mean"}:
        return (
            "each rank has updated its own part rightly, but what it has of the other parts is wrong: look at the "
            "all-gather of the parts"
        )
    parts = sorted({part for (_, part), kind in kinds.items() if kind != "mean"})
    if len(parts) < len({part for _, part in kinds}):
        which = f"part {parts[0]} is" if len(parts) == 1 else f"parts {join([str(part) for part in parts])} are"
        return (
            f"{which} wrong, and the others are right: the parts have "
            f"{join([str(len(cut)) for cut in cuts])} weights here, as weights.tensor_split({ranks}) cuts them"
        )
    return _otherwise(found, start, gradients)


def _kind(step: Tensor, gradients: Tensor, rank: int, part: int) -> str:
    """Classify by which gradient a part of the weights was changed: `mean`, `sum`, `own 2`, …"""
    mean = gradients.mean(0)
    if _close(step, torch.zeros_like(step)):
        return "nothing"
    known = {"mean": mean, "own": gradients[rank], "of its owner": gradients[part], "of rank 0": gradients[0]}
    for name, gradient in known.items():
        if _close(step, RATE * gradient):
            return name
    if len(step) > 1:  # a single number is any multiple of another
        for name, gradient in known.items():
            times = float((step * gradient).sum() / (gradient * gradient).sum())
            if _close(step, times * gradient):
                return f"{name} {times / RATE:.6g}"
    return "other"


def _unchanged(returned: bool, talked: bool) -> str:
    if returned:
        return (
            "the weights have not changed, and what the function returns is not used: write into them, as "
            "weights.copy_(…) does"
        )
    if talked:
        return (
            "the weights have not changed, although messages were sent: write into them, as part -= … does for a part "
            "of weights.tensor_split(n), or weights.copy_(…); weights = … makes another of the same name"
        )
    return (
        "the weights have not changed: reduce-scatter the gradient, update this rank's part of the weights in place, "
        "and all-gather the parts"
    )


def _everywhere(kind: str, ranks: int, talked: bool) -> str:
    """Explain weights that are all changed in the same wrong way."""
    name, _, times = kind.partition(" ")
    if name == "own":
        sent = ", although messages were sent" if talked else ""
        return f"every rank steps along its own gradient{sent}: reduce-scatter gives it the mean over all, for its part"
    if name == "mean":
        return _scaled(float(times), ranks)
    return "the step is not along the mean gradient: reduce-scatter with op='mean', and step by 0.1 of the velocity"


def _scaled(times: float, ranks: int) -> str:
    """Explain a step along the mean gradient that is too long or too short."""
    if times < 0:
        return "the step goes uphill: subtract 0.1 times the velocity from the weights"
    if abs(times - ranks) < 1e-4:
        return (
            f"the step is {ranks} times too long: the gradients are added up over {ranks} ranks and not divided by "
            "their number; op='mean' does both"
        )
    if abs(times - 1 / ranks) < 1e-4:
        return f"the step is {ranks} times too short: the sum over the ranks is divided by {ranks} twice"
    if abs(times - (1 - MOMENTUM)) < 1e-4:
        return "the step is 10 times too short: the velocity takes the whole gradient, and 0.9 of itself"
    if abs(times - 1 / RATE) < 1e-4:
        return "the step is 10 times too long: multiply the velocity by the learning rate, 0.1"
    if abs(times - 1 - MOMENTUM) < 1e-4:
        return "the step is 1.9 times too long, as with Nesterov's momentum: step along the velocity itself"
    return f"the step is {times:.4g} times as long as it should be: 0.1 times the velocity, which begins with the mean"


def _own_part_only(kind: str, ranks: int, talked: bool) -> str:
    """Explain weights of which each rank has changed its own part only."""
    if kind == "mean":
        return (
            "each rank has updated its own part, and the other parts are as they were: the all-gather is missing, by "
            "which every rank gets the updated parts of all"
        )
    if kind.startswith(("own", "of its owner")):
        return (
            "each rank has updated its own part along its own gradient, and nothing else: reduce-scatter the gradient "
            "before, and all-gather the parts afterwards"
        )
    return (
        "each rank has updated its own part only, and not along the mean gradient: reduce-scatter with op='mean' "
        "before, and all-gather the parts afterwards"
    )


def _misplaced(found: Sequence[Tensor], start: Tensor, gradients: Tensor, cuts: list[list[int]]) -> str | None:
    """Explain the right parts in wrong places, or updates of a part that is not this rank's."""
    ranks, right = len(found), start - RATE * gradients.mean(0)
    if ranks == 1:
        return None
    if all(_close(weights.sort().values, right.sort().values) and not _close(weights, right) for weights in found):
        return (
            "the numbers are right, but in wrong places: rank r has part r, so put the parts together in the order of "
            "the ranks"
        )
    swapped = torch.cat([gradients.mean(0)[cuts[(part + 1) % ranks]] for part in range(ranks)])
    backwards = torch.cat([gradients.mean(0)[cuts[part - 1]] for part in range(ranks)])
    for shifted in (swapped, backwards):
        for weights in found:
            step = start - weights
            moved = [cut for cut in cuts if cut and not _close(step[cut], torch.zeros(len(cut), dtype=step.dtype))]
            if moved and all(_close(step[cut], RATE * shifted[cut]) for cut in moved):
                return (
                    "each rank updates its weights along the gradient of another rank's part: rank r has part r of "
                    "both, gradient and weights"
                )
    return None


def _otherwise(found: Sequence[Tensor], start: Tensor, gradients: Tensor) -> str:
    right = start - RATE * gradients.mean(0)
    rank = next(rank for rank, weights in enumerate(found) if not _close(weights, right))
    place = int((found[rank] - right).abs().nan_to_num(torch.inf).argmax())
    return (
        f"weight {place} on rank {rank} should be {right[place]:.4f} after the first step and is "
        f"{found[rank][place]:.4f}: mean gradient of its part, velocity, update, and then the parts of all ranks"
    )


# ------------------------------------------------------------------------------------------ later steps


def one_process(start: Tensor, means: Tensor, rule: Rule | None = None) -> list[Tensor]:
    """Return the weights after each step along these mean gradients: of SGD with momentum, or by another rule."""
    rule = rule or _usual
    weights, velocity, after = start.clone(), torch.zeros_like(start), []
    for mean in means:
        velocity, step = rule(velocity, mean)
        weights = weights - RATE * step
        after.append(weights)
    return after


def _usual(velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    new = MOMENTUM * velocity + gradient
    return new, new


def _damped_later(velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    new = MOMENTUM * velocity + (1 - MOMENTUM) * gradient if velocity.any() else gradient
    return new, new


_RULES: dict[str, Rule] = {
    "each step is along its gradient alone: keep the velocity in state, and make it 0.9 of itself plus the mean "
    "gradient": lambda velocity, gradient: (gradient, gradient),
    "the velocity remembers only the gradient before: put the new velocity into state, not the gradient": (
        lambda velocity, gradient: (gradient, MOMENTUM * velocity + gradient)
    ),
    "the velocity adds up all gradients: keep only 0.9 of the old one in each step": (
        lambda velocity, gradient: (velocity + gradient, velocity + gradient)
    ),
    "the velocity takes only 0.1 of each new gradient: take the whole gradient, and 0.9 of the old velocity": (
        _damped_later
    ),
    "the old velocity is subtracted: add 0.9 of it to the gradient": (
        lambda velocity, gradient: (gradient - MOMENTUM * velocity, gradient - MOMENTUM * velocity)
    ),
    "the velocity is kept as it was in the first step: put the new one into state in every step": (
        lambda velocity, gradient: (velocity if velocity.any() else gradient, MOMENTUM * velocity + gradient)
    ),
    "0.1 of the old velocity is kept, and it is to be 0.9: 0.1 is the learning rate": (
        lambda velocity, gradient: (RATE * velocity + gradient, RATE * velocity + gradient)
    ),
}


def explain_later_step(step: int, found: Sequence[Sequence[Tensor]], start: Tensor, means: Tensor) -> str:
    """Say why the weights are right after the first step and wrong after a later one; `found` is by step and rank."""
    for told, rule in _RULES.items():
        wrong = one_process(start, means, rule)
        if all(_close(weights, wrong[step]) for weights in found[step]):
            return f"the first step is right, but the momentum is not: {told}"
    right = one_process(start, means)
    ranks = len(found[step])
    cuts = torch.arange(len(start)).tensor_split(ranks)
    for rank, weights in enumerate(found[step]):
        fine = [bool(_close(weights[cut], right[step][cut])) for cut in cuts]
        if ranks > 1 and fine[rank] and not all(fine):
            return (
                f"after step {step}, counted from 0, rank {rank} has its own part right and others not: gather the "
                "parts of all ranks in every step"
            )
    return (
        f"all is right until step {step}, counted from 0: look at what a step keeps from the one before. The memory of "
        "gradient is used again for the next one, so what state keeps must be a tensor of its own"
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-9)
