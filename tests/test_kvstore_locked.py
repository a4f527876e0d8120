"""Weights under a lock: no update is lost or torn, whoever dies; and one worker alone is plain torch."""

import mmap
import os
import signal
import sys

import cloudpickle
import pytest
import torch
from test_strategies import adam, data, difference, network, options, plain

import dlab
from dlab.kvstore import recipe
from dlab.kvstore.locked import LockedStore
from dlab.memory.lock import Lock

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

WORKERS = 4
OPTIMIZERS = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("adam", {"lr": 0.1}),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
]
NAMES = ["plain", "momentum", "adam", "adagrad"]


def test_a_lock_outlives_its_holder():
    lock = Lock(memoryview(mmap.mmap(-1, 4096)))
    lock.make()
    child = os.fork()
    if not child:
        lock.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(2):
        with lock:
            pass


def test_nothing_is_lost_and_nothing_is_torn(cluster):
    def count(pushes):
        kv, own = LockedStore(torch.zeros(3000), recipe("sgd", lr=1.0), dlab.transport()), torch.zeros(3000)
        torn = 0
        for _ in range(pushes):
            kv.push_pieces("weights", [torch.ones(1000), torch.ones(2000)], 1)
            torn += len(kv.borrow("weights", own).unique()) != 1
        kv.meet(1)
        return torn, kv.borrow("weights", own).unique().tolist()

    assert cluster.run(count, 2000, timeout=60) == [(0, [-2000.0 * WORKERS])] * WORKERS


@pytest.mark.parametrize(("name", "numbers"), OPTIMIZERS, ids=NAMES)
def test_in_turns_the_workers_are_one_optimizer(cluster, name, numbers):
    """What it remembers is common to all. The truth: torch's own, with the same gradients in the same order."""

    def take_turns():
        transport, kv = (
            dlab.transport(),
            LockedStore(torch.ones(5, dtype=torch.float64), recipe(name, **numbers), dlab.transport()),
        )
        for turn in range(3 * transport.size):
            if turn % transport.size == transport.rank:
                kv.push_pieces("weights", [torch.full((5,), turn + 1.0, dtype=torch.float64)], 1)
            transport.barrier()
        return kv.borrow("weights", torch.ones(5)).clone()

    weights = torch.ones(5, dtype=torch.float64)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[name]
    optimizer = kind([weights], **numbers)
    for turn in range(3 * WORKERS):
        weights.grad = torch.full((5,), turn + 1.0, dtype=torch.float64)
        optimizer.step()
    for found in cluster.run(take_turns):
        assert (found - weights).abs().max() < 1e-12


def test_staleness_counts_the_updates_of_others(cluster):
    def measure():
        transport, kv = dlab.transport(), LockedStore(torch.zeros(3), recipe("sgd", lr=1.0), dlab.transport())
        kv.borrow("weights", torch.zeros(3))
        found = []
        for turn in range(transport.size):
            transport.barrier()
            if turn == transport.rank:
                kv.push_pieces("weights", [torch.ones(3)], 1)
                found = kv.staleness("weights")
        return found

    assert cluster.run(measure) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("changed", [{}, {"optimizer": adam}], ids=["momentum", "adam"])
def test_one_worker_alone_is_plain_torch_also_after_a_checkpoint(tmp_path, changed):
    given = options(1, **changed)
    truth = plain(1, **given)
    strategy = dlab.ParameterServer("async", servers=0)
    whole = dlab.train(network, data(), strategy, workers=1, **given, checkpoint=tmp_path, every=4).wait(60)
    oldest = min(tmp_path.glob("step-*"))
    resumed = dlab.train(network, data(), strategy, workers=1, **given, resume=oldest).wait(60)
    assert difference(whole.model, truth) < 1e-12
    assert difference(resumed.model, whole.model) == 0


def test_in_a_rehearsal_all_threads_work():
    training = dlab.Training(
        model=network, data=data(), strategy=dlab.ParameterServer("async", servers=0), batch_size=12
    )
    shares = dlab.rehearse(training, ranks=3)
    assert len({share.digest for share in shares}) == 1
