"""`par.check`: right networks pass however they are cut; a wrong gradient is found, with the operator that has it."""

import copy

import pytest
import torch
from torch import nn

import dlab
from dlab.sharding import communication


class Chain(nn.Module):
    """A layer that is whole, and two that are cut."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        shapes = ((16, 8), (8, 32), (32, 4))
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes)
        self.first, self.second = dlab.ops.MatMul().shard(first), dlab.ops.MatMul().shard(second)

    def forward(self, x):
        hidden = torch.relu(torch.matmul(x, self.w1))
        return self.second(torch.relu(self.first(hidden, self.w2)), self.w3)


CUTS = [(a, b, c) for a in (1, 2, 4) for b in (1, 2, 4) for c in (1, 2, 4) if a * b * c in (2, 4)]
COLUMN, ROW = ((1, 1), (1, 4)), ((1, 4), (4, 1))


def checked(net, inputs, ranks=4, **options):
    """What `check` says on each rank."""

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, **options)
        try:
            return par.check(inputs)
        except AssertionError as error:
            return str(error)

    return list(dlab.rehearse(work, ranks=ranks))


@pytest.mark.parametrize("first", CUTS, ids=str)
def test_a_right_network_passes(first):
    images = torch.randn(8, 16, dtype=torch.float64)
    for a, b, c in CUTS:
        net = Chain(((first[0], first[1]), first[1:]), ((a, b), (b, c)))
        for said in checked(net, images):
            assert said.startswith("the results and gradients of 5 operators equal those of one process, to 1e-09 of")


@pytest.mark.parametrize("sequence", [False, True])
def test_a_right_transformer_passes(sequence):
    net, layout = dlab.RowTransformer(), dlab.Layout((4,), ("tp",))
    layouts = dlab.megatron_layouts(net, layout, sequence=sequence)
    for said in checked(net, torch.randn(4, 1, 28, 28), layouts=layouts):
        assert said.startswith("the results and gradients of ")


def test_the_gradient_that_was_not_added_up_is_found(monkeypatch):
    class Forgotten(communication.Copy):
        @staticmethod
        def backward(ctx, gradient):
            return gradient, None, None

    monkeypatch.setattr(communication, "Copy", Forgotten)
    # 6 samples cannot be cut into 4: before the first layer that is cut, every rank computes the whole
    for said in checked(Chain(COLUMN, ROW), torch.randn(6, 16, dtype=torch.float64)):
        assert said.startswith("the gradient of the result of 2 Relu differs from that of one process, although all")


def test_a_sum_that_was_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(communication.AllReduce, "forward", staticmethod(lambda ctx, tensor, line: tensor.clone()))
    for said in checked(Chain(COLUMN, ROW), torch.randn(8, 16, dtype=torch.float64)):
        assert said.startswith("the result of 5 MatMul differs from that of one process by up to ")


def test_a_gradient_that_is_added_up_once_too_often_is_found(monkeypatch):
    def twice(ctx, gradient):
        return 4 * gradient, None

    monkeypatch.setattr(communication.AllReduce, "backward", staticmethod(twice))
    for said in checked(Chain(COLUMN, ROW), torch.randn(8, 16, dtype=torch.float64)):
        assert "the gradient of the result of 4 Relu differs" in said
