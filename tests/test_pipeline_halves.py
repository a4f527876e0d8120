"""The two halves of a backward pass give what the whole gives, and compute no product twice."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from dlab.models import TransformerBlock
from dlab.pipeline.halves import Halves
from dlab.pipeline.stage import Stage


class Twice(nn.Module):
    """Uses one weight at two places, and another one as it is and transposed."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.one(torch.tanh(self.one(x))))
        return self.last(x @ self.two @ self.two.t())


class Positions(nn.Module):
    """Adds a learned tensor that a layer has gone over before, returns a second result, and a third from weights."""

    def __init__(self):
        super().__init__()
        self.position, self.over, self.out = nn.Parameter(torch.randn(6)), nn.Linear(6, 6), nn.Linear(6, 3)
        self.free = nn.Parameter(torch.ones(2))

    def forward(self, x):
        y = x + self.over(self.position)
        return self.out(y), y.relu(), self.free.exp()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x**2 * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * x * weight * gradient, x**2 * gradient


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(1, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return Square.apply(self.layer(x), self.weight.expand(*x.shape))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))


def block():
    return TransformerBlock(width=6, heads=2)


NETWORKS = [mlp, Twice, Positions, Own, block, lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ReLU())]


def results(net, x):
    outputs = net(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def prepared(make):
    torch.manual_seed(0)
    net = make().double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        gradients = [torch.randn_like(each) for each in results(copy.deepcopy(net), x)]
    return net, x.requires_grad_(), gradients


def halved(net, x, gradients):
    halves = Halves([get_gradient_edge(each) for each in results(net, x)], gradients, [x])
    before = copy.deepcopy([each.grad for each in net.parameters()])
    (found,) = halves.input_gradients()
    for each, grad in zip(net.parameters(), before, strict=True):
        assert each.grad is grad is None or torch.equal(each.grad, grad)
    halves.add_weight_gradients()
    return found


@pytest.mark.parametrize("make", NETWORKS)
def test_both_halves_together_give_what_the_whole_gives(make):
    net, x, gradients = prepared(make)
    other, y = copy.deepcopy(net), x.detach().clone().requires_grad_()
    for _ in range(2):  # the second time it is added
        y.grad = None
        torch.autograd.backward(results(other, y), gradients)
        assert torch.allclose(halved(net, x, gradients), y.grad, atol=1e-12)
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one.grad, two.grad, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [mlp, block])
def test_no_product_is_computed_twice(make):
    net, x, gradients = prepared(make)
    outputs = results(net, x)
    halves = Halves([get_gradient_edge(each) for each in outputs], gradients, [x])
    with Products() as first:
        halves.input_gradients()
    with Products() as second:
        halves.add_weight_gradients()
    with Products() as whole:
        torch.autograd.backward(results(net, x), gradients)
    forward = Products()
    with forward:
        results(net, x)
    assert first.count + second.count == whole.count - forward.count
    layers = sum(isinstance(each, nn.Linear) for each in net.modules())
    assert second.count == layers  # one for each weight, and none for activations


def test_hooks_on_weights_run_in_the_second_half():
    net, x, gradients = prepared(mlp)
    seen = []
    for name, each in net.named_parameters():
        each.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    halves = Halves([get_gradient_edge(each) for each in results(net, x)], gradients, [x])
    halves.input_gradients()
    assert not seen
    halves.add_weight_gradients()
    assert sorted(seen) == sorted(name for name, _ in net.named_parameters())


def test_an_input_that_is_not_used_gets_zeros():
    layer = nn.Linear(6, 2)
    x, unused = torch.randn(3, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    halves = Halves([get_gradient_edge(layer(x))], [torch.ones(3, 2)], [x, unused])
    first, second = halves.input_gradients()
    assert torch.equal(second, torch.zeros(4))
    assert torch.allclose(first, layer.weight.sum(0).expand(3, 6))


def test_memory_of_a_stage_goes_with_the_second_half():
    """Nothing keeps a micro-batch when both of its halves are done."""
    stage = Stage(1, mlp())
    outputs = stage.forward(0, (torch.randn(4, 6),))
    (first,) = stage.activations[0].inputs
    there = weakref.ref(first)
    gradients = [torch.ones_like(each) for each in outputs]
    del first, outputs
    stage.backward_input(0, gradients)
    assert there() is not None
    stage.backward_weight(0)
    assert there() is None
    assert not stage.activations


def test_with_recomputation_a_forward_saves_its_inputs_only():
    saved = []
    stage, x = Stage(1, mlp(), recompute=True), torch.randn(4, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        (outputs,) = stage.forward(0, (x,))
        assert not saved
        stage.backward(0, [torch.ones_like(outputs)])
    assert len(saved) > 5
