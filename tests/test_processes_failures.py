"""When something goes wrong: the right rank is named, soon, with its own traceback, and the next line works."""

import os
import pickle
import signal
import sys
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
import trouble
from kernels import alive, eventually, seconds_until_gone, within
from torch.utils.data import DataLoader

import dlab
from dlab.processes.parent import pool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


WORKERS = 3  # of the cluster
pytestmark = pytest.mark.usefixtures("the_next_run_works")


# ------------------------------------------------------------------------------------- exceptions


def test_an_exception_arrives_within_a_second_with_its_rank_and_the_other_ranks_are_stopped(cluster):
    def fail_on_rank_1():
        if dist.get_rank() == 1:
            raise ValueError("the learning rate is negative")
        if dist.get_rank() == 0:
            dist.barrier()  # rank 1 will never come
        while True:
            pass

    start, pids = time.monotonic(), cluster.pids
    with pytest.raises(dlab.WorkerError, match="rank 1 failed: ValueError: the learning rate is negative") as error:
        cluster.run(fail_on_rank_1)
    within(start, 1, "a worker's exception")
    assert error.value.rank == 1
    assert error.value.ranks == [1]
    assert cluster.run(dlab.rank) == [0, 1, 2]
    assert cluster.pids[1:] == pids[1:], "who comes back when asked to need not be replaced"


def test_the_error_shows_the_workers_own_traceback_and_nothing_of_dlab(cluster):
    def inner(x):
        return x.view(7)  # the culprit

    def outer():
        return inner(torch.zeros(5))

    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(outer)
    trace = error.value.traceback
    assert f'File "{__file__}", line {inner.__code__.co_firstlineno + 1}, in inner' in trace
    assert "return x.view(7)  # the culprit" in trace
    assert "return inner(torch.zeros(5))" in trace
    assert f"dlab{os.sep}processes" not in trace
    assert trace in str(error.value)
    assert error.value.ranks == [0, 1, 2], "all that failed in the same way"


def test_the_cause_of_an_exception_is_shown_before_it(cluster):
    def chained():
        try:
            {}["missing"]
        except KeyError as problem:
            raise RuntimeError("no such layer") from problem

    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(chained)
    assert error.value.traceback.index("KeyError: 'missing'") < error.value.traceback.index(
        "RuntimeError: no such layer"
    )


def test_the_first_to_fail_is_named_not_those_who_lost_the_connection_to_it(cluster):
    def fail_in_the_middle():
        for step in range(100):
            if dist.get_rank() == 2 and step == 50:
                raise ArithmeticError("overflow")
            dist.all_reduce(torch.ones(1000))

    for _ in range(5):
        with pytest.raises(dlab.WorkerError, match="rank 2 failed: ArithmeticError: overflow") as error:
            cluster.run(fail_in_the_middle)
        assert error.value.ranks == [2]


def test_who_died_is_named_not_those_who_noticed_it_sooner_than_the_notebook(cluster):
    def miss_each_other():
        if dist.get_rank() == 0:
            raise ConnectionError("rank 2 does not answer")
        time.sleep(0.1)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)

    with pytest.raises(dlab.WorkerError, match="rank 2 was killed by signal 9") as error:
        cluster.run(miss_each_other)
    assert error.value.ranks == [2]


def test_who_lost_a_connection_is_named_when_there_is_nobody_else_to_blame(cluster):
    def fail():
        if dist.get_rank() == 1:
            raise RuntimeError("gloo: Connection closed by peer")
        trouble.hang_in_c()  # and is killed, but that is not the reason

    run = cluster.start(fail)
    with pytest.raises(dlab.WorkerError, match="rank 1 failed: RuntimeError: gloo: Connection closed by peer") as error:
        run.wait(60)
    assert error.value.ranks == [1]
    assert [state.data["state"] for state in run.states if state.rank == 1][-1] == "failed"


def test_exceptions_that_cannot_be_pickled_or_printed_are_reported(cluster):
    class Stubborn(RuntimeError):
        def __init__(self, one, two):
            self.file = sys.stdout

        def __str__(self):
            raise ValueError("I will not be printed")

    def fail():
        raise Stubborn(1, 2)

    with pytest.raises(dlab.WorkerError, match=r"ranks 0, 1 and 2 failed: .*Stubborn"):
        cluster.run(fail)


@pytest.mark.parametrize("problem", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(5)])
def test_exceptions_outside_the_usual_family_are_reported_and_the_worker_stays(cluster, problem):
    def fail():
        if dlab.rank() == 1:
            raise problem
        dist.barrier()

    pids = cluster.pids
    with pytest.raises(dlab.WorkerError, match=f"rank 1 failed: {type(problem).__name__}"):
        cluster.run(fail)
    assert cluster.pids == pids


def test_an_error_can_be_pickled(cluster):
    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(lambda: 1 / (dlab.rank() - 1))
    copy = pickle.loads(pickle.dumps(error.value))
    assert (type(copy), str(copy), copy.rank) == (dlab.WorkerError, str(error.value), 1)


