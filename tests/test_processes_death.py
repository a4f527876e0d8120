"""Nothing is left behind: not when the kernel is killed, whatever the workers are doing, and not by a script."""

import re
import signal
import subprocess
import sys

import pytest
from kernels import PATH, Kernel, eventually, expect_nothing_left, left_in

from dlab.processes.between import lifeline

# ------------------------------------------------------------------------------------- the kernel is killed


def test_when_the_kernel_dies_its_workers_are_gone_within_a_second_whatever_they_are_doing(tmp_path):
    with Kernel(TMPDIR=str(tmp_path), PYTHONPATH=PATH) as kernel:
        cell = kernel.run(
            "import os, time, torch, dlab, trouble\n"
            "import torch.distributed as dist\n"
            "def work():\n"
            "    open(os.path.join(os.environ['TMPDIR'], f'begun-{dlab.rank()}'), 'w').close()\n"
            "    if dlab.rank() == 0: dist.recv(torch.zeros(1), src=1)\n"
            "    if dlab.rank() == 1: trouble.hang_in_c()\n"
            "    if dlab.rank() == 2: trouble.be_stopped()\n"
            "    if dlab.rank() == 3: trouble.swallow_exceptions()\n"
            "    while True: pass\n"
            "cluster, paused, idle = dlab.Cluster(5), dlab.Cluster(2), dlab.Cluster(1)\n"
            "run = cluster.start(work)\n"
            "frozen = paused.start(lambda: time.sleep(1000))\n"
            "frozen.pause()"
        )
        assert cell.error is None, cell.traceback
        eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 5)
        family = kernel.process.children(recursive=True)
        assert len(family) >= 1 + 5 + 2 + 1, "the fork server and all workers"
        assert len(left_in(tmp_path)) == 1
        kernel.kill()
        expect_nothing_left(family, tmp_path, "a killed kernel")


@pytest.mark.parametrize("moment", ["while the fork server starts", "while the workers start"])
def test_a_kernel_killed_while_its_first_cluster_starts_leaves_nothing(tmp_path, moment):
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        kernel.submit("import dlab\ncluster = dlab.Cluster(4)\nprint('up')")
        if moment == "while the fork server starts":
            # multiprocessing's resource tracker comes first, then the server
            eventually(lambda: len(kernel.process.children(recursive=True)) >= 2, seconds=60)
        else:
            eventually(lambda: len(kernel.process.children(recursive=True)) >= 4, seconds=60)
        family = kernel.process.children(recursive=True)
        kernel.kill()
        expect_nothing_left(family, tmp_path, f"a kernel killed {moment}")


def test_a_kernel_killed_with_its_whole_process_group_leaves_nothing(tmp_path):
    """As the server does it when somebody restarts a kernel that does not answer."""
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        cell = kernel.run("import dlab, time\nrun = dlab.cluster(2).start(lambda: time.sleep(1000))")
        assert cell.error is None, cell.traceback
        family = kernel.process.children(recursive=True)
        kernel.close()
        expect_nothing_left(family, tmp_path, "a restarted kernel")


# ------------------------------------------------------------------------------------- scripts


@pytest.fixture(scope="module")
def ending(start_together):
    """Scripts that end by themselves."""
    return start_together({"no guard": NO_GUARD, "not closed": NOT_CLOSED, "failing": FAILING})


NO_GUARD = """
    import os
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    import dlab, torch, tqdm
    import torch.distributed as dist

    print("loaded")
    scale = 10

    def work(x):
        for _ in tqdm.tqdm(range(3), disable=dlab.rank() > 0):
            dist.all_reduce(x)
        return scale * x.sum().item()

    with dlab.Cluster(2) as cluster:
        print(*(f"pid {pid}" for pid in cluster.pids), sep="\\n")
        print(cluster.run(work, torch.ones(50_000)))
    print("forks", len(forks))
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_works_and_nothing_forks_it(ending):
    done = ending["no guard"].finish()
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "loaded"
    assert lines.count("loaded") == 1, "no worker imports the script"
    assert lines[3:] == ["[4000000.0, 4000000.0]", "forks 0"]
    bar = re.compile(r"\[rank 0\] +\d+%\|")  # its end, and on a slow machine what it was on the way
    assert [line for line in done.stderr.splitlines() if not bar.match(line)] == []
    assert sum("100%|" in line for line in done.stderr.splitlines()) == 1


NOT_CLOSED = """
    import dlab, time
    cluster = dlab.Cluster(2)
    print(*(f"pid {pid}" for pid in cluster.pids), sep="\\n")
    run = cluster.start(lambda: time.sleep(1000))
"""


@pytest.mark.slow
def test_a_script_that_never_closes_its_cluster_ends_by_itself(ending):
    done = ending["not closed"].finish()
    assert (done.returncode, done.stderr) == (0, "")


FAILING = """
    import dlab

    def work():
        return 1 / dlab.rank()  # rank 0 fails

    cluster = dlab.Cluster(2)
    print(*(f"pid {pid}" for pid in cluster.pids), sep="\\n")
    cluster.run(work)
"""


@pytest.mark.slow
def test_a_script_that_fails_shows_the_workers_traceback_and_exits_with_1(ending):
    done = ending["failing"].finish()
    assert done.returncode == 1
    assert "WorkerError: rank 0 failed: ZeroDivisionError: division by zero" in done.stderr
    assert "return 1 / dlab.rank()  # rank 0 fails" in done.stderr


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
ENDLESS = """
    import dlab, trouble
    cluster = dlab.Cluster(2)
    run = cluster.start(trouble.swallow_exceptions)
    print("ready", flush=True)
    run.wait()
"""


@pytest.fixture(scope="module")
def endless(start_together):
    """A script for each end."""
    return start_together({end.name: ENDLESS for end in ENDS})


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)
def test_a_script_that_is_killed_leaves_nothing(endless, end):
    assert endless[end.name].finish(end).returncode == -end


# ------------------------------------------------------------------------------------- directories


def test_a_directory_goes_although_somebody_creates_its_files_again(tmp_path):
    """As torch's FileStore does with the file that it waits for."""
    creating = (
        "import contextlib, sys\n"
        "while True:\n"
        "    with contextlib.suppress(OSError):\n"
        "        open(sys.argv[1], 'a').close()"
    )
    with subprocess.Popen([sys.executable, "-c", creating, str(tmp_path / "dlab-1" / "store")]) as writer:
        try:
            for _ in range(200):
                (directory := tmp_path / "dlab-1").mkdir()
                eventually((directory / "store").exists)
                lifeline.remove_directory(directory)
                assert left_in(tmp_path) == []
        finally:
            writer.kill()
