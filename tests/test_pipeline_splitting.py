"""Splitting a model into stages: the same blocks in the same order, cut where the largest stage is smallest."""

import itertools
import random

import pytest
import torch
from kernels import is_one_sentence
from pipelines import through
from torch import nn

import dlab
from dlab.pipeline.splitting import cut_evenly, memory_of, parameter_counts


def largest(costs, cuts):
    edges = [0, *cuts, len(costs)]
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise(edges))


def test_no_other_cut_has_a_smaller_largest_part():
    dice = random.Random(0)
    for _ in range(200):
        costs = [dice.choice([0, 0, 1, 3, 10, 50]) for _ in range(dice.randint(1, 8))]
        parts = dice.randint(1, len(costs))
        found = cut_evenly(costs, parts)
        every = list(itertools.combinations(range(1, len(costs)), parts - 1))
        assert tuple(found) in every  # none of them is empty
        assert largest(costs, found) == min(largest(costs, each) for each in every)


def test_a_block_without_cost_stays_with_the_one_before():
    assert cut_evenly([5, 0, 5, 0, 5], 3) == [2, 4]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("by", ["parameters", "memory", "time"])
@pytest.mark.parametrize("make", [dlab.MLP, dlab.TwoLayer, lambda: dlab.RowTransformer(depth=2)])
def test_the_stages_are_the_model(make, by, number):
    model, images = make(), torch.randn(4, 1, 28, 28)
    before = torch.get_rng_state()
    stages = dlab.split(model, number, by=by, inputs=images)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(stages) == number
    assert torch.equal(through(stages, images), model(images))
    assert {id(each) for stage in stages for each in stage.parameters()} == {id(each) for each in model.parameters()}
    assert all(each.grad is None for each in model.parameters())


def test_by_parameters_and_the_names_of_blocks():
    first, second = dlab.split(dlab.MLP(), 2)
    assert list(dict(first.named_children())) == ["0", "1", "2"]
    assert list(dict(second.named_children())) == ["3", "4", "5"]  # as in the model
    assert parameter_counts([first, second]) == [784 * 512 + 512, 512 * 512 + 512 + 512 * 10 + 10]


def test_a_tied_weight_counts_once():
    embed, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embed.weight
    assert parameter_counts([embed, nn.Linear(8, 8), head]) == [400, 72, 0]


def test_sequences_within_sequences_count_as_their_blocks():
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model = nn.Sequential(inner, nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 2))))
    stages = dlab.split(model, 4)
    assert [type(stage[0]) for stage in stages] == [nn.Linear, nn.Tanh, nn.Linear, nn.Linear]
    assert [len(dlab.split(each, 1)[0]) for each in dlab.split(model, 2)] == [2, 2]  # a stage can be split again


def test_memory_is_what_a_graph_saves_beside_parameters_and_their_gradients():
    x = torch.randn(32, 10)
    counted = memory_of([nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5), nn.Flatten()], x)
    weights = [2 * 4 * (10 * 20 + 20), 0, 2 * 4 * (20 * 5 + 5), 0]
    saved = [32 * 10 * 4, 32 * 20 * 4, 32 * 20 * 4, 0]  # the input of a layer, the result of a sigmoid
    assert counted == [one + two for one, two in zip(weights, saved, strict=True)]


class Slow(nn.Linear):
    def forward(self, x):
        for _ in range(60):
            x = torch.tanh(x)
        return super().forward(x)


def test_by_time_a_slow_block_is_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Slow(64, 64), nn.Linear(64, 64))
    assert [len(each) for each in dlab.split(model, 3, by="time", inputs=torch.randn(256, 64))] == [2, 1, 1]


def test_all_ranks_cut_where_rank_0_has_measured():
    def work(transport):
        blocks = [nn.Linear(64, 64) for _ in range(4)]
        blocks[transport.rank] = Slow(64, 64)  # what the others would measure
        stages = dlab.split(nn.Sequential(*blocks), 2, "time", torch.randn(256, 64), transport)
        return [len(each) for each in stages]

    assert dlab.rehearse(work, ranks=3) == [[1, 3]] * 3


def test_running_means_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    dlab.split(model, 2, by="memory", inputs=torch.randn(5, 6))
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(8))


class Pairs(nn.Module):
    def forward(self, x):
        return (x, x + 1) if isinstance(x, torch.Tensor) else (x[1], x[0])


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] - pair[1]


def test_blocks_that_pass_tuples_can_be_cut_between():
    model = nn.Sequential(Pairs(), Pairs(), Join())
    x = torch.randn(3, 2)
    for number in (1, 2, 3):
        assert torch.equal(through(dlab.split(model, number), x), model(x))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((dlab.MLP(), 7), "MLP has 6 blocks, too few for 7 stages: use fewer stages"),
        ((dlab.MLP(), 0), "n=0: give the number of stages, 1 or more"),
        ((dlab.MLP(), True), "n=True: give the number of stages"),
        ((dlab.MLP(), 2, "size"), "by='size': split by 'time', 'parameters' or 'memory'"),
        ((dlab.MLP(), 2, "time"), "to split by time the blocks have to run: give a batch, inputs=…"),
        ((dlab.SimpleCNN(), 2), r"SimpleCNN is no nn.Sequential, so dlab does not know .* a method sequence\(\)"),
    ],
)
def test_what_cannot_be_split_is_refused(given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as error:
        dlab.split(*given)
    assert is_one_sentence(str(error.value))
