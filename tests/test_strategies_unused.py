"""Layers that a batch does not use, on one rank or on all: every synchronous strategy does as one process does.

A layer that some ranks use gets the mean over all ranks, with zeros for the others. One that nobody uses gets no
gradient, so that neither momentum nor weight decay moves it. Run by torchrun, this file is what the ranks of two hosts
do.
"""

import pickle
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import cloudpickle
import netns
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlab
from dlab import kvstore
from dlab.collectives import halving_doubling_allreduce, naive_allreduce, tree_allreduce
from dlab.kvstore.joining import workers
from dlab.strategies import flat
from dlab.strategies.reducers import BackendReducer, Reducer, reducer_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file

RANKS = 2
USED = [  # by step: the optional layers that even ranks use, and those that odd ranks use
    ("b", "b"),  # nobody uses c, of which no optimizer has heard yet
    ("bc", "b"),
    ("c", "b"),  # all ranks use all but one, each another one
    ("bc", "bc"),
    ("", ""),  # nobody uses either, and both have momentum
    ("b", ""),
    ("", "c"),
    ("bc", "bc"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, inputs, used):
        x = self.a(inputs).tanh()
        for name in used:
            x = x + getattr(self, name)(x).tanh()
        return self.d(x)


def samples(step, rank):
    make = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=make, dtype=torch.float64)


def loss(model, step, rank, piece):
    """Half of a rank's batch. A pass for the first half uses what the step before has used."""
    used = USED[step - 1 + piece][rank % 2]
    return model(samples(step, rank).tensor_split(2)[piece], used).square().mean() / 2


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def pieces(accumulate):
    return (0, 1) if accumulate else (1,)


def plain(make_optimizer, ranks=RANKS, accumulate=False):
    """One process: the mean of all ranks' losses."""
    model = Net()
    optimizer, found = make_optimizer(model.parameters()), []
    for step in range(len(USED)):
        optimizer.zero_grad()
        every = [loss(model, step, rank, piece) for rank in range(ranks) for piece in pieces(accumulate)]
        (sum(every) / ranks).backward()
        optimizer.step()
        found.append(vector(model))
    return found


def learn(strategy, make_optimizer, accumulate=False, reducer=reducer_for, until=None, start=None):
    """A rank of a training: the weights after each step, or, `until` some step, what the next one needs to `start`."""
    flat.reducer_for = reducer
    model = Net()
    optimizer, found = make_optimizer(model.parameters()), []
    transport = workers() or dlab.transport()
    module = strategy.begin(model, optimizer, transport)
    if start is not None:
        model.load_state_dict(start["model"])
        strategy.restore([start["state"]] * transport.size)
    for step in range(start["steps"] if start else 0, until or len(USED)):
        strategy.clear()
        for piece in pieces(accumulate):
            with nullcontext() if piece else strategy.accumulating():
                loss(module, step, transport.rank, piece).backward()
        strategy.step()
        found.append(vector(model))
    if until is not None:
        strategy.settle()
        states = [None] * transport.size
        dist.all_gather_object(states, strategy.state())
        model_state = {name: each.clone() for name, each in model.state_dict().items()}
        found = {"model": model_state, "state": states[0], "steps": until}
    strategy.end()
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def assert_equal(found, expected):
    for step, (mine, truth) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12, msg=lambda text, step=step: f"step {step}: {text}")


SMALL = 1e-4  # a bucket for each parameter
STRATEGIES = {
    "sync, ring": dlab.SyncSGD(),
    "sync, naive": dlab.SyncSGD(naive_allreduce),
    "sync, tree": dlab.SyncSGD(tree_allreduce),
    "sync, halving-doubling": dlab.SyncSGD(halving_doubling_allreduce),
    "all-reduce": dlab.AllReduceSGD(SMALL),
    "all-reduce, no overlap": dlab.AllReduceSGD(SMALL, overlap=False),
    "all-reduce, one bucket": dlab.AllReduceSGD(),
    "ZeRO": dlab.ZeRO(bucket_mb=SMALL),
    "ZeRO, one bucket": dlab.ZeRO(),
    "DDP": dlab.DDP(find_unused_parameters=True, bucket_cap_mb=SMALL),
}
REDUCED = [name for name in STRATEGIES if "reduce" in name or "ZeRO" in name]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("name", STRATEGIES)
def test_as_one_process(cluster, name, make_optimizer, accumulate):
    expected = plain(make_optimizer, accumulate=accumulate)
    for found in cluster.run(learn, STRATEGIES[name], make_optimizer, accumulate, timeout=60):
        assert_equal(found, expected)


@pytest.mark.parametrize("reducer", [Reducer, BackendReducer])
@pytest.mark.parametrize("name", REDUCED)
def test_also_without_shared_memory(cluster, name, reducer):
    one, other = cluster.run(learn, STRATEGIES[name], momentum, False, reducer, timeout=60)
    assert_equal(one, plain(momentum))
    assert all(map(torch.equal, one, other))


def test_averaged_models_of_plain_sgd(cluster):
    for found in cluster.run(learn, dlab.ModelAveraging(every=1), sgd, timeout=60):
        assert_equal(found, plain(sgd))


