"""The exercise of the third lesson: right steps pass in many styles, and each mistake is told apart."""

import json
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce

import dlab
from dlab.collectives import broadcast, reduce, ring_allreduce, tree_allreduce
from dlab.exercises import check_step, sgd
from dlab.strategies import Strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "03_sync_sgd.ipynb"


def strategy(change):
    """A strategy whose step does this to the gradients first."""

    class MySGD(Strategy):
        def step(self):
            change(self)
            self.optimizer.step()
            return {"wait": 0.0}

    MySGD.__name__ = change.__name__
    return MySGD


def step(function):
    """A strategy with this step."""
    return type(function.__name__, (Strategy,), {"step": function})


# ------------------------------------------------------------------------------------------------ right


@strategy
def parameter_by_parameter(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)
        parameter.grad /= self.transport.size


@strategy
def all_at_once(self):
    gradients = [parameter.grad for parameter in self.model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    ring_allreduce(flat, self.transport, op="mean")
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@strategy
def divided_first(self):
    for parameter in self.model.parameters():
        parameter.grad /= self.transport.size
        ring_allreduce(parameter.grad, self.transport)


@strategy
def as_in_the_tour(self):
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dlab.world_size()


@strategy
def averaged_by_gloo(self):
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@strategy
def imported_by_name(self):
    for parameter in self.model.parameters():
        all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


@strategy
def all_at_once_in_the_background(self):
    works = [dist.all_reduce(each.grad, async_op=True) for each in self.model.parameters()]
    for work, parameter in zip(works, self.model.parameters(), strict=True):
        work.wait()
        parameter.grad /= self.transport.size


@strategy
def to_rank_0_and_back(self):
    for parameter in self.model.parameters():
        dist.reduce(parameter.grad, dst=0)
        dist.broadcast(parameter.grad, src=0)
        parameter.grad /= dlab.world_size()


@strategy
def of_all_gathered(self):
    for parameter in self.model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(dlab.world_size())]
        dist.all_gather(parts, parameter.grad)
        parameter.grad = torch.stack(parts).mean(0)


@strategy
def by_the_transport_of_dlab(self):
    for parameter in self.model.parameters():
        tree_allreduce(parameter.grad, dlab.transport(), op="mean")


@strategy
def by_the_fastest(self):
    for parameter in self.model.parameters():
        dlab.allreduce(parameter.grad)
        parameter.grad /= self.transport.size


@strategy
def by_hand(self):
    """In the same order everywhere."""
    transport = self.transport
    for parameter in self.model.parameters():
        parts = [parameter.grad.clone() for _ in range(transport.size)]
        for distance in range(1, transport.size):
            to, source = (transport.rank + distance) % transport.size, (transport.rank - distance) % transport.size
            transport.exchange(parameter.grad, to, parts[source], source)
        parameter.grad = sum(parts) / transport.size


@step
def cleared_afterwards(self):
    start = time.perf_counter()
    for group in self.optimizer.param_groups:
        for parameter in group["params"]:
            ring_allreduce(parameter.grad, self.transport, op="mean")
    waited = time.perf_counter() - start
    self.optimizer.step()
    self.optimizer.zero_grad()
    return {"wait": waited}


class Own(Strategy):
    """With arguments, and given as an instance."""

    def __init__(self, scale):
        self.scale = scale

    def step(self):
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.transport)
            parameter.grad *= self.scale / self.transport.size
        self.optimizer.step()
        return {"wait": 0.0, "more": 1}


class WithABegin(Strategy):
    def begin(self, model, optimizer, transport):
        self.parameters = list(model.parameters())
        return super().begin(model, optimizer, transport)

    def step(self):
        for parameter in reversed(self.parameters):
            ring_allreduce(parameter.grad, self.transport, op="mean")
        self.optimizer.step()
        return {"wait": 0}


RIGHT = [parameter_by_parameter, all_at_once, divided_first, Own(1.0), WithABegin, cleared_afterwards, by_hand]
RIGHT += [
    as_in_the_tour,
    averaged_by_gloo,
    imported_by_name,
    all_at_once_in_the_background,
    to_rank_0_and_back,
    of_all_gathered,
]
RIGHT += [by_the_transport_of_dlab, by_the_fastest]


