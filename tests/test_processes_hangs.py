"""A hang is reported: who waits for whom, in which call, at which line of the user; nothing else counts as one."""

import inspect
import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from kernels import eventually

import dlab
from dlab.collectives import ring_allreduce
from dlab.processes.parent import hangs
from dlab.processes.worker import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

WORKERS = 3  # of the cluster
PACKAGE = os.path.dirname(dlab.__file__)  # where its own lines are
FIRST_CELL = "%load_ext dlab\nimport dlab, torch\nfrom dlab.processes.parent import hangs\ncluster = dlab.cluster(2)"
BIG = 1 << 20  # numbers: four times what a ring has room for


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(hangs, "SECONDS", 1.0)  # in which a rank says for whom it waits, also on a busy machine


def hang_of(run):
    """What a run that hangs has told, as one sentence, and the words of each rank."""
    eventually(lambda: run.done or any(event.kind == "hang" for event in run.states))
    assert not run.done, run.wait()
    event = next(event for event in run.states if event.kind == "hang")
    return event.data["why"], {row["rank"]: row["words"] for row in event.data["ranks"]}


def line(function, code):
    """How a line of a function is shown."""
    lines, first = inspect.getsourcelines(function)
    number, text = next((first + number, text.strip()) for number, text in enumerate(lines) if code in text)
    return f"line {number} of {function.__name__}: {text}"


# ------------------------------------------------------------------------------------- who waits for whom


def recv_first():
    transport, x = dlab.transport(), torch.zeros(4)
    transport.recv(x, (dlab.rank() + 1) % dlab.world_size())
    transport.send(x, (dlab.rank() - 1) % dlab.world_size())


def send_first():
    transport, x = dlab.transport(), torch.zeros(BIG)
    transport.send(x, (dlab.rank() + 1) % dlab.world_size())
    transport.recv(x, (dlab.rank() - 1) % dlab.world_size())


def all_reduce_on_rank_0():
    if dlab.rank() == 0:
        dlab.allreduce(torch.ones(8))


def all_reduce_while_others_are_at_a_barrier():
    dlab.allreduce(torch.ones(8))
    if dlab.rank() == 0:
        dlab.allreduce(torch.ones(2))
    else:
        dist.barrier()


def gloo_circle():
    dist.recv(torch.zeros(1), (dlab.rank() + 1) % dlab.world_size())


