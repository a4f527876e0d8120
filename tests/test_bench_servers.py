"""The parameter servers that dlab's is compared with really train, and leave nothing behind. No test asks how fast."""

import threading
from functools import partial
from multiprocessing import forkserver

import psutil
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from dlab.bench import servers
from dlab.bench.servers import Design, Member, TrainingWorker, alone, by_gloo, by_lean_rpc, by_rpc, flat

STEPS, BATCH = 5, 4
SERVERS = [by_rpc, by_lean_rpc, by_gloo]


@pytest.fixture(scope="module")
def imported_once():
    """A process that has imported what takes seconds; optimizers import torch's compiler with their first step."""
    forkserver.set_forkserver_preload(["dlab.bench.servers", "torch._dynamo", "pytest", "psutil"])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()
    forkserver.set_forkserver_preload(["__main__"])


@pytest.fixture
def forked(imported_once, monkeypatch):
    """The processes of a design are forked from that one: how they start is not what the test is about."""
    monkeypatch.setattr(servers.mp, "spawn", partial(servers.mp.start_processes, start_method="forkserver"))


def fail_in_worker(member: Member) -> None:
    if member.rank == 0:
        raise RuntimeError("the first worker is out of order")
    member.start.wait()


def never_end(member: Member) -> None:
    threading.Event().wait()


def keeping_sums(design: Design, sums: torch.Tensor, member: Member) -> None:
    """A design whose workers also add up their gradients, each in a row of `sums`."""
    backward = TrainingWorker.backward

    def backward_and_add(worker: TrainingWorker) -> list[torch.Tensor]:
        gradients = backward(worker)
        sums[member.rank] += torch.cat([gradient.flatten() for gradient in gradients])
        return gradients

    TrainingWorker.backward = backward_and_add
    design(member)


def after_plain_sgd() -> torch.Tensor:
    """The weights that one process has after what one worker does."""
    worker = TrainingWorker(0, BATCH)
    optimizer = torch.optim.SGD(worker.parameters, lr=0.01)
    for _ in range(servers.WARM_UP + 1 + STEPS):
        worker.backward()
        optimizer.step()
    return flat(worker.model)


@pytest.mark.parametrize("design", [pytest.param(by_rpc, marks=pytest.mark.slow), by_gloo])
def test_with_one_worker_the_server_does_plain_sgd(design, request):
    if design is not by_rpc:  # which starts as in the benchmark
        request.getfixturevalue("forked")
    outcome = servers.run(design, 1, BATCH, STEPS)
    assert outcome.updates == servers.WARM_UP + 1 + STEPS
    torch.testing.assert_close(outcome.weights, after_plain_sgd(), rtol=0, atol=1e-6)
    assert (outcome.weights - flat()).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("design", SERVERS)
def test_every_gradient_of_every_worker_is_applied_once(forked, design):
    sums = torch.zeros(3, len(flat())).share_memory_()
    outcome = servers.run(partial(keeping_sums, design, sums), 3, BATCH, STEPS)
    assert outcome.updates == 3 * (servers.WARM_UP + 1 + STEPS)
    assert sums.ne(0).any(1).all()
    torch.testing.assert_close(outcome.weights, flat() - 0.01 * sums.sum(0), rtol=0, atol=1e-6)
    assert outcome.per_second > 0


def test_the_batches_of_workers_differ_and_are_the_same_each_time():
    first, again, second = (next(TrainingWorker(rank, BATCH).batches) for rank in (0, 0, 1))
    assert first[0].shape == (BATCH, 1, 28, 28)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], second[0])


def test_updates_are_counted_from_the_first_begin_to_the_last_end():
    moments = torch.tensor([[10.0, 13.0], [11.0, 14.0]], dtype=torch.float64)
    assert servers.Timing(moments, torch.tensor(0), torch.empty(0), steps=6).per_second == 2 * 6 / 4


@pytest.mark.parametrize("updates", ["rpc_updates", "lean_rpc_updates", "gloo_updates", "alone_updates"])
def test_what_the_rows_call_gives_a_number(monkeypatch, updates):
    asked = []

    def run(design, *arguments):
        asked.extend([design, *arguments])
        return servers.Timing(torch.tensor([[0.0, 2.0]]), torch.tensor(0), torch.empty(0), steps=10)

    monkeypatch.setattr(servers, "run", run)
    assert getattr(servers, updates)(1, 32, 10) == 5
    designs = {"rpc_updates": by_rpc, "lean_rpc_updates": by_lean_rpc, "gloo_updates": by_gloo, "alone_updates": alone}
    assert asked == [designs[updates], 1, 32, 10]


@pytest.mark.slow
def test_workers_alone_need_no_server(forked):
    outcome = servers.run(alone, 2, BATCH, STEPS)
    assert outcome.moments.gt(0).all()
    assert outcome.updates == 0


@pytest.mark.slow
def test_what_a_worker_raises_arrives_and_nobody_stays(forked):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ProcessRaisedException, match="the first worker is out of order"):
        servers.run(fail_in_worker, 2, BATCH, STEPS)
    assert not [child for child in psutil.Process().children(recursive=True) if is_left(child, before)]


def test_who_does_not_end_is_ended(forked, monkeypatch):
    monkeypatch.setattr(servers, "TIME_LIMIT", 1)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="never_end: 2 workers took more than 1 s"):
        servers.run(never_end, 2, BATCH, STEPS)
    assert not [child for child in psutil.Process().children(recursive=True) if is_left(child, before)]


def is_left(child: psutil.Process, before: set[psutil.Process]) -> bool:
    """Is it there now, and was it not before? Python's resource tracker stays, whoever needed it first."""
    return child not in before and "resource_tracker" not in " ".join(child.cmdline())