@pytest.mark.parametrize("right", RIGHT, ids=lambda each: getattr(each, "__name__", str(each)))
def test_synchronous_steps_pass(right):
    assert check_step(right).startswith("well done: ")


OWN = [dlab.SyncSGD, dlab.AllReduceSGD(), dlab.AllReduceSGD(bucket_mb=1e-4, overlap=False)]
OWN += [dlab.ZeRO()]


@pytest.mark.parametrize("own", OWN, ids=str)
def test_those_of_dlab_are_right_but_not_the_learners(own, monkeypatch):
    assert "not yet: with 2 ranks and plain SGD, this calls dlab's own" in check_step(own)
    monkeypatch.setattr(sgd, "OWN", [])
    assert check_step(own).startswith("well done: ")


def test_it_leaves_the_random_numbers_and_the_process_group_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_step(parameter_by_parameter)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not dist.is_initialized() and dlab.world_size() == 1
    with pytest.raises(RuntimeError, match="there is no process group here"):
        dlab.transport()


def test_what_passes_trains_in_processes_too():
    data = torch.utils.data.TensorDataset(torch.randn(16, 1, 28, 28), torch.arange(16) % 10)
    found = [
        dlab.train(dlab.TwoLayer, data, each(), workers=2, batch_size=8, order="global").wait()
        for each in (as_in_the_tour, dlab.SyncSGD, by_the_transport_of_dlab)
    ]
    for one, other in pairwise(found):
        assert one.identical and other.identical
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


# ------------------------------------------------------------------------------------------------ wrong


@strategy
def alone(self):
    pass


@strategy
def sum_of_all(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)


@strategy
def divided_under_another_name(self):
    for parameter in self.model.parameters():
        gradient = parameter.grad
        ring_allreduce(gradient, self.transport)
        gradient = gradient / self.transport.size


@strategy
def divided_twice(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
        parameter.grad /= self.transport.size


@strategy
def multiplied(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)
        parameter.grad *= self.transport.size


@strategy
def only_divided(self):
    for parameter in self.model.parameters():
        parameter.grad /= self.transport.size


@strategy
def no_biases(self):
    for parameter in self.model.parameters():
        if parameter.dim() > 1:
            ring_allreduce(parameter.grad, self.transport, op="mean")


@strategy
def all_but_the_first(self):
    for parameter in list(self.model.parameters())[1:]:
        ring_allreduce(parameter.grad, self.transport, op="mean")


@strategy
def from_rank_0(self):
    for parameter in self.model.parameters():
        broadcast(parameter.grad, self.transport)


@strategy
def for_rank_0(self):
    for parameter in self.model.parameters():
        reduce(parameter.grad, self.transport)
        parameter.grad /= self.transport.size


@strategy
def new_tensors(self):
    """The mean goes nowhere."""
    for parameter in self.model.parameters():
        mean = parameter.grad.clone()
        ring_allreduce(mean, self.transport, op="mean")


@strategy
def noisy(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
        parameter.grad += self.transport.rank + 1


@strategy
def only_two_ranks(self):
    """`/ 2` instead of the number of ranks."""
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)
        parameter.grad /= 2


@strategy
def four_as_in_the_lesson(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)
        parameter.grad /= 4


@strategy
def three(self):
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 3


@strategy
def uphill(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport)
        parameter.grad /= -self.transport.size


@strategy
def largest(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="max")


@strategy
def average(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="avg")


@strategy
def name_for_torch(self):
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad, op="sum")


@strategy
def op_of_torch_for_dlab(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op=dist.ReduceOp.SUM)


@strategy
def without_a_transport(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad)


@strategy
def by_messages_of_torch(self):
    for parameter in self.model.parameters():
        dist.send(parameter.grad, 1)


@strategy
def in_an_order_of_its_own(self):
    """Everybody begins with their own part: right, but for the last bits."""
    for parameter in self.model.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(self.transport.size)]
        for distance in range(1, self.transport.size):
            to, source = (
                (self.transport.rank + distance) % self.transport.size,
                (self.transport.rank - distance) % self.transport.size,
            )
            self.transport.exchange(parameter.grad, to, parts[source], source)
        for distance in range(1, self.transport.size):
            parameter.grad += parts[(self.transport.rank + distance) % self.transport.size]
        parameter.grad /= self.transport.size


