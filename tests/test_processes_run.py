"""A run in the background: the notebook stays free, and can pause, stop, kill, slow down and turn knobs meanwhile."""

import itertools
import os
import signal
import sys
import time

import cloudpickle
import psutil
import pytest
import torch.distributed as dist
from kernels import eventually
from runs import logged, steps

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


# ------------------------------------------------------------------------------------- start and wait


def test_start_keeps_the_notebook_free_and_wait_gives_the_results(started):
    run = started(steps)
    assert run.state == "running"
    assert not run.done
    eventually(lambda: len(logged(run, 0)) > 3 and len(logged(run, 1)) > 3)
    assert not run.done
    run.set("enough", True)
    results = run.wait(30)
    assert results == run.wait() == [len(logged(run, 0)), len(logged(run, 1))]
    assert run.state == "finished"
    assert run.ended > run.started


def test_one_run_at_a_time_and_a_second_start_names_the_one_in_the_way(cluster, started):
    run = started(steps)
    for again in (cluster.start, cluster.run):
        with pytest.raises(
            RuntimeError, match=r"steps has been running on this cluster for \d+ s: wait for it"
        ) as error:
            again(dlab.rank)
        assert "\n" not in str(error.value)
    assert not run.done, "and it is not disturbed"
    run.set("enough", True)
    run.wait(30)


def test_a_run_shows_what_it_is(started):
    run = started(steps)
    assert repr(run).startswith("<Run steps on 2 workers: running, ")
    run.stop()
    assert "stopped" in repr(run)


# ------------------------------------------------------------------------------------- stop


def test_wait_after_stop_says_so_and_gives_what_there_is_only_if_asked_for_it(started):
    run = started(lambda: "done" if dlab.rank() == 1 else time.sleep(1000))
    eventually(lambda: run._supervisor._state.returned)
    start = time.monotonic()
    run.stop()
    print(f"stopped within {time.monotonic() - start:.2f} s (promised: 1 s)")
    assert time.monotonic() - start < 3
    for _ in range(2):
        with pytest.raises(
            dlab.Stopped, match=r"^.* was stopped after .* s, before its end: wait\(partial=True\)"
        ) as told:
            run.wait()
        assert "\n" not in str(told.value)
    assert run.wait(partial=True) == [None, "done"]
    assert run.state == "stopped"
    run.stop()


def test_partial_results_of_a_run_that_was_not_stopped_are_all_of_them_and_errors_stay_errors(started):
    assert started(dlab.rank).wait(30, partial=True) == [0, 1]
    failing = started(lambda: 1 / 0)
    with pytest.raises(dlab.WorkerError, match="ZeroDivisionError"):
        failing.wait(30, partial=True)


def test_a_run_that_ended_with_its_cluster_was_stopped():
    with dlab.Cluster(1) as short:
        run = short.start(time.sleep, 1000)
    with pytest.raises(dlab.Stopped, match="sleep was stopped"):
        run.wait()
    assert run.wait(partial=True) == [None]


def test_a_race_that_was_stopped_says_so_and_gives_what_there_is_only_if_asked_for_it(started):
    def first():
        dlab.log(step=0)

    def endless():
        dlab.log(step=0)
        time.sleep(1000)

    race = dlab.race({"first": first, "endless": endless, "never": first}, workers=2)
    eventually(lambda: "endless" in race.runs and race.runs["endless"].events)
    race.stop()
    with pytest.raises(dlab.Stopped, match=r"the race was stopped before never had begun: wait\(partial=True\)"):
        race.wait()
    assert race.wait(partial=True) == {"first": [None, None], "endless": [None, None]}
    race = dlab.race({"endless": endless}, workers=2)
    eventually(lambda: race.runs and race.runs["endless"].events)
    race.stop()
    with pytest.raises(dlab.Stopped, match="endless was stopped"):
        race.wait()
    dlab.cluster(2).close()


def test_a_function_that_catches_stopped_may_return_what_it_has(started):
    def patient():
        losses = []
        try:
            while True:
                losses.append(len(losses))
                dlab.log(step=len(losses))
                time.sleep(0.005)
        except dlab.Stopped:
            return losses

    run = started(patient)
    eventually(lambda: len(logged(run, 0)) > 2 and len(logged(run, 1)) > 2)
    run.stop()
    for rank, losses in enumerate(run.wait(partial=True)):
        assert losses == list(range(len(logged(run, rank))))


def test_stop_reaches_ranks_that_wait_in_a_collective_or_swallow_exceptions(cluster, started):
    def stubborn():
        dlab.log(step=0)
        if dlab.rank() == 0:
            dist.barrier()
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                dlab.log(swallowed=True)

    run = started(stubborn)
    eventually(lambda: logged(run, 0) and logged(run, 1))
    run.stop()
    assert run.wait(partial=True) == [None, None]
    assert cluster.run(dlab.rank) == [0, 1]