def test_a_failed_run_stays_failed(cluster):
    run = cluster.start(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(dlab.WorkerError, match="ZeroDivisionError"):
            run.wait(30)
    assert run.state == "failed"
    run.stop()
    assert run.state == "failed"


# ------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT], ids=lambda n: n.name
)
def test_a_killed_worker_is_named_by_rank_and_signal_and_is_replaced(cluster, number):
    def die():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
            time.sleep(1000)
        dist.barrier()

    start, pids = time.monotonic(), cluster.pids
    with pytest.raises(dlab.WorkerError, match=rf"rank 1 was killed by signal \d+ \({number.name}\)") as error:
        cluster.run(die)
    within(start, 1, "a killed worker")
    assert error.value.rank == 1
    assert cluster.run(dlab.rank) == [0, 1, 2]
    assert [new == old for new, old in zip(cluster.pids, pids, strict=True)] == [True, False, True]


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_exits_is_named_by_rank_and_code(cluster, code):
    def leave():
        if dist.get_rank() == 2:
            os._exit(code)
        dist.barrier()

    with pytest.raises(dlab.WorkerError, match=f"rank 2 exited with code {code}") as error:
        cluster.run(leave)
    assert error.value.rank == 2


def test_all_workers_may_die_at_once(cluster):
    for _ in range(3):
        with pytest.raises(dlab.WorkerError, match="exited with code 1"):
            cluster.run(lambda: os._exit(1))
        assert cluster.run(dlab.rank) == [0, 1, 2]


def test_workers_that_die_between_two_runs_are_replaced_silently(cluster):
    for victims in ([0], [1, 2], [0, 1, 2]):
        pids = cluster.pids
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        eventually(lambda pids=pids, victims=victims: not alive(pids[rank] for rank in victims))
        eventually(lambda pids=pids, victims=victims: not any(cluster.pids[rank] == pids[rank] for rank in victims))
        assert cluster.run(dlab.rank) == [0, 1, 2]


def test_a_data_loader_has_processes_of_its_own_and_they_end_with_the_worker(cluster):
    def load():
        loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=2, persistent_workers=True)
        for batch in loader:
            dlab.log(sum=batch.sum())
        while True:
            time.sleep(0.01)

    run = cluster.start(load)
    eventually(lambda: len(run.events) == 6)
    assert {event.data["sum"] for event in run.events} == {6.0, 22.0}
    loaders = [child for pid in cluster.pids for child in psutil.Process(pid).children()]
    assert len(loaders) == 6
    run.kill(1)
    with pytest.raises(dlab.WorkerError, match=r"rank 1 .*SIGKILL"):
        run.wait(30)
    assert seconds_until_gone(loaders) < 3


@pytest.mark.parametrize("dying", [0, 2], ids=["dead when looked at", "dying when looked at"])
def test_when_the_fork_server_dies_the_workers_go_with_it_and_the_next_run_has_new_ones(cluster, monkeypatch, dying):
    server, pids = psutil.Process(cluster.pids[0]).ppid(), cluster.pids
    lives, waitpid = [(0, 0)] * dying, os.waitpid
    monkeypatch.setattr(
        "os.waitpid", lambda pid, how: lives.pop() if (lives and pid == server and how) else waitpid(pid, how)
    )
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not alive(pids))
    eventually(lambda: not set(cluster.pids) & set(pids), seconds=60)
    assert not lives, "the server was looked at while it died"
    assert cluster.run(dlab.rank) == [0, 1, 2]


def test_a_rank_that_still_hangs_in_a_collective_after_it_has_returned_is_replaced(cluster, monkeypatch):
    monkeypatch.setitem(pool.FORM, "gloo", 1.0)

    def part_in_discord():
        if dist.get_rank() > 0:
            raise ValueError("no")
        try:
            time.sleep(1000)
        except dlab.Stopped:
            dist.all_reduce(torch.ones(3), async_op=True)  # but the others have left

    for _ in range(3):
        with pytest.raises(dlab.WorkerError, match="ranks 1 and 2 failed: ValueError: no"):
            cluster.run(part_in_discord)
        assert cluster.run(dlab.rank, timeout=30) == [0, 1, 2]


def test_a_rank_that_hangs_in_a_collective_after_it_was_stopped_does_not_delay_the_next_run(cluster):
    def part_in_discord():
        if dist.get_rank() > 0:
            raise ValueError("no")
        try:
            time.sleep(1000)
        finally:
            dist.all_reduce(torch.ones(3), async_op=True)  # but the others have left

    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(dlab.WorkerError, match="ranks 1 and 2 failed: ValueError: no"):
            cluster.run(part_in_discord)
        assert cluster.run(dlab.rank) == [0, 1, 2]
        within(start, 1, "an error, and the next run")
