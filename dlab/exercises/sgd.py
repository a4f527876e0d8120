"""The exercise of `03_sync_sgd.ipynb`, "write the step": every step must give the weights of a single process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import GeneratorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dlab.data.batches import take
from dlab.data.sampler import EpochSampler
from dlab.exercises.applied import Weights, close, close_tensor, explain_applied, find_applied
from dlab.exercises.calling import describe_error, describe_unreturned
from dlab.exercises.groups import process_groups
from dlab.exercises.own import explain_own, noticing
from dlab.exercises.sandbox import Attempt, attempt, count, join, name_ranks
from dlab.reduction import average_gradients
from dlab.strategies import DDP, AllReduceSGD, Strategy, SyncSGD, ZeRO
from dlab.transports import Recorder, Transport

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Join = Callable[[Transport], None]

RATE, BATCH, LIMIT = 0.1, 12, 20.0  # LIMIT: seconds for one case; a correct step takes a tenth of a second
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=RATE),
}
# ranks, samples, optimizer. Two ranks come first, as the simplest case. 48 samples are four full batches; with 41
# the last batch does not divide evenly.
CASES = [
    *((2, 48, "plain SGD"), (3, 48, "plain SGD"), (1, 48, "plain SGD")),
    *((3, 41, "plain SGD"), (2, 41, "momentum"), (2, 48, "Adam")),
]
OWN: list[Callable[..., Any]] = [
    *(average_gradients, SyncSGD.step, AllReduceSGD.begin, AllReduceSGD.step, DDP.begin, ZeRO.begin, ZeRO.step)
]
INSTEAD = "write the step yourself, with ring_allreduce(parameter.grad, self.transport) for the sum over ranks"


def check_step(strategy: Any) -> str:
    """Train with a strategy, `check_step(MySGD)`: "well done …", or "not yet: …" with the first thing to fix.

    The strategy is a class (or an instance) like `dlab.strategies.Strategy`. After every step, every rank must hold the
    weights of one process that trains on all samples of the global batch, and all ranks must agree to the last bit.

    >>> check_step(MySGD)
    'not yet: with 2 ranks and plain SGD, every rank takes a step along its own gradient: nothing is averaged …'
    """
    if not all(hasattr(strategy, name) for name in ("begin", "clear", "step", "end")):
        return f"not yet: {strategy!r} is not a strategy: give a class, as in class MySGD(dlab.strategies.Strategy)."
    if getattr(strategy.step, "__func__", strategy.step) is Strategy.step:
        return "not yet: it has no step of its own: write def step(self), which is called after every backward pass."
    with process_groups() as enter:
        for ranks, samples, optimizer in CASES:
            case = f"with {count(ranks, 'rank')} and {optimizer}"
            if problem := _StepTrial(strategy, ranks, samples, optimizer, enter).problem():
                return f"not yet: {case}, {problem}."
    return (
        "well done: on 1 to 3 ranks, with plain SGD, momentum and Adam, and where the last batch does not divide, "
        "every step is that of one process, and all ranks hold the same bits."
    )


class _Refused(Exception):
    """A step returned something that cannot be used. The message says why."""


@dataclass
class _StepRecord:
    """What a rank observed during one step of the learner's strategy."""

    updates: int = 0  # number of calls of optimizer.step()
    cleared: bool = False  # the gradients were gone when the optimizer was called
    talked: bool = False  # this rank sent a message
    weights: Weights = field(default_factory=dict)  # after the step
    gradients: Weights = field(default_factory=dict)


