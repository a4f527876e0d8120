"""The exercise of `03_sync_sgd.ipynb`, "write the step": after every step it must hold the weights of one process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dlab.data.batches import take
from dlab.data.dealing import Dealer
from dlab.exercises.playing import attempt, count, join, name_ranks
from dlab.transports import Transport

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Weights = dict[str, torch.Tensor]

RATE, BATCH, LIMIT = 0.1, 12, 20.0  # LIMIT: seconds for one case, which takes a right step a tenth of one
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=RATE),
}
# ranks, samples, optimizer; two ranks first, where there is the least to think of. 48 samples are four full batches,
# of 41 the last batch is one that does not divide.
CASES = [
    *((2, 48, "plain SGD"), (3, 48, "plain SGD"), (1, 48, "plain SGD")),
    *((3, 41, "plain SGD"), (2, 41, "momentum"), (2, 48, "Adam")),
]


def check_step(strategy: Any) -> str:
    """Train with a strategy, `check_step(MySGD)`: "well done …", or "not yet: …" with the first thing to mend.

    It is a class (or an instance) like `dlab.strategies.Strategy`. Asked for is, after every step and on every rank,
    what one process would hold that trains on all samples of the global batch; the ranks agree to the last bit.

    >>> check_step(MySGD)
    'not yet: with 2 ranks and plain SGD, every rank takes a step along its own gradient: nothing is averaged …'
    """
    if not all(hasattr(strategy, name) for name in ("begin", "clear", "step", "end")):
        return f"not yet: {strategy!r} is no strategy: give a class, as in class MySGD(dlab.strategies.Strategy)."
    for ranks, samples, optimizer in CASES:
        case = f"with {count(ranks, 'rank')} and {optimizer}"
        if problem := _Trial(strategy, ranks, samples, optimizer).problem():
            return f"not yet: {case}, {problem}."
    return (
        "well done: on 1 to 3 ranks, with plain SGD, momentum and Adam, and where the last batch does not divide, "
        "every step is that of one process, and all ranks hold the same bits."
    )


class _Trial:
    """A small training, by the learner's strategy on threads and by one process; notes the weights after every step."""

    def __init__(self, strategy: Any, ranks: int, samples: int, optimizer: str) -> None:
        self.strategy, self.ranks, self.optimizer = strategy, ranks, optimizer
        make = torch.Generator().manual_seed(7)
        inputs = torch.randn(samples, 5, generator=make, dtype=torch.float64)
        self.data = TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=make))
        self.dealer = Dealer(self.data, ranks, BATCH)
        self.first = _network(make)

    def problem(self) -> str | None:
        """What is wrong, in words that follow "with 2 ranks and Adam,"; None if nothing is."""
        made = attempt(self._work, self.ranks, LIMIT)
        if made.deadlock:
            return f"there is a {made.deadlock}: every rank must take part in every exchange, in the same order"
        if made.failed:
            return made.tell_failure("step")
        if made.rehearsal is None:
            return f"{name_ranks(made.stuck)} had not returned after {LIMIT:g} s: look for a loop that does not end"
        return self._wrong_weights(made.rehearsal)

    # the trainings

    def _work(self, wire: Transport) -> list[Weights]:
        model = copy.deepcopy(self.first)
        strategy = self.strategy() if isinstance(self.strategy, type) else copy.deepcopy(self.strategy)
        module = strategy.begin(model, OPTIMIZERS[self.optimizer](model.parameters()), wire)
        notes = []
        for step in range(self.dealer.steps):
            strategy.clear()
            self._backward(module, step, [wire.rank], self.dealer.weight(step, wire.rank))
            told = strategy.step()
            if not isinstance(told, dict) or "wait" not in told:
                raise TypeError(f"step() gave {told!r}: let it return the seconds that it waited, {{'wait': 0.0}}")
            notes.append(_weights(model))
        strategy.end()
        return notes

    def _backward(self, module: nn.Module, step: int, ranks: list[int], weight: float = 1.0) -> None:
        positions = torch.cat([self.dealer.positions(0, step, rank) for rank in ranks])
        inputs, labels = take(self.data, positions)
        (F.cross_entropy(module(inputs), labels) * weight).backward()

    def _one_process(self) -> list[Weights]:
        """Plain torch on all samples of each global batch."""
        model, notes = copy.deepcopy(self.first), []
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        for step in range(self.dealer.steps):
            optimizer.zero_grad()
            self._backward(model, step, list(range(self.ranks)))
            optimizer.step()
            notes.append(_weights(model))
        return notes

    def _models_averaged(self) -> list[Weights]:
        """The mistake that plain SGD forgives: every rank takes its own step, then the weights are averaged."""
        models, notes = [copy.deepcopy(self.first) for _ in range(self.ranks)], []
        optimizers = [OPTIMIZERS[self.optimizer](model.parameters()) for model in models]
        for step in range(self.dealer.steps):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                self._backward(model, step, [rank], self.dealer.weight(step, rank))
                optimizer.step()
            ends = [_weights(model) for model in models]
            notes.append({name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]})
            for model in models:
                model.load_state_dict(notes[-1])
        return notes

    # what is wrong

    def _wrong_weights(self, found: list[list[Weights]]) -> str | None:
        wanted = self._one_process()
        for step in range(self.dealer.steps):
            ends = [notes[step] for notes in found]  # by rank
            if all(_close(end, wanted[step]) for end in ends):
                unlike = [rank for rank, end in enumerate(ends) if not _same_bits(end, ends[0])]
                if unlike:
                    return (
                        f"the weights of rank 0 and {name_ranks(unlike)} differ in their last bits: they would drift "
                        "apart, so let all ranks add up in the same order"
                    )
            elif step == 0 and self.optimizer == "plain SGD":
                return self._tell_first_step(ends)
            else:
                return self._tell_later_step(step, ends, wanted)
        return None

    def _tell_first_step(self, ends: list[Weights]) -> str:
        """A step of plain SGD shows the gradient that was applied: which one was it, for each parameter and rank?"""
        own, model = [], copy.deepcopy(self.first)
        for rank in range(self.ranks):
            model.zero_grad()
            self._backward(model, 0, [rank], self.dealer.weight(0, rank))
            own.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
        start = _weights(self.first)
        verdicts: dict[tuple[int, str], str] = {}
        for rank, end in enumerate(ends):
            for name in start:
                applied, parts = (start[name] - end[name]) / RATE, torch.stack([each[name] for each in own])
                verdicts[rank, name] = _verdict(applied, parts, rank)
        return self._tell_verdicts(verdicts)

    def _tell_verdicts(self, verdicts: dict[tuple[int, str], str]) -> str:
        kinds = set(verdicts.values())
        if kinds == {"own", "rank 0"}:
            kinds = {"rank 0"}  # which is rank 0's own
        if len(kinds) == 1:
            return _SENTENCES[kinds.pop()].format(n=self.ranks, n2=self.ranks**2)
        by_name = {name: {verdicts[rank, name] for rank in range(self.ranks)} for _, name in verdicts}
        right = [name for name, kinds in by_name.items() if kinds == {"mean"}]
        wrong = [name for name, kinds in by_name.items() if kinds != {"mean"}]
        if right:
            return (
                f"{join(right)} {_are(right)} averaged, but {join(wrong)} {_are(wrong)} not: "
                "go through all parameters of the model, whatever their shape"
            )
        done = [rank for rank in range(self.ranks) if all(verdicts[rank, name] == "mean" for name in by_name)]
        others = [rank for rank in range(self.ranks) if rank not in done]
        if done:
            return (
                f"{name_ranks(done)} applied the mean of all gradients, but {name_ranks(others)} did not: "
                "every rank needs it, to stay equal to the others"
            )
        return "the ranks applied different gradients: each must end with the mean of all ranks' gradients"

    def _tell_later_step(self, step: int, ends: list[Weights], wanted: list[Weights]) -> str:
        averaged = self._models_averaged()[step]
        if self.optimizer == "Adam" and all(_close(end, averaged) for end in ends):
            return (
                "the weights are averaged after a step of each rank's own. With SGD that comes to the same, whose step "
                "is proportional to the gradient; Adam's is not: average the gradients before optimizer.step()"
            )
        samples = self.dealer.counts(step)
        if len(set(samples)) > 1:
            return (
                f"all is well until step {step}, where the ranks have {join([str(each) for each in samples])} samples: "
                "the loss is weighted for that already, so take the plain mean over ranks"
            )
        name = next(name for name in wanted[step] if any(not _close_tensor(e[name], wanted[step][name]) for e in ends))
        return (
            f"{name} is right before step {step} and wrong after it: look at what a step keeps from the one before, "
            "and which gradient it applies"
        )


