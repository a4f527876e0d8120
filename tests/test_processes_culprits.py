"""The rank that did not arrive is named, not those that waited: every way to hang, and every way to wait for a rank."""

import inspect
import itertools
import os
import random
import re
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import trouble
from kernels import eventually

import dlab
from dlab.collectives import halving_doubling_allreduce, ring_allreduce, tree_allreduce
from dlab.processes.between.errors import name_ranks
from dlab.processes.parent import stacks
from dlab.transports import connect

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
HANGS = int(os.environ.get("DLAB_CULPRITS", "15"))
SEED = 1
RANKS = 4
TIMEOUT = 0.5
SERVER = RANKS  # servers count on after the workers


# ------------------------------------------------------------------------------------- what keeps a rank from coming


def sleep():
    time.sleep(1000)


def loop():
    while True:
        pass


def compute():
    x = torch.ones(128, 128)
    while True:
        torch.mm(x, x)


def lock_own_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_own_event():
    threading.Event().wait()


OUTSIDE = "stopped from outside"  # whatever it is doing; all the others stop themselves
WAYS = (
    sleep,
    loop,
    compute,
    lock_own_lock,
    wait_for_own_event,
    trouble.hang_in_python,
    trouble.hang_in_c,
    trouble.be_stopped,
    OUTSIDE,
)


# ------------------------------------------------------------------------------------- what the others wait in


def gloo_all_reduce():
    return lambda: dist.all_reduce(torch.ones(1000))


def gloo_barrier():
    return dist.barrier


def gloo_work():
    def begin_and_wait():
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        work.wait()

    return begin_and_wait


def to_the_next():
    rank, size = dist.get_rank(), dist.get_world_size()

    def pass_on():
        work = dist.isend(torch.ones(4), (rank + 1) % size)
        dist.recv(torch.zeros(4), (rank - 1) % size)
        work.wait()

    return pass_on


def distributed_data_parallel():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    return lambda: model(torch.ones(2, 16)).sum().backward()


def rendezvous():
    return connect  # what dlab.transport() does the first time


def transport_barrier():
    return dlab.transport().barrier


def small_ring():
    transport = dlab.transport()
    return lambda: ring_allreduce(torch.ones(1000), transport)


def big_ring():
    transport = dlab.transport()
    return lambda: ring_allreduce(torch.ones(1 << 21), transport)


def tree():
    transport = dlab.transport()
    return lambda: tree_allreduce(torch.ones(1000), transport)


def halving_doubling():
    transport = dlab.transport()
    return lambda: halving_doubling_allreduce(torch.ones(1000), transport)


def allreduce_small():
    return lambda: dlab.allreduce(torch.ones(100))


def allreduce_private():
    return lambda: dlab.allreduce(torch.ones(1 << 19))


def allreduce_shared():
    x = dlab.shared_empty(1 << 18)
    return lambda: dlab.allreduce(x.fill_(1.0))


def shared_empty():
    return lambda: dlab.shared_empty(100)


def store_round():
    kv, x = dlab.kvstore.create("dist_sync"), torch.zeros(1000)
    kv.init("w", x)

    def push_and_pull():
        kv.push("w", torch.ones(1000))
        kv.pull("w", x)

    return push_and_pull


def store_barrier():
    kv = dlab.kvstore.create("dist_async")
    kv.init("w", torch.zeros(10))
    kv.set_optimizer("sgd", lr=0.1)

    def push_and_meet():
        kv.push("w", torch.ones(10))
        kv.barrier()

    return push_and_meet


def store_init():
    kv, keys = dlab.kvstore.create("dist_sync"), itertools.count()
    return lambda: kv.init(f"w{next(keys)}", torch.zeros(10))


def repeat(wait, way, victim):
    """All do the same again and again; in the fourth turn, one does something else."""
    do = wait()
    for turn in range(100_000):
        if turn == 3:
            dlab.log(stuck=turn)
            if dlab.rank() == victim and way != OUTSIDE:
                way()
        do()


class Samples(torch.utils.data.Dataset):
    """A data set of the user's, of which a rank never gets a sample."""

    def __init__(self, way, victim, count):
        self.way, self.victim, self.count, self.given = way, victim, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.given += 1
        if self.given == 17:  # in the fifth step
            dlab.log(stuck=self.given)
            if dlab.rank() == self.victim and self.way != OUTSIDE:
                self.way()
        return torch.ones(16), index % 2


def train(strategy, way, victim, cluster, folder, **others):
    # those that wait for nobody before the end have to come to it; who is stopped from outside must not be there yet
    count = 16 * 20 if way != OUTSIDE else 16 * 2000
    options = {"batch_size": 16, "on": cluster, "workers": RANKS, **others}
    if options.pop("saved", False):
        options.update(checkpoint=folder, every=1)
    return dlab.train(network, Samples(way, victim, count), strategy, **options)


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


