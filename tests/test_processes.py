"""A cluster: warm workers with torch.distributed inside, which take functions as they are and leave nothing behind."""

import gc
import os
import stat
import statistics
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import alive, eventually, is_one_sentence, open_handles

import dlab
from dlab.processes.parent import forkserver

WORKERS = 4  # of the cluster
CORES = len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------- running functions


def test_a_function_runs_on_every_rank_and_its_results_come_by_rank(cluster):
    assert cluster.run(lambda: dlab.rank() ** 2) == [0, 1, 4, 9]
    assert cluster.run(lambda: dlab.world_size()) == [4, 4, 4, 4]


def test_arguments_and_keyword_arguments_arrive(cluster):
    def add(a, b, *rest, c=0, **named):
        return a + b + sum(rest) + c + named["d"] + dlab.rank()

    assert cluster.run(add, 1, 2, 3, c=10, d=100) == [116, 117, 118, 119]


def test_a_warm_run_takes_milliseconds(cluster):
    times = []
    for _ in range(30):
        start = time.perf_counter()
        assert cluster.run(lambda: dist.get_rank()) == [0, 1, 2, 3]
        times.append(time.perf_counter() - start)
    print(f"a warm run takes {1000 * statistics.median(times):.1f} ms")
    assert statistics.median(times) < 0.05


def test_workers_come_from_a_fork_server_that_has_imported_torch(cluster):
    servers = {psutil.Process(pid).ppid() for pid in cluster.pids}
    assert len(servers) == 1
    (server,) = servers
    assert psutil.Process(server).ppid() == os.getpid()
    assert "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text()
    with dlab.Cluster(1) as other:
        assert psutil.Process(other.pids[0]).ppid() == server


def test_a_function_that_uses_torch_and_a_module_named_like_one_of_torchs_is_sent(cluster):
    def product():
        made = dlab.ops.MatMul()(torch.ones(2, 3), torch.ones(3, 4))  # cloudpickle sends torch.ops along
        return made.sum().item(), torch.classes is not None, torch.ops.aten.neg(torch.ones(1)).item()

    assert cluster.run(product) == [(24.0, True, -1.0)] * 4
    assert all(each is torch.ops for each in cluster.run(lambda: torch.ops))  # and comes back, as the same module


def test_lambdas_closures_and_classes_travel_by_value(cluster):
    factor = 3

    class Scaled:
        def __init__(self, value):
            self.value = value

        def times(self):
            return Scaled(self.value * factor)

    thing = Scaled(5)
    assert [result.value for result in cluster.run(lambda: thing.times())] == [15] * 4
    assert all(isinstance(result, Scaled) for result in cluster.run(lambda: thing.times()))


def test_modules_beside_the_notebook_are_found(cluster, tmp_path, monkeypatch):
    (tmp_path / "lesson_beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import lesson_beside

    assert cluster.run(lesson_beside.answer) == [42] * 4
    assert cluster.run(os.getcwd) == [str(tmp_path)] * 4


def test_a_run_does_not_see_the_variables_of_the_run_before(cluster):
    def count():
        count.calls = getattr(count, "calls", 0) + 1
        return count.calls

    assert cluster.run(count) == cluster.run(count) == [1] * 4


# ------------------------------------------------------------------------------------- torch.distributed inside


def test_all_reduce_just_works(cluster):
    def total():
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x.tolist()

    assert cluster.run(total) == [[6.0, 6.0, 6.0]] * 4


def test_gloo_meets_through_a_file_store_in_a_private_directory(cluster):
    def store():
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return dist.get_backend(), type(store).__name__, store.path

    ((backend, kind, path),) = set(cluster.run(store))
    assert (backend, kind) == ("gloo", "FileStore")
    home = Path(path).parent
    assert home == forkserver.directory()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert home.stat().st_uid == os.getuid()


def test_workers_listen_on_loopback_only(cluster):
    cluster.run(lambda: dist.barrier())
    connections = [each for pid in cluster.pids for each in psutil.Process(pid).net_connections("inet")]
    assert connections, "gloo has connected the ranks"
    assert {each.laddr.ip for each in connections} <= {"127.0.0.1", "::1"}
    assert cluster.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]) == ["lo"] * 4


