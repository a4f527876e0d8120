"""Letters to everybody: all arrive, in order, once; who is full waits; who dies is missed."""

import os
import random
import signal
import time

import pytest
import torch

import dlab
from dlab.transports.outbox import SharedOutbox, open_outbox

RANKS, LETTERS = 4, 300


def _correspond(wire=None, room=5, seed=0):
    """Post many letters and read those of all others, in an order of one's own."""
    outbox = open_outbox(wire or dlab.transport(), 700, torch.float32, room)
    dice = random.Random(f"{seed} {outbox.rank}")
    posted, found = 0, {other: [] for other in outbox.others}
    while posted < LETTERS or any(len(each) < LETTERS for each in found.values()):
        if posted < LETTERS and not outbox.behind() and dice.random() < 0.7:
            outbox.post(torch.full((700,), 1000.0 * outbox.rank + posted))
            posted += 1
            continue
        for other in outbox.others:
            letter = outbox.next(other)
            if letter is not None:
                assert len(letter.unique()) == 1  # not torn
                found[other].append(letter[0].item())
    outbox.close()
    return type(outbox).__name__, found


def _check(results):
    for rank, (_, found) in enumerate(results):
        for other, letters in found.items():
            assert other != rank
            assert letters == [1000.0 * other + number for number in range(LETTERS)]


@pytest.fixture(scope="module")
def cluster():
    with dlab.Cluster(RANKS) as cluster:
        yield cluster


@pytest.mark.parametrize("room", [1, 5, 64])
def test_all_letters_arrive_once_and_in_order(cluster, room):
    results = cluster.run(_correspond, room=room, timeout=60)
    _check(results)
    assert {name for name, _ in results} == {"SharedOutbox"}


def test_between_threads_of_a_rehearsal():
    _check(dlab.rehearse(_correspond, ranks=3))


def _mailed():
    from dlab.transports import outbox

    share_memory, outbox.share_memory = outbox.share_memory, lambda *_: None  # as between hosts
    try:
        return _correspond()
    finally:
        outbox.share_memory = share_memory


def test_between_hosts_messages_carry_them(cluster):
    results = cluster.run(_mailed, timeout=60)
    _check(results)
    assert {name for name, _ in results} == {"MailedOutbox"}


def _fill():
    outbox = open_outbox(dlab.transport(), 3, torch.float32, room=2)
    assert isinstance(outbox, SharedOutbox)
    states = [outbox.behind()]
    for _ in range(2):
        outbox.post(torch.zeros(3))
        states.append(outbox.behind())
    dlab.transport().barrier()  # all have posted, nobody has read
    others = set(outbox.others)
    for other in sorted(others):
        outbox.next(other)
    outbox.behind()  # puts the last one down
    dlab.transport().barrier()
    return states == [set(), set(), others] and outbox.behind() == set()


def test_who_has_too_many_unread_is_behind(cluster):
    assert cluster.run(_fill, timeout=30) == [True] * RANKS


class Loses:
    """Rank 1 posts two letters and dies; the others read them and then learn that it is gone."""

    survives = True

    def __call__(self):
        outbox = open_outbox(dlab.transport(), 3, torch.float32, room=2)
        if outbox.rank == 1:
            for number in range(2):
                outbox.post(torch.full((3,), float(number)))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        letters = [outbox.wait(1) for _ in range(2)]
        values = [each[0].item() for each in letters if each is not None]
        last = outbox.wait(1)
        for _ in range(5):  # nobody waits for it to read, either
            while outbox.behind():
                outbox.pause(outbox.behind())
            outbox.post(torch.zeros(3))
            for other in set(outbox.others) - {1}:
                outbox.wait(other)
        return values, last, outbox.gone


def test_the_letters_of_the_dead_can_be_read_and_nobody_waits_for_them(cluster):
    results = cluster.start(Loses()).wait(30)
    assert results[1] is None
    for rank in (0, 2, 3):
        values, last, gone = results[rank]
        assert last is None
        assert gone == {1}
        assert len(values) == 2  # a value seen again would be torn
