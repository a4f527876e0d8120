"""Chaos: whatever happens to a rank, whenever, the right one is named, the next run works, nothing is left."""

import os
import random
import signal
import sys
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
import trouble
from kernels import open_handles

import dlab
from dlab.processes import forkserver

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
INJECTIONS = int(os.environ.get("DLAB_CHAOS", "40"))
SEED = 6653  # its first 40 meet more pairs of how, what, whom and when than those of 20,000 others
RANKS = 3
TIMEOUT = 0.4
MOMENTS = ("at the start", "instead of a collective", "at the end")
CRASHES = {
    trouble.fail: "rank {} failed: ValueError: trouble",
    trouble.leave: "rank {} failed: SystemExit: 7",
    trouble.vanish: "rank {} exited with code 7",
    trouble.be_killed: "rank {} was killed by signal 9 (SIGKILL)",
}
HANGS = (trouble.be_stopped, trouble.hang_in_python, trouble.hang_in_c, trouble.swallow_exceptions)


def work(what, victim, moment):
    """Sum three times; at the given moment, one rank does something else."""

    def comes(now):
        if now == moment and dist.get_rank() == victim:
            what()

    total = torch.full((1000,), float(dist.get_rank()))
    comes("at the start")
    dist.all_reduce(total)
    comes("instead of a collective")
    dist.all_reduce(total)
    comes("at the end")
    return total[0].item()


def crash(cluster, what, victim, moment):
    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(work, what, victim, moment)
    assert CRASHES[what].format(victim) in str(error.value)
    assert error.value.ranks == [victim]


def hang(cluster, what, victim, moment):
    with pytest.raises(dlab.WorkerTimeout) as error:
        cluster.run(work, what, victim, moment, timeout=TIMEOUT)
    assert error.value.rank == victim, str(error.value)
    others = "" if moment == "at the end" else f"waited for rank {victim}"
    assert others in str(error.value)


def interrupt(cluster, what, victim, moment):
    notebook = os.getpid()

    def interrupt_and_hang():
        os.kill(notebook, signal.SIGINT)
        what()

    with pytest.raises(KeyboardInterrupt):
        cluster.run(work, interrupt_and_hang, victim, moment)


def outside(cluster, what, victim, moment):
    """Somebody else kills or stops the process, at no particular moment."""

    def go_on():
        while True:
            dist.all_reduce(torch.ones(1000))

    number = signal.SIGKILL if what in CRASHES else signal.SIGSTOP
    run = cluster.start(go_on)
    time.sleep(0.05)
    os.kill(cluster.pids[victim], number)
    if number == signal.SIGKILL:
        with pytest.raises(dlab.WorkerError, match=rf"rank {victim} was killed by signal 9"):
            run.wait(30)
    else:
        with pytest.raises(dlab.WorkerTimeout) as error:
            run.wait(TIMEOUT)
        assert error.value.rank == victim, str(error.value)
        run.stop()


@pytest.mark.slow
@pytest.mark.timeout(30 + 3 * INJECTIONS)
def test_whatever_happens_the_right_rank_is_named_and_the_next_run_works_and_nothing_is_left():
    dlab.Cluster(1).close()  # the fork server stays until this process ends
    chance = random.Random(SEED)
    files, handles, processes = set(forkserver.directory().iterdir()), open_handles(), psutil.Process().children()
    slowest = {}
    with dlab.Cluster(RANKS) as cluster:
        for number in range(INJECTIONS):
            how = chance.choice((crash, crash, hang, interrupt, outside))
            what = chance.choice(tuple(CRASHES) if how is crash or (how is outside and number % 2) else HANGS)
            victim, moment = chance.randrange(RANKS), chance.choice(MOMENTS)
            story = f"injection {number}: {how.__name__}, rank {victim}, {what.__name__}, {moment}"
            start = time.monotonic()
            try:
                how(cluster, what, victim, moment)
                slowest[how.__name__] = max(slowest.get(how.__name__, 0.0), time.monotonic() - start)
                assert cluster.run(work, None, None, None, timeout=30) == [9.0] * RANKS
            except BaseException as problem:
                problem.add_note(story)
                raise
        everybody = cluster.pids
    print({how: f"{seconds:.2f} s" for how, seconds in slowest.items()})
    assert slowest["crash"] < 1.5 + 2
    assert slowest["hang"] < TIMEOUT + 2 + 2
    assert slowest["interrupt"] < 1 + 2
    del cluster
    assert not any(psutil.pid_exists(pid) for pid in everybody)
    assert psutil.Process().children() == processes
    assert set(forkserver.directory().iterdir()) == files
    assert open_handles() == handles
