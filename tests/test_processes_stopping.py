"""Time runs out, or the notebook is interrupted: the function ends within a second, whatever the workers are doing."""

import os
import re
import signal
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import trouble
from kernels import within

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


WORKERS = 3  # of the cluster
pytestmark = pytest.mark.usefixtures("the_next_run_works")


# ------------------------------------------------------------------------------------- time runs out


def test_a_timeout_names_the_ranks_that_did_not_finish_and_what_they_were_in(cluster):
    def wait_for_rank_1():
        if dist.get_rank() == 0:
            return "done"
        if dist.get_rank() == 1:
            time.sleep(1000)  # a long breakfast
        dist.recv(torch.zeros(1), src=1)

    start = time.monotonic()
    with pytest.raises(dlab.WorkerTimeout) as error:
        cluster.run(wait_for_rank_1, timeout=0.5)
    within(start, 1.5, "a timeout of 0.5 s")
    text = str(error.value)
    assert "ranks 1 and 2 did not finish wait_for_rank_1 within 0.5 s; rank 2 waited for rank 1" in text
    assert "rank 1: at line" in text
    assert "time.sleep(1000)  # a long breakfast" in text
    assert re.search(r"rank 2: waiting in recv( for rank 1)?, line", text)  # for whom is known a moment later
    assert error.value.ranks == [1, 2], "the likely culprit comes first"
    assert isinstance(error.value, TimeoutError)


@pytest.mark.parametrize(
    ("what", "sign"),
    [
        (trouble.be_stopped, "rank 1: stopped by a signal (SIGSTOP)"),
        (trouble.hang_in_c, "of hang_in_c: library.pthread_mutex_lock(lock)"),
        (trouble.swallow_exceptions, "of swallow_exceptions: time.sleep(1000)"),
    ],
)
def test_a_timeout_ends_ranks_whatever_they_are_doing(cluster, what, sign):
    def hang():
        if dlab.rank() == 1:
            what()

    start = time.monotonic()
    with pytest.raises(dlab.WorkerTimeout, match=r"rank 1 did not finish hang within 0\.4 s") as error:
        cluster.run(hang, timeout=0.4)
    within(start, 0.4 + 1, f"a timeout of 0.4 s, {what.__name__}")
    assert sign in str(error.value)


def test_waiting_with_a_timeout_leaves_the_run_going(cluster):
    run = cluster.start(lambda: [time.sleep(0.01) for _ in iter(lambda: dlab.knob("go"), True)] and dlab.rank())
    with pytest.raises(dlab.WorkerTimeout, match=r"it goes on: run\.stop\(\) ends it"):
        run.wait(0.2)
    assert not run.done
    run.set("go", True)
    assert run.wait(30) == [0, 1, 2]


# ------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize(
    "what",
    [trouble.hang_in_python, dist.barrier, trouble.hang_in_c, trouble.swallow_exceptions, trouble.be_stopped],
    ids=lambda what: what.__name__,
)
def test_an_interrupt_stops_the_function_within_a_second_and_tells_where_it_was(cluster, capsys, what):
    notebook = os.getpid()

    def hang():
        if dlab.rank() > 0:
            what()
        time.sleep(0.2)
        os.kill(notebook, signal.SIGINT)
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.run(hang)
    seconds = time.monotonic() - start
    assert cluster.run(dlab.rank) == [0, 1, 2]
    assert seconds < 0.2 + 1 + 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hang was stopped:" and lines[1].startswith("rank 0: at line"), lines
    assert [line[:8] for line in lines[1:]] == ["rank 0: ", "rank 1: ", "rank 2: "]
    print(f"an interrupt, {what.__name__}: {seconds - 0.2:.2f} s (promised: 1 s)")


def test_a_second_interrupt_does_not_leave_the_function_running(cluster):
    notebook = os.getpid()

    def hang():
        if dlab.rank() == 0:
            for _ in range(2):
                os.kill(notebook, signal.SIGINT)
                time.sleep(0.1)
        trouble.be_stopped()  # so that it takes a while to find out where everybody is

    def run_until_both_have_come():
        try:
            cluster.run(hang)
        finally:
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        run_until_both_have_come()
    assert cluster.run(dlab.rank) == [0, 1, 2]


def test_an_interrupt_that_comes_just_when_a_run_begins_leaves_nothing_in_the_way(cluster):
    notebook = os.getpid()
    for pause in (0.0, 0.0005, 0.001, 0.002):

        def interrupt(pause=pause):
            if dlab.rank() == 0:
                time.sleep(pause)
                os.kill(notebook, signal.SIGINT)
            time.sleep(1000)

        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                cluster.run(interrupt)
            assert cluster.run(dlab.rank) == [0, 1, 2]
