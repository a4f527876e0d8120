"""Chaos: whatever happens to a rank, whenever, in whatever training: the right one is named, what comes next works,
and nothing is left.

DLAB_CHAOS=300 makes more injections, DLAB_CHAOS_SEED another choice of them.
"""

import itertools
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
from kernels import eventually, open_handles
from torch import nn

import dlab
from dlab.processes.parent import forkserver

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
INJECTIONS = int(os.environ.get("DLAB_CHAOS", "60"))
SEED = int(os.environ.get("DLAB_CHAOS_SEED", "1"))
RANKS = 3
SERVER = RANKS  # the number of the only server
TIMEOUT = 1.0  # seconds in which everybody has come to where they wait for one that hangs
COLD = 1.2  # more, for a training on workers that are new
CRASHES = {
    trouble.fail: "rank {} failed: ValueError: trouble",
    trouble.leave: "rank {} failed: SystemExit: 7",
    trouble.vanish: "rank {} exited with code 7",
    trouble.be_killed: "rank {} was killed by signal 9 (SIGKILL)",
}
DEATHS = (trouble.vanish, trouble.be_killed)
HANGS = (trouble.be_stopped, trouble.hang_in_python, trouble.hang_in_c, trouble.swallow_exceptions)
STRATEGIES = {
    "sync": dlab.SyncSGD(),
    "all-reduce": dlab.AllReduceSGD(),
    "ZeRO": dlab.ZeRO(),
    "model averaging": dlab.ModelAveraging(every=2),
    "ddp": dlab.DDP(),
    "async": dlab.AsyncSGD(clock=dlab.VirtualClock(seed=3)),
    "server, sync": dlab.ParameterServer("sync"),
    "server, async": dlab.ParameterServer("async"),
    "server, ssp": dlab.ParameterServer("ssp", staleness=1),
    "lock": dlab.ParameterServer("async", servers=0),
}
REPEATABLE = ("sync", "all-reduce", "ZeRO", "model averaging", "ddp", "async", "server, sync")
FUNCTIONS = ("at the start", "instead of a collective", "at the end", "in an import")
TRAININGS = ("in a step", "in a checkpoint")


def work(what=None, victim=None, moment=None, folder=None):
    """Sum three times; at the given moment, one rank does something else."""

    def comes(now):
        if now == moment and dist.get_rank() == victim:
            what()

    total = torch.full((1000,), float(dist.get_rank()))
    comes("at the start")
    if moment == "in an import":
        sys.path.insert(0, str(folder))
        try:
            sys.modules["chaos_arguments"] = type(sys)("chaos_arguments")
            sys.modules["chaos_arguments"].comes = comes
            sys.modules.pop("chaos_module", None)
            import chaos_module  # noqa: F401
        finally:
            sys.path.pop(0)
    dist.all_reduce(total)
    comes("instead of a collective")
    dist.all_reduce(total)
    comes("at the end")
    return total[0].item()


class Plan:
    """A training of some steps in which something happens to one rank: in its third step, or in a checkpoint's."""

    def __init__(self, what=None, victim=None, moment=None):
        self.what, self.victim, self.moment = what, victim, moment

    def model(self):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        if dist.is_initialized() and dist.get_rank() == self.victim and self.moment == "in a checkpoint":
            synchronise = os.fsync

            def happen(file):
                os.fsync = synchronise
                self.what()

            os.fsync = happen
        return model

    def loss(self, outputs, labels):
        if self.moment == "in a step" and dist.get_rank() == self.victim:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                self.what()
        return nn.functional.cross_entropy(outputs, labels)


def data():
    chance = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(48, 6, generator=chance), torch.randint(3, (48,), generator=chance)
    )


def start(cluster, name, plan, **given):
    return dlab.train(plan.model, data(), STRATEGIES[name], loss=plan.loss, on=cluster, batch_size=12, lr=0.05, **given)


def weights(result):
    return torch.cat([each.view(-1) for each in result.model.state_dict().values()])


_numbers = itertools.count()  # of folders for checkpoints


