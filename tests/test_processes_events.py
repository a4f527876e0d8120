"""What goes between a run and the notebook while it runs: knobs one way, events the other, nobody waits."""

import sys
import time

import cloudpickle
import numpy as np
import pytest
import torch
from kernels import eventually
from runs import logged, steps

import dlab
from dlab.views.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


# ------------------------------------------------------------------------------------- knobs


def test_a_knob_set_while_running_acts(started):
    def listen():
        while dlab.knob("lr", 0.01) == 0.01:
            time.sleep(0.005)
        return dlab.knob("lr", 0.01), dlab.knob("momentum", 0.5), dlab.knob("unset")

    run = started(listen)
    run.set("lr", 0.05)
    assert run.wait(30) == [(0.05, 0.5, None)] * 2
    assert run.knobs == {"lr": 0.05}


def test_knobs_are_forgotten_with_their_run(started):
    run = started(steps)
    run.set("lr", 0.05)
    run.stop()
    run = started(lambda: dlab.knob("lr", 0.01))
    assert run.wait(30) == [0.01, 0.01]
    assert run.knobs == {}


def test_a_run_tells_once_which_knobs_it_has(started):
    def ask():
        for _ in range(5):
            dlab.knob("lr", 0.01)
        dlab.knob("mode", "fast")

    run = started(ask)
    run.wait(30)
    knobs = [(event.rank, event.data) for event in run.events if event.kind == "knob"]
    both = [{"name": "lr", "default": 0.01}, {"name": "mode", "default": "fast"}]
    assert sorted(knobs, key=lambda knob: knob[0]) == [(rank, knob) for rank in (0, 1) for knob in both]


def test_a_knob_turned_very_often_is_always_read_whole(started):
    def watch_closely():
        seen = set()
        while not dlab.knob("enough"):
            seen.add(tuple(dlab.knob("pair", ["", ""])))
        return seen

    run = started(watch_closely)
    for number in range(1000):
        text = chr(97 + number % 26) * (1 + number % 1000)
        run.set("pair", [text, text])
    run.set("enough", True)
    for seen in run.wait(30):
        assert len(seen) > 1
        assert all(first == second for first, second in seen)


# ------------------------------------------------------------------------------------- events


def test_a_function_may_log_tensors_and_numpy_numbers(started):
    def tell():
        dlab.log(loss=torch.tensor(0.5, requires_grad=True))
        dlab.log(loss=np.float64(0.5), batch=np.int64(3), good=np.bool_(True))
        dlab.log(shape=torch.zeros(2, 3).shape, dtype=torch.float32, weights=torch.ones(2, 2), norms=np.arange(2.0))

    run = started(tell)
    run.wait(30)
    assert [event.data for event in logged(run, 0)] == [
        {"loss": 0.5},
        {"loss": 0.5, "batch": 3, "good": True},
        {"shape": [2, 3], "dtype": "torch.float32", "weights": [[1.0, 1.0], [1.0, 1.0]], "norms": [0.0, 1.0]},
    ]


def test_events_of_many_threads_all_arrive_whole(started):
    def chat():
        import threading

        def talk(thread):
            for number in range(2000):
                dlab.log(thread=thread, number=number)

        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = started(chat)
    run.wait(60)
    for rank in (0, 1):
        events = [event.data for event in logged(run, rank)]
        for thread in range(4):
            assert [data["number"] for data in events if data["thread"] == thread] == list(range(2000))


def test_events_that_do_not_fit_are_counted_and_reported(started, capsys):
    def flood():
        for number in range(400):
            dlab.log(number=number, text="x" * 100_000)

    run = started(flood)
    run.wait(60)
    error = capsys.readouterr().err
    for rank in (0, 1):
        arrived = [event.data["number"] for event in logged(run, rank)]
        (dropped,) = [event.data["count"] for event in run.events if event.kind == "dropped" and event.rank == rank]
        assert len(arrived) + dropped == 400
        assert arrived == sorted(arrived)
        assert f"[rank {rank}] {dropped} events did not fit and are lost: log less often" in error


def test_an_event_larger_than_the_ring_is_counted(started, capsys):
    run = started(lambda: dlab.log(text="x" * 10_000_000))
    run.wait(30)
    assert [(event.kind, event.data) for event in run.events] == [("dropped", {"count": 1})] * 2
    assert "1 events did not fit" in capsys.readouterr().err


def test_events_belong_to_their_own_run(started):
    first = started(lambda: dlab.log(run=1))
    first.wait(30)
    second = started(lambda: dlab.log(run=2))
    second.wait(30)
    assert [event.data["run"] for event in first.events] == [1, 1]
    assert [event.data["run"] for event in second.events] == [2, 2]


def test_a_run_saves_its_events(started, tmp_path):
    run = started(lambda: [dlab.log(step=step, loss=0.5 / (step + 1)) for step in range(5)] and None)
    run.wait(30)
    run.save(tmp_path / "run.jsonl")
    loaded = dlab.load_events(tmp_path / "run.jsonl")
    for rank in (0, 1):
        told = [event for event in loaded if event.kind == "log" and event.rank == rank]
        assert told == logged(run, rank) and len(told) == 5
        states = [event.data["state"] for event in loaded if event.kind == "state" and event.rank == rank]
        assert states == ["running", "returned"]
    assert len(loaded) == 14
    assert [event.time for event in loaded] == sorted(event.time for event in loaded)


def test_who_was_killed_is_dead_in_the_file_too(started, tmp_path):
    run = started(steps)
    eventually(lambda: all(logged(run, rank) for rank in (0, 1)))
    run.kill(1)
    with pytest.raises(dlab.WorkerError, match="rank 1 was killed"):
        run.wait(30)
    run.save(tmp_path / "run.jsonl")
    loaded = dlab.load_events(tmp_path / "run.jsonl")
    (death,) = [event for event in loaded if event.data.get("state") == "dead"]
    assert death.rank == 1 and death.time >= logged(run, 1)[-1].time
    words = [" ".join(line.split()) for line in str(Ranks(loaded)).splitlines()]
    assert words == [
        f"rank 0 stopped step {logged(run, 0)[-1].data['step']}",
        f"rank 1 dead: was killed by signal 9 (SIGKILL) step {logged(run, 1)[-1].data['step']}",
    ]