def test_a_clean_up_in_the_function_is_done_when_it_is_stopped(started, tmp_path):
    def careful(path):
        try:
            dlab.log(step=0)
            time.sleep(1000)
        finally:
            (path / str(dlab.rank())).touch()

    run = started(careful, tmp_path)
    eventually(lambda: logged(run, 0) and logged(run, 1))
    run.stop()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


# ------------------------------------------------------------------------------------- pause and resume


def test_pause_stops_events_from_arriving_and_resume_continues(cluster, started):
    run = started(steps)
    eventually(lambda: len(logged(run, 0)) > 2 and len(logged(run, 1)) > 2)
    run.pause()
    assert run.state == "paused"
    eventually(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in cluster.pids))
    before = len(run.events)
    time.sleep(0.3)
    assert len(run.events) == before
    run.resume()
    assert run.state == "running"
    eventually(lambda: len(run.events) > before + 10)
    run.set("enough", True)
    assert run.wait(30) == [len(logged(run, 0)), len(logged(run, 1))], "and no step is lost"


def test_a_paused_run_can_be_stopped(started):
    run = started(steps)
    run.pause()
    run.stop()
    assert run.wait(10, partial=True) == [None, None]


def test_a_paused_run_that_is_stopped_may_still_return_what_it_has(started):
    def patient():
        try:
            dlab.log(step=0)
            time.sleep(1000)
        except dlab.Stopped:
            return "so far"

    run = started(patient)
    eventually(lambda: logged(run, 0) and logged(run, 1))
    run.pause()
    run.stop()
    assert run.wait(10, partial=True) == ["so far", "so far"]


def test_a_rank_of_a_paused_run_can_be_killed(started):
    run = started(steps)
    run.pause()
    run.kill(0)
    with pytest.raises(dlab.WorkerError, match=r"rank 0 .*SIGKILL"):
        run.wait(10)


def test_pausing_a_run_that_has_ended_does_not_touch_the_next(cluster, started):
    old = started(dlab.rank)
    old.wait(30)
    run = started(steps)
    old.pause()
    old.kill(0)
    old.delay(0, 100)
    old.set("enough", True)
    old.stop()
    seen = len(logged(run, 0))
    eventually(lambda: len(logged(run, 0)) > seen + 3)
    assert not run.done


# ------------------------------------------------------------------------------------- kill


def test_kill_names_the_rank_and_sigkill_and_the_events_before_it_are_kept(cluster, started):
    run = started(steps)
    eventually(lambda: len(logged(run, 1)) > 2)
    start = time.monotonic()
    run.kill(1)
    with pytest.raises(
        dlab.WorkerError, match=r"rank 1 was killed by signal 9 \(SIGKILL\) while it ran steps"
    ) as error:
        run.wait(30)
    print(f"reported within {time.monotonic() - start:.2f} s (promised: 1 s)")
    assert time.monotonic() - start < 3
    assert error.value.rank == 1
    assert run.state == "failed"
    assert len(logged(run, 1)) > 2


def test_a_rank_killed_from_outside_while_it_runs_is_named(cluster, started):
    run = started(steps)
    os.kill(cluster.pids[0], signal.SIGKILL)
    with pytest.raises(dlab.WorkerError, match=r"rank 0 .*SIGKILL"):
        run.wait(30)


# ------------------------------------------------------------------------------------- delay


def test_delay_makes_the_chosen_rank_slower_and_only_that_one(started):
    run = started(steps)
    run.delay(1, 0.3)
    eventually(lambda: len(logged(run, 1)) > 1)
    before = len(logged(run, 0)), len(logged(run, 1))
    eventually(lambda: len(logged(run, 1)) >= before[1] + 3)
    slow = [event.time for event in logged(run, 1)[-3:]]
    assert min(late - early for early, late in itertools.pairwise(slow)) >= 0.29
    assert len(logged(run, 0)) - before[0] > 10
    run.delay(1, 0)
    before = len(logged(run, 1))
    eventually(lambda: len(logged(run, 1)) > before + 20, seconds=5)  # 20 delayed steps would take longer


def test_a_long_delay_ends_when_it_is_taken_back_and_does_not_last_into_the_next_run(started):
    run = started(steps)
    run.delay(0, 1000)
    run.delay(1, 1000)
    time.sleep(0.1)
    run.delay(1, 0)
    before = len(logged(run, 1))
    eventually(lambda: len(logged(run, 1)) > before + 3)
    run.stop()
    run = started(steps)
    eventually(lambda: len(logged(run, 0)) > 3)
