"""The fence: which one a machine gets, that each can be called, and that every structure needs it and calls it."""

import ast
import contextlib
import importlib
import inspect
import io
import mmap
import pkgutil
import platform
import random
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import weak_memory
from weak_memory import WeakMemory

import dlab
from dlab import memory
from dlab.collectives.shared import SharedCollectives
from dlab.memory import fence as fences
from dlab.memory import posted_messages
from dlab.memory.backoff import Peers
from dlab.memory.counters import Counters
from dlab.memory.front import Front
from dlab.memory.gradient_slot import GradientSlot, PushCount
from dlab.memory.plan_table import PlanTable
from dlab.memory.posted_messages import PostedMessages
from dlab.memory.request_queue import Request, RequestQueue
from dlab.memory.ring import RecordRing, Ring
from dlab.memory.versioned_text import VersionedText
from dlab.memory.waits import Slot, Wait
from dlab.transports import TorchTransport, connect
from dlab.transports.broadcast_queue import DistributedBroadcastQueue, open_broadcast_queue

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

MODULES = [importlib.import_module(f"dlab.memory.{each.name}") for each in pkgutil.iter_modules(memory.__path__)]

# ------------------------------------------------------------------------------------- which one


def test_x86_needs_none():
    assert fences.choose("x86_64") is fences.choose("AMD64") is fences.do_nothing


def test_others_take_libatomic_then_membarrier_then_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(fences, "from_libatomic", lambda: lambda: calls.append("libatomic"))
    monkeypatch.setattr(fences, "from_membarrier", lambda machine: lambda: calls.append(f"membarrier {machine}"))
    fences.choose("aarch64")()
    monkeypatch.setattr(fences, "from_libatomic", lambda: None)
    fences.choose("aarch64")()
    assert calls == ["libatomic", "membarrier aarch64"]
    monkeypatch.setattr(fences, "from_membarrier", lambda machine: None)
    assert fences.choose("aarch64") is None


def test_this_machine_has_the_one_that_is_chosen_for_it():
    assert fences.has_fence()
    if platform.machine() == "x86_64":
        assert fences.fence is fences.do_nothing and not fences.WEAK


def test_libatomic_can_be_called():
    fence = fences.from_libatomic()
    if fence is None:
        pytest.skip("libatomic1 is not installed here")
    assert fence() is None


def test_a_library_that_is_not_there_or_has_no_fence_is_none():
    assert fences.from_libatomic("libdlabhasnone.so.1") is None
    assert fences.from_libatomic("libc.so.6") is None


def test_membarrier_can_be_called():
    fence = fences.from_membarrier(platform.machine())
    if fence is None:
        pytest.skip("this kernel or container has no membarrier")
    assert fence() == 0


def test_a_machine_whose_system_calls_are_not_known_has_no_membarrier():
    assert fences.from_membarrier("sparc64") is None


# ------------------------------------------------------------------------------------- every structure calls it


@pytest.fixture(params=[True, False], ids=["with fences", "without"])
def fenced(request, monkeypatch):
    """Run a test on the weakest memory there is: with fences it must pass, and without it must fail."""
    set_fence(monkeypatch, weak_memory.fence if request.param else fences.do_nothing)
    return request.param


def set_fence(monkeypatch, fence):
    """Let all structures call this one, as if this machine needed it."""
    for module in MODULES:
        if hasattr(module, "fence") and module is not fences:
            monkeypatch.setattr(module, "fence", fence)
            monkeypatch.setattr(module, "WEAK", True, raising=False)


def check(fenced, run, seeds=60):
    """`run(seed)` says whether everything came through; with fences always, without them not every time."""
    assert all(map(run, range(seeds))) == fenced


def two_ends(structure, nbytes, seed):
    """A core and a structure on its memory, and another core with the same structure."""
    shared = WeakMemory(nbytes, seed)
    cores = shared.core(), shared.core()
    ends = []
    for core in cores:
        with core as view:
            ends += [core, structure(view)]
    return ends


