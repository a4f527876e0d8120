"""A pipeline on threads equals the unsplit model: every schedule, any number of stages and micro-batches."""

import copy
import random
import re

import pytest
import torch
import torch.nn.functional as F
from kernels import is_one_sentence
from pipelines import alone, difference, gradients, piped, rehearsed, samples, small_stages, through
from torch import nn

import dlab
from dlab.events import Event
from dlab.pipeline import Pipeline

EXACT = 1e-12
SCHEDULES = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zb1p", 2), ("zbv", 2)]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_loss_outputs_and_gradients_equal_those_of_the_unsplit_model(name, virtual, ranks, microbatches):
    stages, batch = small_stages(ranks * virtual), samples(11)  # no multiple of anything
    found = rehearsed(ranks, stages, batch, name, microbatches)
    assert difference(found, alone(stages, batch)) < EXACT


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_with_recomputation(name, virtual):
    stages, batch = small_stages(2 * virtual), samples(9)
    found = rehearsed(2, stages, batch, name, 4, recompute=True)
    assert difference(found, alone(stages, batch)) < EXACT


def a_table(seed, ranks=3, virtual=2, microbatches=4):
    """A learner's own table: stages anywhere, whole or cut backwards, in any order that can run."""
    dice = random.Random(seed)
    homes = [stage % ranks for stage in range(ranks * virtual)]
    dice.shuffle(homes)
    last = len(homes) - 1
    waiting = {(stage, number) for stage in range(last + 1) for number in range(microbatches)}
    forward, input_done, weights = set(), set(), set()
    rows = [[] for _ in range(ranks)]
    while waiting or weights:
        ready = [(s, n, "F") for s, n in waiting if (s, n) not in forward and (s == 0 or (s - 1, n) in forward)]
        back = [(s, n) for s, n in waiting & forward if s == last or (s + 1, n) in input_done]
        ready += [(s, n, dice.choice("BI")) for s, n in back] + [(s, n, "W") for s, n in weights]
        stage, number, kind = dice.choice(sorted(ready))
        rows[homes[stage]].append(f"{stage}{kind}{number}")
        if kind == "F":
            forward.add((stage, number))
        elif kind == "W":
            weights.remove((stage, number))
        else:
            waiting.remove((stage, number))
            input_done.add((stage, number))
            if kind == "I":
                weights.add((stage, number))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_any_valid_table_of_a_learner_runs(seed):
    stages, batch = small_stages(6), samples(10)
    found = rehearsed(3, stages, batch, dlab.Schedule(a_table(seed)))
    assert difference(found, alone(stages, batch)) < EXACT


def test_a_table_with_sends_and_receives_runs_as_it_is_written():
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B1", "0B1", "0RECV_B0", "0B0"],
        ["1RECV_F0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "1F0", "1I0", "1SEND_B0", "1W0"],
    ]
    stages, batch = small_stages(2), samples(7)
    assert difference(rehearsed(2, stages, batch, rows), alone(stages, batch)) < EXACT


def test_messages_are_those_of_the_schedule_and_shapes_are_sent_once():
    stages, batch = small_stages(3), samples(9)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 3, transport=transport)
        for _ in range(2):
            pipe.step(*batch)

    messages = dlab.rehearse(work, ranks=3).messages
    per_step = 2 * 2 * 3 + 2  # there and back between three stages for each micro-batch, and the loss to two ranks
    assert len(messages) == 2 * per_step
    assert sorted(event.data["bytes"] for event in messages) == [8] * 4 + [3 * 8 * 8] * 24
    there = [event.data for event in messages if event.data["phase"] == "activations to stage 2"]
    assert [(each["source"], each["destination"], each["step"]) for each in there] == [
        (1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 0), (1, 2, 1), (1, 2, 2)
    ]  # fmt: skip
    assert [each["round"] for each in there] == [0, 0, 0, 1, 1, 1]


def test_gradients_are_added_to_those_that_are_there_and_can_be_weighted():
    stages, batch = small_stages(2), samples(8)
    right = alone(stages, batch)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "zb1p", 3, transport=transport)
        pipe.step(*batch)
        loss = pipe.step(*batch, weight=0.5)
        return loss, gradients(pipe.stages.items())

    for loss, found in dlab.rehearse(work, ranks=2):
        assert loss.item() == pytest.approx(right.loss.item(), abs=EXACT)  # the mean, without the weight
        for name, gradient in found.items():
            assert torch.allclose(gradient, 1.5 * right.gradients[name], atol=EXACT)


