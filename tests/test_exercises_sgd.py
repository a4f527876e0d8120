"""The exercises of the third and fourth lesson: right solutions pass, and each mistake is told apart."""

import json
import random
import re
import time
from pathlib import Path

import pytest
import torch

import dlab
from dlab.collectives import broadcast, reduce, ring_allreduce
from dlab.exercises import check_staleness, check_step, sgd
from dlab.exercises.staleness import EXAMPLE, count_versions
from dlab.strategies import Strategy

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def strategy(change):
    """A strategy whose step does this to the gradients first."""

    class MySGD(Strategy):
        def step(self):
            change(self)
            self.optimizer.step()
            return {"wait": 0.0}

    return MySGD


# ------------------------------------------------------------------------------------ the step: right


@strategy
def parameter_by_parameter(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.wire)
        parameter.grad /= self.wire.size


@strategy
def all_at_once(self):
    gradients = [parameter.grad for parameter in self.model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    ring_allreduce(flat, self.wire, op="mean")
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@strategy
def divided_first(self):
    for parameter in self.model.parameters():
        parameter.grad /= self.wire.size
        ring_allreduce(parameter.grad, self.wire)


class Own(Strategy):
    """With arguments, and given as an instance."""

    def __init__(self, scale):
        self.scale = scale

    def step(self):
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.wire)
            parameter.grad *= self.scale / self.wire.size
        self.optimizer.step()
        return {"wait": 0.0, "more": 1}


RIGHT = [parameter_by_parameter, all_at_once, divided_first, Own(1.0), dlab.SyncSGD, dlab.AllReduceSGD()]
RIGHT += [dlab.AllReduceSGD(bucket_mb=1e-4, overlap=False), dlab.AllReduceSGD(sharded_update=True)]


@pytest.mark.parametrize("right", RIGHT, ids=str)
def test_synchronous_strategies_pass(right):
    assert check_step(right).startswith("well done: ")


def test_it_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_step(dlab.SyncSGD)
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------------------------ the step: wrong


@strategy
def alone(self):
    pass


@strategy
def sum_of_all(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.wire)


@strategy
def divided_twice(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.wire, op="mean")
        parameter.grad /= self.wire.size


@strategy
def only_divided(self):
    for parameter in self.model.parameters():
        parameter.grad /= self.wire.size


@strategy
def no_biases(self):
    for parameter in self.model.parameters():
        if parameter.dim() > 1:
            ring_allreduce(parameter.grad, self.wire, op="mean")


@strategy
def all_but_the_first(self):
    for parameter in list(self.model.parameters())[1:]:
        ring_allreduce(parameter.grad, self.wire, op="mean")


@strategy
def from_rank_0(self):
    for parameter in self.model.parameters():
        broadcast(parameter.grad, self.wire)


@strategy
def for_rank_0(self):
    for parameter in self.model.parameters():
        reduce(parameter.grad, self.wire)
        parameter.grad /= self.wire.size


@strategy
def new_tensors(self):
    """The mean goes nowhere."""
    for parameter in self.model.parameters():
        mean = parameter.grad.clone()
        ring_allreduce(mean, self.wire, op="mean")


@strategy
def noisy(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.wire, op="mean")
        parameter.grad += self.wire.rank + 1


@strategy
def only_two_ranks(self):
    """`/ 2` instead of the number of ranks."""
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.wire)
        parameter.grad /= 2


@strategy
def in_an_order_of_its_own(self):
    """Everybody begins with their own part: right, but for the last bits."""
    for parameter in self.model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(self.wire.size)]
        for distance in range(1, self.wire.size):
            to, source = (self.wire.rank + distance) % self.wire.size, (self.wire.rank - distance) % self.wire.size
            self.wire.exchange(parameter.grad, to, parts[source], source)
        for distance in range(1, self.wire.size):
            parameter.grad += parts[(self.wire.rank + distance) % self.wire.size]
        parameter.grad /= self.wire.size


@strategy
def keeps_the_first(self):
    """A flat copy is made once and never filled again."""
    if not hasattr(self, "means"):
        self.means = [parameter.grad.clone() for parameter in self.model.parameters()]
        for mean in self.means:
            ring_allreduce(mean, self.wire, op="mean")
    for parameter, mean in zip(self.model.parameters(), self.means, strict=True):
        parameter.grad.copy_(mean)


@strategy
def one_rank_stays_away(self):
    if self.wire.rank != 1:
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.wire)


