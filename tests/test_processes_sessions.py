"""A process may fork, lose its directory, or have a strange place for temporary files: its clusters go on."""

import importlib.util
import os
import re
import runpy
import signal
import stat
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import psutil
import pytest
from kernels import PATH, Kernel, Script, alive, eventually, expect_nothing_left, is_one_sentence, left_in

import dlab
from dlab.processes.parent import forkserver


@pytest.fixture(scope="module")
def scripts(start_together) -> dict[str, Script]:
    return start_together({"forks": FORKS, "loses": LOSES, "spawns": SPAWNS})


# ------------------------------------------------------------------------------------- forks


FORKS = """
    import multiprocessing, os, signal, sys, time
    import dlab
    from dlab.processes.parent import forkserver

    def fork():
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.alarm(30)  # whatever happens, it does not stay

    def wait_for_knob():
        while not dlab.knob("enough"):
            time.sleep(0.01)

    def has_a_cluster_of_its_own():
        signal.alarm(30)
        own = dlab.cluster(2)
        assert own is not cluster
        assert own.run(dlab.rank) == [0, 1]
        assert not set(own.pids) & set(cluster.pids)
        assert forkserver.directory() != home

    home, cluster = forkserver.directory(), dlab.cluster(2)
    pids = cluster.pids
    print(*(f"pid {pid}" for pid in pids), sep="\\n")
    run = cluster.start(wait_for_knob)

    if (code := fork()) is None:
        os._exit(3)
    print("left at once:", code)
    if (code := fork()) is None:
        sys.exit(4)
    print("left:", code)
    if (code := fork()) is None:
        sys.excepthook = lambda *_: None
        raise ValueError("a fork fails")
    print("failed:", code)
    if (code := fork()) is None:
        for use in (lambda: cluster.run(dlab.rank), lambda: run.wait(), lambda: run.stop(), lambda: run.set("a", 1)):
            try:
                use()
            except RuntimeError as problem:
                print(problem, flush=True)
        cluster.close()
        sys.exit(0)
    print("used what is not its own:", code)
    if (code := fork()) is None:
        has_a_cluster_of_its_own()
        sys.exit(5)
    print("had a cluster:", code)
    # a daemon, as those of a Pool are
    child = multiprocessing.get_context("fork").Process(target=has_a_cluster_of_its_own, daemon=True)
    child.start()
    child.join()
    print("had a cluster, too:", child.exitcode)

    assert not run.done
    run.set("enough", True)
    run.wait(20)
    assert cluster.run(dlab.rank) == [0, 1]
    assert cluster.pids == pids
    assert forkserver.directory() == home and home.is_dir()
    print("all is as before")
"""


@pytest.mark.slow
def test_a_fork_leaves_the_cluster_of_its_parent_alone_and_may_have_its_own(scripts):
    done = scripts["forks"].finish()
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("pid ")]
    assert lines[:3] == ["left at once: 3", "left: 4", "failed: 1"]
    sentences = lines[3:7]
    assert len(set(sentences)) == 1
    assert re.match(r"this cluster belongs to process \d+, .* fork.*: make one .* with dlab.Cluster", sentences[0])
    assert is_one_sentence(sentences[0])
    assert lines[7:] == [
        "used what is not its own: 0",
        "had a cluster: 5",
        "had a cluster, too: 0",
        "all is as before",
    ]
    assert done.stderr == ""


def test_a_fork_of_a_kernel_has_a_cluster_and_takes_no_message_from_the_kernel(tmp_path):
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        cell = kernel.run(
            "import dlab, os, signal\n"
            "assert dlab.cluster(1).run(dlab.rank) == [0]\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    signal.alarm(30)\n"
            "    code = 1\n"
            "    try: code = 7 + dlab.cluster(1).run(dlab.rank)[0]\n"
            "    finally: os._exit(code)\n"
        )
        assert cell.error is None, cell.traceback
        cells = [kernel.submit(f"print({number})") for number in range(20)]
        assert [kernel.finish(each).stdout for each in cells] == [f"{number}\n" for number in range(20)]
        cell = kernel.run("print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), dlab.cluster(1).run(dlab.rank))")
        assert cell.stdout == "7 [0]\n", cell
        family = kernel.process.children(recursive=True)
        kernel.kill()
        expect_nothing_left(family, tmp_path, "a kernel that has forked")