def test_batches_of_other_lengths_and_shapes_follow_each_other():
    stages = [nn.Linear(6, 4).double(), nn.Sequential(nn.Tanh(), nn.Linear(4, 5)).double()]
    longer = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, 5, (4, 3))

    def loss(outputs, labels):
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())

    def work(transport):
        pipe, found = Pipeline(copy.deepcopy(stages), "1f1b", 4, loss, transport), []
        for batch in (samples(9), longer, samples(4), longer, samples(9)):
            pipe.zero_grad()
            found.append((pipe.step(*batch), gradients(pipe.stages.items())))
        return found

    for found in dlab.rehearse(work, ranks=2):
        for (value, got), batch in zip(found, (samples(9), longer, samples(4), longer, samples(9)), strict=True):
            right = alone(stages, batch, loss)
            assert value.item() == pytest.approx(right.loss.item(), abs=EXACT)
            assert all(torch.allclose(each, right.gradients[name], atol=EXACT) for name, each in got.items())


def test_a_batch_of_fewer_samples_than_micro_batches_leaves_some_out_if_it_is_told_to():
    stages, batch = small_stages(2), samples(3)
    right = alone(stages, batch)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 8, transport=transport)
        with pytest.raises(ValueError, match="a batch of 3 samples cannot make 8 micro-batches"):
            pipe.step(*batch)
        return pipe.step(*batch, fewer=True), pipe(batch[0]), gradients(pipe.stages.items())

    for loss, outputs, found in dlab.rehearse(work, ranks=2):
        assert loss.item() == pytest.approx(right.loss.item(), abs=EXACT)
        assert torch.allclose(outputs, right.outputs, atol=EXACT)
        assert all(torch.allclose(each, right.gradients[name], atol=EXACT) for name, each in found.items())


# ------------------------------------------------------------------------------------------ what stages may be