@strategy
def to_itself(self):
    for parameter in self.model.parameters():
        right, left = (self.wire.rank + 1) % self.wire.size, (self.wire.rank - 1) % self.wire.size
        total, travelling = parameter.grad.clone(), parameter.grad.clone()
        for _ in range(max(1, self.wire.size - 1)):
            incoming = torch.empty_like(travelling)
            self.wire.exchange(travelling, right, incoming, left)
            total += incoming
            travelling = incoming
        ring_allreduce(parameter.grad, self.wire, op="mean")


class Weights(Strategy):
    """Averaged after the step."""

    def step(self):
        self.optimizer.step()
        for parameter in self.model.parameters():
            ring_allreduce(parameter.data, self.wire, op="mean")
        return {"wait": 0.0}


class NoUpdate(Strategy):
    def step(self):
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.wire, op="mean")
        return {"wait": 0.0}


class TooLate(Strategy):
    def step(self):
        self.optimizer.step()
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.wire, op="mean")
        return {"wait": 0.0}


class ReturnsNothing(Strategy):
    def step(self):
        self.optimizer.step()


class Fails(Strategy):
    def step(self):
        self.optimizer.step(closure=missing)  # noqa: F821
        return {"wait": 0.0}


class FailsInside(Strategy):
    def step(self):
        self.model[0].weight.grad = "no tensor"
        return {"wait": 0.0}


