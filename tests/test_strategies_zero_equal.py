"""ZeRO of every stage equals one process, whatever the model does with its weights, and over every transport."""

import sys
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from test_strategies import adam, data, difference, network, options, plain
from test_strategies_unused import USED, Net, assert_equal, loss, pieces
from test_strategies_unused import plain as plain_unused
from torch import nn
from torch.utils.checkpoint import checkpoint

import dlab
from dlab.collectives.shared_allreduce import SharedAllReduce
from dlab.strategies.zero import gradients, strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file
for name in ("test_strategies", "test_strategies_unused"):
    cloudpickle.register_pickle_by_value(sys.modules[name])

SMALL = 0.0005  # megabytes: several buckets in stage 2


class Tied(nn.Module):
    """Two layers share a weight, and one of them is used twice; the head is a function of that weight outside of it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x):
        x = self.b(self.a(self.a(x).tanh()).tanh())
        return self.c((x @ self.a.weight.T).tanh())


class Own(nn.Module):
    """Parameters of its own around layers, attention that reads weights of a module inside it, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(6)), nn.Linear(6, 8)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        for each in self.frozen.parameters():
            each.requires_grad = False
        self.double()

    def forward(self, x):
        x = self.first(x * self.scale)[:, None, :]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.frozen(self.norm(x[:, 0])).tanh())


class Recomputed(nn.Module):
    """A part is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)
        self.inner = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9))
        self.double()

    def forward(self, x):
        return self.last(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=False))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(make, strategy, ranks, monkeypatch, on=None, **changed):
    """How far a training on threads, or in a cluster, is from one process."""
    monkeypatch.setattr("test_strategies.network", make)
    given = options(ranks, **changed)
    if on is None:
        shares = dlab.rehearse(dlab.Training(model=make, data=data(), strategy=strategy, **given), ranks=ranks)
        assert len({share.digest for share in shares}) == 1
        model = make()
        model.load_state_dict(shares[0].weights)
    else:
        result = dlab.train(make, data(), strategy, on=on, **given).wait(60)
        assert result.identical
        model = result.model
    return difference(model, plain(ranks, **given))


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def several(request):
    with dlab.Cluster(request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["momentum", "AdamW"])
@pytest.mark.parametrize("make", [network, Tied])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_process_in_shared_memory(several, monkeypatch, stage, make, optimizer):
    assert trained(make, dlab.ZeRO(stage, SMALL), several.workers, monkeypatch, several, optimizer=optimizer) < 1e-12


@pytest.mark.parametrize("changed", [{"accumulate": 3}, {"order": "global"}, {"accumulate": 5, "batch_size": 9}])
@pytest.mark.parametrize("stage", [2, 3])
def test_in_micro_batches_of_which_some_ranks_have_fewer(several, monkeypatch, stage, changed):
    assert trained(network, dlab.ZeRO(stage, SMALL), several.workers, monkeypatch, several, **changed) < 1e-12


@pytest.mark.parametrize("optimizer", [None, adamw], ids=["momentum", "AdamW"])
@pytest.mark.parametrize("make", [network, Tied])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_equals_one_process_where_parts_are_sent(monkeypatch, stage, ranks, make, optimizer):
    monkeypatch.setattr(gradients, "SharedAllReduce", NoSharedMemory)
    assert trained(make, dlab.ZeRO(stage, SMALL), ranks, monkeypatch, optimizer=optimizer, epochs=1) < 1e-12


@pytest.mark.parametrize("make", [network, Tied, Own, Recomputed])
def test_a_model_of_which_no_rank_makes_all_weights_at_once(monkeypatch, make):
    monkeypatch.setattr(strategy, "LARGE", 1)
    made = []
    begin = dlab.ZeRO.begin

    def look(self, model, *others):
        made.append([each.isnan().all() and each.untyped_storage().nbytes() == 8 for each in model.parameters()])
        return begin(self, model, *others)

    monkeypatch.setattr(dlab.ZeRO, "begin", look)
    assert trained(make, dlab.ZeRO(3), 2, monkeypatch, epochs=1) < 1e-12
    assert len(made) == 2 and sum(map(sum, made)) >= 6  # constants, such as biases of 0, have their values


@pytest.mark.parametrize("make", [Own, Recomputed])
@pytest.mark.parametrize("stage", [2, 3])
def test_models_of_many_kinds(monkeypatch, stage, make):
    monkeypatch.setattr(gradients, "SharedAllReduce", NoSharedMemory)
    assert trained(make, dlab.ZeRO(stage, SMALL), 3, monkeypatch, epochs=1, accumulate=2) < 1e-12
    with dlab.Cluster(2) as two:
        assert trained(make, dlab.ZeRO(stage, SMALL, overlap=False), 2, monkeypatch, two, epochs=1) < 1e-12


def learn(strategy, make_optimizer, accumulate=False, sent=False):
    """The weights after each step of a rank, in a model of which each batch leaves out other layers."""
    gradients.SharedAllReduce = NoSharedMemory if sent else SharedAllReduce
    model = Net()
    optimizer, found = make_optimizer(model.parameters()), []
    transport = dlab.transport()
    module = strategy.begin(model, optimizer, transport)
    for step in range(len(USED)):
        strategy.clear()
        for piece in pieces(accumulate):
            with nullcontext() if piece else strategy.accumulating():
                loss(module, step, transport.rank, piece).backward()
        strategy.step()
        whole = strategy.whole_state()
        found.append(torch.cat([whole[name].reshape(-1) for name, _ in model.named_parameters()]))
    strategy.end()
    return found


class NoSharedMemory:
    @staticmethod
    def connect(transport):
        return None


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)


@pytest.fixture(scope="module")
def two():
    with dlab.Cluster(2) as cluster:
        yield cluster


@pytest.mark.parametrize("sent", [False, True], ids=["shared", "sent"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("zero", [dlab.ZeRO(2, 1e-4), dlab.ZeRO(2), dlab.ZeRO(3), dlab.ZeRO(3, overlap=False)], ids=str)
def test_layers_that_a_batch_leaves_out_on_one_rank_or_on_all(two, zero, make_optimizer, accumulate, sent):
    expected = plain_unused(make_optimizer, accumulate=accumulate)
    found = two.run(learn, zero, make_optimizer, accumulate, sent, timeout=60)
    for mine in found:
        assert_equal(mine, expected)
    assert all(map(torch.equal, *found))


# ------------------------------------------------------------------------------------------ to the bit


def deep():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    make = torch.Generator().manual_seed(3)
    for each in model.parameters():
        each.data = torch.randn(each.shape, generator=make) / 4
    return model


def own_samples(rank):
    make = torch.Generator().manual_seed(100 + rank)
    return torch.randn(4, 8, generator=make), torch.randn(4, 4, generator=make)


def whole_batch(ranks):
    """One process, float32, 3 steps of SGD: the mean over the ranks of the gradients of each rank's samples."""
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for rank in range(ranks):
            inputs, targets = own_samples(rank)
            gradients = torch.autograd.grad(F.mse_loss(model(inputs), targets), list(model.parameters()))
            sums = [total + each for total, each in zip(sums, gradients, strict=True)]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total / ranks
        optimizer.step()
    return model.state_dict()


