"""What `explain` tells before anything runs is what ranks then send: bytes of each rank, forward and backward."""

import copy
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
from torch import nn

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


class EveryCollective(nn.Module):
    """A chain of operators whose strategies need each collective, forward or backward."""

    def __init__(self, ranks: int, dim: int | None = 1) -> None:
        super().__init__()
        n = ranks
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(16, 16, dtype=torch.float64)) for _ in range(3))
        self.rows = dlab.ops.MatMul().shard(((n, 1), (1, 1)))  # gradient of w1: all-reduce
        self.columns = dlab.ops.ReLU().shard(((1, n),))  # all-to-all
        self.scatter = dlab.ops.MatMul().shard(((1, n), (n, 1)), out_strategy=(n, 1))  # reduce-scatter
        self.gather = dlab.ops.MatMul().shard(((1, 1), (1, n)))  # all-gather
        self.sum = dlab.ops.ReduceSum(dim).shard(((1, n),))  # all-reduce

    def forward(self, x):
        x = self.columns(self.rows(x, self.w1))
        return self.sum(self.gather(self.scatter(x, self.w2), self.w3))


class Mixed(nn.Module):
    """Operators on several device matrices, with a residual connection."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        half = max(1, ranks // 2)
        self.fc = nn.Linear(16, 16, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(16, 16, dtype=torch.float64))
        self.cut = dlab.ops.MatMul().shard(((2, half), (half, 1)))
        self.relu = dlab.ops.ReLU().shard(((half, 2),))

    def forward(self, x):
        y = self.fc(self.relu(self.cut(x, self.w)))
        return torch.softmax(x + y, dim=-1)


def sent(net, x, ranks, backward, **settings):
    """The bytes that each rank sends, as they are recorded."""

    def run(transport):
        own, mine = copy.deepcopy(net), x.clone().requires_grad_(x.requires_grad)
        result = dlab.AutoParallel(own, transport=transport, **settings)(mine)
        if backward:
            result.sum().backward()

    found = Counter(dict.fromkeys(range(ranks), 0))
    for each in dlab.rehearse(run, ranks=ranks).messages:
        if each.kind == "message":
            found[each.rank] += each.data["bytes"]
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("network", [EveryCollective, Mixed])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_each_rank_sends_what_was_told(network, ranks, needs_gradient):
    torch.manual_seed(0)
    net, x = network(ranks), torch.randn(16, 16, dtype=torch.float64, requires_grad=needs_gradient)
    told = dlab.AutoParallel(copy.deepcopy(net), ranks=ranks).explain(x)
    forward = sent(net, x, ranks, backward=False)
    both = sent(net, x, ranks, backward=True)
    assert forward == [told.bytes_per_rank("forward")] * ranks
    assert [b - f for b, f in zip(both, forward, strict=True)] == [told.bytes_per_rank("backward")] * ranks
    assert told.bytes_per_rank("forward") > 0 and told.bytes_per_rank("backward") > 0
    if network is EveryCollective:
        assert set(told.collectives("forward")) == {"all-to-all", "reduce-scatter", "all-gather", "all-reduce"}


@pytest.mark.parametrize("own_batch", [False, True])
@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "auto"])
def test_each_mode_sends_what_was_told(mode, own_batch):
    torch.manual_seed(0)
    net, x = EveryCollective(4) if mode != "auto" else Mixed(4), torch.randn(16, 16, dtype=torch.float64)
    x.requires_grad_()
    settings = {"parallel_mode": mode, "dataset_strategy": "data_parallel" if own_batch else "full_batch"}
    told = dlab.AutoParallel(copy.deepcopy(net), ranks=4, **settings).explain(x)
    assert sent(net, x, 4, backward=False, **settings) == [told.bytes_per_rank("forward")] * 4
    assert sent(net, x, 4, backward=True, **settings) == [told.bytes_per_rank()] * 4
    assert (told.bytes_per_rank() == 0) == (mode == "stand_alone")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_number_that_ranks_cannot_share_equally_is_sent_by_some_of_them(ranks):
    net, x = EveryCollective(ranks, dim=None), torch.randn(16, 16, dtype=torch.float64)
    told = dlab.AutoParallel(copy.deepcopy(net), ranks=ranks).explain(x).bytes_per_rank("forward")
    for each in sent(
        net, x, ranks, backward=False
    ):  # in a ring, the sum of one number goes twice past each rank at most
        assert abs(each - told) <= 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_processes_do_the_collectives_that_were_told(ranks):
    torch.manual_seed(0)
    net, x = EveryCollective(ranks), torch.randn(16, 16, dtype=torch.float64)
    told = dlab.AutoParallel(copy.deepcopy(net), ranks=ranks).explain(x)

    def work():
        dlab.AutoParallel(net)(x).sum().backward()

    with dlab.Cluster(ranks) as cluster:
        run = cluster.start(work)
        run.wait(60)
    factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1}  # of the tensor that a rank has for it
    counts, lengths = Counter(), Counter()
    for each in run.events:
        if each.kind == "collective":
            counts[each.rank, each.data["name"]] += each.data["count"]
            lengths[each.rank] += factor.get(each.data["name"], (ranks - 1) / ranks) * each.data["bytes"]
    assert counts == {(rank, name): n for rank in range(ranks) for name, n in Counter(told.collectives()).items()}
    assert lengths == dict.fromkeys(range(ranks), told.bytes_per_rank())


def test_a_plan_leaves_the_network_as_it_was():
    net = EveryCollective(4)
    shapes, grads = [each.shape for each in net.parameters()], [each.grad for each in net.parameters()]
    par = dlab.AutoParallel(net, ranks=4)
    par.explain(torch.randn(16, 16, dtype=torch.float64))
    assert [each.shape for each in net.parameters()] == shapes
    assert [each.grad for each in net.parameters()] == grads == [None] * 3
    assert set(par.layouts.values()) == {None}


@pytest.mark.parametrize("mode", ["layouts", "cuts"])
def test_a_hundred_operators_are_planned_for_4096_ranks_without_any_process(mode):
    import multiprocessing
    import threading

    layout = dlab.Layout((16, 16, 16), ("dp", "sp", "mp"))
    if mode == "layouts":
        matmuls = [
            dlab.ops.MatMul().shard((layout("dp", "sp"), layout("sp", "mp"))),
            dlab.ops.MatMul().shard((layout(("dp", "sp"), "None"), layout("None", "mp"))),
        ]
    else:
        matmuls = [dlab.ops.MatMul().shard(((16, 16), (16, 16))), dlab.ops.MatMul().shard(((16, 1), (1, 256)))]
    weights = nn.ParameterList(nn.Parameter(torch.empty(4096, 4096, device="meta")) for _ in range(50))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = weights

        def forward(self, x):
            for number, weight in enumerate(self.weights):
                x = torch.relu(matmuls[number % 2](x, weight))
            return x

    threads = threading.active_count()
    told = dlab.AutoParallel(Chain(), ranks=4096).explain(torch.empty(4096, 4096, device="meta"))
    assert len(told.rows) == 100 and multiprocessing.active_children() == [] and threading.active_count() <= threads
    cuts = [256, 16] if mode == "layouts" else [256, 256]  # of the weights of every second layer
    assert told.parameter_bytes == 25 * sum(4096 * 4096 * 4 // each for each in cuts)
    sums = [each for each in told.messages if each.collective == "all-reduce" and each.direction == "forward"]
    # the sum over j, cut 16 ways: each rank has 256 x 256 numbers and sends 2 * 15/16 of them
    assert [each.bytes for each in sums] == [2 * 15 * 256 * 256 * 4 // 16] * 25