# ------------------------------------------------------------------------------------- the directory


LOSES = """
    import os, shutil, signal, stat, time
    import torch, torch.distributed as dist
    import dlab
    from dlab.processes.parent import forkserver

    def total():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    cluster = dlab.Cluster(2)  # whose ranks have not spoken to each other
    pids, homes = cluster.pids, [forkserver.directory()]
    shutil.rmtree(homes[-1])
    assert cluster.run(total, timeout=20) == [2.0, 2.0]
    assert cluster.pids == pids, "its workers stay"
    for way in ("a new cluster", "a new worker", "only the socket is lost"):
        homes.append(forkserver.directory())
        if way == "only the socket is lost":
            for file in homes[-1].glob("listener-*"):
                file.unlink()
        else:
            shutil.rmtree(homes[-1])
        if way == "a new worker":
            os.kill(cluster.pids[1], signal.SIGKILL)
        with dlab.Cluster(1) as other:
            assert other.run(total, timeout=20) == [1.0]
        assert cluster.run(total, timeout=20) == [2.0, 2.0]
        assert cluster.pids == pids or way == "a new worker"
        pids = cluster.pids
    homes.append(forkserver.directory())
    assert len(set(homes)) == len(homes)
    assert [home.is_dir() for home in homes] == [False] * (len(homes) - 1) + [True]
    assert stat.S_IMODE(homes[-1].stat().st_mode) == 0o700
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_process_that_has_lost_its_directory_makes_a_new_one_and_leaves_nothing_when_it_is_killed(scripts):
    done = scripts["loses"].finish(signal.SIGKILL)
    assert (done.stdout, done.stderr) == ("", "")


def python(text: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(text)]
    inherited = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    environment = {**inherited, "PYTHONPATH": PATH, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_long_path_for_temporary_files_is_no_obstacle(tmp_path):
    home = tmp_path / ("a" * 100)
    home.mkdir()
    done = python(
        """
        import dlab
        from dlab.processes.parent import forkserver
        with dlab.Cluster(2) as cluster:
            print(cluster.run(dlab.rank), forkserver.directory(), oct(forkserver.directory().stat().st_mode))
        """,
        TMPDIR=str(home),
    )
    assert done.returncode == 0, done.stderr
    ranks, directory, mode = re.match(r"(\[.*\]) (\S+) (\S+)", done.stdout).groups()
    assert (ranks, mode) == ("[0, 1]", "0o40700")
    assert not Path(directory).exists()
    assert left_in(home) == []


@pytest.mark.parametrize("home", ["it is too long", "it does not exist"])
def test_without_a_place_for_its_sockets_a_cluster_is_refused_in_a_sentence(tmp_path, monkeypatch, home):
    path = tmp_path / ("a" * 100 if home == "it is too long" else "nowhere")
    if home == "it is too long":
        path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setattr(forkserver, "SHORT", ())
    monkeypatch.setattr(forkserver, "_session", forkserver._Session())
    with pytest.raises(OSError, match=r"set TMPDIR to a directory .* at most \d+ bytes") as error:
        dlab.Cluster(1)
    assert str(path) in str(error.value)
    assert is_one_sentence(str(error.value).replace(str(path), ""))


# ------------------------------------------------------------------------------------- the fork server


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_fork_server_that_dies_is_named_and_all_that_follows_works(number):
    with dlab.Cluster(3) as cluster:
        run = cluster.start(time.sleep, 1000)
        pids = cluster.pids
        os.kill(psutil.Process(pids[0]).ppid(), number)
        with pytest.raises(dlab.WorkerError) as error:
            run.wait(30)
        expected = "the process that starts workers died, and ranks 0, 1 and 2 with it, while they ran sleep"
        assert str(error.value) == f"{expected}; new ones take their place"
        assert error.value.ranks == [0, 1, 2]
        whys = [event.data["why"] for event in run.states if event.data["state"] == "dead"]
        assert whys == ["died with the process that starts workers"] * 3
        eventually(lambda: not alive(pids))
        assert cluster.run(dlab.rank, timeout=60) == [0, 1, 2]
        with dlab.Cluster(1) as other:
            assert other.run(dlab.rank, timeout=60) == [0]
            servers = {psutil.Process(pid).ppid() for pid in cluster.pids + other.pids}
        assert [child.pid for child in alive(psutil.Process().children()) if is_server(child)] == list(servers)
        home = forkserver.directory()
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert len([file for file in home.iterdir() if file.name.startswith("listener-")]) == 1


def is_server(process: psutil.Process) -> bool:
    return any("dlab.processes.worker.preload" in part for part in process.cmdline())


def test_a_worker_that_exits_with_255_is_not_taken_for_one_whose_server_has_died():
    with dlab.Cluster(1) as cluster, pytest.raises(dlab.WorkerError, match="rank 0 exited with code 255"):
        cluster.run(lambda: os._exit(255))


def test_a_fork_server_that_never_gets_up_is_told_of(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'forkserver' in ' '.join(sys.orig_argv): os._exit(9)\n"
    )
    done = python(
        """
        import dlab
        try:
            dlab.Cluster(1)
        except RuntimeError as problem:
            print(problem)
        """,
        PYTHONPATH=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    assert "the process that starts workers died twice before it had started one" in done.stdout, done.stderr
    assert is_one_sentence(done.stdout.strip())
    assert left_in(tmp_path) == []


# ------------------------------------------------------------------------------------- workers that are stopped


@pytest.fixture
def stopped_when_it_starts(monkeypatch):
    """Rank 1's first process is stopped as soon as it is there."""
    from dlab.processes.parent import pool

    stopped = []

    class Stopped(pool.WorkerHandle):
        def __init__(self, seat, *rest):
            super().__init__(seat, *rest)
            if seat.rank == 1 and not stopped:
                os.kill(self.pid, signal.SIGSTOP)
                stopped.append(self.pid)

    monkeypatch.setattr(pool, "WorkerHandle", Stopped)
    monkeypatch.setitem(pool.FORM, "gloo", 1000.0)
    return stopped


