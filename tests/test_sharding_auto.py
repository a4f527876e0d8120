"""Strategies that dlab chooses: the best of all combinations, the published answers, within the memory."""

import copy
import multiprocessing
import threading
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlab
from dlab.sharding import search
from dlab.sharding.candidates import LATENCY, MOST


def mlp(hidden, layers=6, bias=False):
    """Linear layers with activations between them."""
    parts = [each for _ in range(layers) for each in (nn.Linear(hidden, hidden, bias=bias), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


class Step(nn.Module):
    """A network and the squared error of its result."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return ((self.net(x) - y) ** 2).mean()


class Block(nn.Module):
    """A transformer block: residual connections, and one tensor that three operators take."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.first(x)
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (each(y).reshape(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Tied(nn.Module):
    """One weight in two operators, and a gradient that does not go on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = torch.relu(x @ self.weight)
        return torch.tanh(y.detach() + y) @ self.weight.t()


# the truth: every combination, each explained as if it had been written by hand


class ByHand(nn.Module):
    """Two products with an activation, and with `residual` their input added, with the strategies that are given."""

    def __init__(self, residual, strategies):
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 24))
        self.second = nn.Parameter(torch.randn(24, 12 if residual else 48))
        self.residual = residual
        calls = [torch.matmul, torch.relu, torch.matmul, *[torch.add] * residual]
        self.calls = [dlab.shard(call, *each) for call, each in zip(calls, strategies, strict=True)]

    def forward(self, x):
        y = self.calls[2](self.calls[1](self.calls[0](x, self.first)), self.second)
        return self.calls[3](x, y) if self.residual else y


def strategies_of(name, ranks):
    """Every strategy of an operator on matrices, with every out_strategy (for 4 ranks, all that make 4 parts)."""
    cuts = [each for each in range(1, ranks + 1) if ranks % each == 0]
    if name == "matmul":
        for i, j, k in product(cuts, repeat=3):
            if i * j * k == ranks:
                outs = [each for each in product(cuts, repeat=2) if ranks < 4 or prod(each) == ranks] if j > 1 else []
                yield from ((((i, j), (j, k)), out) for out in [None, *outs])
    else:
        for a, b in product(cuts, repeat=2):
            if ranks % (a * b) == 0:
                yield (((a, b),) * (2 if name == "add" else 1)), None


def explained(residual, strategies, x, ranks):
    """Bytes with latency, and the memory of parameters and gradients; None for what is refused."""
    try:
        told = dlab.AutoParallel(ByHand(residual, strategies), ranks=ranks).explain(x)
    except ValueError:
        return None
    return told.bytes_per_rank(), len(told.messages), 2 * told.parameter_bytes


@pytest.fixture(scope="module")
def everything():
    """What each combination costs, by ranks, batch and network."""
    found = {}
    for ranks, batch, residual in [(2, 64, True), (2, 4, False), (3, 6, False), (4, 64, False)]:
        x = torch.randn(batch, 12, requires_grad=residual)
        names = ["matmul", "relu", "matmul", *["add"] * residual]
        costs = [explained(residual, each, x, ranks) for each in product(*(strategies_of(n, ranks) for n in names))]
        found[ranks, batch, residual] = x, [each for each in costs if each is not None]
    return found


@pytest.mark.parametrize("latency", [0, 100, LATENCY])
def test_no_combination_of_strategies_is_better(everything, latency):
    for (ranks, _, residual), (x, costs) in everything.items():
        net = ByHand(residual, [(None,)] * (3 + residual))
        par = dlab.AutoParallel(net, parallel_mode="auto", ranks=ranks, latency=latency)
        plan, told = par.plan(x), par.explain(x)
        assert plan.exact
        assert told.bytes_per_rank() + latency * len(told.messages) == min(b + latency * c for b, c, _ in costs)
        assert len(costs) > 10


def test_with_a_bound_on_memory_no_combination_that_keeps_it_is_better(everything):
    for (ranks, _, residual), (x, costs) in everything.items():
        for bound in sorted({memory for _, _, memory in costs}):
            net = ByHand(residual, [(None,)] * (3 + residual))
            par = dlab.AutoParallel(net, parallel_mode="auto", ranks=ranks, memory=bound)
            told = par.explain(x)
            assert 2 * told.parameter_bytes == par.plan(x).memory <= bound
            best = min(b + LATENCY * c for b, c, memory in costs if memory <= bound)
            assert told.bytes_per_rank() + LATENCY * len(told.messages) == best
        with pytest.raises(ValueError, match=rf"memory={bound // 1000} bytes per rank.* at least \d+ bytes on each"):
            dlab.AutoParallel(net, parallel_mode="auto", ranks=ranks, memory=bound // 1000).plan(x)


class Chain(nn.Module):
    """Three products of different sizes, and the sum of the result."""

    def __init__(self, strategies):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(*each) for each in ((4, 16), (16, 16), (16, 8)))
        calls = [*[torch.matmul] * 3, torch.sum]
        self.calls = [dlab.shard(call, *each) for call, each in zip(calls, strategies, strict=True)]

    def forward(self, x):
        for call, weight in zip(self.calls, self.weights, strict=False):
            x = call(x, weight)
        return self.calls[3](x)


def test_a_dearer_beginning_that_leaves_memory_for_the_rest_is_not_forgotten():
    x, latency, costs = torch.randn(64, 4), 200, []
    for strategies in product(*([list(strategies_of("matmul", 2))] * 3), strategies_of("sum", 2)):
        try:
            told = dlab.AutoParallel(Chain(strategies), ranks=2).explain(x)
        except ValueError:
            continue
        costs.append((told.bytes_per_rank() + latency * len(told.messages), 2 * told.parameter_bytes))
    for bound in sorted({memory for _, memory in costs}):
        par = dlab.AutoParallel(Chain([(None,)] * 4), "auto", ranks=2, memory=bound, latency=latency)
        told = par.explain(x)
        best = min(cost for cost, memory in costs if memory <= bound)
        assert told.bytes_per_rank() + latency * len(told.messages) == best


def test_the_least_memory_that_the_error_names_is_enough():
    net, x = mlp(16, layers=3, bias=True), torch.randn(8, 16)
    with pytest.raises(ValueError, match="at least") as problem:
        dlab.AutoParallel(net, parallel_mode="auto", ranks=4, memory=1).plan(x)
    least = int(str(problem.value).split("at least ")[1].split()[0])
    assert least == 2 * 4 * (3 * 16 * 16 + 3 * 16) // 4
    assert dlab.AutoParallel(net, parallel_mode="auto", ranks=4, memory=least).plan(x).memory == least
    with pytest.raises(ValueError, match="at least"):
        dlab.AutoParallel(net, parallel_mode="auto", ranks=4, memory=least - 1).plan(x)


# published answers


def weights(plan):
    """How the weight of each linear layer is cut."""
    return [row.chosen.strategy[1] for row in plan.rows if "Linear" in row.operator]


def test_a_large_batch_of_a_narrow_network_is_data_parallel():
    x, y = torch.randn(256, 32), torch.randn(256, 32)
    par = dlab.AutoParallel(Step(mlp(32)), parallel_mode="auto", ranks=4)
    told = par.explain(x, y)
    assert weights(par.plan(x, y)) == [(1, 1)] * 6
    assert [row.chosen.strategy[0] for row in par.plan(x, y).rows if "Linear" in row.operator] == [(4, 1)] * 6
    assert told.collectives("backward") == ["all-reduce"] * 6  # of the gradients alone
    assert told.bytes_per_rank("forward") == 4  # of the loss, on this rank


def test_a_small_batch_of_a_wide_network_alternates_columns_and_rows():
    x, y = torch.randn(32, 256), torch.randn(32, 256)
    par = dlab.AutoParallel(Step(mlp(256)), parallel_mode="auto", ranks=4)
    told = par.explain(x, y)
    assert weights(par.plan(x, y)) == [(4, 1), (1, 4)] * 3
    assert told.collectives("forward") == ["all-reduce"] * 3 and told.collectives("backward") == ["all-reduce"] * 2


def test_counting_bytes_alone_finds_something_that_sends_less_in_more_collectives():
    x, y = torch.randn(32, 256), torch.randn(32, 256)
    told = [
        dlab.AutoParallel(Step(mlp(256)), parallel_mode="auto", ranks=4, latency=latency).explain(x, y)
        for latency in (0, LATENCY)
    ]
    assert told[0].bytes_per_rank() < told[1].bytes_per_rank()
    assert len(told[0].messages) > len(told[1].messages)


def test_between_the_two_answers_both_batch_and_weights_are_cut():
    hidden = 1024
    cuts = []
    for batch in (256, 512, 1024, 2048, 3072, 4096):
        x = torch.empty(batch, hidden, device="meta")
        plan = dlab.AutoParallel(Step(mlp(hidden)), parallel_mode="auto", ranks=4).plan(x, x)
        cuts.append(max(prod(each) for each in weights(plan)))
    assert cuts[0] == 4 and cuts[-2] > 1 and cuts[-1] == 1  # 4096 / 4 tokens of a rank are as many as features
    assert cuts == sorted(cuts, reverse=True)  # the more tokens there are, the less the weights are cut


# what is predicted, told and done


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("make", [Block, Tied, lambda: mlp(16, 3, bias=True)])
def test_the_bytes_of_a_plan_are_those_that_are_told(make, ranks):
    net = make()
    x = torch.randn(12, 12, 16) if isinstance(net, Block) else torch.randn(24, 8 if isinstance(net, Tied) else 16)
    par = dlab.AutoParallel(net, parallel_mode="auto", ranks=ranks)
    plan, told = par.plan(x), par.explain(x)
    for direction in ("forward", "backward"):
        assert plan.bytes_per_rank(direction) == told.bytes_per_rank(direction)
    assert sum(row.sent.collectives for row in plan.rows) == len(told.messages)
    assert plan.memory == 2 * told.parameter_bytes
    assert plan.layouts == told.layouts


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [Block, Tied, lambda: mlp(16, 3, bias=True)])
def test_what_is_chosen_computes_what_one_process_does(make, ranks):
    torch.manual_seed(0)
    net = make().double()
    x = torch.randn(4, 8, 16) if isinstance(net, Block) else torch.randn(8, 8 if isinstance(net, Tied) else 16)
    x = x.double().requires_grad_()
    alone = copy.deepcopy(net)
    expected = alone(x)
    expected.square().sum().backward()

    def run(transport):
        own, mine = copy.deepcopy(net), x.detach().clone().requires_grad_()
        par = dlab.AutoParallel(own, parallel_mode="auto", transport=transport, latency=0)
        result = par(mine)
        result.square().sum().backward()
        return result.detach(), mine.grad, par.whole(grad=True), repr(par.plan(mine)), par.layouts

    for result, gradient, gradients, shown, layouts in (found := dlab.rehearse(run, ranks=ranks)):
        assert torch.allclose(result, expected, atol=1e-10) and torch.allclose(gradient, x.grad, atol=1e-10)
        for name, parameter in alone.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-10), name
        assert shown == found[0][3] and layouts == found[0][4]


def test_a_step_trains_on_its_own_part_of_the_batch_in_real_processes():
    torch.manual_seed(0)
    net, batches = mlp(8, 2), torch.randn(3, 8, 8)

    def train(parallel):
        own = copy.deepcopy(net)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = own(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if not parallel:
            return [step(x).item() for x in batches]
        call = dlab.AutoParallel(step, parallel_mode="auto", dataset_strategy="data_parallel")
        parts = [x.chunk(2)[dlab.rank()] for x in batches]
        return [call(x).item() for x in parts], repr(call.plan(parts[0]))

    with dlab.Cluster(2) as cluster:
        found = cluster.run(train, True)
    for losses, plan in found:
        assert losses == pytest.approx(train(False), abs=1e-6)
        assert plan == found[0][1]  # each process has decided by itself


def test_a_strategy_given_by_hand_stays():
    par = dlab.AutoParallel(ByHand(False, [(((1, 2), (2, 1)), (2, 1)), (None,), (None,)]), "auto", ranks=2)
    plan = par.plan(torch.randn(64, 12))
    assert plan.strategies[0] == (((1, 2), (2, 1)), (2, 1)) and plan.rows[0].other is None


def test_a_second_shape_is_planned_for_the_weights_as_they_are():
    net = mlp(16, 2)

    def run(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), parallel_mode="auto", transport=transport)
        large, small = torch.ones(64, 16), torch.ones(4, 16)
        par(large)
        before = dict(par.layouts)
        assert torch.allclose(par(small), net(small), atol=1e-5)
        assert par.layouts == before == par.plan(small).layouts
        assert par.plan(large) is par.plan(large)
        return par.plan(small).memory

    assert len(set(dlab.rehearse(run, ranks=2))) == 1


def test_the_table_says_what_was_chosen_and_what_else_there_was():
    x = torch.randn(4, 16)
    plan = dlab.AutoParallel(mlp(16, 2), parallel_mode="auto", ranks=2).plan(x)
    heading, first = repr(plan).splitlines()[:2]
    assert heading.split() == ["operator", "strategy", "forward", "backward", "next", "best", "bytes", "with", "it"]
    assert first.startswith("1 Linear")
    assert "all combinations" in repr(plan) and "<table>" in plan._repr_html_()
    for row in plan.rows:
        assert row.other is not None and row.other != row.chosen


def test_the_next_best_strategy_costs_what_it_would_if_it_were_given_by_hand():
    x = torch.randn(64, 12)
    chosen = dlab.AutoParallel(ByHand(False, [(None,)] * 3), "auto", ranks=2).plan(x)
    for number, row in enumerate(chosen.rows):
        other = list(chosen.strategies)
        other[number] = row.other.strategy, row.other.out_strategy
        told = dlab.AutoParallel(ByHand(False, other), ranks=2).explain(x).bytes_per_rank()
        assert told - chosen.bytes_per_rank() == row.other_bytes - row.sent.bytes


# bounds and errors


def test_the_work_is_bounded_and_no_process_is_started(monkeypatch):
    net = nn.Sequential(*[mlp(64, 2) for _ in range(5)])
    threads = threading.active_count()
    plan = dlab.AutoParallel(net, parallel_mode="auto", ranks=64).plan(torch.randn(64, 64))
    assert plan.tried <= MOST * len(plan.rows)
    assert multiprocessing.active_children() == [] and threading.active_count() <= threads
    x = torch.randn(4, 4, 16)
    best = dlab.AutoParallel(Block(), parallel_mode="auto", ranks=4).plan(x)
    monkeypatch.setattr(search, "BEAM", 3)
    short = dlab.AutoParallel(Block(), parallel_mode="auto", ranks=4).plan(x)
    assert not short.exact and "most promising" in repr(short)
    assert short.bytes_per_rank() >= best.bytes_per_rank()


def test_what_cannot_be_planned_is_a_sentence():
    class Sorted(nn.Module):
        def forward(self, x):
            return torch.sort(x)[0]

    with pytest.raises(NotImplementedError, match="does not know how to cut 'sort'"):
        dlab.AutoParallel(Sorted(), parallel_mode="auto", ranks=2).plan(torch.randn(4, 4))
    with pytest.raises(ValueError, match="leaves nothing to choose"):
        dlab.AutoParallel(mlp(4), ranks=2).plan(torch.randn(4, 4))
    with pytest.raises(ValueError, match="leave out layouts="):
        layouts = {"0.weight": dlab.Layout((2,), ("tp",))("tp", None)}
        dlab.AutoParallel(mlp(4), parallel_mode="auto", ranks=2, layouts=layouts)
    for memory in (0, -5, 1.5, "2 GB"):
        with pytest.raises(ValueError, match="number of bytes per rank"):
            dlab.AutoParallel(mlp(4), parallel_mode="auto", ranks=2, memory=memory)
    with pytest.raises(ValueError, match="number of bytes per rank"):
        dlab.AutoParallel(mlp(4), ranks=2, memory=100)


def test_a_network_that_calls_other_operators_than_planned_is_refused_on_all_ranks():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.relu(x) if self.calls < 2 else torch.tanh(x)

    with pytest.raises(ValueError, match=r"calls Tanh of .* where Relu of .* had been planned"):
        dlab.rehearse(lambda transport: dlab.AutoParallel(Fickle(), "auto", transport)(torch.ones(4, 4)), ranks=2)