class Two(nn.Module):
    """Returns two tensors and a whole number for each sample, of which the next stage gets all."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x, mask=None):
        return self.first(x), self.second(x), (x[:, 0] > 0).long()


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, one, two, which):
        return self.one(one) * which[:, None] + self.two(two)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("recompute", [False, True])
def test_tuples_of_tensors_between_stages_also_of_whole_numbers(name, recompute):
    torch.manual_seed(3)
    stages = [Two().double(), Mix().double()]
    inputs, labels = samples(7)
    batch = (inputs, inputs > 0), labels
    found = rehearsed(2, stages, batch, name, 3, recompute=recompute)
    assert difference(found, alone(stages, batch)) < EXACT


def test_the_outputs_may_be_a_tuple_and_the_labels_too():
    stages = [nn.Linear(6, 6).double(), Two().double()]
    inputs, labels = samples(7)

    def loss(outputs, wanted):
        (first, second, _), (labels, targets) = outputs, wanted
        return F.cross_entropy(first, labels % 4) + F.mse_loss(second, targets)

    batch = inputs, (labels, torch.randn(7, 3, dtype=torch.float64))
    right = alone_with_tuple(stages, batch, loss)
    for value, outputs in dlab.rehearse(
        lambda transport: two_results(Pipeline(copy.deepcopy(stages), "1f1b", 3, loss, transport), batch), ranks=2
    ):
        assert value.item() == pytest.approx(right[0], abs=EXACT)
        assert all(torch.allclose(one, other) for one, other in zip(outputs, right[1], strict=True))


def alone_with_tuple(stages, batch, loss):
    outputs = through(stages, batch[0])
    return loss(outputs, batch[1]).item(), outputs


def two_results(pipe, batch):
    return pipe.step(*batch), pipe(batch[0])


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_stages_and_stages_without_parameters(name, frozen):
    stages = small_stages(3)
    stages[frozen].requires_grad_(False)
    batch = samples(6)
    assert difference(rehearsed(3, stages, batch, name, 3), alone(stages, batch)) < EXACT
    stages = [nn.Flatten(), *small_stages(2), nn.Identity()]
    assert difference(rehearsed(4, stages, batch, name, 3), alone(stages, batch)) < EXACT


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 3), ("zb1p", 3), ("zbv", 2), ("gpipe", 4)])
def test_the_gradients_of_tied_weights_are_added_up(name, ranks):
    number = ranks * (2 if name == "zbv" else 1)
    torch.manual_seed(5)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(number)]
    stages[-1][0].weight = stages[0][0].weight  # zbv has both on one rank
    stages[1][0].bias = stages[0][0].bias
    batch = samples(7)
    right = alone(stages, batch)
    found = rehearsed(ranks, stages, batch, name, 3)
    for answer in found:  # an unsplit model names a tied weight in all stages that have it
        for key, gradient in answer.gradients.items():
            assert torch.allclose(gradient, right.gradients[key], atol=EXACT)
    twice = dlab.rehearse(lambda transport: added_twice(transport, stages, batch, name), ranks=ranks)
    for each in twice:
        for key, gradient in each.items():
            assert torch.allclose(gradient, 2 * right.gradients[key], atol=EXACT)


def added_twice(transport, stages, batch, name):
    pipe = Pipeline(copy.deepcopy(stages), name, 3, transport=transport)
    for _ in range(2):
        pipe.step(*batch)
    return gradients(pipe.stages.items())


def with_norms():
    torch.manual_seed(2)
    return [
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()).double(),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double(),
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_norm_sees_one_micro_batch_after_the_other(name, recompute):
    inputs, labels = samples(9)
    stages = with_norms()
    plain = nn.Sequential(*copy.deepcopy(stages))
    for part, label in zip(inputs.tensor_split(3), labels.tensor_split(3), strict=True):
        (F.cross_entropy(plain(part), label) / 3).backward()
    plain.eval()

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), name, 3, transport=transport, recompute=recompute)
        pipe.step(inputs, labels)
        return pipe.eval()(inputs), gradients(pipe.stages.items()), dict(pipe.named_buffers())

    for outputs, found, buffers in dlab.rehearse(work, ranks=2):
        assert torch.allclose(outputs, plain(inputs), atol=EXACT)
        right = {name: each.grad for name, each in plain.named_parameters()}
        assert all(torch.allclose(each, right[name], atol=EXACT) for name, each in found.items())
        running = {f"stages.{name}": each for name, each in plain.named_buffers()}
        assert all(torch.allclose(each.double(), running[name].double()) for name, each in buffers.items())


def test_recomputation_drops_the_same_again():
    """The gradient of a sum through dropout is its mask: it must be that of the forward pass."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50, dtype=torch.float64))
            self.seen = []

        def forward(self, x):
            y = F.dropout(x * self.weight, 0.5)
            self.seen.append(y.detach().clone())
            return y

    def work(transport):
        pipe = Pipeline([Dropped(), Dropped()], "gpipe", 3, lambda y, _: y.sum(1).mean(), transport, recompute=True)
        pipe.step(torch.ones(3, 50, dtype=torch.float64), torch.zeros(3))
        return next(iter(pipe.stages.values())).seen

    for seen in dlab.rehearse(work, ranks=2):
        assert len(seen) == 6
        assert all(torch.equal(first, second) for first, second in zip(seen[:3], seen[3:], strict=True))
        assert not torch.equal(seen[0], seen[1])


def test_with_autocast_stages_compute_in_bfloat16():
    stages = [each.float() for each in small_stages(2)]
    inputs, labels = samples(8)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 4, transport=transport, amp=True)
        loss = pipe.step(inputs.float(), labels)
        return loss, pipe(inputs.float()).dtype, gradients(pipe.stages.items())

    whole = nn.Sequential(*copy.deepcopy(stages))
    with torch.autocast("cpu", torch.bfloat16):
        right = F.cross_entropy(whole(inputs.float()), labels)
    right.backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    for loss, dtype, found in dlab.rehearse(work, ranks=2):
        assert loss.item() == pytest.approx(right.item(), abs=1e-3)
        assert dtype == torch.bfloat16
        assert all(torch.allclose(each, expected[name], atol=1e-2) for name, each in found.items())


def test_outputs_are_computed_without_gradients_also_in_inference_mode():
    stages, batch = small_stages(2), samples(8)
    right = alone(stages, batch)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 4, transport=transport)
        with torch.inference_mode():
            first = pipe(batch[0])
        second = pipe(batch[0])
        pipe.step(*batch)  # in memory that was used in inference mode
        with torch.no_grad(), pytest.raises(RuntimeError, match="gradients, but they are turned off here"):
            pipe.step(*batch)
        return first, second, gradients(pipe.stages.items())

    for first, second, found in dlab.rehearse(work, ranks=2):
        assert torch.allclose(first, right.outputs)
        assert torch.allclose(second, right.outputs)
        assert not second.requires_grad
        assert all(torch.allclose(each, right.gradients[name]) for name, each in found.items())