class _StepTrial:
    """Trains a small model with the learner's strategy on threads and in one process, and compares every step."""

    def __init__(self, strategy: Any, ranks: int, samples: int, optimizer: str, enter: Join) -> None:
        self.strategy, self.ranks, self.optimizer, self.enter = strategy, ranks, optimizer, enter
        make = torch.Generator().manual_seed(7)
        inputs = torch.randn(samples, 5, generator=make, dtype=torch.float64)
        self.data = TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=make))
        self.sampler = EpochSampler(self.data, ranks, BATCH)
        self.first = _network(make)
        self.own: list[str] = []  # dlab's own solutions that were called

    def problem(self) -> str | None:
        """Return what is wrong, in words that follow "with 2 ranks and Adam,", or None."""
        made = attempt(self._work, self.ranks, LIMIT)
        if self.own:
            return explain_own(self.own, INSTEAD)
        if made.deadlock:
            return f"there is a {made.deadlock}: every rank must take part in every exchange, in the same order"
        if made.failed:
            return _describe_failure(made)
        if made.rehearsal is None:
            who = name_ranks(made.stuck or list(range(self.ranks)))
            return describe_unreturned(who, bool(made.stuck), LIMIT)
        return self._wrong_weights(made.rehearsal)

    # training

    def _work(self, transport: Transport) -> list[_StepRecord]:
        self.enter(transport)
        with noticing(*OWN) as called:
            try:
                return self._train(transport)
            finally:
                self.own += called

    def _train(self, transport: Transport) -> list[_StepRecord]:
        model, notes = copy.deepcopy(self.first), list[_StepRecord]()

        def look(*_: Any) -> None:
            notes[-1].updates += 1
            notes[-1].cleared = not any(each.grad is not None and each.grad.any() for each in model.parameters())

        def talk(*_: Any) -> None:
            if notes:
                notes[-1].talked = True

        strategy = self.strategy() if isinstance(self.strategy, type) else copy.deepcopy(self.strategy)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        optimizer.register_step_pre_hook(look)
        module = strategy.begin(model, optimizer, Recorder(transport, talk))
        for step in range(self.sampler.steps):
            strategy.clear()
            self._backward(module, step, [transport.rank], self.sampler.weight(step, transport.rank))
            notes.append(_StepRecord())
            _check_told(strategy.step())
            notes[-1].weights, notes[-1].gradients = _weights(model), _gradients(model)
        strategy.end()
        return notes

    def _backward(self, module: nn.Module, step: int, ranks: list[int], weight: float = 1.0) -> None:
        positions = torch.cat([self.sampler.positions(0, step, rank) for rank in ranks])
        inputs, labels = take(self.data, positions)
        (F.cross_entropy(module(inputs), labels) * weight).backward()

    def _one_process(self) -> list[Weights]:
        """Train with plain torch on all samples of each global batch, and return the weights after each step."""
        model, notes = copy.deepcopy(self.first), []
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        for step in range(self.sampler.steps):
            optimizer.zero_grad()
            self._backward(model, step, list(range(self.ranks)))
            optimizer.step()
            notes.append(_weights(model))
        return notes

    def _models_averaged(self) -> list[Weights]:
        """Train with the mistake that plain SGD forgives: each rank takes its own step, then averages the weights."""
        models, notes = [copy.deepcopy(self.first) for _ in range(self.ranks)], []
        optimizers = [OPTIMIZERS[self.optimizer](model.parameters()) for model in models]
        for step in range(self.sampler.steps):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                self._backward(model, step, [rank], self.sampler.weight(step, rank))
                optimizer.step()
            ends = [_weights(model) for model in models]
            notes.append({name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]})
            for model in models:
                model.load_state_dict(notes[-1])
        return notes

    # explaining what is wrong

    def _wrong_weights(self, found: list[list[_StepRecord]]) -> str | None:
        wanted = self._one_process()
        for step in range(self.sampler.steps):
            notes = [by_step[step] for by_step in found]  # indexed by rank
            if all(close(note.weights, wanted[step]) for note in notes):
                unlike = [rank for rank, note in enumerate(notes) if not _same_bits(note.weights, notes[0].weights)]
                if unlike:
                    return (
                        f"the weights of rank 0 and {name_ranks(unlike)} differ in their last bits: they would drift "
                        "apart, so let all ranks add up in the same order"
                    )
            elif (told := _explain_update(notes)) or (step == 0 and self.optimizer == "plain SGD"):
                return told or self._explain_first_step(notes)
            else:
                return self._explain_later_step(step, [note.weights for note in notes], wanted)
        return None

    def _explain_first_step(self, notes: list[_StepRecord]) -> str:
        own, start = self._own_gradients(), _weights(self.first)
        mean = {name: torch.stack([each[name] for each in own]).mean(0) for name in start}
        return explain_applied(
            find_applied(own, [_applied(start, note) for note in notes]),
            self.ranks,
            talked=any(note.talked for note in notes),
            late=all(close(note.gradients, mean) for note in notes),
            divisor=self._divisor_elsewhere,
        )

    def _own_gradients(self) -> list[Weights]:
        """Return the gradients of each rank in the first step."""
        own, model = [], copy.deepcopy(self.first)
        for rank in range(self.ranks):
            model.zero_grad()
            self._backward(model, 0, [rank], self.sampler.weight(0, rank))
            own.append(_gradients(model))
        return own

    def _divisor_elsewhere(self) -> float:
        """Return the divisor of the sum with one rank more: is it a number that was written down?"""
        other = _StepTrial(self.strategy, self.ranks + 1, 48, "plain SGD", self.enter)
        made = attempt(other._work, other.ranks, LIMIT)
        if made.rehearsal is None:
            return 0.0
        steps = [_applied(_weights(self.first), notes[0]) for notes in made.rehearsal]
        kinds = set(find_applied(other._own_gradients(), steps).values())
        return 1 / kinds.pop().times if len(kinds) == 1 else 0.0

    def _explain_later_step(self, step: int, ends: list[Weights], wanted: list[Weights]) -> str:
        averaged = self._models_averaged()[step]
        if self.optimizer == "Adam" and all(close(end, averaged) for end in ends):
            return (
                "the weights are averaged after each rank has taken its own step. With SGD that gives the same result, "
                "since its step is proportional to the gradient; Adam's is not: average the gradients before "
                "optimizer.step()"
            )
        samples = self.sampler.counts(step)
        if len(set(samples)) > 1:
            return (
                f"all is right until step {step}, where the ranks have {join([str(each) for each in samples])} "
                f"samples: "
                "the loss is weighted for that already, so take the plain mean over ranks"
            )
        name = next(name for name in wanted[step] if any(not close_tensor(e[name], wanted[step][name]) for e in ends))
        return (
            f"{name} is right before step {step} and wrong after it: look at what a step keeps from the one before, "
            "and which gradient it applies"
        )


