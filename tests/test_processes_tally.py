"""Collectives are told in few events, and what these say is what was done, to the last byte."""

import random
import sys
import threading
import time
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from kernels import eventually

import dlab
from dlab.processes.worker import tally
from dlab.processes.worker.tally import PERIOD, Tally

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

WORKERS = 4


def totals(run):
    """By rank, name and group what all events say: how many, and how many bytes."""
    counts, nbytes = Counter(), Counter()
    for rank, data in ((event.rank, event.data) for event in run.events if event.kind == "collective"):
        assert data["start"] <= data["end"] and 0 <= data["seconds"] <= data["end"] - data["start"] + 1e-6
        key = rank, data["name"], tuple(data.get("group", range(WORKERS))), data.get("axis", "")
        counts[key] += data["count"]
        nbytes[key] += data["bytes"]
    return {key: (counts[key], nbytes[key]) for key in counts}


# ------------------------------------------------------------------------------------- in real runs


def many_at_random(seed, calls):
    """Collectives of all sorts, in turn over the world and over lines of a mesh; gives what was done."""
    mesh = dlab.Mesh((2, 2), ("dp", "tp"))
    done, choose = Counter(), random.Random(seed)  # the same on all ranks
    groups = {"": None, "dp": mesh["dp"], "tp": mesh["tp"]}
    for _ in range(calls):
        axis, name, rows = choose.choice(list(groups)), choose.choice(list(NAMES)), choose.choice([1, 7, 50_000])
        group = groups[axis]
        size = group.size if group else WORKERS
        tensor = torch.ones(size, rows, dtype=choose.choice([torch.float32, torch.float64]))
        NAMES[name](tensor, group=group)
        done[name, tuple(group.members if group else range(WORKERS)), axis] += 1
        done[name, tuple(group.members if group else range(WORKERS)), axis, "bytes"] += tensor.nbytes
        if choose.random() < 0.1:
            time.sleep(1.5 * PERIOD)
    return dict(done)


NAMES = {
    "all-reduce": dlab.allreduce,
    "reduce-scatter": dlab.reduce_scatter,
    "all-gather": dlab.all_gather,
    "all-to-all": dlab.all_to_all,
}


def test_what_is_told_is_what_was_done(cluster):
    run = cluster.start(many_at_random, 5, 300)
    expected = {
        (rank, *key): (count, done[(*key, "bytes")])
        for rank, done in enumerate(run.wait(60))
        for key, count in done.items()
        if len(key) == 3
    }
    assert totals(run) == expected and len(expected) == WORKERS * 3 * len(NAMES)


def loop(count):
    tensor = dlab.shared_empty(1024).zero_()
    dlab.allreduce(tensor)
    start = time.time()
    for _ in range(count):
        dlab.allreduce(tensor)
    return time.time() - start


def test_a_loop_of_small_ones_is_told_in_few_events(cluster):
    run = cluster.start(loop, 5000)
    seconds = run.wait(60)
    told = [event for event in run.events if event.rank == 0]
    assert totals(run)[0, "all-reduce", (0, 1, 2, 3), ""] == (5001, 5001 * 4096)
    assert len(told) <= 3 + seconds[0] / PERIOD
    assert sum(event.data["seconds"] for event in told) <= 1.1 * seconds[0] + PERIOD


def test_the_buckets_of_a_step_are_one_collective(cluster):
    strategy = dlab.AllReduceSGD(bucket_mb=0.001)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.zeros(64, dtype=torch.long))
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Linear(300, 3))  # noqa: E731
    run = dlab.train(make, data, strategy, on=cluster, batch_size=16)
    run.wait(60)
    steps, parameters = 64 // 16, sum(each.numel() for each in make().parameters())
    found = totals(run)
    assert [found[rank, "all-reduce", (0, 1, 2, 3), ""] for rank in range(4)] == [(steps, 4 * parameters * steps)] * 4
    buckets = Counter()
    for event in run.events:
        if event.kind == "collective":
            buckets[event.rank] += event.data["buckets"]
    assert set(buckets.values()) == {3 * steps}, "a bucket for each of the last two parameters, and one for the others"


def test_weights_that_lie_in_shared_memory_are_pushed_and_pulled(cluster):
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.zeros(64, dtype=torch.long))
    run = dlab.train(
        lambda: torch.nn.Linear(6, 3), data, dlab.ParameterServer("async", servers=0), on=cluster, batch_size=16
    )
    run.wait(60)
    found, nbytes = totals(run), 4 * (6 * 3 + 3)
    for rank in range(WORKERS):
        assert found[rank, "push", (0, 1, 2, 3), ""] == (4, 4 * nbytes)
        pulls, pulled = found[rank, "pull", (0, 1, 2, 3), ""]
        assert pulls >= 4 and pulled == pulls * nbytes