def together(*functions):
    """Each in a thread of its own, which take turns often."""
    threads, interval = [threading.Thread(target=each) for each in functions], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def test_a_ring_gives_what_was_put(fenced):
    def run(seed):
        sizes, (sender, out, receiver, into) = random.Random(seed), two_ends(Ring, 128 + 32, seed)
        content, sent, received = bytes(sizes.randbytes(400)), 0, bytearray()
        while len(received) < len(content):
            with sender:
                sent += out.put(content[sent : sent + sizes.randrange(1, 20)])
            with receiver:
                target = bytearray(sizes.randrange(1, 20))
                received += target[: into.get(target)]
        return bytes(received) == content

    check(fenced, run)


def test_a_record_ring_gives_whole_records(fenced):
    def run(seed):
        sizes, (writer, out, reader, into) = random.Random(seed), two_ends(RecordRing, 64 + 100, seed)
        written, read = b"", b""
        for _ in range(60):
            record = sizes.randbytes(sizes.randrange(1, 40))
            with writer:
                written += record if out.append(record) else b""
            with reader:
                read += into.take_all()
        return written.startswith(read) and len(read) > 0

    check(fenced, run)


def test_a_versioned_text_is_never_torn(fenced):
    def run(seed):
        writer, out, reader, into = two_ends(VersionedText, 16 + 64, seed)
        texts = []

        def write():
            with writer:
                for turn in range(1, 40):
                    out.write(bytes([turn]) * turn)
                weak_memory.fence()

        def read():
            seen, until = -1, time.monotonic() + 20
            with reader:
                while seen < 2 * 39 and time.monotonic() < until:
                    seen, text = into.read_newer(seen) or (seen, b"")
                    texts.append(text)

        together(write, read)
        return all(text == bytes([len(text)]) * len(text) for text in texts)

    check(fenced, run)


def test_a_wait_is_read_whole_or_not_at_all(fenced):
    def run(seed):
        writer, out, reader, into = two_ends(Slot, Slot.ROOM, seed)
        found = []
        for turn in range(1, 30):
            with writer:
                out.write(Wait(float(turn), f"for turn {turn} of {{}}", [turn], [turn]), 1e9)
            with reader:
                found.append(into.read(0.0))
        return all(wait == (wait.ranks[0], f"for turn {wait.ranks[0]} of {{}}", *wait[2:]) for wait in found if wait)

    check(fenced, run)


def test_requests_and_answers_are_those_that_were_written(fenced):
    def run(seed):
        worker, asks, server, serves = two_ends(RequestQueue, RequestQueue.ROOM, seed)
        for turn in range(1, 30):
            with worker:
                number = asks.post(1, turn, turn, -turn)
            request = None
            while request is None:
                worker.idle()
                with server:
                    request = serves.head()
            if request != Request(1, turn, (turn, -turn)):
                return False
            with server:
                serves.serve(1000 + turn)
            done = False
            while not done:
                server.idle()
                with worker:
                    done = asks.served >= number
                    reply = asks.reply(number) if done else 0
            if reply != 1000 + turn:
                return False
        return True

    check(fenced, run, seeds=5)


def test_a_push_that_is_counted_has_its_staleness(fenced):
    def run(seed):
        server, out, worker, into = two_ends(lambda view: PushCount(view, 0), 64, seed)
        for turn in range(1, 30):
            with server:
                out.write(turn, 100 + turn)
            with worker:
                applied, staleness = into.read()
            if applied and staleness < 100 + applied:
                return False
        return True

    check(fenced, run)


def test_what_a_counter_announces_is_there(fenced):
    def run(seed):
        room = Counters.room(2)
        shared = WeakMemory(room + 8, seed)
        one, other = shared.core(), shared.core()
        for turn in range(1, 30):
            with one as view:
                view[room:].cast("Q")[0] = turn
                Counters(view, 2).announce(0, turn)
            with other as view:
                if 0 not in Counters(view, 2).behind(turn) and view[room:].cast("Q")[0] < turn:
                    return False
        return True

    check(fenced, run)


class FakeTensor:
    """Of bytes, in weak memory."""

    def __init__(self, view, dtype, count, offset):
        self.view = view[offset : offset + count]

    def copy_(self, content):
        self.view[:] = content