class Chaos:
    """Injections into one cluster."""

    def __init__(self, cluster, folder, chance, right):
        self.cluster, self.folder, self.chance, self.right = cluster, folder, chance, right
        (folder / "chaos_module.py").write_text("import chaos_arguments\nchaos_arguments.comes('in an import')\n")

    def choose(self):
        """What is done, at which moment, in which training."""
        hows = (self.crash, self.crash, self.hang, self.interrupt, self.outside, self.stop)
        return (
            self.chance.choice(hows),
            self.chance.choice((*FUNCTIONS, *TRAININGS * 3)),
            self.chance.choice(tuple(STRATEGIES)),
        )

    def train(self, name):
        return start(self.cluster, name, Plan(), epochs=2).wait(60)

    def disturbed(self, what, victim, moment, name):
        """A run in which this happens to a rank at that moment."""
        if moment in FUNCTIONS:
            return self.cluster.start(work, what, victim, moment, self.folder)
        return start(self.cluster, name, Plan(what, victim, moment), epochs=2, **self.saving(moment, every=4))

    def saving(self, moment, every):
        """Checkpoints, in a folder of their own, if it is one that is to be disturbed."""
        return {"checkpoint": self.folder / f"{next(_numbers)}", "every": every} if "checkpoint" in moment else {}

    # --- what can be done to a rank

    def crash(self, moment, name):
        what, victim = self.chance.choice(tuple(CRASHES)), self.chance.randrange(RANKS)
        yield f"{what.__name__}, rank {victim}"
        run = self.disturbed(what, victim, moment, name)
        if moment in TRAININGS and STRATEGIES[name].survives and what in DEATHS:
            assert len(run.wait(60).losses) == 8
            return
        with pytest.raises(dlab.WorkerError) as error:
            run.wait(60)
        assert CRASHES[what].format(victim) in str(error.value)
        assert error.value.ranks == [victim]

    def hang(self, moment, name):
        what, victim = self.chance.choice(HANGS), self.chance.randrange(RANKS)
        yield f"{what.__name__}, rank {victim}"

        def tell_and_hang():
            dlab.log(moment=moment)
            what()

        run = self.disturbed(tell_and_hang, victim, moment, name)
        eventually(lambda: run.done or any("moment" in event.data for event in run.events))
        with pytest.raises(dlab.WorkerTimeout) as error:
            run.wait(TIMEOUT)
        assert error.value.rank == victim, str(error.value)
        if moment != "at the end":
            assert f"waited for rank {victim}" in str(error.value), str(error.value)
        run.stop()

    def interrupt(self, moment, name):
        what, victim, notebook = self.chance.choice(HANGS), self.chance.randrange(RANKS), os.getpid()
        yield f"{what.__name__}, rank {victim}"

        def interrupt_and_hang():
            os.kill(notebook, signal.SIGINT)
            what()

        with pytest.raises(KeyboardInterrupt):
            self.disturbed(interrupt_and_hang, victim, moment, name).wait(60)

    def outside(self, moment, name):
        """Somebody else kills or stops a process, at no particular moment; a server's, too."""
        serves = moment in TRAININGS and STRATEGIES[name].servers
        victim = self.chance.randrange(RANKS + bool(serves))
        number = self.chance.choice([signal.SIGKILL, signal.SIGSTOP])
        who = f"rank {victim}" if victim < RANKS else "server 0"
        yield f"{number.name}, {who}"
        run = self.endless(moment, name)
        self.after_a_while()
        begun = any(event.kind == "log" for event in run.events)
        os.kill(self.cluster.pids[victim], number)
        if number == signal.SIGSTOP:
            if moment in TRAININGS and STRATEGIES[name].survives and victim < RANKS and name != "server, ssp":
                time.sleep(0.2)  # nobody waits for it, or not yet
                run.stop()
                return
            with pytest.raises(dlab.WorkerTimeout) as error:
                run.wait(TIMEOUT + COLD * (moment in TRAININGS))
            assert error.value.rank == victim, str(error.value)
            run.stop()
        elif moment in TRAININGS and (STRATEGIES[name].survives if victim < RANKS else "checkpoint" in moment):
            time.sleep(0.5)  # it goes on without the worker, or with a new server
            if run.done and not begun:  # who had not met the others yet cannot be done without
                with pytest.raises(dlab.WorkerError, match=f"{who} was killed by signal 9"):
                    run.wait(60)
                return
            assert not run.done, run.wait()
            run.stop()
        else:
            with pytest.raises(dlab.WorkerError, match=f"{who} was killed by signal 9"):
                run.wait(60)

    def stop(self, moment, name):
        """At any moment, also of the imports and rendezvous with which a run begins."""
        yield ""
        run = self.endless(moment, name)
        self.after_a_while()
        run.stop()
        with pytest.raises(dlab.Stopped):
            run.wait(60)

    def endless(self, moment, name):
        if moment in TRAININGS:
            return start(self.cluster, name, Plan(), epochs=10**6, **self.saving(moment, every=2))

        def go_on():
            while True:
                dist.all_reduce(torch.ones(1000))

        return self.cluster.start(go_on)

    def after_a_while(self):
        time.sleep(self.chance.choice([0.0, 0.02, 0.05, 0.1, 0.3, 0.6]))

    # --- what comes next

    def check(self, not_this):
        """The next run works, and so does the next training, of another strategy, with the right result."""
        assert self.cluster.run(work, timeout=60) == [9.0] * RANKS
        name = self.chance.choice([name for name in STRATEGIES if name != not_this])
        result = self.train(name)
        if name in REPEATABLE:  # a training before any trouble, in a cluster of its own, tells what is right
            if name not in self.right:
                with dlab.Cluster(RANKS, servers=1) as undisturbed:
                    self.right[name] = weights(start(undisturbed, name, Plan(), epochs=2).wait(60))
            assert torch.equal(weights(result), self.right[name]), name
        else:
            assert len(result.losses) == 8 and weights(result).isfinite().all()