@strategy
def keeps_the_first(self):
    """A flat copy is made once and never filled again."""
    if not hasattr(self, "means"):
        self.means = [parameter.grad.clone() for parameter in self.model.parameters()]
        for mean in self.means:
            ring_allreduce(mean, self.transport, op="mean")
    for parameter, mean in zip(self.model.parameters(), self.means, strict=True):
        parameter.grad.copy_(mean)


@strategy
def one_rank_stays_away(self):
    if self.transport.rank != 1:
        for parameter in self.model.parameters():
            ring_allreduce(parameter.grad, self.transport)


@strategy
def only_rank_0_asks(self):
    if dlab.rank() == 0:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


@strategy
def to_itself(self):
    for parameter in self.model.parameters():
        right, left = (self.transport.rank + 1) % self.transport.size, (self.transport.rank - 1) % self.transport.size
        total, travelling = parameter.grad.clone(), parameter.grad.clone()
        for _ in range(max(1, self.transport.size - 1)):
            incoming = torch.empty_like(travelling)
            self.transport.exchange(travelling, right, incoming, left)
            total += incoming
            travelling = incoming
        ring_allreduce(parameter.grad, self.transport, op="mean")


@step
def weights(self):
    """Averaged after the step."""
    self.optimizer.step()
    for parameter in self.model.parameters():
        ring_allreduce(parameter.data, self.transport, op="mean")
    return {"wait": 0.0}


@step
def weights_first(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.data, self.transport, op="mean")
    self.optimizer.step()
    return {"wait": 0.0}


