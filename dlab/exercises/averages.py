"""Recognise what a learner's function made of the gradients, for the exercise of `00_tour.ipynb`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlab.exercises.sandbox import join, name_ranks

Gradients = dict[str, Tensor]  # by parameter name
Found = tuple[dict[str, Tensor | None], dict[str, Tensor | None]]  # a rank's gradients and weights after the call


def explain_wrong(own: Sequence[tuple[Gradients, Gradients]], found: Sequence[Found], calls: list[str]) -> str | None:
    """Say what is wrong with the gradients or weights; None if every gradient is the mean over the ranks.

    `own` holds the gradients and weights that each rank began with, `calls` the collectives that the ranks called.
    """
    if problem := _explain_weights(own, found):
        return problem
    results = [gradients for gradients, _ in found]
    for name, gradient in own[0][0].items():
        for rank, result in enumerate(results):
            tensor = result[name]
            if tensor is None:
                return f"the gradient of {name} on rank {rank} is None: put the mean into parameter.grad, and leave it"
            if tensor.shape != gradient.shape:
                return (
                    f"the gradient of {name} should have the shape {tuple(gradient.shape)} and has "
                    f"{tuple(tensor.shape)}: give each part its shape back, as with part.view_as(gradient)"
                )
    tensors = [{name: tensor for name, tensor in result.items() if tensor is not None} for result in results]
    return _explain_gradients([gradients for gradients, _ in own], tensors, calls)


def _explain_weights(own: Sequence[tuple[Gradients, Gradients]], found: Sequence[Found]) -> str | None:
    pairs = [(found[rank][1][name], own[rank][1][name], name) for rank in range(len(own)) for name in own[0][1]]
    if all(after is not None and torch.equal(after, before) for after, before, _ in pairs):
        return None
    means = {name: torch.stack([weights[name] for _, weights in own]).mean(0) for name in own[0][1]}
    if all(after is not None and _close(after, means[name]) for after, _, name in pairs):
        return "the weights are averaged, parameter.data: average the gradients, parameter.grad, and leave the weights"
    return "the weights have changed: change the gradients, parameter.grad, and leave the step to the optimizer"


def _explain_gradients(own: list[Gradients], found: list[Gradients], calls: list[str]) -> str | None:
    ranks, names = len(own), list(own[0])
    kinds: dict[tuple[int, str], str] = {}
    for name in names:
        parts = torch.stack([gradients[name] for gradients in own])
        for rank in range(ranks):
            kinds[rank, name] = _kind(found[rank][name], parts, rank)
    if set(kinds.values()) == {"mean"}:
        return None
    if set(kinds.values()) == {"own"}:
        return _SENTENCES["own, sent" if any("reduce" in call for call in calls) else "own"]
    for source in range(ranks):
        if all(kind == ("own" if rank == source else f"rank {source}") for (rank, _), kind in kinds.items()):
            return (
                f"every rank has the gradients of rank {source}: those of the others are lost. A mean needs all {ranks}"
            )
    if len(set(kinds.values())) == 1:
        return _explain_all_alike(kinds[0, names[0]], own, found)
    wrong = [name for name in names if any(kinds[rank, name] != "mean" for rank in range(ranks))]
    if len(wrong) < len(names):
        right = [name for name in names if name not in wrong]
        if {kinds[rank, name] for rank in range(ranks) for name in wrong} == {"order"}:
            return _explain_order(wrong)
        return (
            f"{join(right)} {_are(right)} averaged, but {join(wrong)} {_are(wrong)} not: "
            "go through all parameters of the model, whatever their shape"
        )
    done = [rank for rank in range(ranks) if all(kinds[rank, name] == "mean" for name in names)]
    if done:
        others = [rank for rank in range(ranks) if rank not in done]
        return (
            f"{name_ranks(done)} {_has(done)} the mean, but {name_ranks(others)} {_has(others)} not: "
            "every rank needs it, or their networks drift apart"
        )
    return _explain_all_alike("other", own, found)


def _explain_all_alike(kind: str, own: list[Gradients], found: list[Gradients]) -> str:
    ranks, name = len(own), next(iter(own[0]))
    if kind == "order":
        return _explain_order(list(own[0]))
    if kind in _SENTENCES:
        return _SENTENCES[kind].format(n=ranks, n2=ranks**2)
    means = {each: torch.stack([gradients[each] for gradients in own]).mean(0) for each in own[0]}
    if all(_close(_sorted(*result.values()), _sorted(*means.values())) for result in found):
        return (
            "the numbers are right, but they are in the wrong parameters: take the parts out of the packed tensor in "
            "the order in which they were put in"
        )
    if divisor := _divisor(found, means):
        return (
            f"the sum over the ranks was divided by {divisor:g}, and there are {ranks} ranks: "
            "divide by dlab.world_size(), which is right for any number of them"
        )
    wrong = int((found[0][name] - means[name]).abs().argmax())
    return (
        f"the gradient of {name} on rank 0 is not the mean over the ranks: its element {wrong} should be "
        f"{means[name].flatten()[wrong]:.4f} and is {found[0][name].flatten()[wrong]:.4f}. Sum each element over the "
        "ranks, and divide it by their number"
    )


def _kind(tensor: Tensor, parts: Tensor, rank: int) -> str:
    """Classify what a rank holds, given the ranks' own gradients of a parameter (`parts`): their mean, their sum, …"""
    ranks, mean = len(parts), parts.mean(0)
    candidates = {
        "mean": mean,
        "own": parts[rank],
        "sum": parts.sum(0),
        "twice": mean / ranks,
        "own divided": parts[rank] / ranks,
        "added": parts[rank] + mean,
        "zero": torch.zeros_like(mean),
        "largest": parts.amax(0),
        "smallest": parts.amin(0),
        "own mean": parts[rank].mean().expand_as(mean),
        "mean of all": mean.mean().expand_as(mean),
        **{f"rank {other}": parts[other] for other in range(ranks)},
    }
    for name, candidate in candidates.items():
        if _close(tensor, candidate):
            return name
    if torch.allclose(tensor, mean, rtol=0.02, atol=0.02):
        return "rounded"
    return "order" if _close(_sorted(tensor), _sorted(mean)) else "other"