def three_steps(transport, stage):
    model = deep()
    strategy, optimizer = dlab.ZeRO(stage), torch.optim.SGD(model.parameters(), lr=0.1)
    module = strategy.begin(model, optimizer, transport)
    for _ in range(3):
        strategy.clear()
        inputs, targets = own_samples(transport.rank)
        F.mse_loss(module(inputs), targets).backward()
        strategy.step()
    return {name: each.clone() for name, each in strategy.whole_state().items()}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_float32_has_the_bits_of_one_process_that_adds_the_ranks_gradients_in_their_order(monkeypatch, ranks, stage):
    monkeypatch.setattr(gradients, "SharedAllReduce", NoSharedMemory)
    expected = whole_batch(ranks)
    with dlab.Cluster(ranks, threads=1) as cluster:
        here = [
            *cluster.run(lambda: three_steps(dlab.transport(), stage)),
            *dlab.rehearse(lambda t: three_steps(t, stage), ranks),
        ]
    for found in here:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class TwoSided(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.one(x) + self.other(x.flip(1).relu())


def exact():
    """Weights that are whole numbers: with such samples and these steps every sum and product is exact in float32."""
    model = TwoSided()
    make = torch.Generator().manual_seed(3)
    for each in model.parameters():
        each.data = torch.randint(-1, 2, each.shape, generator=make).float()
    return model


def whole_numbers():
    make = torch.Generator().manual_seed(4)
    return torch.randint(-1, 2, (16, 4), generator=make).float(), torch.randint(-1, 2, (16, 2), generator=make).float()


def on_all_at_once(dtype):
    model, (inputs, targets) = exact().to(dtype), whole_numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()
        optimizer.step()
    return model.state_dict()


def exact_steps(transport, stage):
    model, (inputs, targets) = exact(), whole_numbers()
    strategy, optimizer = dlab.ZeRO(stage), torch.optim.SGD(model.parameters(), lr=2**-1)
    module = strategy.begin(model, optimizer, transport)
    mine = slice(transport.rank * 16 // transport.size, (transport.rank + 1) * 16 // transport.size)
    for _ in range(3):
        strategy.clear()
        F.mse_loss(module(inputs[mine]), targets[mine]).backward()
        strategy.step()
    return {name: each.clone() for name, each in strategy.whole_state().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_float32_has_the_bits_of_the_whole_batch_where_nothing_is_rounded(ranks, stage):
    expected = on_all_at_once(torch.float32)
    assert all(torch.equal(each.double(), on_all_at_once(torch.float64)[name]) for name, each in expected.items())
    assert not all(torch.equal(each, exact().state_dict()[name]) for name, each in expected.items())
    for found in dlab.rehearse(lambda transport: exact_steps(transport, stage), ranks):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