def test_a_posted_message_is_read_as_it_was_posted(fenced, monkeypatch):
    monkeypatch.setattr(posted_messages, "tensor_in", FakeTensor)
    layout = (2, 5, torch.uint8, 2)

    def run(seed):
        nbytes = PostedMessages.bytes_for(*layout)
        sender, out, reader, into = two_ends(lambda view: PostedMessages(view, *layout), nbytes, seed)
        posted = read = 0
        while read < 15:
            with sender:
                if out.unread(0, 1) < 2:
                    posted += 1
                    out.post(0, bytes([posted]) * 5, [1])
            with reader:
                if into.unread(0, 1):
                    found = bytes(into.oldest(0, 1).view)
                    into.mark_as_read(0, 1)
                    read += 1
                    if found != bytes([read]) * 5:
                        return False
        return True

    check(fenced, run, seeds=10)


def test_at_a_barrier_everything_before_is_there(fenced):
    room = PlanTable.room(2)

    def run(seed):
        shared, wrong = WeakMemory(room + 16, seed), []

        def rank(number):
            with shared.core() as view:
                mine = view[room:].cast("Q")
                table = PlanTable(view, number, range(2), 20.0, str, lambda *plans: f"{plans}")
                for turn in range(1, 30):
                    mine[number] = turn
                    table.meet((turn, 1, 2, 3, 4, 5))
                    wrong.extend([turn] * (mine[1 - number] != turn))
                    table.meet()
                weak_memory.fence()  # or the other may wait for this one's last store for ever

        together(lambda: rank(0), lambda: rank(1))
        return not wrong

    check(fenced, run, seeds=3)


def page():
    return memoryview(mmap.mmap(-1, 1 << 18))


def after(structure, operation):
    """The structure, after this was done to it."""
    operation(structure)
    return structure


def at_the_barrier(plan):
    """The table of a rank that the only other one waits for, with this plan."""
    table = PlanTable(page(), 0, range(2), 1.0, str, lambda *plans: "they differ")
    table._lines[8] = 1 << 32 | hash(plan) & (1 << 32) - 1
    return table


def disagree(table):
    with pytest.raises(ValueError, match="they differ"):
        table.meet((1, 2))