WRONG = [
    (alone, "with 2 ranks and plain SGD, every rank takes a step along its own gradient: nothing is averaged"),
    (new_tensors, "every rank takes a step along its own gradient"),
    (TooLate, "divide by their number, and then call optimizer.step()"),
    (sum_of_all, "the step is 2 times too long: the gradients are summed over 2 ranks and not divided"),
    (divided_twice, "the step is 2 times too short: the sum over 2 ranks was divided by 4. Divide only once"),
    (only_divided, "every rank applies its own gradient, divided by 2: the sum over all ranks is missing"),
    (
        no_biases,
        "hidden.weight and output.weight are averaged, but hidden.bias and output.bias are not: go through all",
    ),
    (all_but_the_first, "hidden.bias, output.weight and output.bias are averaged, but hidden.weight is not"),
    (from_rank_0, "every rank applies the gradient of rank 0: what the others have learned is lost"),
    (for_rank_0, "rank 0 applied the mean of all gradients, but rank 1 did not: every rank needs it"),
    (noisy, "with 2 ranks and plain SGD, the applied gradient is not the mean over ranks"),
    (Own(2.0), "the step is 2 times too long"),
    (only_two_ranks, "with 3 ranks and plain SGD, the applied gradient is not the mean over ranks"),
    (in_an_order_of_its_own, "with 3 ranks and plain SGD, the weights of rank 0 and rank"),
    (keeps_the_first, "is right before step 1 and wrong after it: look at what a step keeps"),
    (Weights, "with 2 ranks and Adam, the weights are averaged after a step of each rank's own. With SGD that comes"),
    (NoUpdate, "the weights have not changed: call self.optimizer.step()"),
    (ReturnsNothing, "ended in TypeError: step() gave None: let it return the seconds that it waited, {'wait': 0.0}"),
    (Fails, "ranks 0 and 1 ended in NameError: name 'missing' is not defined, in the line `self.optimizer.step(clos"),
    (FailsInside, "ended in TypeError"),
    (one_rank_stays_away, "there is a deadlock: rank 0 waits to"),
    (to_itself, "with 1 rank and plain SGD, rank 0 ended in ValueError: rank 0 sends to itself"),
    (Strategy, "ended in NotImplementedError"),
    (print, "is no strategy: give a class, as in class MySGD(dlab.strategies.Strategy)"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_each_mistake_in_a_step_gets_its_own_sentence(wrong, sentence):
    answer = check_step(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


class WeightedAgain(Strategy):
    """By the samples of each rank, which the loss is weighted by already."""

    def begin(self, model, optimizer, wire):
        self.steps = 0
        return super().begin(model, optimizer, wire)

    def step(self):
        counts = [2, 2, 1] if self.steps == 3 else [4, 4, 4]
        for parameter in self.model.parameters():
            parameter.grad *= counts[self.wire.rank] * self.wire.size / sum(counts)
            ring_allreduce(parameter.grad, self.wire, op="mean")
        self.optimizer.step()
        self.steps += 1
        return {"wait": 0.0}


def test_samples_are_weighted_only_once(monkeypatch):
    monkeypatch.setattr(sgd, "CASES", [(3, 41, "plain SGD")])
    answer = check_step(WeightedAgain)
    assert "all is well until step 3, where the ranks have 2, 2 and 1 samples: the loss is weighted" in answer


def test_averaging_weights_is_right_for_sgd_and_wrong_for_adam(monkeypatch):
    monkeypatch.setattr(sgd, "CASES", [case for case in sgd.CASES if case[2] != "Adam"])
    assert check_step(Weights).startswith("well done")


def test_a_step_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(sgd, "LIMIT", 0.5)

    @strategy
    def spin(self):
        while self.wire.rank == 1:
            time.sleep(0.01)

    assert "had not returned after 0.5 s: look for a loop that does not end" in check_step(spin)


# -------------------------------------------------------------------------------------- the staleness


def by_versions(ends):
    read, staleness = {}, []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version + 1
    return staleness


def by_looking_back(ends):
    staleness = []
    for place, (_, rank) in enumerate(ends):
        last = max((earlier for earlier in range(place) if ends[earlier][1] == rank), default=-1)
        staleness.append(place - last - 1)
    return staleness


@pytest.mark.parametrize("right", [by_versions, by_looking_back, lambda ends: tuple(by_looking_back(ends))])
def test_right_counts_pass(right):
    assert check_staleness(right).startswith("well done: ")


def test_the_checker_counts_as_one_would_by_hand():
    assert count_versions(EXAMPLE) == [0, 1, 1, 0, 2, 5, 2]
    dice = random.Random(1)
    ends = sorted((dice.random(), dice.randrange(5)) for _ in range(300))
    assert count_versions(ends) == by_looking_back(ends)


STALE = [
    (lambda ends: [0 for _ in ends], "with 7 updates of 3 ranks, every update got 0"),
    (lambda ends: [each + 1 for each in by_versions(ends)], "every number is too large by 1: an update does not make"),
    (lambda ends: list(range(len(ends))), "you have counted all updates from the beginning"),
    (lambda ends: [2 for _ in ends], "every update got the number of the other ranks"),
    (lambda ends: sorted(by_versions(ends)), "the numbers are right, but in another order"),
    (lambda ends: by_versions(ends)[:-1], "it gave 6 numbers: give one for each update"),
    (lambda ends: None, "it gave None: give a list of whole numbers"),
    (lambda ends: ["no"] * len(ends), "give a list of whole numbers"),
    (lambda ends: ends[99], "it ended in IndexError: list index out of range"),
    (lambda ends: [min(each, 2) for each in by_versions(ends)], "update 5, by rank 2, got 2, but its staleness is 5"),
    (lambda ends: by_versions(ends) if ends else 1 / 0, "with 0 updates of 0 ranks, it ended in ZeroDivisionError"),
]


@pytest.mark.parametrize(("wrong", "sentence"), STALE, ids=[str(number) for number in range(len(STALE))])
def test_each_mistake_in_counting_gets_its_own_sentence(wrong, sentence):
    answer = check_staleness(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_first_update_is_not_fresh_by_itself():
    def first_is_fresh(ends):
        seen, counts = set(), []
        for (_, rank), each in zip(ends, by_versions(ends), strict=True):
            counts.append(each if rank in seen else 0)
            seen.add(rank)
        return counts

    assert "the first update of each rank got 0: it was computed on the weights of the very" in check_staleness(
        first_is_fresh
    )


def test_seconds_are_not_updates():
    def seconds(ends):
        last, counts = {}, []
        for moment, rank in ends:
            counts.append(int(moment - last.get(rank, 0.0)))
            last[rank] = moment
        return counts

    assert "you have measured seconds: staleness counts updates" in check_staleness(seconds)


# ------------------------------------------------------------------------------------- the notebooks


def cells_of(name):
    return json.loads((NOTEBOOKS / name).read_text())["cells"]


LESSONS = [
    ("03_sync_sgd.ipynb", "class MySGD", "MySGD", check_step, "nothing is averaged"),
    ("04_async_sgd.ipynb", "def my_staleness", "my_staleness", check_staleness, "every update got 0"),
]


@pytest.mark.parametrize(("notebook", "opening", "name", "check", "sentence"), LESSONS, ids=["sync", "async"])
def test_the_hidden_solution_passes_and_the_stub_does_not(notebook, opening, name, check, sentence):
    cells = cells_of(notebook)

    def define(source):
        names = {"torch": torch, "dlab": dlab, "ring_allreduce": ring_allreduce}
        exec(source, names)
        return names[name]

    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check(define(solution)).startswith("well done")
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith(opening)]
    answer = check(define(stub))
    assert sentence in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