FUNCTIONS = {
    "gloo": [
        gloo_all_reduce,
        gloo_barrier,
        gloo_work,
        to_the_next,
        distributed_data_parallel,
        rendezvous,
        transport_barrier,
        small_ring,
        big_ring,
        tree,
        halving_doubling,
        allreduce_small,
        allreduce_private,
        allreduce_shared,
        shared_empty,
    ],
    "dlab": [gloo_all_reduce, gloo_barrier, gloo_work, to_the_next, distributed_data_parallel],
    "servers": [store_round, store_barrier, store_init, gloo_all_reduce],
}
TRAININGS = {
    "gloo": [
        (dlab.ModelAveraging(every=1), {}),
        (dlab.SyncSGD(), {}),
        (dlab.SyncSGD(allreduce=ring_allreduce), {}),
        (dlab.AllReduceSGD(), {}),
        (dlab.AllReduceSGD(overlap=False), {}),
        (dlab.AsyncSGD(room=1), {}),
        (dlab.AsyncSGD(clock=dlab.VirtualClock(seed=1)), {}),
        (dlab.ParameterServer(mode="async", servers=0), {}),
        (dlab.DDP(), {}),
        (dlab.AllReduceSGD(), {"saved": True}),
        (dlab.SyncSGD(), {"elastic": True}),
    ],
    "dlab": [(dlab.DDP(), {})],
    "servers": [
        (dlab.ParameterServer(mode="sync"), {}),
        (dlab.ParameterServer(mode="async"), {}),
        (dlab.ParameterServer(mode="ssp", staleness=1), {}),
        (dlab.ParameterServer(mode="ssp", staleness=1), {"saved": True}),
    ],
}
WAITS = [(kind, wait, {}) for kind, waits in FUNCTIONS.items() for wait in waits]
WAITS += [(kind, strategy, options) for kind, trainings in TRAININGS.items() for strategy, options in trainings]


def deal(count):
    """So many of all cases, in which every way to hang and every way to wait comes before any comes again."""
    chance = random.Random(SEED)
    ways, waits, victims = (itertools.chain.from_iterable(shuffles(chance, all)) for all in (WAYS, WAITS, range(RANKS)))
    return list(itertools.islice(zip(waits, ways, victims, strict=False), count))


def shuffles(chance, all):
    while True:
        yield chance.sample(list(all), len(all))


@pytest.fixture(scope="module")
def clusters():
    with (
        dlab.Cluster(RANKS) as gloo,
        dlab.Cluster(RANKS, backend="dlab") as own,
        dlab.Cluster(RANKS, servers=1) as servers,
    ):
        yield {"gloo": gloo, "dlab": own, "servers": servers}


def start(cluster, what, options, way, victim, folder):
    if callable(what) and not isinstance(what, dlab.strategies.Strategy):
        return cluster.start(repeat, what, way, victim)
    return train(what, way, victim, cluster, folder, **options)


def expect(way, victim):
    """What the message says of the one that did not arrive."""
    who = name_ranks([victim], RANKS)
    if way in (OUTSIDE, trouble.be_stopped):
        return rf"^{who}: stopped by a signal \(SIGSTOP\)$"
    first = inspect.getsourcelines(way)[1]
    last = first + len(inspect.getsourcelines(way)[0])
    return rf"^{who}: at line ({'|'.join(map(str, range(first, last)))}) of {way.__name__}: "


def look(cluster, run, way, victim, wait=0.0, say=None):
    """What is wrong with what a timeout tells of a victim, which, or another rank, says when it has come so far."""
    say = victim if say is None else say
    eventually(lambda: run.done or any(e.rank == say and "stuck" in e.data for e in run.events if e.kind == "log"))
    if run.done:
        return f"it has ended: {run._error}"
    time.sleep(wait)
    if way == OUTSIDE:
        os.kill(cluster.pids[victim], signal.SIGSTOP)
    with pytest.raises(dlab.WorkerTimeout) as error:
        run.wait(TIMEOUT)
    text, problems = str(error.value), []
    if error.value.rank != victim:
        problems.append(f"rank {error.value.rank} is named")
    if not re.search(expect(way, victim), text, re.MULTILINE):
        problems.append("not its own line")
    waits = re.search(r"^rank \d: waiting", text, re.MULTILINE)  # an asynchronous strategy need not, before its end
    if waits and not re.search(rf"; ranks? [\d, and]+ waited for {name_ranks([victim], RANKS)}\n", text):
        problems.append("not that others waited for it")
    return f"{', '.join(problems)}:\n{text}" if problems else ""