def in_trouble(how):
    for _ in range(10):
        dlab.allreduce(torch.ones(3))
    if how == "fails":
        raise ValueError("enough")
    dlab.log(step=10)
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["fails", "is stopped"])
def test_a_run_that_does_not_end_well_has_told_all_the_same(cluster, how):
    run = cluster.start(in_trouble, how)
    if how == "fails":
        with pytest.raises(dlab.WorkerError, match="enough"):
            run.wait(60)
    else:
        eventually(lambda: sum(event.kind == "log" for event in run.events) == WORKERS)
        run.stop()
    assert totals(run) == {(rank, "all-reduce", (0, 1, 2, 3), ""): (10, 120) for rank in range(WORKERS)}


def torch_collectives():
    """What DDP, FSDP and DTensor call, over the world and in a group, now and later."""
    ones, rank, size = torch.ones(6), dist.get_rank(), dist.get_world_size()
    works = [dist.all_reduce(ones, async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
    dist.broadcast(ones, 1)
    dist.reduce(ones, 1)
    dist.all_gather([torch.empty(6) for _ in range(size)], ones)
    dist.all_gather_single(torch.empty(6 * size), ones)
    dist.reduce_scatter_single(torch.empty(3), torch.ones(3 * size))
    dist.all_to_all_single(torch.empty(8), torch.ones(8))
    dist.gather(ones, [torch.empty(6) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.empty(5), [torch.ones(5) for _ in range(size)] if rank == 0 else None)
    dist.barrier()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(ones, group=pairs[rank // 2])


def test_the_backend_tells_of_every_collective():
    with dlab.Cluster(WORKERS, backend="dlab") as cluster:
        run = cluster.start(torch_collectives)
        run.wait(60)
    found = totals(run)
    world, all_of_it = tuple(range(WORKERS)), {}
    for rank in range(WORKERS):
        pair = (0, 1) if rank < 2 else (2, 3)
        expected = {
            "all-reduce": (20, 20 * 24),
            "broadcast": (1, 24),
            "reduce": (1, 24),
            "all-gather": (2, 48),
            "reduce-scatter": (1, 48),
            "all-to-all": (1, 32),
            "gather": (1, 24),
            "scatter": (1, 80 if rank == 0 else 0),
        }
        all_of_it |= {(rank, name, world): count for name, count in expected.items()}
        all_of_it[rank, "all-reduce", pair] = (1, 24)
    assert {key[:3]: count for key, count in found.items()} == all_of_it


# ------------------------------------------------------------------------------------- one after another


def collective(start, end, nbytes=8, **more):
    told = {"name": "all-reduce", "algorithm": "shared memory", "count": 1, "bytes": nbytes}
    return told | {"seconds": end - start, "start": start, "end": end} | more


@pytest.fixture
def told():
    return []


@pytest.fixture
def sums(told):
    return Tally(lambda kind, data: told.append(data) or kind == "collective")


def test_those_that_begin_within_a_period_are_told_together(sums, told):
    sums.add(collective(1.0, 1.002))
    sums.add(collective(1.004, 1.008, nbytes=80))
    assert not told
    sums.add(collective(1.0 + PERIOD, 5.0))  # begins later: it stands for itself
    assert told == [collective(1.0, 1.008, nbytes=88, count=2, seconds=pytest.approx(0.006))]
    sums.add(collective(5.5, 5.6))
    assert told[1:] == [collective(1.0 + PERIOD, 5.0)]
    sums.flush()
    sums.flush()
    assert told[2:] == [collective(5.5, 5.6)]
    sums.add(collective(5.601, 5.602))  # of the next run, which begins a period of its own
    sums.flush()
    assert told[3:] == [collective(5.601, 5.602)]


def test_other_names_algorithms_and_groups_are_told_apart(sums, told):
    others = [{}, {"name": "broadcast"}, {"algorithm": "gloo"}, {"group": [0, 1], "axis": "tp"}, {"group": [1, 0]}]
    for each in others * 3:
        sums.add(collective(1.0, 1.001, **each))
    sums.flush()
    expected = [
        collective(1.0, 1.001, **each, nbytes=24, count=3) | {"seconds": pytest.approx(0.003)} for each in others
    ]
    assert len(told) == len(others) and all(each in expected for each in told)


def test_what_the_ring_has_no_room_for_is_told_later(told):
    room = False
    sums = Tally(lambda kind, data: room and (told.append(data) or True))
    sums.add(collective(1.0, 1.001))
    sums.add(collective(2.0, 2.001))
    room = True
    sums.add(collective(3.0, 3.001))
    assert [(each["count"], each["bytes"], each["start"], each["end"]) for each in told] == [(2, 16, 1.0, 2.001)]


def test_threads_do_not_lose_any(monkeypatch, sums, told):
    monkeypatch.setattr(tally, "PERIOD", 0.0)

    def work():
        for _ in range(2000):
            sums.add(collective(time.time(), time.time()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums.flush()
    assert sum(each["count"] for each in told) == 8000 and sum(each["bytes"] for each in told) == 64000
