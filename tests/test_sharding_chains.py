"""Chains of sharded operators, drawn at random: results and every gradient equal plain torch."""

import sys
from math import prod

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded import Net, assert_same, by_ranks, by_torch, check_on_threads

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4
SIZE = 8  # rows and columns of everything, so that whatever comes can follow whatever came


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# a program: a list of steps as data; each has a name, which weights or earlier values it uses, and its strategy


def cuts_of(draw, ranks, number):
    """So many numbers of cuts, whose product divides the ranks."""
    cuts = []
    for _ in range(number):
        cuts.append(draw(st.sampled_from([cut for cut in (1, 2, 4, 8) if (ranks // prod(cuts)) % cut == 0])))
    return draw(st.permutations(cuts))


def placed(draw, ranks, words, cuts):
    """The same cuts as layouts: axes in any order, and a long one written as two."""
    subscripts = dict(zip(sorted(set("".join(words))), cuts, strict=True))
    axes = {}
    for subscript, cut in subscripts.items():
        parts = [2] * (cut.bit_length() - 1) if draw(st.booleans()) else [cut]
        for number, part in enumerate(parts):
            axes[f"{subscript}{number}"] = part
    axes["rest"] = ranks // prod(cuts)
    order = draw(st.permutations(list(axes)))
    layout = dlab.Layout(tuple(axes[name] for name in order), tuple(order))
    names = {
        subscript: tuple(draw(st.permutations([a for a in axes if a[0] == subscript]))) for subscript in subscripts
    }
    return tuple(layout(*(names[subscript] for subscript in word)) for word in words)


WORDS = {"matmul": ("ij", "jk"), "transposed": ("ij", "kj"), "linear": ("bj", "kj"), "relu": ("ab",), "gelu": ("ab",)}
WORDS |= {"residual": ("ab", "ab"), "times": ("ab", "ab"), "softmax": ("a.",), "layer_norm": ("a.", ".", ".")}
WITHOUT = ("matmul", "linear", "relu", "gelu", "residual", "times", "softmax", "layer_norm", "turn", "heads", "scale")
WITHOUT += ("center", "tied", "square", "pieces", "bias", "table")


@st.composite
def programs(draw, ranks=None):
    ranks = draw(st.sampled_from([2, 4, 8])) if ranks is None else ranks
    steps = []
    for number in range(draw(st.integers(1, 6))):
        with_strategy = draw(st.booleans())
        name = draw(st.sampled_from(sorted(WORDS) if with_strategy else WITHOUT))
        strategy = out = None
        if with_strategy:
            words = WORDS[name]
            subscripts = sorted(set("".join(words)) - {"."})
            cuts = dict(zip(subscripts, cuts_of(draw, ranks, len(subscripts)), strict=True))
            if "." in "".join(words) or draw(st.booleans()):
                strategy = tuple(tuple(cuts.get(subscript, 1) for subscript in word) for word in words)
            else:
                strategy = placed(draw, ranks, words, [cuts[subscript] for subscript in subscripts])
            if draw(st.booleans()):
                out = tuple(cuts_of(draw, ranks, 2))
        steps.append((name, draw(st.integers(0, 2)), draw(st.integers(0, number)), strategy, out))
    end = draw(st.sampled_from(["whole", "sum", "mean", "loss"]))
    return ranks, steps, end


def interpret(steps, end, cut):
    """The function that a program is; with `cut`, operators have their strategies, else all is plain torch."""

    def operator(name, function, strategy, out):
        return dlab.shard(function, in_strategy=strategy, out_strategy=out) if cut and strategy else function

    def body(weights, x, ids):
        values = [x]
        for name, which, earlier, strategy, out in steps:
            x, other, weight, bias = values[-1], values[earlier], weights[which], weights[3]
            if name == "transposed":
                matmul = dlab.ops.MatMul(transpose_b=True)
                x = matmul.shard(strategy, out)(x, weight) if cut else x @ weight.mT
            elif name == "softmax":
                x = operator(name, F.softmax, strategy, out)(x, dim=-1)
            elif name == "layer_norm":
                x = operator(name, F.layer_norm, strategy, out)(x, (SIZE,), bias, weights[4])
            elif name == "linear":
                x = operator(name, F.linear, strategy, out)(x, weight, bias)
            elif name in ("matmul", "relu", "gelu"):
                function = {"matmul": torch.matmul, "relu": torch.relu, "gelu": F.gelu}[name]
                x = operator(name, function, strategy, out)(x, *([weight] if name == "matmul" else []))
            elif name in ("residual", "times"):
                function = torch.add if name == "residual" else torch.mul
                x = operator(name, function, strategy, out)(x, other)
            else:
                x = WITHOUT_STRATEGY[name](x, other, weight, bias, ids)
            x = x / 3
            values.append(x)
        return {"whole": x, "sum": x.sum(), "mean": x.mean(), "loss": F.cross_entropy(x, ids)}[end]

    return body


WITHOUT_STRATEGY = {
    "turn": lambda x, other, w, b, ids: x.t(),
    "heads": lambda x, other, w, b, ids: x.view(SIZE, 2, -1).transpose(0, 1).reshape(SIZE, -1),
    "scale": lambda x, other, w, b, ids: 2 * x - other,
    "center": lambda x, other, w, b, ids: x - x.mean(dim=1, keepdim=True),
    "tied": lambda x, other, w, b, ids: torch.matmul(torch.tanh(x @ w), w.t()),
    "square": lambda x, other, w, b, ids: torch.square(x) * (w**2).mean(),
    "pieces": lambda x, other, w, b, ids: torch.cat([x[:, 4:], other[:, :4]], dim=1),
    "bias": lambda x, other, w, b, ids: x + b,
    "table": lambda x, other, w, b, ids: x + F.embedding(ids, w),
}


def networks(steps, end, seed=0):
    torch.manual_seed(seed)
    weights = [torch.randn(SIZE, SIZE) for _ in range(3)] + [torch.randn(SIZE) for _ in range(2)]
    inputs = [torch.randn(SIZE, SIZE), torch.randint(0, SIZE, (SIZE,))]
    return Net(interpret(steps, end, False), *weights), Net(interpret(steps, end, True), *weights), inputs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.sampled_from(["rules", "bytes"]))
def test_random_chains_equal_plain_torch_on_threads(program, planner):
    ranks, steps, end = program
    plain, cut, inputs = networks(steps, end)
    check_on_threads(plain, cut, inputs, ranks, passes=2, planner=planner)


def run_all(programs_):
    torch.set_default_dtype(torch.float64)
    found = [by_ranks(networks(steps, end)[1], networks(steps, end)[2], passes=2) for _, steps, end in programs_]
    torch.set_default_dtype(torch.float32)
    return found


def test_random_chains_equal_plain_torch_on_processes(cluster):
    """Many programs in one run, since that is where the time goes."""
    drawn = []

    @settings(max_examples=25, deadline=None, database=None)
    @given(programs(ranks=WORKERS))
    def collect(program):
        drawn.append(program)

    collect()
    for rank, found in enumerate(cluster.run(run_all, drawn, timeout=100)):
        for (_, steps, end), each in zip(drawn, found, strict=True):
            plain, _, inputs = networks(steps, end)
            assert_same(each, by_torch(plain, inputs, passes=2), f"{steps} {end} on rank {rank}")


def test_the_programs_can_tell(monkeypatch):
    """A wrong gradient is noticed: without the sum of `Copy` the same comparison fails."""
    from dlab.sharding.communication import Copy

    steps = [("matmul", 0, 0, ((2, 1), (1, 2)), None)]
    plain, cut, inputs = networks(steps, "whole")
    check_on_threads(plain, cut, inputs, ranks=4)
    monkeypatch.setattr(Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None, None)))
    with pytest.raises(AssertionError, match="gradient of"):
        check_on_threads(plain, cut, inputs, ranks=4)