@pytest.mark.slow
@pytest.mark.timeout(30 + 5 * HANGS)
def test_the_rank_that_did_not_come_is_named_whatever_it_does_and_whatever_the_others_wait_in(clusters, tmp_path):
    chance, wrong = random.Random(SEED), []
    for number, ((kind, what, options), way, victim) in enumerate(deal(HANGS)):
        cluster = clusters[kind]
        run = start(cluster, what, options, way, victim, tmp_path / str(number))
        try:
            problem = look(cluster, run, way, victim, chance.uniform(0, 0.1))
        finally:
            run.stop()
        if problem:
            name = getattr(what, "__name__", repr(what))
            story = f"hang {number}: {getattr(way, '__name__', way)} on rank {victim}, {name} {options} on {kind}"
            wrong.append(f"{story}: {problem}")
    assert not wrong, f"{len(wrong)} of {HANGS} are wrong:\n\n" + "\n\n".join(wrong)


# ------------------------------------------------------------------------------------- servers, delays, chains


def never_update(key, gradient, weight):
    time.sleep(1000)


def push_to_one_who_never_updates():
    kv, x = dlab.kvstore.create("dist_sync"), torch.zeros(4)
    kv.init("w", x)
    kv.set_updater(never_update)
    dlab.log(stuck=0)
    kv.push("w", torch.ones(4))
    kv.pull("w", x)


def test_a_server_that_does_not_answer_is_named(clusters):
    cluster = clusters["servers"]
    everybody = "; ranks 0, 1, 2 and 3 waited for server 0\n"
    with pytest.raises(dlab.WorkerTimeout, match=everybody) as error:
        cluster.run(push_to_one_who_never_updates, timeout=1)
    assert error.value.ranks == [SERVER, 0, 1, 2, 3]
    assert re.search(r"\nserver 0: at line \d+ of never_update: time\.sleep\(1000\)\n", str(error.value))
    run = cluster.start(repeat, store_round, OUTSIDE, 0)
    assert look(cluster, run, OUTSIDE, SERVER, say=0) == ""
    run.stop()


def test_a_chain_names_its_end_and_whoever_is_not_waited_for_comes_later(clusters):
    def wait_for_the_next():
        transport, rank = dlab.transport(), dlab.rank()
        if rank in (1, 3):
            time.sleep(1000)
        transport.recv(torch.zeros(1), {0: 2, 2: 3}[rank])

    with pytest.raises(dlab.WorkerTimeout, match="; ranks 0 and 2 waited for rank 3\n") as error:
        clusters["gloo"].run(wait_for_the_next, timeout=1)
    assert error.value.ranks == [3, 1, 0, 2]


def test_who_waits_for_one_that_has_returned_does_not_wait_for_one_that_sleeps(clusters):
    def wait_for_rank_2():
        transport, rank = dlab.transport(), dlab.rank()
        if rank == 0:
            transport.recv(torch.zeros(1), 2)
        if rank == 1:
            time.sleep(1000)

    with pytest.raises(dlab.WorkerTimeout, match="; ranks 2 and 3 have returned\n") as error:
        clusters["gloo"].run(wait_for_rank_2, timeout=1)
    assert "waited for" not in str(error.value)


def test_those_that_are_stopped_come_first_though_they_waited_themselves(clusters):
    cluster = clusters["gloo"]
    run = cluster.start(repeat, allreduce_small, sleep, 0)
    eventually(lambda: any("stuck" in event.data and event.rank == 0 for event in run.events))
    time.sleep(0.3)
    for rank in (3, 2):
        os.kill(cluster.pids[rank], signal.SIGSTOP)
    with pytest.raises(dlab.WorkerTimeout, match="; rank 1 waited for rank") as error:
        run.wait(TIMEOUT)
    run.stop()
    assert error.value.ranks == [2, 3, 0, 1]


def test_a_rank_that_is_delayed_is_named_and_its_delay(clusters):
    cluster = clusters["gloo"]
    run = train(dlab.AllReduceSGD(), OUTSIDE, 0, cluster, None)
    eventually(lambda: len(run.events) > 20)
    run.delay(2, 1000.0)
    time.sleep(0.3)
    with pytest.raises(dlab.WorkerTimeout, match="; ranks 0, 1 and 3 waited for rank 2\n") as error:
        run.wait(TIMEOUT)
    run.stop()
    assert error.value.rank == 2
    assert "\nrank 2: asleep for its delay (run.delay)\n" in str(error.value)


# ------------------------------------------------------------------------------------- what a stack tells


DLAB = os.path.dirname(dlab.__file__)
HERE = inspect.getsourcelines(sleep)[1] + 1  # a line of the user's: that of time.sleep


