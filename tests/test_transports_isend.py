"""Sends that do not wait: on every transport they arrive in order, are recorded once, and are waited for in the end."""

import os
import re
import signal
import time

import pytest
import torch

import dlab
from dlab.transports import Group, TorchTransport, connect

LARGE = 700_001  # more than fits into a ring of shared memory


def inputs(ranks=2):
    return [torch.zeros(1) for _ in range(ranks)]


def compute_before_receiving(transport, mine):
    """Rank 0 sends much and wants an answer first: this would stand still if it waited."""
    other = 1 - transport.rank
    if transport.rank == 0:
        request = transport.isend(torch.arange(LARGE, dtype=torch.float64), other)
        transport.recv(mine, other)
        request.wait()
        return mine.item(), request.done
    transport.send(mine + 5, other)
    got = torch.empty(LARGE, dtype=torch.float64)
    transport.recv(got, other)
    return torch.equal(got, torch.arange(LARGE, dtype=torch.float64))


def test_it_does_not_wait_for_the_receiver(transport):
    assert transport(compute_before_receiving, inputs()) == [(5.0, True), True]


def one_after_another(transport, mine):
    if transport.rank == 0:
        sent = [torch.full((LARGE if number % 3 == 1 else number,), float(number)) for number in range(8)]
        requests = [transport.isend(each, 1) for each in sent[:3]]
        transport.send(sent[3], 1)
        requests += [transport.isend(each, 1) for each in sent[4:6]]
        transport.exchange(sent[6], 1, mine, 1)
        requests.append(transport.isend(sent[7], 1))
        for request in reversed(requests):
            request.wait()
            request.wait()  # a second time changes nothing
        return mine.item()
    found = []
    for number in range(8):
        got = torch.empty(LARGE if number % 3 == 1 else number)
        if number == 6:
            transport.exchange(mine + 9, 0, got, 0)
        else:
            transport.recv(got, 0)
        found.append(got.unique().tolist())
    return found


def test_messages_to_one_rank_keep_their_order_however_they_are_sent(transport):
    first, found = transport(one_after_another, inputs())
    assert first == 9.0
    assert found == [[float(number)] if number else [] for number in range(8)]


def change_it_afterwards(transport, mine):
    if transport.rank == 0:
        for number in range(3):
            tensor = torch.full((LARGE,), float(number))
            transport.isend(tensor, 1).wait()
            tensor.fill_(-1)
        return None
    found = []
    for _ in range(3):
        got = torch.empty(LARGE)
        transport.recv(got, 0)
        found += got.unique().tolist()
    return found


def test_once_waited_for_the_tensor_may_change(transport):
    assert transport(change_it_afterwards, inputs())[1] == [0.0, 1.0, 2.0]


def around_a_group(transport, mine):
    if transport.rank == 1:
        return None
    group = Group(transport, [2, 0])
    request = group.isend(torch.full((3,), float(transport.rank)), 1 - group.rank)
    got = torch.empty(3)
    group.recv(got, 1 - group.rank)
    request.wait()
    return got.tolist()


def test_in_a_group_the_members_have_their_own_numbers_and_each_message_is_recorded_once(transport):
    found = transport(around_a_group, inputs(3))
    assert found == [[2.0] * 3, None, [0.0] * 3]
    told = sorted((e.data["source"], e.data["destination"], e.data["bytes"], e.data["low"]) for e in found.messages)
    assert told == [(0, 2, 12, 0.0), (2, 0, 12, 2.0)]


def check_what_is_sent(transport, mine):
    problems = []
    for tensor, rank in ((mine, 5), (mine, transport.rank), (torch.ones(4, 4).t()[1:], 1 - transport.rank)):
        try:
            transport.isend(tensor, rank)
        except (IndexError, ValueError) as problem:
            problems.append(str(problem))
    return problems


def test_what_cannot_be_sent_is_refused(transport):
    for rank, (nobody, itself, scattered) in enumerate(transport(check_what_is_sent, inputs())):
        assert nobody == f"rank {rank} names rank 5, but the ranks are 0 to 1"
        assert "sends to itself" in itself
        assert "contiguous" in scattered


# ------------------------------------------------------------------------------------------ who waits in vain


def test_in_a_rehearsal_a_circle_of_waits_is_noticed():
    def wait_first(transport):
        request = transport.isend(torch.ones(2), 1 - transport.rank)
        request.wait()
        transport.recv(torch.empty(2), 1 - transport.rank)

    circle = re.escape("deadlock: rank 0 waits to send to 1, rank 1 waits to send to 0")
    with pytest.raises(dlab.Deadlock, match=circle):
        dlab.rehearse(wait_first, ranks=2)

    def receive_first(transport):
        got = torch.empty(2)
        request = transport.isend(torch.ones(2), 1 - transport.rank)
        transport.recv(got, 1 - transport.rank)
        request.wait()
        return got.tolist()

    assert dlab.rehearse(receive_first, ranks=2) == [[1.0, 1.0]] * 2


def test_in_a_rehearsal_a_message_that_nobody_will_take_is_noticed():
    def leave(transport):
        if transport.rank == 0:
            transport.isend(torch.ones(2), 1).wait()

    with pytest.raises(dlab.Deadlock, match="rank 0 waits to send to 1, which has returned"):
        dlab.rehearse(leave, ranks=2)


def test_what_was_posted_by_a_rank_that_has_returned_still_arrives():
    def leave(transport):
        if transport.rank == 0:
            transport.isend(torch.ones(2), 1)
            return None
        time.sleep(0.1)
        got = torch.zeros(2)
        transport.recv(got, 0)
        return got.tolist()

    assert dlab.rehearse(leave, ranks=2)[1] == [1.0, 1.0]


def send_to_the_dead(kind):
    transport = kind()
    transport.barrier()  # gloo connects two ranks with their first message
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.isend(torch.ones(5_000_000), 1).wait()
    except ConnectionError as problem:
        return str(problem)
    return None


class Survive:
    """The cluster lets the others end by themselves."""

    survives = True

    def __init__(self, kind):
        self.kind = kind

    def __call__(self):
        return send_to_the_dead(self.kind)


@pytest.mark.parametrize("kind", [connect, TorchTransport], ids=["shared memory", "gloo"])
def test_a_dead_receiver_is_named(kind):
    with dlab.Cluster(2, backend="gloo") as cluster:
        first, second = cluster.start(Survive(kind)).wait(60)
    assert second is None
    assert re.search(r"rank 0 (has waited|could not) (to )?send to rank 1", first)