def ring_in_another_order():
    transport = dlab.transport()
    if dlab.rank() == 0:
        transport.recv(torch.zeros(1), 1)
    ring_allreduce(torch.ones(BIG), transport)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("function", "why", "words"),
    [
        (
            recv_first,
            "each waits for the next: 0 → 1 → 2 → 0",
            {rank: (f"in recv for rank {(rank + 1) % 3}", "transport.recv") for rank in range(3)},
        ),
        (
            send_first,
            "each waits for the next: 0 → 1 → 2 → 0",
            {rank: (f"in send for rank {(rank + 1) % 3}", "transport.send") for rank in range(3)},
        ),
        (
            all_reduce_on_rank_0,
            "ranks 1 and 2 have returned",
            {0: ("in allreduce for rank 1", "dlab.allreduce")},
        ),
        (
            all_reduce_while_others_are_at_a_barrier,
            "all wait for each other",
            {0: ("in allreduce for ranks 1 and 2", "dlab.allreduce(torch.ones(2))"), 1: ("in barrier", "dist.barrier")},
        ),
        (
            gloo_circle,
            "each waits for the next: 0 → 1 → 2 → 0",
            {rank: (f"in recv for rank {(rank + 1) % 3}", "dist.recv") for rank in range(3)},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_hang_says_who_waits_for_whom_in_what_and_where(started, capsys, function, why, words):
    run = started(function)
    found, told = hang_of(run)
    assert found == why
    for rank, (how, code) in words.items():
        assert told[rank] == f"waiting {how}, {line(function, code)}"
    assert not run.done, "it goes on"
    assert run.state == "running"
    text = capsys.readouterr().err
    assert text.count("no rank has made progress for") == 1
    assert PACKAGE not in text


@pytest.mark.usefixtures("soon")
def test_of_two_ranks_that_receive_first_each_waits_for_the_other():
    with dlab.Cluster(2) as cluster:
        run = cluster.start(recv_first)
        assert hang_of(run)[0] == "each waits for the next: 0 → 1 → 0"


@pytest.mark.usefixtures("soon")
def test_rings_in_another_order_are_told_by_the_line_that_called_them(started):
    run = started(ring_in_another_order)
    _, told = hang_of(run)
    assert told[0].startswith("waiting in recv for rank 1, line "), told
    assert {told[rank].split(", line")[1].split(": ")[1] for rank in (1, 2)} == {
        "ring_allreduce(torch.ones(BIG), transport)"
    }
    assert told[1].startswith("waiting in ring_allreduce for rank "), told


# ------------------------------------------------------------------------------------- stores, servers, strategies


def pull_what_rank_1_does_not_push():
    kv = dlab.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    if dlab.rank() == 0:
        kv.push("w", torch.ones(4))
        kv.pull("w", torch.zeros(4))
    else:
        dlab.transport().recv(torch.zeros(1), 0)


@pytest.mark.usefixtures("soon")
def test_a_pull_waits_for_a_server_and_the_server_for_who_has_not_pushed():
    with dlab.Cluster(2, servers=1) as cluster:
        run = cluster.start(pull_what_rank_1_does_not_push)
        why, told = hang_of(run)
        assert why == "each waits for the next: 0 → server 0 → 1 → 0"
        assert told[0].startswith("waiting in pull for server 0, line "), told
        assert told[2] == "waiting for rank 1 to push key 'w'"
        run.stop()
        late = cluster.start(lambda: pull_what_rank_1_does_not_push() if dlab.rank() == 0 else only_init())
        assert hang_of(late)[0] == "rank 1 has returned"


def only_init():
    dlab.kvstore.create("dist_sync").init("w", torch.zeros(4))


def loss_in_which_rank_1_gets_stuck(output, label):
    calls = context.once(list)
    calls.append(1)
    if dlab.rank() == 1 and len(calls) > 3:
        dist.recv(torch.zeros(1), 0)
    return torch.nn.functional.cross_entropy(output, label)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("strategy", "wait"),
    [
        (dlab.AllReduceSGD(), "for rank 1 to fill in piece 0 of the gradient"),
        (dlab.SyncSGD(allreduce=ring_allreduce), "to receive from rank 1"),
        (dlab.AsyncSGD(room=2), "for rank 1 to write or read a message"),
        (dlab.ParameterServer(mode="sync"), "for server 0 to answer its pull of key 'weights'"),
    ],
    ids=["AllReduceSGD", "SyncSGD", "AsyncSGD", "ParameterServer"],
)
def test_in_a_function_of_dlab_the_wait_and_the_step_are_told_and_no_line(strategy, wait):
    data = torch.utils.data.TensorDataset(torch.randn(512, 784), torch.randint(0, 10, (512,)))
    servers = 1 if isinstance(strategy, dlab.ParameterServer) else 0
    with dlab.Cluster(2, servers=servers) as cluster:
        run = dlab.train(
            dlab.TwoLayer, data, strategy, workers=2, batch_size=16, loss=loss_in_which_rank_1_gets_stuck, on=cluster
        )
        why, told = hang_of(run)
        assert why.startswith("each waits for the next: 0 → ")
        assert told[1] == f"waiting in recv for rank 0, {line(loss_in_which_rank_1_gets_stuck, 'dist.recv')}"
        assert re.fullmatch(rf"waiting {wait}, after step \d+", told[0]), told[0]


@pytest.mark.usefixtures("soon")
def test_on_the_backend_of_dlab_whoever_waits_tells_for_whom_whichever_thread_does():
    def one_rank_only():
        if dlab.rank() == 0:
            dist.all_reduce(torch.ones(4))

    def one_rank_only_and_later():
        if dlab.rank() == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.wait()

    def circle():
        dist.recv(torch.zeros(1), 1 - dlab.rank())

    with dlab.Cluster(2, backend="dlab") as cluster:
        for function, name, code in (
            (one_rank_only, "all_reduce", "dist.all_reduce"),
            (one_rank_only_and_later, "wait", "work.wait"),
        ):
            run = cluster.start(function)
            why, told = hang_of(run)
            assert why == "rank 1 has returned"
            assert told == {0: f"waiting in {name} for rank 1, {line(function, code)}"}
            run.stop()
        why, told = hang_of(cluster.start(circle))
        assert why == "each waits for the next: 0 → 1 → 0"
        assert told[0].startswith("waiting in recv for rank 1, line ")


@pytest.mark.usefixtures("soon")
def test_a_work_handle_and_a_backward_pass_that_wait_are_seen(started):
    def wait_for_a_handle():
        if dlab.rank() == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.wait()

    def wait_in_a_backward_pass():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        if dlab.rank() == 0:
            model(torch.ones(4)).sum().backward()

    run = started(wait_for_a_handle)
    assert hang_of(run) == (
        "ranks 1 and 2 have returned",
        {0: f"waiting in wait, {line(wait_for_a_handle, 'work.wait')}"},
    )
    run.stop()
    told = f"waiting in its backward pass, {line(wait_in_a_backward_pass, 'backward()')}"
    assert hang_of(started(wait_in_a_backward_pass)) == ("ranks 1 and 2 have returned", {0: told})


# ------------------------------------------------------------------------------------- no false alarm


def _others_wait():
    dlab.transport().recv(torch.zeros(1), 1)


def compute_on_rank_1():
    transport = dlab.transport()
    if dlab.rank() != 1:
        return _others_wait()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    return [transport.send(torch.zeros(1), other) for other in (0, 2)]


def sleep_on_rank_1():
    transport = dlab.transport()
    if dlab.rank() != 1:
        return _others_wait()
    time.sleep(3)
    return [transport.send(torch.zeros(1), other) for other in (0, 2)]


def be_delayed_on_rank_1():
    transport = dlab.transport()
    while not dlab.knob("delayed"):
        time.sleep(0.01)
    if dlab.rank() != 1:
        return _others_wait()
    dlab.log(step=1)
    return [transport.send(torch.zeros(1), other) for other in (0, 2)]


def many_short_waits():
    """Nobody logs, and whoever is not asleep waits; but they get on. A wait is short also where the machine is busy."""
    transport, x = dlab.transport(), torch.zeros(1)
    for turn in range(27):
        if dlab.rank() == turn % 3:
            time.sleep(0.1)
        transport.barrier()
    for turn in range(27):
        if dlab.rank() == turn % 3:
            time.sleep(0.1)
        dist.all_reduce(x)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("function", [compute_on_rank_1, sleep_on_rank_1, be_delayed_on_rank_1, many_short_waits])
def test_ranks_that_wait_for_one_that_does_something_are_no_hang(started, capsys, function):
    run = started(function)
    run.delay(1, 3.0)
    run.set("delayed", True)
    run.wait(60)
    assert not [event for event in run.states if event.kind == "hang"]
    assert "progress" not in capsys.readouterr().err


@pytest.mark.usefixtures("soon")
def test_a_pause_is_no_hang_and_its_time_does_not_count(started):
    def wait_for_rank_1():
        transport = dlab.transport()
        dlab.log(step=0)
        if dlab.rank() == 1:
            while not dlab.knob("go"):
                time.sleep(0.01)
        transport.barrier()

    run = started(wait_for_rank_1)
    eventually(lambda: len(run.events) >= 4)  # a step of each, and the knob
    run.pause()
    time.sleep(2)
    run.resume()
    run.set("go", True)
    run.wait(60)
    assert not [event for event in run.states if event.kind == "hang"]


# ------------------------------------------------------------------------------------- told, updated, taken back


@pytest.mark.usefixtures("soon")
def test_a_hang_that_ends_is_taken_back_and_both_are_saved(started, capsys, tmp_path):
    def be_saved_by_a_thread():
        transport, x = dlab.transport(), torch.zeros(1)

        def save():
            while not dlab.knob("go"):
                time.sleep(0.01)
            transport.send(x, 0)

        if dlab.rank() == 1:
            threading.Thread(target=save).start()
        transport.recv(x, 1 if dlab.rank() == 0 else 0)
        for other in (1, 2) if dlab.rank() == 0 else ():
            transport.send(x, other)

    run = started(be_saved_by_a_thread)
    assert hang_of(run)[0] == "each waits for the next: 0 → 1 → 0"
    run.set("go", True)
    run.wait(60)
    told = capsys.readouterr().err
    assert told.index("no rank has made progress for") < told.index("the run went on after")
    run.save(tmp_path / "events")
    hung, over = [event for event in dlab.load_events(tmp_path / "events") if event.kind == "hang"]
    assert hung.data["why"] and not over.data["why"] and over.time > hung.time


def test_a_timeout_tells_the_circle(cluster):
    with pytest.raises(dlab.WorkerTimeout, match="each waits for the next: 0 → 1 → 2 → 0") as error:
        cluster.run(recv_first, timeout=2)
    for rank in range(3):
        told = f"waiting in recv for rank {(rank + 1) % 3}, {line(recv_first, 'transport.recv')}"
        assert f"rank {rank}: {told}" in str(error.value)


def test_a_timeout_names_who_did_not_come_before_those_who_wait_in_a_collective_of_dlab(cluster):
    def oversleep():
        dlab.allreduce(torch.ones(4))
        if dlab.rank() == 2:
            time.sleep(1000)
        dlab.allreduce(torch.ones(4))

    with pytest.raises(dlab.WorkerTimeout, match=r"; ranks 0 and 1 waited for rank 2\n") as error:
        cluster.run(oversleep, timeout=2)
    assert error.value.ranks == [2, 0, 1]
    assert "rank 0: waiting in allreduce for rank 2, line " in str(error.value)
    assert f"rank 2: at {line(oversleep, 'time.sleep')}" in str(error.value)


def test_an_interrupt_tells_the_circle(cluster, capsys):
    run = cluster.start(recv_first)
    with pytest.raises(dlab.WorkerTimeout):
        run.wait(1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recv_first was stopped:"
    assert lines[1].startswith("rank 0: waiting in recv for rank 1, line ")
    assert lines[-1] == "each waits for the next: 0 → 1 → 2 → 0"


def shown(kernel, cell, kind):
    """The texts that a cell has displayed, or updated."""
    return [
        (message["content"]["transient"]["display_id"], message["content"]["data"]["text/plain"])
        for message in kernel._messages[cell]
        if message["msg_type"] == kind
    ]


RECV_FIRST = """def recv_first():
    transport = dlab.transport()
    transport.recv(torch.zeros(1), 1 - dlab.rank())

run = cluster.start(recv_first)
"""


@pytest.mark.slow
def test_in_a_notebook_it_is_told_in_the_cell_after_five_seconds_and_updated_in_place(kernel):
    cell = kernel.submit(RECV_FIRST)
    kernel.finish(cell)
    kernel._read(lambda: shown(kernel, cell, "update_display_data"), 60, "no update")
    assert kernel.run("run.stop()").error is None
    ((name, text),) = shown(kernel, cell, "display_data")
    waits = "rank {} waits in recv for rank {}, line 3 of recv_first: transport.recv(torch.zeros(1), 1 - dlab.rank())"
    assert re.match(rf"no rank has made progress for \d+ s:\n{re.escape(waits.format(0, 1))}\n", text), text
    assert f"{waits.format(1, 0)}\neach waits for the next: 0 → 1 → 0\nThe run goes on" in text
    assert int(re.search(r"for (\d+) s", text)[1]) >= 5
    again, update = shown(kernel, cell, "update_display_data")[0]
    assert again == name and int(re.search(r"for (\d+) s", update)[1]) > int(re.search(r"for (\d+) s", text)[1])
    assert kernel.shown(cell).stderr == ""


def test_in_a_cell_for_workers_the_line_is_the_cells(kernel):
    assert kernel.run("hangs.SECONDS = 1.0").error is None
    code = "import dlab, torch\ntransport = dlab.transport()\n\ntransport.recv(torch.zeros(1), 1 - dlab.rank())"
    cell = kernel.submit(f"%%workers -n 2\n{code}")
    kernel._read(lambda: shown(kernel, cell, "display_data"), 60, "nothing is told")
    text = shown(kernel, cell, "display_data")[0][1]
    line = "line 4 of the cell: transport.recv(torch.zeros(1), 1 - dlab.rank())"
    assert f"rank 0 waits in recv for rank 1, {line}" in text.splitlines()
    kernel.interrupt()
    assert "each waits for the next: 0 → 1 → 0" in kernel.finish(cell).stdout
