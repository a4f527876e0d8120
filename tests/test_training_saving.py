"""A rank or a server dies in the middle of a save: the run goes on, and the checkpoint is whole or not there."""

import os
import signal
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from test_strategies import data_in_float, difference, network_in_float

import dlab
from dlab.kvstore.joining import channels_of
from dlab.processes.worker.context import is_worker, once
from dlab.training import loop
from dlab.training.checkpoints import open_checkpoint

RANKS, EVERY, STEPS = 4, 5, 15
SERVERS = 1  # of the cluster
METHODS = [(loop, "save"), (dlab.ParameterServer, "end"), (loop.Trainer, "result")]  # in which it may happen
_methods = {name: getattr(kind, name) for kind, name in METHODS}


def suicide():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_server():
    os.kill(channels_of(None).peers._pids[RANKS], signal.SIGKILL)
    time.sleep(0.1)  # it dies during this call, not somewhen later


def nothing_yet():
    return []


def network_that_dies(moments, do=suicide):
    """In the worker: `moments[rank]` is (when, event, function, n), and then it happens in the save after that step, or
    in the method of that name, when it calls the function, or returns from it, for the n-th time."""
    when, event, function, count = moments.get(dlab.rank(), (None, "", "", 0))
    happened = once(nothing_yet)  # in this run: not again, when it goes back

    def during(name):
        def method(self):
            left = count

            def look(frame, what, _):
                nonlocal left
                if (what, f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}") == (event, function):
                    left -= 1
                    if not left:
                        sys.setprofile(None)
                        do()

            if not happened and when == (self.steps if name == "save" else name):
                happened.append(when)
                sys.setprofile(look)
            try:
                return _methods[name](self)
            finally:
                sys.setprofile(None)

        return method

    for kind, name in METHODS if is_worker() else ():  # of this run; the next one sets its own
        setattr(kind, name, during(name))
    return network_in_float()


def train(cluster, strategy, folder, moments, do=suicide, **given):
    given = {"epochs": 3, "batch_size": 12, "lr": 0.01, "checkpoint": folder, "every": EVERY} | given
    return dlab.train(partial(network_that_dies, moments, do), data_in_float(), strategy, on=cluster, **given)


def seconds_between_steps(run, rank):
    times = [event.time for event in run.events if event.kind == "log" and event.rank == rank]
    return max(after - before for before, after in pairwise(times))


SURVIVING = {
    "asynchronous": dlab.AsyncSGD(),
    "in virtual time": dlab.AsyncSGD(dlab.VirtualClock(seed=1)),
    "locked": dlab.ParameterServer("async", servers=0),
    "async": dlab.ParameterServer("async"),
    "ssp": dlab.ParameterServer("ssp"),
}
MOMENTS = {  # who dies where; and how many ranks the checkpoint after the fifth step has, None if it is not there
    "before it settles": ({2: ("call", "state.save_together", 1)}, 3),
    "when it has settled": ({2: ("call", "ring.all_gather", 1)}, None),
    "while losses are gathered": ({1: ("call", "shared.move", 2)}, None),
    "before its own file": ({3: ("call", "saving.write", 1)}, None),
    "in its own file": ({2: ("call", "saving.write_bytes", 1)}, None),
    "after its own file": ({2: ("return", "saving.write", 1)}, None),
    "the first, before the folder": ({0: ("call", "saving.save_checkpoint", 1)}, None),
    "the first, in the common file": ({0: ("call", "saving.write_bytes", 2)}, None),
    "the first, before the manifest": ({0: ("call", "saving.write_bytes", 3)}, None),
    "the first, before the name": ({0: ("return", "saving.write_bytes", 3)}, None),
    "the first, after the name": ({0: ("return", "saving.commit", 1)}, 4),
    "two at once": ({0: ("call", "saving.write", 1), 3: ("call", "saving.write", 1)}, None),
    "two, one after another": ({0: ("call", "saving.write_bytes", 1), 3: ("return", "saving.write", 1)}, None),
}


SOME = ["when it has settled", "in its own file", "the first, before the manifest"]


@pytest.mark.parametrize(  # one with every moment, and each of the others with some
    ("name", "moment"),
    [(name, moment) for name in SURVIVING for moment in (MOMENTS if name == "async" else SOME)],
)
def test_others_go_on_and_save_the_next_one(cluster, tmp_path, name, moment):
    dying, ranks = MOMENTS[moment]
    run = train(cluster, SURVIVING[name], tmp_path, {rank: (EVERY, *where) for rank, where in dying.items()})
    seen = None
    while not run.done and not (tmp_path / f"step-{2 * EVERY:08d}").exists():
        seen = open_checkpoint(tmp_path).ranks if (tmp_path / f"step-{EVERY:08d}").exists() else None
        time.sleep(0.005)
    result = run.wait(60)
    assert result is not None and result.identical
    living = sorted(set(range(RANKS)) - set(dying))
    assert {event.rank for event in run.states if event.data["state"] == "dead"} == set(dying)
    logs = [event for event in run.events if event.kind == "log"]
    for rank in range(RANKS):
        last = max(event.data["step"] for event in logs if event.rank == rank)
        assert last == (STEPS - 1 if rank in living else EVERY - 1)
    assert max(seconds_between_steps(run, rank) for rank in living) < 5  # not after a timeout, which are 20 s and more
    assert seen == ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    assert [open_checkpoint(path).ranks for path in tmp_path.iterdir()] == [len(living)] * 2