@step
def no_update(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
    return {"wait": 0.0}


@step
def updated_by_hand(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
        parameter.data -= self.optimizer.param_groups[0]["lr"] * parameter.grad
    return {"wait": 0.0}


@step
def updated_in_the_loop(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
        self.optimizer.step()
    return {"wait": 0.0}


@step
def cleared_first(self):
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
    self.optimizer.zero_grad()
    self.optimizer.step()
    return {"wait": 0.0}


@step
def set_to_zero_first(self):
    self.model.zero_grad(set_to_none=False)
    parameter_by_parameter.step(self)
    return {"wait": 0.0}


@step
def too_late(self):
    self.optimizer.step()
    for parameter in self.model.parameters():
        ring_allreduce(parameter.grad, self.transport, op="mean")
    return {"wait": 0.0}


@step
def returns_nothing(self):
    parameter_by_parameter.step(self)


@step
def returns_a_number(self):
    parameter_by_parameter.step(self)
    return 0.0


@step
def returns_no_seconds(self):
    return parameter_by_parameter.step(self) | {"wait": None}


@step
def yields(self):
    yield parameter_by_parameter.step(self)


@step
def fails(self):
    self.optimizer.step(closure=missing)  # noqa: F821
    return {"wait": 0.0}


@step
def fails_inside(self):
    self.model[0].weight.grad = "no tensor"
    return {"wait": 0.0}


def add_up(wrong):
    return wrong + "a number"


@step
def fails_in_a_function_of_its_own(self):
    add_up(1)


@step
def asks_the_base(self):
    return Strategy.step(self)


@step
def exits(self):
    raise SystemExit


class FailsAtOnce(Strategy):
    def begin(self, model, optimizer, transport):
        self.mean = model.gradients

    def step(self):
        pass


class Inherits(dlab.SyncSGD):
    """Has no step of its own."""


class InheritsAndAsks(dlab.SyncSGD):
    def step(self):
        return super().step()


class Delegates(Strategy):
    def begin(self, model, optimizer, transport):
        self.other = dlab.SyncSGD()
        return self.other.begin(model, optimizer, transport)

    def clear(self):
        self.other.clear()

    def step(self):
        return self.other.step()

    def end(self):
        self.other.end()


class DelegatesToBuckets(Delegates):
    def begin(self, model, optimizer, transport):
        self.other = dlab.AllReduceSGD()
        return self.other.begin(model, optimizer, transport)


class InheritsDDP(dlab.DDP):
    def step(self):
        self.optimizer.step()
        return {"wait": 0.0}


@strategy
def calls_average_gradients(self):
    dlab.average_gradients(self.model, ring_allreduce, self.transport)


YOURSELF = ": write the step yourself, with ring_allreduce(parameter.grad, self.transport)"
WRONG = [
    (alone, "with 2 ranks and plain SGD, every rank takes a step along its own gradient: nothing is averaged"),
    (new_tensors, "its own gradient, although numbers were exchanged: the mean must be in parameter.grad before"),
    (weights_first, "its own gradient, although numbers were exchanged: the mean must be in parameter.grad before"),
    (too_late, "its own gradient, and averages afterwards: call optimizer.step() last"),
    (sum_of_all, "the step is 2 times too long: the gradients are summed over 2 ranks and not divided"),
    (divided_under_another_name, "not divided by their number; parameter.grad /= self.transport.size does it in place"),
    (divided_twice, "the step is 2 times too short: the sum over 2 ranks was divided by 4. Divide only once"),
    (multiplied, "the step is too long: the sum over 2 ranks is multiplied by 2; divide it by 2"),
    (
        only_divided,
        "every rank applies its own gradient, divided by 2: the sum over all ranks must be in parameter.grad",
    ),
    (
        no_biases,
        "hidden.weight and output.weight are averaged, but hidden.bias and output.bias are not: go through all",
    ),
    (all_but_the_first, "hidden.bias, output.weight and output.bias are averaged, but hidden.weight is not"),
    (from_rank_0, "every rank applies the gradient of rank 0: what the others have learned is lost"),
    (for_rank_0, "rank 0 applied the mean of all gradients, but rank 1 did not: every rank needs it"),
    (noisy, "with 2 ranks and plain SGD, the applied gradient is not the mean over ranks"),
    (Own(2.0), "the step is 2 times too long"),
    (
        only_two_ranks,
        "with 3 ranks and plain SGD, you divide by 2, but there are 3 ranks: divide by self.transport.size",
    ),
    (
        four_as_in_the_lesson,
        "with 2 ranks and plain SGD, you divide by 4, but there are 2 ranks: divide by self.transport",
    ),
    (three, "with 2 ranks and plain SGD, you divide by 3, but there are 2 ranks: divide by self.transport.size"),
    (uphill, "the step goes uphill: optimizer.step() subtracts the gradient, so leave its sign as it is"),
    (largest, "of the ranks' gradients, the largest is applied: add them up, op='sum', and divide by their number"),
    (average, "ended in ValueError: there is no op 'avg': use sum, mean"),
    (name_for_torch, "ranks 0 and 1 gave torch.distributed an op that it does not know: write op=dist.ReduceOp.SUM"),
    (
        op_of_torch_for_dlab,
        "use sum, mean, product, max, min, and, or, xor, in the line `ring_allreduce(parameter.grad",
    ),
    (without_a_transport, "missing 1 required positional argument: 'transport', in the line `ring_allreduce(param"),
    (by_messages_of_torch, "this check has no point-to-point calls of torch.distributed: use transport.exchange, in"),
    (in_an_order_of_its_own, "with 3 ranks and plain SGD, the weights of rank 0 and rank"),
    (keeps_the_first, "is right before step 1 and wrong after it: look at what a step keeps"),
    (weights, "with 2 ranks and Adam, the weights are averaged after each rank has taken its own step. With SGD that"),
    (no_update, "the weights are not updated by the optimizer: call self.optimizer.step(), after averaging"),
    (updated_by_hand, "and momentum, the weights are not updated by the optimizer: call self.optimizer.step()"),
    (updated_in_the_loop, "optimizer.step() is called 4 times in one step: call it once, after all gradients"),
    (cleared_first, "the gradients are cleared before they are applied: leave zero_grad() out of step(); the training"),
    (set_to_zero_first, "the gradients are cleared before they are applied"),
    (returns_nothing, "plain SGD, step() gave None: let it return the seconds that it waited, {'wait': 0.0}"),
    (returns_a_number, "plain SGD, step() gave 0.0: let it return the seconds that it waited"),
    (returns_no_seconds, "step() gave {'wait': None}: let it return the seconds that it waited"),
    (yields, "plain SGD, step() has a yield in it, so that nothing of it has run: use return"),
    (fails, "ranks 0 and 1 ended in NameError: name 'missing' is not defined, in the line `self.optimizer.step(clos"),
    (fails_inside, "ended in TypeError"),
    (fails_in_a_function_of_its_own, "ended in TypeError: unsupported operand type(s) for +: 'int' and 'str', in the"),
    (fails_in_a_function_of_its_own, 'in the line `return wrong + "a number"`'),
    (FailsAtOnce, "ended in AttributeError: 'Sequential' object has no attribute 'gradients', in the line `self.mean"),
    (exits, "ranks 0 and 1 called exit(), which ends a whole program: use return"),
    (one_rank_stays_away, "there is a deadlock: rank 0 waits to"),
    (only_rank_0_asks, "which has returned: every rank must take part in every exchange, in the same order"),
    (to_itself, "with 1 rank and plain SGD, rank 0 ended in ValueError: rank 0 sends to itself"),
    (Strategy, "it has no step of its own: write def step(self), which is called after every backward pass"),
    (Strategy(), "it has no step of its own: write def step(self)"),
    (asks_the_base, "ended in NotImplementedError, in the line `return Strategy.step(self)"),
    (asks_the_base, "`: Strategy leaves its step to you"),
    (print, "is not a strategy: give a class, as in class MySGD(dlab.strategies.Strategy)"),
    (dlab.SyncSGD, "this calls dlab's own SyncSGD.step, which is the answer" + YOURSELF),
    (dlab.DDP(), "this calls dlab's own DDP.begin, which is the answer" + YOURSELF),
    (dlab.SyncSGD(allreduce=tree_allreduce), "this calls dlab's own SyncSGD.step, which is the answer" + YOURSELF),
    (Inherits, "this calls dlab's own SyncSGD.step, which is the answer" + YOURSELF),
    (InheritsAndAsks, "this calls dlab's own SyncSGD.step, which is the answer" + YOURSELF),
    (Delegates, "this calls dlab's own SyncSGD.step, which is the answer" + YOURSELF),
    (DelegatesToBuckets, "this calls dlab's own AllReduceSGD.begin, which is the answer" + YOURSELF),
    (InheritsDDP, "this calls dlab's own DDP.begin, which is the answer" + YOURSELF),
    (calls_average_gradients, "this calls dlab's own average_gradients, which is the answer" + YOURSELF),
    (
        dlab.ModelAveraging(every=1),
        "with 2 ranks and Adam, the weights are averaged after each rank has taken its own step",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "sentence"), WRONG, ids=[getattr(wrong, "__name__", str(wrong)) for wrong, _ in WRONG]
)
def test_each_mistake_in_a_step_gets_its_own_sentence(wrong, sentence):
    answer = check_step(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


class WeightedAgain(Strategy):
    """By the samples of each rank, which the loss is weighted by already."""

    def begin(self, model, optimizer, transport):
        self.steps = 0
        return super().begin(model, optimizer, transport)

    def step(self):
        counts = [2, 2, 1] if self.steps == 3 else [4, 4, 4]
        for parameter in self.model.parameters():
            parameter.grad *= counts[self.transport.rank] * self.transport.size / sum(counts)
            ring_allreduce(parameter.grad, self.transport, op="mean")
        self.optimizer.step()
        self.steps += 1
        return {"wait": 0.0}


def test_samples_are_weighted_only_once(monkeypatch):
    monkeypatch.setattr(sgd, "CASES", [(3, 41, "plain SGD")])
    answer = check_step(WeightedAgain)
    assert "all is right until step 3, where the ranks have 2, 2 and 1 samples: the loss is weighted" in answer


def test_averaging_weights_is_right_for_sgd_and_wrong_for_adam(monkeypatch):
    monkeypatch.setattr(sgd, "CASES", [case for case in sgd.CASES if case[2] != "Adam"])
    assert check_step(weights).startswith("well done")


def test_a_step_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(sgd, "LIMIT", 0.5)

    @strategy
    def spin(self):
        while self.transport.rank == 1:
            time.sleep(0.01)

    assert "had not returned after 0.5 s: look for a loop that does not end" in check_step(spin)
    deadline = time.monotonic() + 10
    while any(re.fullmatch(r"rank \d", thread.name) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the learner's threads still run"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------ the notebook


def test_the_hidden_solution_passes_and_the_stub_does_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]

    def define(source):
        names = {"torch": torch, "dlab": dlab}
        exec(source, names)
        return names["MySGD"]

    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_step(define(solution)).startswith("well done")
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("class MySGD")]
    answer = check_step(define(stub))
    assert "nothing is averaged" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