def test_a_worker_that_is_stopped_before_it_has_joined_is_woken_and_that_is_told(stopped_when_it_starts, capfd):
    with dlab.Cluster(2) as cluster:
        assert cluster.run(dlab.rank) == [0, 1]
        assert cluster.pids[1] in stopped_when_it_starts
    told = capfd.readouterr().err
    assert told == "dlab: rank 1 was stopped by a signal before it had joined the others: it is told to go on\n"


def test_a_worker_that_is_stopped_when_a_new_group_forms_is_woken_too(cluster, capfd, monkeypatch):
    from dlab.processes.parent import pool

    monkeypatch.setitem(pool.FORM, "gloo", 1000.0)
    pids = cluster.pids
    cluster.run(lambda: dlab.rank())
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: cluster.pids[1] != pids[1])
    assert cluster.run(dlab.rank, timeout=60) == [0, 1]
    assert cluster.pids[0] == pids[0]
    told = capfd.readouterr().err
    assert told == "dlab: rank 0 was stopped by a signal before it had joined the others: it is told to go on\n"


def test_a_group_that_takes_long_to_form_says_whom_it_waits_for(monkeypatch, capfd, stopped_when_it_starts):
    from dlab.processes.between import lifeline
    from dlab.processes.parent import pool

    monkeypatch.setattr(lifeline, "state_of", lambda pid: "D")
    monkeypatch.setattr(pool, "SLOW", 0.3)
    monkeypatch.setitem(pool.FORM, "gloo", 1.5)  # then it is replaced
    with dlab.Cluster(2) as cluster:
        assert cluster.run(dlab.rank) == [0, 1]
        assert cluster.pids[1] not in stopped_when_it_starts
    told = capfd.readouterr().err.splitlines()
    assert told[0] == "dlab: rank 1 has not joined the others yet (waits for a disk or a device) …"
    assert len(told) == 1