@pytest.mark.parametrize("moment", [*SOME, "the first, after the name", "two, one after another"])
def test_so_does_an_elastic_run(cluster, tmp_path, moment):
    dying, _ = MOMENTS[moment]
    moments = {rank: (EVERY, *where) for rank, where in dying.items()}
    result = train(cluster, dlab.SyncSGD(), tmp_path, moments, elastic=True, order="global").wait(60)
    assert result.identical
    living = RANKS - len(dying)
    assert [open_checkpoint(path).ranks for path in tmp_path.iterdir()] == [living] * 2
    # in this order nobody's death changes what a step learns
    alone = dlab.train(network_in_float, data_in_float(), workers=1, order="global", epochs=3, batch_size=12, lr=0.01)
    assert difference(result.model, alone.wait(60).model) < 1e-5


SERVER_DIES = {
    "before they settle": (1, "call", "state.save_together", 1),
    "before what it remembers is asked for": (0, "call", "distributed.slots", 1),
    "while losses are gathered": (1, "call", "ring.all_gather", 1),
    "while a rank writes": (2, "call", "saving.write_bytes", 1),
    "before the name": (0, "return", "saving.write_bytes", 3),
    "after the name": (0, "return", "saving.commit", 1),
}


@pytest.mark.parametrize("step", [EVERY, STEPS], ids=["in the middle", "in the last"])
@pytest.mark.parametrize("moment", SERVER_DIES)
def test_a_server_dies_and_all_go_back(cluster, tmp_path, capfd, moment, step):
    rank, *where = SERVER_DIES[moment]
    strategy = dlab.ParameterServer("sync")
    result = train(cluster, strategy, tmp_path, {rank: (step, *where)}, kill_server).wait(60)
    assert result.identical
    assert capfd.readouterr().out.count("a server has died: a new one continues") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    whole = dlab.train(network_in_float, data_in_float(), strategy, on=cluster, epochs=3, batch_size=12, lr=0.01)
    assert difference(result.model, whole.wait(60).model) == 0


@pytest.mark.parametrize(
    ("rank", "where", "times"),
    [
        (0, ("end", "call", "distributed.slots", 1), {1}),  # nobody else can know that all is well
        (2, ("end", "call", "lines.say_how_it_ended", 1), {0, 1}),  # others may have settled, or not
        (1, ("result", "call", "evaluation.evaluate", 1), {0}),
    ],
)
def test_a_server_dies_at_the_end_and_all_go_back_or_nobody(cluster, tmp_path, capfd, rank, where, times):
    strategy, test = dlab.ParameterServer("async"), data_in_float()
    result = train(cluster, strategy, tmp_path, {rank: where}, kill_server, test=test).wait(60)
    assert result.identical and result.evaluation is not None
    assert capfd.readouterr().out.count("a server has died: a new one continues") in times


def network_of_one_who_kills_the_server():
    if is_worker() and dlab.rank() == 1 and not once(nothing_yet):
        once(nothing_yet).append(True)
        kill_server()
    return network_in_float()


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_server_dies_before_the_first_step_and_all_begin_again(cluster, tmp_path, capfd, mode):
    given = {
        "epochs": 1,
        "batch_size": 12,
        "lr": 0.01,
        "on": cluster,
        "strategy": dlab.ParameterServer(mode, staleness=0),
    }
    right = dlab.train(network_in_float, data_in_float(), **given).wait(60)
    found = dlab.train(network_of_one_who_kills_the_server, data_in_float(), checkpoint=tmp_path, **given).wait(60)
    assert "a server has died: a new one continues from step 0" in capfd.readouterr().out
    assert difference(found.model, right.model) == 0


def kill_server_too():
    kill_server()
    suicide()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_server_and_a_worker_die_at_once(cluster, tmp_path, mode, victim):
    moments = {victim: (2 * EVERY, "call", "saving.write_bytes", 1)}
    run = train(cluster, dlab.ParameterServer(mode), tmp_path, moments, kill_server_too)
    result = run.wait(60)
    assert result.identical
    assert {event.rank for event in run.states if event.data["state"] == "dead"} == {victim}
    assert open_checkpoint(tmp_path).ranks == RANKS - 1


def test_a_worker_dies_and_later_the_server(cluster, tmp_path):
    moments = {0: (EVERY, "call", "saving.write", 1)}

    def both():  # which of them, the one who does it knows
        kill_server() if dlab.rank() == 1 else suicide()

    moments[1] = (2 * EVERY, "call", "saving.write", 1)
    result = train(cluster, dlab.ParameterServer("async"), tmp_path, moments, both).wait(60)
    assert result.identical
    assert open_checkpoint(tmp_path).ranks == RANKS - 1