def inject(folder):
    """All injections, ten to a cluster, so that workers that have imported nothing yet are struck, too.

    Gives the slowest of each kind, and what was wrong.
    """
    chance, numbers, right = random.Random(SEED), iter(range(INJECTIONS)), {}
    slowest, wrong, everybody = {}, [], []
    while some := list(itertools.islice(numbers, 10)):
        with dlab.Cluster(RANKS, servers=1) as cluster:
            chaos = Chaos(cluster, folder, chance, right)
            for number in some:
                story, begin = f"injection {number}: ", time.monotonic()
                how, moment, name = chaos.choose()
                try:
                    story += f"{how.__name__} {moment} of {name}, "
                    for told in how(moment, name):
                        story += f"{told}: "
                    slowest[how.__name__] = max(slowest.get(how.__name__, 0.0), time.monotonic() - begin)
                    chaos.check(name)
                except (Exception, pytest.fail.Exception, KeyboardInterrupt) as problem:
                    wrong.append(f"{story}{type(problem).__name__}: {str(problem)[:1500]}")
                    if cluster.closed:
                        break
                    if (going := cluster._supervisor.going) is not None:
                        going.stop()
            everybody += cluster.pids
    return slowest, wrong, everybody


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * INJECTIONS)
def test_whatever_happens_the_right_rank_is_named_and_what_comes_next_works_and_nothing_is_left(tmp_path):
    dlab.Cluster(1).close()  # the fork server stays until this process ends
    files, handles, processes = set(forkserver.directory().iterdir()), open_handles(), psutil.Process().children()
    slowest, wrong, everybody = inject(tmp_path)
    print({how: f"{seconds:.2f} s" for how, seconds in slowest.items()})
    assert not wrong, f"{len(wrong)} of {INJECTIONS}:\n" + "\n\n".join(wrong)
    assert not any(psutil.pid_exists(pid) for pid in everybody)
    assert psutil.Process().children() == processes
    assert set(forkserver.directory().iterdir()) == files
    assert open_handles() == handles
