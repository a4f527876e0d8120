"""The exercise of `07_operator_parallel.ipynb`, "write the row-parallel layer": compared with one process's matmul."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlab.exercises.calling import describe_error, describe_unreturned, shorten
from dlab.exercises.groups import process_groups
from dlab.exercises.own import explain_own, noticing
from dlab.exercises.sandbox import attempt, count, name_ranks
from dlab.kinds import MESSAGE
from dlab.ops import Operator
from dlab.sharding.communication import AllReduce, Line
from dlab.sharding.parallel import AutoParallel
from dlab.transports import Recorder, Transport

LIMIT = 20.0  # seconds for one case; a right layer takes a hundredth of one
SAMPLES, FEATURES, OUTPUTS = 12, 24, 36  # 1 to 4 ranks share each of them equally
CASES = [(2, True), (1, True), (3, True), (4, True), (2, False)]  # ranks, and whether x needs a gradient
OWN: tuple[Callable[..., Any], ...] = (AllReduce.forward, Line.all_reduce, AutoParallel.__call__, Operator.__call__)
INSTEAD = "write x @ w and ring_allreduce(…, transport) yourself"


def check_row_parallel(layer: Any) -> str:
    """Try an autograd function, `layer.apply(x, w, transport)`: "well done …", or "not yet: …".

    Each rank calls it with its columns of x and its rows of w and must get the whole product x w. Backward each must
    get the gradients of its own parts. Tried on 1 to 4 ranks, with the bytes counted: an all-reduce of the product
    forward, nothing backward.

    >>> check_row_parallel(MyRowParallel)
    'not yet: with 2 ranks, each rank returns its own partial sum: …'
    """
    apply = getattr(layer, "apply", layer)
    if not callable(apply):
        return f"not yet: {shorten(layer)} is not a layer: write class MyRowParallel(torch.autograd.Function)."
    with process_groups() as join:
        for ranks, needed in CASES:
            if problem := _Layer(apply, ranks, needed, join).problem():
                case = f"with {count(ranks, 'rank')}" + ("" if needed else ", where x needs no gradient")
                return f"not yet: {case}, {problem.rstrip('.')}."
    return (
        "well done: on 1 to 4 ranks result and gradients are those of one process, with one all-reduce forward and "
        "nothing sent backward."
    )


@dataclass
class _LayerOutcome:
    """What a rank has after the forward and backward pass."""

    result: Tensor
    x: Tensor | None  # the gradients
    w: Tensor | None
    changed: str  # which of the tensors that are not the layer's own is no longer what it was
    forward: int = 0  # bytes that this rank has sent
    backward: int = 0


class _UnusableResult(Exception):
    """The layer returned something that cannot be used. The message says why."""


class _Layer:
    """Runs a learner's layer on the threads of a rehearsal, and one process's matmul beside it."""

    def __init__(self, apply: Callable[..., Any], ranks: int, needed: bool, join: Callable[[Transport], None]) -> None:
        self.apply, self.ranks, self.needed, self.join = apply, ranks, needed, join
        make = torch.Generator().manual_seed(7)
        self.x, self.w, self.gradient = (
            torch.randn(shape, generator=make, dtype=torch.float64)
            for shape in ((SAMPLES, FEATURES), (FEATURES, OUTPUTS), (SAMPLES, OUTPUTS))
        )
        self.result = self.x @ self.w
        self.own: list[str] = []
        self._lock = threading.Lock()

    def problem(self) -> str | None:
        """Return what is wrong, in words that follow "with 2 ranks,", or None."""
        made = attempt(self._work, self.ranks, LIMIT)
        if self.own:
            return explain_own(self.own, INSTEAD)
        if made.deadlock:
            return f"there is a {made.deadlock}: every rank must take part in the all-reduce"
        if made.failed:
            error = made.failed[min(made.failed)]
            who = name_ranks(sorted(made.failed))
            return str(error) if isinstance(error, _UnusableResult) else f"{who} ended in {describe_error(error)}"
        if made.rehearsal is None:
            return describe_unreturned(name_ranks(made.stuck or list(range(self.ranks))), bool(made.stuck), LIMIT)
        outcomes: list[_LayerOutcome] = list(made.rehearsal)
        return self._wrong_result(outcomes) or self._wrong_gradient(outcomes) or self._wrong_bytes(outcomes)

    # running

    def _work(self, transport: Transport) -> _LayerOutcome:
        with noticing(*OWN) as called:
            try:
                return self._pass(transport)
            finally:
                with self._lock:
                    self.own += called

    def _pass(self, transport: Transport) -> _LayerOutcome:
        sent: list[int] = []
        recorded = Recorder(transport, lambda kind, data: sent.append(data["bytes"]) if kind == MESSAGE else None)
        self.join(recorded)
        rank = transport.rank
        x = self.x.chunk(self.ranks, dim=1)[rank].clone().requires_grad_(self.needed)
        w = self.w.chunk(self.ranks, dim=0)[rank].clone().requires_grad_()
        kept = {"x": x.detach().clone(), "w": w.detach().clone()}
        result = self.apply(x, w, recorded)
        if not isinstance(result, Tensor):
            raise _UnusableResult(f"forward gives {shorten(result)}: return the product, a tensor")
        if result.shape != self.result.shape:
            raise _UnusableResult(
                f"forward gives a tensor of shape {tuple(result.shape)}, but the product has {tuple(self.result.shape)}"
            )
        if not result.requires_grad:
            raise _UnusableResult(
                "the result has no way back to w: return what MyRowParallel.apply gives, not .detach()"
            )
        outcome = _LayerOutcome(result.detach().clone(), None, None, "", forward=sum(sent))
        gradient = self.gradient.clone()
        sent.clear()
        result.backward(gradient)
        outcome.x, outcome.w, outcome.backward = x.grad, w.grad, sum(sent)
        now = {"x": x.detach(), "w": w.detach()} | {"the gradient": gradient}
        kept["the gradient"] = self.gradient
        outcome.changed = next((name for name in now if not torch.equal(now[name], kept[name])), "")
        return outcome

    # explaining what is wrong

    def _wrong_result(self, outcomes: list[_LayerOutcome]) -> str | None:
        for rank, outcome in enumerate(outcomes):
            if outcome.changed in ("x", "w"):
                return (
                    f"forward has changed {outcome.changed}, which is the caller's: make a new tensor for the product"
                )
            if _close(outcome.result, self.result):
                continue
            parts = [x @ w for x, w in zip(self.x.chunk(self.ranks, 1), self.w.chunk(self.ranks, 0), strict=True)]
            if _close(outcome.result, parts[rank]):
                return (
                    "each rank returns its own partial sum: add up the products of all ranks, by "
                    "ring_allreduce(product, transport)"
                )
            if (times := _times(outcome.result, self.result)) is not None:
                return f"forward gives {times:g} times the product: {_too_much(times, self.ranks)}"
            if torch.allclose(outcome.result.to(self.result.dtype), self.result, atol=1e-3):
                return (
                    f"the result of rank {rank} is right to a few digits only: x and w are float64 here, so compute in "
                    "the type of the inputs"
                )
            return f"the result of rank {rank} is not the product x w: forward is x @ w, and then the sum over ranks"
        return None

    def _wrong_gradient(self, outcomes: list[_LayerOutcome]) -> str | None:
        wanted = {
            "x": (self.gradient @ self.w.T).chunk(self.ranks, 1),
            "w": (self.x.T @ self.gradient).chunk(self.ranks, 0),
        }
        for rank, outcome in enumerate(outcomes):
            if outcome.changed:
                return "backward has changed the gradient that it is given, which is not its own: work on a copy"
            for name in ("x", "w") if self.needed else ("w",):
                found, right = getattr(outcome, name), wanted[name][rank]
                if found is None:
                    return f"the result is right, but {name} gets no gradient: backward returns one for x, w and None"
                if _close(found, right):
                    continue
                begin = f"the result is right, but the gradient of {name} is wrong"
                if (times := _times(found, right)) is not None:
                    return f"the result is right, but the gradient of {name} is {times:g} times what it should be: " + (
                        _gradient_too_much(times, self.ranks, outcome.backward)
                    )
                if outcome.backward:
                    return (
                        f"{begin}, and {outcome.backward:,} bytes are sent backward: every rank has the whole gradient "
                        "already, and its own part needs nothing from others"
                    )
                return f"{begin}: it is {'gradient @ w.T' if name == 'x' else 'x.T @ gradient'}"
        return None

    def _wrong_bytes(self, outcomes: list[_LayerOutcome]) -> str | None:
        back, forth = (sum(getattr(each, way) for each in outcomes) for way in ("backward", "forward"))
        least = 2 * (self.ranks - 1) * self.result.nbytes
        if back:
            return (
                f"result and gradients are right, but {back:,} bytes are sent backward: each rank has all that it needs"
            )
        if forth > least:
            return (
                f"result and gradients are right, but the ranks send {forth:,} bytes forward, and one all-reduce of "
                f"the product takes {least:,}: {_why_more(forth, least, self.ranks)}"
            )
        return None


def _too_much(times: float, ranks: int) -> str:
    if abs(times - 1 / ranks) < 1e-9:
        return "the partial sums are added up, not averaged"
    if abs(times - ranks) < 1e-9:
        return "the sum over ranks is taken twice"
    return "each rank's partial sum counts once"


def _gradient_too_much(times: float, ranks: int, sent: int) -> str:
    if abs(times - ranks) < 1e-9 and sent:
        return (
            "backward all-reduces as well, but the gradient of a sum is the gradient of each summand, and every rank "
            "has it already"
        )
    if abs(times - 1 / ranks) < 1e-9:
        return "nothing is averaged here, so do not divide by the number of ranks"
    return "use the gradient as it comes in"


def _why_more(forth: int, least: int, ranks: int) -> str:
    if forth == 2 * least:
        return "it is all-reduced twice"
    if 2 * forth == ranks * least:
        return "that is what naive_allreduce takes, so take ring_allreduce"
    return "send nothing but the product, and add it up by ring_allreduce"


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def _times(found: Tensor, right: Tensor) -> float | None:
    """Return by which factor the one is the other, if there is one."""
    if found.shape != right.shape:
        return None
    factor = float((found * right).sum() / (right * right).sum())
    return round(factor, 9) if _close(found, factor * right) else None