def test_what_a_learner_keeps_is_not_overwritten():
    kept = {}

    class Keeps(nn.Linear):
        def forward(self, x):
            kept.setdefault("inputs", []).append(x)
            return super().forward(x)

    def work(transport):
        pipe = Pipeline([nn.Linear(6, 6).double(), Keeps(6, 5).double()], "1f1b", 2, transport=transport)
        for count in (4, 4, 4):
            pipe.step(torch.full((count, 6), float(len(kept.get("inputs", ()))), dtype=torch.float64), samples(4)[1])
            transport.barrier()

    dlab.rehearse(work, ranks=2)
    first, *others = [each.detach() for each in kept["inputs"]]
    assert all(not torch.equal(first, each) for each in others[2:])
    assert len({each.data_ptr() for each in kept["inputs"]}) == 6


def test_memory_to_receive_in_is_used_again():
    stages = small_stages(2)

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 8, transport=transport)
        for _ in range(3):
            pipe.step(*samples(16))
        return sum(len(each) for each in pipe._messages._slots.values())

    first, second = dlab.rehearse(work, ranks=2)
    assert first <= 3  # a gradient at a time, and the loss
    assert second <= 3  # activations: at most those that came early, and the one that is used


# ------------------------------------------------------------------------------------------ what is told


def test_actions_and_the_schedule_are_told():
    stages, batch, told = small_stages(2), samples(8), {0: [], 1: []}

    def work(transport):
        pipe = Pipeline(copy.deepcopy(stages), "1f1b", 4, transport=transport)
        pipe.record(lambda kind, data: told[transport.rank].append(Event(0.0, transport.rank, kind, data)), every=2)
        for _ in range(4):
            pipe.step(*batch)

    dlab.rehearse(work, ranks=2)
    for rank, events in told.items():
        plan, *actions = events
        row = dlab.schedule("1f1b", 2, 4).rows[rank]
        assert plan.kind == "schedule"
        assert plan.data["actions"] == list(row)
        assert plan.data["starts"][:2] == ([0.0, 1.0] if rank == 0 else [1.0, 2.0])
        assert [event.kind for event in actions] == ["action"] * 24
        assert [event.data["action"] for event in actions] == [*row, *row, *row]
        assert {event.data["step"] for event in actions} == {0, 1, 2}
        assert all(event.data["start"] <= event.data["end"] for event in actions)


def test_it_says_what_it_is():
    def work(transport):
        return repr(Pipeline(small_stages(4), "interleaved", 4, transport=transport))

    assert dlab.rehearse(work, ranks=2)[1] == "<Pipeline on rank 1 of 2: stages 1, 3 of 4, interleaved>"


# ------------------------------------------------------------------------------------------ refusals


def refused(ranks, make, batch=None):
    """What each rank says."""
    said = {}

    def work(transport):
        try:
            pipe = make(transport)
            if batch is not None:
                pipe.step(*batch)
        except (ValueError, TypeError, RuntimeError) as problem:
            said[transport.rank] = f"{type(problem).__name__}: {problem}"

    dlab.rehearse(work, ranks=ranks)
    assert set(said) == set(range(ranks)), "all ranks say it"
    assert all(is_one_sentence(each) for each in said.values())
    (sentence,) = set(said.values())
    return sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((3, "1f1b"), "3 stages cannot be divided among 2 ranks: use a multiple of 2 stages"),
        ((4, "1f1b"), "1f1b has one stage per rank"),
        ((2, "zbv"), "zbv has two stages on each rank, so 2 ranks need 4 stages, not 2"),
        ((2, "2f2b"), "there is no schedule '2f2b'"),
        ((2, dlab.schedule("1f1b", 3)), "the schedule is for 3 stages on 3 ranks, but there are 2 stages on 2 ranks"),
        ((0, "1f1b"), "at least one stage"),
    ],
)
def test_stages_that_do_not_fit_are_refused_on_all_ranks(given, sentence):
    number, schedule = given
    stages = small_stages(number) if number else []
    assert sentence in refused(2, lambda transport: Pipeline(stages, schedule, 4, transport=transport))