@pytest.fixture(scope="module")
def served():
    with dlab.Cluster(RANKS, servers=3) as cluster:  # the borders of their parts are not those of parameters
        yield cluster


SERVED = {
    "one server": dlab.ParameterServer(),
    "three servers": dlab.ParameterServer(servers=3),
    "nobody ahead": dlab.ParameterServer("ssp", staleness=0, servers=3),
}


@pytest.mark.parametrize("make_optimizer", [sgd, momentum, adam])
@pytest.mark.parametrize("name", SERVED)
def test_on_servers_as_one_process(served, name, make_optimizer):
    for found in served.run(learn, SERVED[name], make_optimizer, timeout=60):
        assert_equal(found, plain(make_optimizer))


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_an_asynchronous_gradient_moves_what_it_has_used(make_optimizer):
    with dlab.Cluster(1, servers=2) as cluster:
        (found,) = cluster.run(learn, dlab.ParameterServer("async", servers=2), make_optimizer, timeout=60)
        assert_equal(found, plain(make_optimizer, ranks=1))
        if make_optimizer is momentum:  # without a server Adam counts all steps
            (found,) = cluster.run(learn, dlab.ParameterServer("async", servers=0), make_optimizer, timeout=60)
            assert_equal(found, plain(make_optimizer, ranks=1))


def test_compression_keeps_what_it_has_not_sent_of_a_layer_that_is_left_out(served):
    """A worker's residual is that of a store that was given the gradients of the other steps only."""

    def work():
        kv = kvstore.create("dist_sync")
        kv.big = 1
        kv.init("w", torch.zeros(6))
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        for gradient, left_out in (([0.4] * 6, []), ([0.0] * 6, [(2, 5)]), ([0.3] * 6, [])):
            kv.push_pieces("w", [torch.tensor(gradient)], 0, left_out)
        out = torch.zeros(6)
        kv.pull("w", out=out)
        kv.barrier()
        return out, torch.cat([kv.residual("w", part) for part in range(kv.num_servers)])

    for weights, residual in served.run(work, timeout=60):
        # 0.4 is below the threshold; with 0.3 it is 0.7, of which both workers send 0.5
        torch.testing.assert_close(weights, torch.full((6,), -1.0))
        torch.testing.assert_close(residual, torch.full((6,), 0.2))


@pytest.mark.parametrize("after", [1, 5])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_what_servers_remember_goes_into_a_checkpoint_and_to_another_number_of_them(served, make_optimizer, after):
    """After so many steps; some parameters have been updated less often than others, or never."""

    def work():
        first = learn(dlab.ParameterServer(servers=3), make_optimizer, until=after)
        return learn(dlab.ParameterServer(servers=2), make_optimizer, start=first)

    for found in served.run(work, timeout=60):
        assert_equal(found, plain(make_optimizer)[after:])


@pytest.mark.parametrize("accumulate", [False, True])
def test_plain_ddp_says_what_to_write(cluster, accumulate):
    with pytest.raises(dlab.WorkerError, match=r"write dlab\.DDP\(find_unused_parameters=True\)"):
        cluster.run(learn, dlab.DDP(), sgd, accumulate, timeout=60)


def test_in_the_last_step_too(cluster, monkeypatch):
    """PyTorch itself would say so in the next one only."""
    monkeypatch.setattr(sys.modules[__name__], "USED", [("bc", "bc"), ("bc", "bc"), ("bc", "b")])
    with pytest.raises(dlab.WorkerError, match=r"write dlab\.DDP\(find_unused_parameters=True\)"):
        cluster.run(learn, dlab.DDP(), sgd, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(netns.why_not() is not None, reason=f"no two hosts here: {netns.why_not()}")
def test_on_two_hosts(tmp_path):
    with netns.TwoHosts() as hosts:
        node = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        node += [f"--master-addr={hosts.addresses[0]}"]
        commands = [[*node, f"--node-rank={host}", __file__, str(tmp_path)] for host in range(2)]
        environment = {"GLOO_SOCKET_IFNAME": hosts.interface, "OMP_NUM_THREADS": "1"}
        answers = hosts.run(*commands, seconds=120, environment=environment)
    assert [answer.code for answer in answers] == [0, 0], answers
    for rank in range(4):
        kind, trained, averaged, served = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert kind == "BackendReducer"
        for found in trained.values():
            assert_equal(found, plain(momentum, ranks=4))
        assert_equal(averaged, plain(sgd, ranks=4))
        if rank < 2:  # the others serve
            assert_equal(served, plain(momentum, ranks=2))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    kind = type(reducer_for(dlab.transport(), torch.device("cpu"))).__name__
    trained = {name: learn(strategy, momentum) for name, strategy in STRATEGIES.items()}
    averaged = learn(dlab.ModelAveraging(every=1), sgd)
    served = kvstore.run(partial(learn, dlab.ParameterServer(servers=2), momentum), servers=2)
    (Path(sys.argv[1]) / str(dist.get_rank())).write_bytes(pickle.dumps((kind, trained, averaged, served)))
    dist.destroy_process_group()