def _explain_update(notes: list[_StepRecord]) -> str | None:
    """Explain an optimizer that was not called exactly once with gradients present; None if it was."""
    if all(note.cleared for note in notes):
        return (
            "the gradients are cleared before they are applied: leave zero_grad() out of step(); the training clears "
            "them before the next backward pass"
        )
    if not any(note.updates for note in notes):
        return "the weights are not updated by the optimizer: call self.optimizer.step(), after averaging"
    if (most := max(note.updates for note in notes)) > 1:
        return f"optimizer.step() is called {most} times in one step: call it once, after all gradients are averaged"
    return None


def _check_told(told: Any) -> None:
    if isinstance(told, GeneratorType):
        raise _Refused("step() has a yield in it, so that nothing of it has run: use return")
    if not isinstance(told, dict) or not isinstance(told.get("wait"), int | float):
        raise _Refused(f"step() gave {told!r}: let it return the seconds that it waited, {{'wait': 0.0}}")


def _describe_failure(made: Attempt) -> str:
    error = made.failed[min(made.failed)]
    if isinstance(error, _Refused):
        return str(error)
    who = name_ranks(sorted(made.failed))
    if isinstance(error, TypeError) and "ReduceOp" in str(error):  # the original message is a page of C++ types
        return (
            f"{who} gave torch.distributed an op that it does not know: write op=dist.ReduceOp.SUM there; names such "
            "as 'sum' are for dlab.collectives"
        )
    hint = ": Strategy leaves its step to you" if isinstance(error, NotImplementedError) else ""
    return f"{who} ended in {describe_error(error)}{hint}"


def _network(make: torch.Generator) -> nn.Module:
    """Make a network of two named layers without touching the notebook's random numbers."""
    empty = partial(nn.utils.skip_init, nn.Linear, dtype=torch.float64)
    model = nn.Sequential(OrderedDict(hidden=empty(5, 4), tanh=nn.Tanh(), output=empty(4, 3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=make, dtype=torch.float64))
    return model


def _weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _gradients(model: nn.Module) -> Weights:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _applied(start: Weights, note: _StepRecord) -> Weights:
    return {name: (start[name] - note.weights[name]) / RATE for name in start}


def _same_bits(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)
