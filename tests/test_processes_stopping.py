"""Time runs out, or the notebook is interrupted: the function ends within a second, whatever the workers are doing."""

import importlib
import os
import pickle
import re
import signal
import sys
import time
from importlib import util

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import trouble
from kernels import within

import dlab
from dlab.processes.parent import run_state
from dlab.processes.worker.stopping import Stoppable, TorchModes

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
    assert lines[0] == "hang was stopped:"
    first = [1, 2, 0] if what is trouble.be_stopped else [0, 1, 2]  # who is stopped is the likely culprit
    assert [line[:8] for line in lines[1:4]] == [f"rank {rank}: " for rank in first]
    assert lines[1 + first.index(0)].startswith("rank 0: at line"), lines
    assert lines[4:] == (["ranks 1 and 2 waited for rank 0"] if what is dist.barrier else [])
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


# ------------------------------------------------------------------------------------- nothing is left half done


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package that has imported a part of itself when it does something else; it may then use the part."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body):
        name = f"package_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
        folder = tmp_path / name
        folder.mkdir()
        (folder / "part.py").write_text("value = 7\n")
        (folder / "__init__.py").write_text(f"import {name}.part\n{body}\nvalue = {name}.part.value\n")
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("package_")]:
        del sys.modules[name]


@pytest.fixture
def stoppable():
    """What a worker runs functions in, here."""
    stoppable = Stoppable()
    before = signal.signal(signal.SIGUSR1, stoppable.on_signal)
    yield stoppable
    signal.signal(signal.SIGUSR1, before)


def execute(name):
    """As programs do that load a file as a module by themselves."""
    spec = util.find_spec(name)
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "load",
    [
        __import__,
        importlib.import_module,
        lambda name: [pickle.loads(f"c{name}\nvalue\n.".encode()), sys.modules[name]][1],
        lambda name: importlib.reload(sys.modules.setdefault(name, util.module_from_spec(util.find_spec(name)))),
        execute,
    ],
    ids=["import", "import_module", "unpickling", "reload", "exec_module"],
)
def test_a_stop_waits_until_an_import_is_over_however_it_was_asked_for(stoppable, package, load):
    name = package("import signal; signal.raise_signal(signal.SIGUSR1)")
    with pytest.raises(dlab.Stopped), stoppable:
        assert load(name).value == 7
        signal.raise_signal(signal.SIGUSR1)
    assert sys.modules[name].value == sys.modules[name].part.value == 7


def test_a_function_is_stopped_once_and_only_while_it_runs(stoppable):
    tidy = False
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(dlab.Stopped), stoppable:
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.raise_signal(signal.SIGUSR1)
            tidy = True
    signal.raise_signal(signal.SIGUSR1)
    assert tidy


@pytest.mark.parametrize("catches", [False, True])
def test_a_stop_leaves_the_modes_of_torch_as_they_were(stoppable, catches):
    before = TorchModes.now()

    def enter_and_be_stopped():
        torch.set_grad_enabled(False)
        torch.autocast("cpu", torch.float16).__enter__()
        torch.autocast("cpu", torch.bfloat16).__enter__()
        signal.raise_signal(signal.SIGUSR1)  # before any `with` knows that it has to leave

    try:
        with stoppable:
            try:
                enter_and_be_stopped()
            except dlab.Stopped:
                if not catches:
                    raise
    except dlab.Stopped:
        assert not catches
    assert TorchModes.now() == before
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    x = torch.ones(2, 2, requires_grad=True)
    assert (x @ x).dtype == torch.float32 and (x @ x).requires_grad


def test_modes_that_a_function_sets_last_when_it_was_not_stopped(cluster):
    def set_mode(enabled):
        torch.set_grad_enabled(enabled)

    cluster.run(set_mode, False)
    assert cluster.run(torch.is_grad_enabled) == [False] * WORKERS
    cluster.run(set_mode, True)
    assert cluster.run(torch.is_grad_enabled) == [True] * WORKERS


def imports(name):
    importlib.import_module(name)
    time.sleep(1000)


def wait_for_files(folder, count):
    for _ in range(3000):
        if len(list(folder.glob("began-*"))) == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"there are only {list(folder.iterdir())}")


BEGIN = "import os, pathlib, time; pathlib.Path({!r}, f'began-{{os.getpid()}}').touch()"


def test_after_a_stop_during_an_import_the_next_run_finds_the_module_whole(cluster, package, tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "GRACE", 30.0)  # however slow the machine is, nobody is killed
    name = package(BEGIN.format(str(tmp_path)) + "\nfor _ in range(20): time.sleep(0.01)")
    before = cluster.pids
    run = cluster.start(imports, name)
    wait_for_files(tmp_path, WORKERS)
    start = time.monotonic()
    run.stop()
    within(start, 1, "a stop in the middle of an import of 0.2 s")
    assert cluster.run(lambda: sys.modules[name].part.value) == [7] * WORKERS
    assert cluster.pids == before


def test_an_import_that_does_not_end_is_ended_with_its_process(cluster, package, tmp_path):
    name = package(
        BEGIN.format(str(tmp_path)) + f"\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.01)"
    )
    before = cluster.pids
    run = cluster.start(imports, name)
    wait_for_files(tmp_path, WORKERS)
    start = time.monotonic()
    run.stop()
    within(start, 1, "a stop in the middle of an endless import")
    assert run.state == "stopped"
    (tmp_path / "go").touch()
    assert cluster.run(lambda: importlib.import_module(name).part.value, timeout=30) == [7] * WORKERS
    assert not set(cluster.pids) & set(before)


def test_a_stop_that_comes_before_a_worker_has_begun_is_not_lost(cluster, monkeypatch):
    monkeypatch.setattr(run_state, "GRACE", 30.0)
    before = cluster.pids
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    run = cluster.start(time.sleep, 1000)
    start = time.monotonic()
    run.stop()
    within(start, 1, "a stop of a function that no worker has begun")
    assert cluster.run(dlab.rank) == [0, 1, 2]
    assert cluster.pids == before
