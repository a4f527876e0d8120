"""Rehearsals: threads for ranks, messages recorded, deadlocks named at once."""

import re
import time

import pytest
import torch

import dlab
from dlab.transports import Group


def test_results_come_by_rank():
    assert dlab.rehearse(lambda transport: (transport.rank, transport.size), ranks=3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("elements", [0, 1, 1_000_000])
def test_exchange_never_deadlocks_however_large_the_tensor(elements):
    def rotate(transport):
        mine, other = torch.full((elements,), float(transport.rank)), torch.empty(elements)
        right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        transport.exchange(mine, right, other, left)
        return torch.equal(other, torch.full((elements,), float(left)))

    assert dlab.rehearse(rotate, ranks=5) == [True] * 5


def test_messages_between_two_ranks_keep_their_order():
    def count(transport):
        if transport.rank == 0:
            for number in range(50):
                transport.send(torch.tensor([number]), 1)
            return None
        got = torch.empty(1, dtype=torch.long)
        numbers = []
        for _ in range(50):
            transport.recv(got, 0)
            numbers.append(got.item())
        return numbers

    assert dlab.rehearse(count, ranks=2)[1] == list(range(50))


def test_every_message_is_recorded_once_by_its_sender():
    def tell(transport):
        transport.label("hello", 7)
        if transport.rank == 0:
            transport.send(torch.ones(3, dtype=torch.float64), 2)
        elif transport.rank == 2:
            transport.recv(torch.empty(3, dtype=torch.float64), 0)

    (event,) = dlab.rehearse(tell, ranks=3).messages
    assert (event.kind, event.rank) == ("message", 0)
    start, end = event.data.pop("start"), event.data.pop("end")
    assert start <= end <= event.time
    content = {"count": 3, "low": 1.0, "high": 1.0}
    assert event.data == {
        "source": 0,
        "destination": 2,
        "bytes": 24,
        "phase": "hello",
        "step": 7,
        "round": 0,
        **content,
    }


def test_barrier_lets_nobody_pass_before_all_have_come():
    arrived, seen = [], []

    def meet(transport):
        arrived.append(transport.rank)
        transport.barrier()
        seen.append(len(arrived))

    for ranks in (1, 2, 5):
        arrived.clear()
        seen.clear()
        assert not dlab.rehearse(meet, ranks=ranks).messages
        assert seen == [ranks] * ranks


def test_a_circle_of_receivers_is_named_as_a_chain():
    def wait(transport):
        transport.recv(torch.empty(1), (transport.rank + 1) % transport.size)

    chain = ", ".join(f"rank {rank} waits to receive from {(rank + 1) % 3}" for rank in range(3))
    with pytest.raises(dlab.Deadlock, match=re.escape(chain)):
        dlab.rehearse(wait, ranks=3)


def test_a_circle_of_senders_deadlocks_even_with_small_messages():
    def push(transport):
        transport.send(torch.empty(1), (transport.rank + 1) % transport.size)
        transport.recv(torch.empty(1), (transport.rank - 1) % transport.size)

    with pytest.raises(dlab.Deadlock, match="rank 0 waits to send to 1, rank 1 waits to send to 0"):
        dlab.rehearse(push, ranks=2)


def test_a_circle_is_found_while_other_ranks_still_work():
    import threading

    free = threading.Event()

    def mixed(transport):
        if transport.rank == 2:
            free.wait(20)
        else:
            try:
                transport.recv(torch.empty(1), 1 - transport.rank)
            finally:
                free.set()

    with pytest.raises(dlab.Deadlock, match="rank 0 waits to receive from 1, rank 1 waits to receive from 0"):
        dlab.rehearse(mixed, ranks=3)
    assert free.is_set()


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock():
    def lonely(transport):
        if transport.rank:
            transport.recv(torch.empty(1), 0)

    with pytest.raises(dlab.Deadlock, match="rank 1 waits to receive from 0, which has returned"):
        dlab.rehearse(lonely, ranks=2)


def test_the_ranks_that_wait_are_released_when_one_fails():
    def fail(transport):
        if transport.rank == 1:
            raise KeyError("lost")
        transport.recv(torch.empty(1), 1)

    with pytest.raises(KeyError, match="lost"):
        dlab.rehearse(fail, ranks=4)


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [
        (torch.ones(4), torch.ones(5), "rank 0 sent 4 float32 to rank 1, which expected 5 float32"),
        (torch.ones(4), torch.ones(4).double(), "rank 0 sent 4 float32 to rank 1, which expected 4 float64"),
    ],
)
def test_ends_that_disagree_are_both_named(sent, expected, words):
    def send(transport):
        if transport.rank == 0:
            transport.send(sent, 1)
        else:
            transport.recv(expected, 0)

    with pytest.raises(ValueError, match=words):
        dlab.rehearse(send, ranks=2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: t.send(torch.ones(1), 2), IndexError, "names rank 2, but the ranks are 0 to 1"),
        (lambda t: t.recv(torch.ones(1), -1), IndexError, "names rank -1"),
        (lambda t: t.send(torch.ones(1), t.rank), ValueError, "to itself"),
        (lambda t: t.send(torch.ones(2, 2).t(), 1 - t.rank), ValueError, r"call \.contiguous\(\)"),
        (lambda t: t.send(torch.eye(2).to_sparse(), 1 - t.rank), ValueError, "to_dense"),
        (lambda t: Group(t, [1 - t.rank]), ValueError, "is not in the group"),
    ],
)
def test_what_cannot_be_sent_gets_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        dlab.rehearse(call, ranks=2)


@pytest.mark.parametrize("ranks", [0, -1, 1.5])
def test_a_rehearsal_needs_ranks(ranks):
    with pytest.raises(ValueError, match="1 or more"):
        dlab.rehearse(lambda transport: None, ranks=ranks)


def test_who_does_not_wait_for_a_failed_rank_goes_on():
    """So what a rehearsal finds wrong does not depend on which rank is the first."""
    failed = []

    def fail(transport):
        try:
            if transport.rank == 1:
                time.sleep(0.1)
                transport.send(torch.ones(1), 2)
            if transport.rank == 2:
                transport.recv(torch.empty(1), 1)
            if transport.rank == 3:
                transport.recv(torch.empty(1), 4)
            if transport.rank == 4:
                transport.recv(torch.empty(1), 0)
            raise ArithmeticError
        except ArithmeticError:
            failed.append(transport.rank)
            raise

    with pytest.raises(ArithmeticError):
        dlab.rehearse(fail, 5)
    assert sorted(failed) == [0, 1, 2]  # 4 has waited for 0, and 3 for 4
