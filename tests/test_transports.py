"""The transports between processes, shared memory and gloo: large tensors, ends that disagree, ranks that wait."""

import pytest
import torch

import dlab
from dlab.collectives import ring_allreduce
from dlab.transports import SharedTransport, TorchTransport, connect

WORKERS = 3  # of the cluster
KINDS = {"shared memory": connect, "gloo": TorchTransport}
kinds = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))


def _disagree(kind, elements, dtype):
    transport = kind()
    if dlab.rank() == 0:
        transport.send(torch.ones(4), 1)
    elif dlab.rank() == 1:
        transport.recv(torch.ones(elements, dtype=dtype), 0)


@kinds
@pytest.mark.parametrize(
    ("elements", "dtype", "expected"), [(5, torch.float32, "5 float32"), (3, torch.float32, "3 float32")]
)
def test_ends_that_disagree_are_both_named(cluster, kind, elements, dtype, expected):
    with pytest.raises(dlab.WorkerError, match=f"rank 0 sent 4 float32 to rank 1, which expected {expected}") as error:
        cluster.run(_disagree, kind, elements, dtype, timeout=30)
    assert error.value.rank == 1


def _swap_first_and_last(kind, elements):
    transport = kind()
    if transport.rank == 1:
        return None
    other = 2 - transport.rank
    mine, theirs = torch.full((elements,), float(transport.rank)), torch.empty(elements)
    transport.exchange(mine, other, theirs, other)
    return theirs.unique().tolist()


@kinds
def test_exchange_between_two_ranks_never_deadlocks_however_large_the_tensor(cluster, kind):
    found = cluster.run(_swap_first_and_last, kind, 3_000_000, timeout=60)
    assert found == [[2.0], None, [0.0]]


def _wait_in_vain(kind, *args):
    transport = kind(*args)
    if transport.rank == 2:
        transport.recv(torch.empty(1), 0)


def test_a_rank_that_waits_too_long_says_for_whom(cluster):
    with pytest.raises(dlab.WorkerError, match=r"rank 2 has waited to receive from rank 0 for 0\.3 s"):
        cluster.run(_wait_in_vain, connect, None, 0.3, timeout=30)


def test_so_it_does_over_gloo():
    late = pytest.raises(dlab.WorkerError, match=r"rank 2 could not receive from rank 0: .*(timeout|[Tt]imed out)")
    with dlab.Cluster(3, timeout=1) as impatient, late:
        impatient.run(_wait_in_vain, TorchTransport, timeout=30)


def _many_ranks():
    tensor = torch.full((100_003,), float(dlab.rank()))
    ring_allreduce(tensor, dlab.transport())
    return tensor.unique().tolist()


def test_more_ranks_than_cores_get_on():
    with dlab.Cluster(7) as cluster:
        assert cluster.run(_many_ranks, timeout=60) == [[21.0]] * 7


def _ring_twice():
    for number in (1, 2):
        tensor = torch.full((9,), float(number))
        ring_allreduce(tensor, dlab.transport())
    return type(dlab.transport()._transport)


def test_dlab_transport_is_shared_memory_on_one_host_and_records_every_message(cluster):
    run = cluster.start(_ring_twice)
    assert run.wait(30) == [SharedTransport] * 3
    messages = [event for event in run.events if event.kind == "message"]
    assert len(messages) == 2 * 2 * 3 * 2
    assert {event.data["bytes"] for event in messages} == {12}
    assert {event.data["phase"] for event in messages} == {"reduce-scatter", "all-gather"}
    assert all(event.data["destination"] == (event.rank + 1) % 3 for event in messages)


def _leave_a_letter():
    transport = dlab.transport()
    if transport.rank == 0:
        transport.send(torch.ones(5), 1)  # nobody receives it


def test_what_one_run_leaves_unread_does_not_reach_the_next(cluster):
    cluster.run(_leave_a_letter)
    assert cluster.run(_ring_twice)[0] is SharedTransport


def test_outside_a_process_group_there_is_no_transport():
    with pytest.raises(RuntimeError, match=r"dlab\.rehearse"):
        dlab.transport()


def _send_around(dtype):
    ring_allreduce(torch.ones(4).to(dtype), connect())


def test_types_that_cannot_be_named_are_refused(cluster):
    with pytest.raises(dlab.WorkerError, match="float8_e5m2 cannot be sent: convert"):
        cluster.run(_send_around, torch.float8_e5m2, timeout=30)