_SENTENCES = {
    "own": "every gradient is still the rank's own: sum it over all ranks by all_reduce, divide by their number, and "
    "put the result into parameter.grad",
    "own, sent": "every gradient is still the rank's own, although there was an all-reduce: torch.cat makes a copy, so "
    "copy the parts of the result back, as with gradient.copy_(part.view_as(gradient))",
    "sum": "the gradients are the sum over the {n} ranks, not the mean: the division by their number, "
    "dlab.world_size(), is missing",
    "twice": "the sum over the {n} ranks was divided by {n2}: divide only once (ReduceOp.AVG and op='mean' divide "
    "already)",
    "own divided": "every gradient is the rank's own, divided by {n}: the sum over the ranks is missing, or was not "
    "copied back",
    "added": "the mean was added to the rank's own gradient: replace that gradient, with copy_ instead of +=",
    "zero": "every gradient is zero: the mean was lost on its way back into parameter.grad",
    "largest": "the gradients are the largest over the ranks, not the mean: reduce with ReduceOp.SUM",
    "smallest": "the gradients are the smallest over the ranks, not the mean: reduce with ReduceOp.SUM",
    "own mean": "every gradient is filled with the mean of its own elements: the exercise asks for the mean over the "
    "ranks, for each element by itself",
    "mean of all": "every gradient is filled with one number, the mean of all its elements: the exercise asks for the "
    "mean over the ranks, for each element by itself",
    "rounded": "the mean is right to two or three digits only: numbers of 16 bits round it. Pack and add the gradients "
    "as they are, in float32",
}


def _explain_order(names: list[str]) -> str:
    return (
        f"{join(names)} {'has' if len(names) == 1 else 'have'} the right numbers in the wrong places: "
        "undo flatten by view_as, without a transpose, so that each element comes back to where it was"
    )


def _divisor(found: list[Gradients], means: Gradients) -> float | None:
    """Return the number by which the sum was divided, if it is the same for all ranks and parameters."""
    name = next(iter(means))
    place = int(means[name].abs().argmax())
    share = float(found[0][name].flatten()[place] / means[name].flatten()[place])
    if not share or not all(_close(result[each], means[each] * share) for result in found for each in means):
        return None
    return round(len(found) / share, 4)


def _sorted(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
