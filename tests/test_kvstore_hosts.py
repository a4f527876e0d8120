"""Servers and workers on two hosts with a cable between them: all is as in a cluster on one host, to the bit.

Run by torchrun, this file is what the ranks do: of two hosts with two ranks each, one has the workers, one the servers.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

import cloudpickle
import netns
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import dlab
from dlab import kvstore

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file

SERVERS = 2


def add(key, gradient, stored):
    stored += gradient


def facts():
    """What two workers find when they push and pull, in many ways."""
    found = []
    kv = kvstore.create("dist_sync")
    table = torch.arange(1_200_000.0).view(1200, 1000)  # cut over both servers
    kv.init([3, "table"], [torch.ones(2, 3), table], rows=True)
    kv.push(3, torch.full((2, 3), kv.rank + 1.0))
    found.append(kv.pull(3))  # no updater: the sum
    kv.set_optimizer("sgd", lr=0.5, momentum=0.9)
    for step in range(3):
        kv.push(3, torch.full((2, 3), kv.rank + 1.0))
        kv.push("table", torch.full_like(table, step))
        found += [kv.pull(3), kv.pull("table")[:, 0]]
    found += [slot for slot, _ in kv.slots(3)]

    rows = kvstore.create("dist_sync")
    rows.init("rows", table, rows=True)
    rows.set_optimizer("sgd", lr=1.0)
    some = torch.tensor([[1, 700, 1199]])
    rows.push("rows", torch.sparse_coo_tensor(some, torch.ones(3, 1000), table.shape, check_invariants=False))
    found.append(rows.row_sparse_pull("rows", torch.tensor([1199, 2, 1])))

    coded = kvstore.create("dist_sync")
    coded.init("coded", torch.zeros(100))
    coded.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    for _ in range(3):
        coded.push("coded", torch.linspace(-1, 1, 100))
        found.append(coded.pull("coded"))

    counting = kvstore.create("dist_async")
    counting.init("count", torch.zeros(1000))
    counting.set_updater(add)
    for _ in range(500):  # more than a queue holds
        counting.push("count", torch.ones(1000))
    counting.barrier()
    found.append(counting.pull("count"))
    return found


def training(mode, **more):
    numbers = torch.randn(240, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(numbers, (numbers.sum(1) > 0).long())
    strategy = dlab.ParameterServer(mode, servers=SERVERS, **more)
    return dlab.Training(model=network, data=samples, strategy=strategy, batch_size=12, lr=0.1, momentum=0.9)


def network():
    return nn.Linear(6, 2).double()


def weights(share):
    return None if share is None else share.weights and share.weights["weight"]


def everything():
    """Of a rank of torchrun."""
    shares = [training("sync")(), training("ssp", staleness=0)(), training("async")()]
    return kvstore.run(facts, servers=SERVERS), [weights(share) for share in shares]


def fail():
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.ones(3))
    if kv.rank == 1:
        kv.push("nothing", torch.ones(3))
    kv.push("w", torch.ones(3))
    return kv.pull("w")


def die():
    kv = kvstore.create("dist_async")
    kv.init("w", torch.ones(3))
    if kv.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()


def launch(*words, seconds=90):
    with netns.TwoHosts() as hosts:
        node = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        node += [f"--master-addr={hosts.addresses[0]}"]
        commands = [[*node, f"--node-rank={host}", __file__, *map(str, words)] for host in range(2)]
        environment = {"GLOO_SOCKET_IFNAME": hosts.interface, "OMP_NUM_THREADS": "1"}
        return hosts.run(*commands, seconds=seconds, environment=environment)


needs_hosts = pytest.mark.skipif(netns.why_not() is not None, reason=f"no two hosts here: {netns.why_not()}")


@pytest.mark.slow
@needs_hosts
def test_two_hosts_are_as_one(tmp_path):
    answers = launch("everything", tmp_path)
    assert [answer.code for answer in answers] == [0, 0], answers
    far = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(4)]
    assert far[2] == far[3] == (None, [None] * 3)  # who serves has nothing to tell
    with dlab.Cluster(2, servers=SERVERS, threads=1) as cluster:
        near = cluster.run(facts)
        sync = cluster.run(training("sync"))
    for rank in range(2):
        for number, (one, other) in enumerate(zip(far[rank][0], near[rank], strict=True)):
            assert torch.equal(one, other), number
    synchronous, bounded, free = far[0][1]
    assert torch.equal(synchronous, weights(sync[0]))
    assert torch.equal(bounded, synchronous)
    assert (free - synchronous).abs().max() < 1


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(("what", "words"), [("fail", "key 'nothing' has no value yet"), ("die", "SIGKILL")])
def test_nobody_on_the_other_host_waits_for_who_has_failed(what, words):
    one, other = launch(what)
    assert one.code == 1
    assert words in one.output
    assert other.code is not None  # it has ended by itself


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[1] == "everything":
        (Path(sys.argv[2]) / str(dist.get_rank())).write_bytes(pickle.dumps(everything()))
        dist.destroy_process_group()
    else:
        kvstore.run({"fail": fail, "die": die}[sys.argv[1]], servers=SERVERS)
