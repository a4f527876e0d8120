"""Servers are processes of the cluster: supervised, named in errors, replaced, and gone with it."""

import os
import signal
import sys

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import alive, eventually

import dlab
from dlab import kvstore
from dlab.kvstore.functions import digest_of, find_function
from dlab.processes.between.errors import name_ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

WORKERS, SERVERS = 2, 2


@pytest.fixture(autouse=True)
def the_next_run_works(cluster):
    yield
    assert cluster.run(_learn, timeout=60) == [[3.0], [3.0]]


def _learn(steps=1, updater=None):
    kv = kvstore.create("dist_sync")
    kv.init([0, 1], [torch.zeros(1), torch.zeros(1)])  # one on each server
    if updater is not None:
        kv.set_updater(updater)
    for _ in range(steps):
        kv.push([0, 1], [torch.full((1,), kv.rank + 1.0)] * 2)
        dlab.log(loss=0.0)
    return kv.pull(1).tolist()


def test_servers_are_in_no_process_group_and_the_cluster_knows_them(cluster):
    assert cluster.run(lambda: (dlab.rank(), dist.get_world_size())) == [(0, WORKERS), (1, WORKERS)]
    assert (cluster.workers, cluster.servers) == (WORKERS, SERVERS)
    assert "2 workers and 2 servers" in repr(cluster)
    names = [" ".join(psutil.Process(pid).cmdline()) for pid in cluster.pids]
    assert len(set(cluster.pids)) == len(names) == WORKERS + SERVERS


def test_a_killed_server_is_named_and_replaced(cluster):
    pids = cluster.pids
    run = cluster.start(_learn, 10**9)
    eventually(lambda: run.events)
    run.kill(WORKERS + 1)
    with pytest.raises(
        dlab.WorkerError, match=r"server 1 was killed by signal 9 \(SIGKILL\) while it ran _learn; a new"
    ):
        run.wait(30)
    assert cluster.run(_learn) == [[3.0], [3.0]]
    assert [old == new for old, new in zip(pids, cluster.pids, strict=True)][-2:] == [True, False]


def test_a_server_that_dies_between_runs_is_replaced(cluster):
    pid = cluster.pids[-1]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: cluster.pids[-1] != pid)
    assert cluster.run(_learn) == [[3.0], [3.0]]


def test_a_killed_worker_is_named(cluster):
    run = cluster.start(_learn, 10**9)
    eventually(lambda: run.events)
    run.kill(0)
    with pytest.raises(dlab.WorkerError, match="rank 0 was killed by signal 9"):
        run.wait(30)


def test_a_run_can_be_paused_and_stopped(cluster):
    pids = cluster.pids
    run = cluster.start(_learn, 10**9)
    eventually(lambda: run.events)
    run.pause()
    run.resume()
    run.stop()
    assert run.state == "stopped"
    assert cluster.pids[WORKERS:] == pids[WORKERS:], "servers come back when asked to"


def test_an_updater_that_fails_is_told_with_its_line(cluster):
    def divide(key, gradient, stored):
        stored /= gradient[5]  # the culprit

    with pytest.raises(dlab.WorkerError, match=r"servers? 0( and 1)? failed: IndexError") as error:
        cluster.run(_learn, updater=divide, timeout=30)
    assert f"line {divide.__code__.co_firstlineno + 1}, in divide" in error.value.traceback


def test_a_server_runs_nothing_that_the_parent_has_not_sent(cluster):
    def learn():
        bad = eval("lambda key, gradient, stored: stored.add_(gradient)")
        return _learn(updater=bad)

    with pytest.raises(dlab.WorkerError, match="the server knows no function '<lambda>': it runs only what the noteb"):
        cluster.run(learn, timeout=30)


def test_functions_are_found_where_the_parents_function_names_them():
    def inner(key, gradient, stored):
        stored += gradient

    def calls_inner():
        def innermost(key, gradient, stored):
            stored -= gradient

        return inner, innermost, _learn

    _, innermost, _ = calls_inner()
    for function in (inner, innermost, _learn):
        found = find_function(function.__name__, digest_of(function), [calls_inner])
        assert found.__code__ == function.__code__
    with pytest.raises(LookupError, match="the server knows no function 'inner'"):
        find_function("inner", digest_of(innermost), [calls_inner])


def test_a_cluster_leaves_no_server_behind():
    with dlab.Cluster(1, servers=1) as cluster:
        pids = cluster.pids
    assert not alive(pids)


@pytest.mark.parametrize("servers", [-1, 1.5, "two"])
def test_impossible_numbers_of_servers(servers):
    with pytest.raises(ValueError, match=r"a cluster with .* servers is not possible: give a whole number, 0 or more"):
        dlab.Cluster(2, servers=servers)


def test_names():
    assert name_ranks([0, 2, 3, 4], 3) == "ranks 0 and 2 and servers 0 and 1"
    assert name_ranks([3], 3) == "server 0"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