def stack(*frames):
    """As a worker writes it, innermost frame first; `None` is a line of the user's."""
    files = [(__file__, "sleep") if frame is None else (f"{DLAB}/{frame[0]}", frame[1]) for frame in frames]
    files += [(f"{DLAB}/processes/worker.py", name) for name in ("_perform", "_answer", "serve", "main")]
    lines = [f'  File "{file}", line {HERE} in {name}\n' for file, name in files]
    return "".join(
        ["Current thread 0x0000 (most recent call first):\n", *lines, '  File "<string>", line 1 in <module>\n']
    )


SHARED, TABLE = "collectives/shared_allreduce.py", "memory/plan_table.py"
BACKOFF, MOVE = ("memory/backoff.py", "__call__"), ("transports/shared.py", "move")
SERVE, LEARN = ("kvstore/server.py", "serve"), ("training/loop.py", "learn")


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ([BACKOFF, MOVE, None], True),
        ([("memory/ring.py", "get"), ("transports/shared.py", "_advance"), MOVE, None], True),  # between two naps
        (
            [(TABLE, "_wait_for"), (TABLE, "meet"), (SHARED, "allreduce"), None],
            True,
        ),  # before the first nap
        ([("memory/ring.py", "append"), ("events.py", "push"), ("processes/worker/context.py", "log"), None], False),
        ([("transports/broadcast_queue.py", "behind"), ("strategies/asynchronous.py", "_post"), LEARN], True),
        ([("kvstore/distributed.py", "_wait_for"), LEARN], True),
        (
            [
                (SHARED, "reduce_blocks"),
                (SHARED, "allreduce"),
                None,
            ],
            False,
        ),  # adds up
        ([None, ("data/batches.py", "take"), LEARN], False),  # a data set of the user's
        ([None, MOVE, LEARN], False),  # whatever has called the user's line
        ([BACKOFF, MOVE, None, ("data/batches.py", "take"), LEARN], True),  # which waits itself
        ([BACKOFF, SERVE], True),
        ([("memory/request_queue.py", "head"), ("kvstore/server.py", "_serve_some"), SERVE], True),
        ([("kvstore/server.py", "_push"), ("kvstore/server.py", "_answer"), SERVE], False),
        ([None, ("kvstore/server.py", "_push"), ("kvstore/server.py", "_answer"), SERVE], False),
    ],
)
def test_a_stack_tells_who_waits_and_who_is_in_the_users_own_code(frames, waits):
    where = stacks.describe(stack(*frames), os.getpid())
    assert where.waits == waits
    if None in frames:
        assert f"line {HERE} of sleep: time.sleep(1000)" in where.sentence
    assert not where.stopped and not where.returned


# ------------------------------------------------------------------------------------- waits that end by themselves


def wait_for_a_second():
    transport = connect(timeout=1.0)
    if dlab.rank() == 2:
        time.sleep(1000)
    ring_allreduce(torch.ones(10), transport)


def test_who_did_not_come_is_named_too_when_a_wait_of_dlab_has_run_out_of_time(clusters):
    with pytest.raises(dlab.WorkerError, match=r"^ranks? .* failed: TimeoutError: rank \d has waited to ") as error:
        clusters["gloo"].run(wait_for_a_second)
    assert error.value.ranks[0] == 2 and set(error.value.ranks[1:]) <= {0, 1, 3}
    assert re.search(
        r"\nrank 2 did not arrive: at line \d+ of wait_for_a_second: time\.sleep\(1000\)\n", str(error.value)
    )


@pytest.mark.parametrize("wait", [dist.barrier, "recv"], ids=["barrier", "recv"])
def test_who_did_not_come_is_named_too_when_a_wait_of_gloo_has_run_out_of_time(wait):
    def oversleep():
        dist.barrier()
        if dlab.rank() == 1:
            time.sleep(1000)
        if wait == "recv":
            dist.recv(torch.zeros(1), 1)
        else:
            wait()

    with dlab.Cluster(3, timeout=1) as cluster:
        with pytest.raises(dlab.WorkerError, match=r"failed: .*Timed out waiting") as error:
            cluster.run(oversleep)
        assert error.value.rank == 1
        assert re.search(r"\nrank 1 did not arrive: at line \d+ of oversleep: time\.sleep\(1000\)\n", str(error.value))
        assert cluster.run(dlab.rank, timeout=30) == [0, 1, 2]


def test_a_timeout_of_the_users_own_is_the_failure_of_the_rank_that_raised_it(clusters):
    def lose_patience():
        if dlab.rank() == 0:
            raise TimeoutError("no bread")
        time.sleep(1000)

    with pytest.raises(dlab.WorkerError, match=r"^rank 0 failed: TimeoutError: no bread\n") as error:
        clusters["gloo"].run(lose_patience)
    assert error.value.ranks == [0]
