"""Operators with strategies: outside of AutoParallel they compute what torch does; what they cannot cut is refused."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import dlab
from dlab import ops
from dlab.ops import Operator

X, W = torch.randn(4, 6), torch.randn(6, 3)
OPERATORS = [each for each in vars(ops).values() if inspect.isclass(each) and issubclass(each, Operator)]


@pytest.mark.parametrize(
    ("operator", "inputs", "right"),
    [
        (ops.MatMul(), (X, W), X @ W),
        (ops.MatMul(transpose_b=True), (X, W.t()), X @ W),
        (ops.MatMul(transpose_b=True), (X.expand(2, 4, 6), W.t().expand(2, 3, 6)), (X @ W).expand(2, 4, 3)),
        (ops.ReLU(), (X,), X.relu()),
        (ops.Gelu(), (X,), F.gelu(X)),
        (ops.Add(), (X, X[0]), X + X[0]),
        (ops.Mul(), (X, X), X * X),
        (ops.Softmax(), (X,), X.softmax(-1)),
        (ops.Softmax(dim=0), (X,), X.softmax(0)),
        (ops.LayerNorm((6,)), (X, W[:, 0], W[:, 1]), F.layer_norm(X, (6,), W[:, 0], W[:, 1])),
        (ops.LayerNorm(6, eps=0.1), (X,), F.layer_norm(X, (6,), eps=0.1)),
        (ops.Embedding(), (torch.tensor([2, 0]), X), X[[2, 0]]),
        (ops.ReduceSum(), (X,), X.sum()),
        (ops.ReduceSum(dim=1, keepdim=True), (X,), X.sum(1, keepdim=True)),
        (ops.Flatten(), (torch.ones(2, 3, 4),), torch.ones(2, 12)),
        (ops.Transpose((1, 0)), (X,), X.t()),
        (ops.CrossEntropy(), (X, torch.arange(4)), F.cross_entropy(X, torch.arange(4))),
        (dlab.shard(torch.matmul), (X, W), X @ W),
        (dlab.shard(F.linear), (X, W.t(), W[0]), F.linear(X, W.t(), W[0])),
    ],
)
def test_outside_of_auto_parallel_an_operator_is_the_function_of_torch(operator, inputs, right):
    operator.shard()
    assert torch.equal(operator(*inputs), right)
    strategies = tuple((2,) * each.dim() for each in inputs)
    assert torch.equal(operator.shard(strategies)(*inputs), right)  # a strategy is for ranks: here is only one process


def test_the_operators_that_there_are_and_that_each_says_what_it_does():
    first = ["MatMul", "ReLU", "Gelu", "Add", "Mul", "Softmax"]
    second = ["LayerNorm", "Embedding", "ReduceSum", "Flatten", "Transpose", "CrossEntropy"]
    assert {each.__name__ for each in OPERATORS} == {"Operator", *first, *second}
    assert all(each.__doc__ and each.__doc__ != Operator.__doc__ for each in OPERATORS if each is not Operator)


def test_shard_returns_the_operator_and_can_be_called_again():
    operator = ops.MatMul(transpose_b=True)
    assert operator.shard(((2, 1), (1, 1)), out_strategy=(2, 1)) is operator
    assert operator.in_strategy == ((2, 1), (1, 1)) and operator.out_strategy == (2, 1)
    assert repr(operator) == "MatMul(transpose_b=True).shard(((2, 1), (1, 1)), (2, 1))"
    assert dlab.shard(operator, in_strategy=((1, 2), (1, 2))) is operator and operator.out_strategy is None
    assert repr(dlab.shard(torch.relu, ((2, 1),))) == "relu().shard(((2, 1),), None)" and repr(ops.ReLU()) == "ReLU()"
    layout = dlab.Layout((2,), ("dp",))
    assert "Layout((2,), ('dp',))('dp', 'None')" in repr(dlab.shard(torch.relu, (layout("dp", None),)))


def test_two_operators_of_one_function_have_strategies_of_their_own():
    first, second = dlab.shard(torch.relu, ((2, 1),)), dlab.shard(torch.relu, ((1, 2),))
    assert first.in_strategy != second.in_strategy and type(first).function is torch.relu


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x + 1, "<lambda>"),
        (torch.cumsum, "cumsum"),
        (F.conv2d, "conv2d"),
        (torch.nn.ReLU(), "ReLU()"),
        (3, "3"),
        ([torch.relu], "relu"),
        (print, "print"),
    ],
)
def test_a_function_that_dlab_cannot_cut_is_refused_by_name(function, name):
    with pytest.raises(ValueError) as caught:
        dlab.shard(function, in_strategy=((1, 1),))
    sentence = str(caught.value)
    assert "does not know how to cut" in sentence and name in sentence
    assert all(word in sentence for word in ("matmul", "layer_norm", "softmax", "outside of the network"))


@pytest.mark.parametrize("strategy", [4, "dp", dlab.Layout((2,), ("dp",))("dp", None)])
def test_a_strategy_is_a_tuple_with_an_entry_for_each_input(strategy):
    for shard in (ops.ReLU().shard, lambda strategy: dlab.shard(torch.relu, in_strategy=strategy)):
        with pytest.raises(ValueError, match="give a tuple with the cuts, or the layout, of each input"):
            shard(strategy)