def test_what_is_no_module_is_refused():
    said = refused(2, lambda transport: Pipeline([nn.Tanh(), torch.tanh], transport=transport))
    assert re.search(r"stage 1 is <built-in .*, not a torch\.nn\.Module", said)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (samples(3), "a batch of 3 samples cannot make 4 micro-batches: use larger batches or fewer micro-batches"),
        ((samples(8)[0], samples(7)[1]), "inputs and labels have 8 and 7 samples"),
        ((samples(8)[0][:0], samples(8)[1][:0]), "the batch is empty"),
        (([1, 2], samples(8)[1]), "inputs must be a tensor or a tuple of tensors"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks(batch, sentence):
    assert sentence in refused(2, lambda transport: Pipeline(small_stages(2), "1f1b", 4, transport=transport), batch)


class Returns(nn.Linear):
    def __init__(self, what, width=6):
        super().__init__(6, width)
        self.what = what

    def forward(self, x):
        return self.what(super().forward(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_stage_that_returns_no_tensor_is_refused_on_all_ranks(schedule, culprit):
    def make(transport):
        stages = [nn.Linear(6, 6) for _ in range(3)]
        stages[culprit] = Returns(lambda y: {"y": y})
        return Pipeline(stages, schedule, 4, lambda y, labels: F.cross_entropy(y, labels), transport)

    batch = samples(8)[0].float(), samples(8)[1]
    if culprit < 2:
        assert f"stage {culprit} returned a dict, which cannot be sent" in refused(3, make, batch)
    else:  # only the loss knows what it can use
        assert "TypeError" in refused(3, make, batch)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_a_loss_that_is_not_one_number_is_refused_on_all_ranks(schedule):
    def many(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="none")

    stages = small_stages(3)
    said = refused(3, lambda transport: Pipeline(copy.deepcopy(stages), schedule, 4, many, transport), samples(8))
    assert said == "ValueError: loss() returned a tensor (2,): it must return the mean over the samples, a tensor with one number"  # fmt: skip  # noqa: E501


def test_an_error_of_the_network_reaches_all_ranks_in_the_first_step():
    stages = [nn.Linear(6, 6), nn.Linear(7, 6), nn.Linear(6, 5)]
    batch = samples(8)[0].float(), samples(8)[1]
    said = refused(3, lambda transport: Pipeline(copy.deepcopy(stages), "1f1b", 4, transport=transport), batch)
    assert said.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_ranks_with_different_batches_are_told_so():
    def work(transport):
        pipe = Pipeline(small_stages(2), "1f1b", 4, transport=transport)
        pipe.step(*samples(8 + transport.rank))

    with pytest.raises(ValueError, match="every rank of a pipeline must be called with the same whole batch"):
        dlab.rehearse(work, ranks=2)


def test_a_shape_that_changes_for_equal_batches_is_refused():
    class Changes(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)[:, : 6 - (self.calls > 2)]

    def work(transport):
        pipe = Pipeline([Changes(6, 6), nn.LazyLinear(5)], "1f1b", 2, transport=transport)
        for _ in range(2):
            pipe.step(samples(4)[0].float(), samples(4)[1])

    sentence = r"the results of stage 0 are now float32 \(2, 5\), and were float32 \(2, 6\) for an equal batch"
    with pytest.raises(ValueError, match=sentence):
        dlab.rehearse(work, ranks=2)


def test_after_a_failure_it_must_be_made_anew():
    def work(transport):
        pipe = Pipeline(small_stages(2), "1f1b", 4, lambda outputs, labels: outputs, transport)
        for sentence in ("one number", "has failed in the middle of a step"):
            with pytest.raises((ValueError, RuntimeError), match=sentence):
                pipe.step(*samples(8))

    dlab.rehearse(work, ranks=2)


def test_it_stays_on_its_rank():
    def work(transport):
        pipe = Pipeline(small_stages(2), "1f1b", 4, transport=transport)
        with pytest.raises(TypeError, match="a pipeline cannot be copied or sent to another process"):
            copy.deepcopy(pipe)
        return list(pipe.state_dict())

    assert dlab.rehearse(work, ranks=2)[1][0] == "stages.1.0.weight"


def test_what_it_finds_fails_when_it_is_wrong():
    """The comparison itself: a weight that counts twice is noticed."""
    stages, batch = small_stages(2), samples(9)
    right = alone(stages, batch)
    found = dlab.rehearse(lambda transport: piped(transport, stages, batch, "1f1b", 4), ranks=2)
    found[0][0].gradients["0.0.weight"].mul_(1.001)
    assert difference([answer for answer, _ in found], right) > 1e-6