# What weak memory above cannot show: a load that comes after a store that follows it, and what is rarely looked at.
CALLS = {
    "put": (2, lambda: Ring(page()), lambda ring: ring.put(b"some")),
    "get": (2, lambda: after(Ring(page()), lambda ring: ring.put(b"some")), lambda ring: ring.get(bytearray(4))),
    "append": (2, lambda: RecordRing(page()), lambda ring: ring.append(b"some")),
    "take_all": (2, lambda: after(RecordRing(page()), lambda ring: ring.append(b"some")), RecordRing.take_all),
    "clear": (1, lambda: RecordRing(page()), RecordRing.clear),
    "write a text": (2, lambda: VersionedText(page()), lambda text: text.write(b"some")),
    "read a text": (2, lambda: VersionedText(page()), lambda text: text.read_newer(-1)),
    "write a wait": (2, lambda: Slot(page()), lambda slot: slot.write(Wait(1.0, "", [], []), 2.0)),
    "read a wait": (3, lambda: after(Slot(page()), CALLS["write a wait"][2]), lambda slot: slot.read(0.0)),
    "meet": (2, lambda: at_the_barrier((1, 2)), lambda table: table.meet((1, 2))),
    "disagree": (2, lambda: at_the_barrier((1, 3)), disagree),
    "announce": (1, lambda: Counters(page(), 2), lambda counters: counters.announce(0, 1)),
    "behind": (1, lambda: Counters(page(), 2), lambda counters: counters.behind(1)),
    "mark_as_read": (1, lambda: PostedMessages(page(), 2, 1, torch.uint8, 2), lambda some: some.mark_as_read(0, 1)),
    "post a message": (
        2,  # one when it looks for what its reader has read
        lambda: PostedMessages(page(), 2, 1, torch.uint8, 2),
        lambda some: some.post(0, torch.zeros(1, dtype=torch.uint8), [1]),
    ),
    "post a request": (1, lambda: RequestQueue(page()), lambda queue: queue.post(1, 2, 3)),
    "head": (2, lambda: after(RequestQueue(page()), CALLS["post a request"][2]), RequestQueue.head),
    "serve": (1, lambda: RequestQueue(page()), RequestQueue.serve),
    "served": (1, lambda: RequestQueue(page()), lambda queue: queue.served),
    "generation": (1, lambda: RequestQueue(page()), lambda queue: queue.generation),
    "renew": (1, lambda: RequestQueue(page()), RequestQueue.renew),
    "tell the outcome": (1, lambda: RequestQueue(page()), lambda queue: setattr(queue, "outcome", 1)),
    "read the outcome": (1, lambda: RequestQueue(page()), lambda queue: queue.outcome),
    "count a push": (2, lambda: GradientSlot(page(), 0, 1, torch.float32, 0), lambda slot: slot.apply(0)),
    "applied": (1, lambda: GradientSlot(page(), 0, 1, torch.float32, 0), lambda slot: slot.applied),
    "come": (1, lambda: page().cast("Q"), lambda numbers: Peers(numbers[:2], 0)),
    "alive": (2, lambda: Peers(page().cast("Q")[:2], 0), Peers.alive),
    "over": (1, lambda: Front(page(), 1), lambda front: front.over),
    "end": (2, lambda: Front(page(), 1), Front.end),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_publish_and_every_read_of_what_was_published_calls_the_fence(name, monkeypatch):
    expected, make, operation = CALLS[name]
    structure, calls = make(), []
    set_fence(monkeypatch, lambda: calls.append(name))
    operation(structure)
    assert len(calls) == expected


# ------------------------------------------------------------------------------------- one package, and what it says


def structures():
    """The classes of `dlab.memory` that are made on shared memory."""
    for module in MODULES:
        for name, each in inspect.getmembers(module, inspect.isclass):
            takes = getattr(each.__init__, "__annotations__", {}).values()
            if each.__module__ == module.__name__ and "memoryview" in takes:
                yield pytest.param(each, id=name)


@pytest.mark.parametrize("structure", list(structures()))
def test_each_structure_says_who_writes_who_reads_and_what_makes_it_safe(structure):
    sentence = " ".join(inspect.getdoc(structure).split())
    assert all(word in sentence for word in ("write", "read", "safe because"))


def test_nobody_else_maps_memory():
    top = Path(dlab.__file__).parent
    for path in top.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        assert not names & {"mmap", "shared_memory"} or path.parent == top / "memory", f"{path} maps memory itself"


# ------------------------------------------------------------------------------------- a machine without any


@contextlib.contextmanager
def no_fence(ranks):
    """In a worker: as if these ranks were on a machine that has none. Gives what it says."""
    said, chosen = io.StringIO(), fences._chosen
    fences._chosen = None if dlab.rank() in ranks else chosen
    fences._say_that_there_is_none.cache_clear()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        fences._chosen = chosen
        fences._say_that_there_is_none.cache_clear()


@pytest.mark.parametrize("ranks", [[0, 1], [0], [1]], ids=["all", "the first", "another"])
def test_without_a_fence_ranks_use_torch_distributed_and_say_so_once(cluster, ranks):
    def use_everything():
        with no_fence(ranks) as said:
            transport, shared = connect(), SharedCollectives.connect(TorchTransport())
            queue = open_broadcast_queue(transport, 3, torch.float32)
            transport.exchange(torch.ones(3), 1 - transport.rank, received := torch.empty(3), 1 - transport.rank)
            queue.close()
        return type(transport), shared, type(queue), received.tolist(), said.getvalue()

    results = cluster.run(use_everything, timeout=60)
    for kind, shared, queue, received, said in results:
        assert kind is TorchTransport and shared is None and queue is DistributedBroadcastQueue
        assert received == [1, 1, 1]
        assert said.count("\n") == said.count("install libatomic1") <= 1
    assert [bool(said) for *_, said in results] == [0 in ranks, 0 not in ranks]  # not by both


def test_without_a_fence_an_allreduce_is_that_of_the_backend(cluster):
    def reduce():
        with no_fence([0, 1]):
            tensor, flat = torch.full((5,), 1.0 + dlab.rank()), dlab.shared_empty(4)
            flat.fill_(1.0)
            dlab.allreduce(tensor)
            dlab.allreduce(flat)
            return tensor.tolist(), flat.tolist()

    assert cluster.run(reduce, timeout=60) == [([3.0] * 5, [2.0] * 4)] * 2


def test_without_a_fence_a_cluster_has_no_servers():
    def make_store():
        with no_fence([0, 1]):
            dlab.kvstore.create("dist_sync")

    with dlab.Cluster(2, servers=1) as cluster, pytest.raises(dlab.WorkerError, match=r"install libatomic1, or start"):
        cluster.run(make_store, timeout=30)