def test_the_device_of_a_worker_on_gloo_is_the_cpu(cluster):
    assert cluster.backend == "gloo" or torch.cuda.is_available()
    with dlab.Cluster(1, backend="gloo") as single:
        assert single.run(dlab.device) == [torch.device("cpu")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_nccl_without_gpus_says_so_in_one_sentence():
    with pytest.raises(ValueError, match=r"nccl needs a GPU for each of the 4 workers") as error:
        dlab.Cluster(4, backend="nccl")
    assert is_one_sentence(str(error.value))


def test_a_function_may_destroy_the_process_group_and_the_next_run_has_a_new_one(cluster):
    cluster.run(lambda: dist.destroy_process_group())
    assert cluster.run(lambda: dist.get_rank()) == [0, 1, 2, 3]
    cluster.run(lambda: dist.destroy_process_group() if dlab.rank() == 1 else None)
    cluster.run(lambda: dist.barrier())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_threads_per_worker_are_cores_divided_by_workers_but_at_least_one(workers):
    with dlab.Cluster(workers) as cluster:
        assert cluster.run(torch.get_num_threads) == [max(1, CORES // workers)] * workers


def test_threads_per_worker_can_be_chosen():
    with dlab.Cluster(1, threads=3) as cluster:
        assert cluster.run(torch.get_num_threads) == [3]


# ------------------------------------------------------------------------------------- one and many clusters


def test_the_shared_cluster_is_made_once_and_anew_after_it_was_closed():
    shared = dlab.cluster(2)
    try:
        assert dlab.cluster(2) is shared
        assert shared.run(dlab.rank) == [0, 1]
        shared.close()
        assert dlab.cluster(2) is not shared
        assert dlab.cluster(2).run(dlab.rank) == [0, 1]
    finally:
        dlab.cluster(2).close()


def test_two_clusters_side_by_side_do_not_disturb_each_other(cluster):
    # the knob reaches the ranks one after the other, so each waits until all of them have seen it
    def run_together():
        enough = torch.zeros(1)
        while not enough:
            enough.fill_(bool(dlab.knob("enough")))
            dist.all_reduce(enough, op=dist.ReduceOp.MIN)
            dlab.log(size=dlab.world_size())
        return dlab.world_size(), dlab.knob("name")

    with dlab.Cluster(2) as other:
        here, there = cluster.start(run_together), other.start(run_together)
        here.set("name", "here")
        there.set("name", "there")
        here.set("enough", True)
        assert here.wait(30) == [(4, "here")] * 4
        assert not there.done
        there.kill(1)
        with pytest.raises(dlab.WorkerError, match="rank 1"):
            there.wait(30)
        assert {event.data["size"] for event in here.events if event.kind == "log"} == {4}
        assert {event.data["size"] for event in there.events if event.kind == "log"} <= {2}
        assert cluster.run(dlab.rank) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- the end


def test_after_close_no_worker_file_or_handle_is_left():
    dlab.Cluster(1).close()  # the fork server stays until this process ends
    gc.collect()
    files, handles = set(forkserver.directory().iterdir()), open_handles()
    with dlab.Cluster(3) as cluster:
        cluster.run(lambda: dist.barrier())
        pids = cluster.pids
        assert len(alive(pids)) == 3
    assert not alive(pids)
    assert set(forkserver.directory().iterdir()) == files
    del cluster
    gc.collect()
    assert open_handles() == handles


def test_closing_twice_is_fine():
    cluster = dlab.Cluster(1)
    cluster.close()
    cluster.close()
    assert cluster.closed
    assert repr(cluster) == "<Cluster of 1 workers on gloo, closed>" or torch.cuda.is_available()


def test_a_closed_cluster_says_so_in_one_sentence():
    with dlab.Cluster(1) as cluster:
        run = cluster.start(dlab.rank)
        run.wait()
    with pytest.raises(RuntimeError, match="this cluster is closed: make a new one") as error:
        cluster.run(dlab.rank)
    assert is_one_sentence(str(error.value))
    assert run.wait() == [0], "what had come back stays"
    assert run.events == []


def test_closing_ends_the_run_in_progress():
    cluster = dlab.Cluster(2)
    run = cluster.start(lambda: time.sleep(1000) if dlab.rank() else "done")
    eventually(lambda: run._supervisor._state.returned)
    cluster.close()
    with pytest.raises(dlab.Stopped):
        run.wait(10)
    assert run.wait(10, partial=True) == ["done", None]
    assert run.state == "stopped"


def test_a_cluster_that_nobody_holds_is_closed_by_garbage_collection():
    cluster = dlab.Cluster(2)
    pids, trace = cluster.pids, weakref.ref(cluster)
    cluster.run(lambda: dist.barrier())
    del cluster
    gc.collect()
    assert trace() is None
    eventually(lambda: not alive(pids))


def test_a_run_keeps_its_cluster_alive():
    run = dlab.Cluster(1).start(lambda: dlab.knob("go") or time.sleep(0.01))
    gc.collect()
    assert run.wait(30) == [None]