_SENTENCES = {
    "own": "every rank takes a step along its own gradient: nothing is averaged, so sum the gradients over all ranks, "
    "divide by their number, and then call optimizer.step()",
    "sum": "the step is {n} times too long: the gradients are summed over {n} ranks and not divided by their number",
    "twice": "the step is {n} times too short: the sum over {n} ranks was divided by {n2}. Divide only once; op='mean' "
    "divides already",
    "own divided": "every rank applies its own gradient, divided by {n}: the sum over all ranks is missing",
    "nothing": "the weights have not changed: call self.optimizer.step(), after averaging",
    "rank 0": "every rank applies the gradient of rank 0: what the others have learned is lost. A mean needs them all",
    "mean": "the weights are right",
    "other": "the applied gradient is not the mean over ranks: for each parameter, sum parameter.grad over all ranks, "
    "divide by {n}, and leave the result in parameter.grad",
}


def _verdict(applied: torch.Tensor, parts: torch.Tensor, rank: int) -> str:
    """Which gradient was applied to a parameter: the mean of the ranks' own ones (`parts`), or which other?"""
    ranks = len(parts)
    candidates = {
        "mean": parts.mean(0),
        "own": parts[rank],
        "sum": parts.sum(0),
        "twice": parts.mean(0) / ranks,
        "own divided": parts[rank] / ranks,
        "nothing": torch.zeros_like(applied),
        "rank 0": parts[0],
    }
    return next((name for name, gradient in candidates.items() if _close_tensor(applied, gradient)), "other")


def _network(make: torch.Generator) -> nn.Module:
    """Two layers with names, without a draw from the notebook's own random numbers."""
    empty = partial(nn.utils.skip_init, nn.Linear, dtype=torch.float64)
    model = nn.Sequential(OrderedDict(hidden=empty(5, 4), tanh=nn.Tanh(), output=empty(4, 3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=make, dtype=torch.float64))
    return model


def _weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _close(one: Weights, other: Weights) -> bool:
    return all(_close_tensor(one[name], other[name]) for name in other)


def _close_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def _same_bits(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