def test_a_fork_server_that_is_stopped_is_woken(capfd):
    with dlab.Cluster(1) as cluster:
        server = psutil.Process(cluster.pids[0]).ppid()
        os.kill(server, signal.SIGSTOP)
        with dlab.Cluster(1) as other:
            assert other.run(dlab.rank) == [0]
    told = capfd.readouterr().err
    assert told == "dlab: the process that starts workers was stopped by a signal: it is told to go on\n"


def test_a_fork_server_that_takes_long_is_told_of(capfd, monkeypatch):
    monkeypatch.setattr(forkserver, "SLOW", 0.0)
    monkeypatch.setattr(forkserver, "LOOK", 0.05)
    with dlab.Cluster(1) as cluster:
        os.kill(psutil.Process(cluster.pids[0]).ppid(), signal.SIGSTOP)
        looks, wake = [1, 2], forkserver.lifeline.wake
        monkeypatch.setattr(forkserver.lifeline, "wake", lambda pid: not looks.pop() if looks else wake(pid))
        with dlab.Cluster(1) as other:
            assert other.run(dlab.rank) == [0]
    first, second = capfd.readouterr().err.splitlines()
    assert first == "dlab: the process that starts workers is not ready yet: it imports torch …"
    assert "stopped by a signal" in second


# ------------------------------------------------------------------------------------- where functions come from


SPAWNS = """
    import multiprocessing
    import dlab

    class Scale:
        by = 10

        def __call__(self, x):
            return x * self.by

    def square():
        return Scale()(dlab.rank() ** 2)

    def work():
        with dlab.Cluster(2) as cluster:
            print(square.__module__, cluster.run(square), type(cluster.run(Scale)[0]) is Scale)

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=work)
        child.start()
        child.join()
        print("ended:", child.exitcode)
"""


def test_a_spawned_process_gives_functions_of_its_main_script_to_workers(scripts):
    done = scripts["spawns"].finish()
    assert done.stdout.splitlines() == ["__mp_main__ [0, 10] True", "ended: 0"], done.stderr


LESSON = """
import math
import sys

factor = 10

class Answer:
    def __init__(self, value):
        self.value = value

def scale(x):
    return factor * math.floor(x)

def answer():
    return Answer(scale(4.2))
"""


@pytest.mark.parametrize("how", ["from a file", "from a file, in a package", "with the name of another", "by hand"])
def test_a_module_that_workers_cannot_import_travels_by_value(cluster, tmp_path, monkeypatch, how):
    name = {"from a file, in a package": "lessons_off_the_path.first", "with the name of another": "lesson_twice"}.get(
        how, "lesson_off_the_path"
    )
    file = tmp_path / "lesson.py"
    file.write_text(LESSON)
    if how == "with the name of another":
        monkeypatch.syspath_prepend(tmp_path / "path")
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "lesson_twice.py").write_text("def answer():\n    return None\n")
    if how == "by hand":
        module = types.ModuleType(name)
        exec(LESSON, vars(module))
    else:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    results = cluster.run(module.answer)
    assert [result.value for result in results] == [40, 40]
    assert type(results[0]) is module.Answer
    assert cluster.run(lambda: module.scale(2.5)) == [20, 20], "the module itself travels, too"


def test_a_module_that_workers_can_import_travels_by_name(cluster, tmp_path, monkeypatch):
    (tmp_path / "lesson_on_the_path.py").write_text(
        "calls = 0\n\ndef count():\n    global calls\n    calls += 1\n    return calls\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lesson_on_the_path")
    assert [cluster.run(module.count)[0] for _ in range(3)] == [1, 2, 3], "it stays in the workers"


def test_a_script_run_by_runpy_gives_its_functions_to_workers(cluster, tmp_path):
    (tmp_path / "script.py").write_text(LESSON + "result = cluster.run(answer)[1].value\n")
    assert runpy.run_path(str(tmp_path / "script.py"), {"cluster": cluster})["result"] == 40
