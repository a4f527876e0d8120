"""Messages to everybody: all arrive, in order, once; who is full waits; who dies is missed."""

import os
import random
import signal
import time

import pytest
import torch

import dlab
from dlab.transports.broadcast_queue import SharedBroadcastQueue, open_broadcast_queue

RANKS, CHARACTERS = 4, 300


def _correspond(transport=None, room=5, seed=0):
    """Post many messages and read those of all others, in an order of one's own."""
    queue = open_broadcast_queue(transport or dlab.transport(), 700, torch.float32, room)
    dice = random.Random(f"{seed} {queue.rank}")
    posted, found = 0, {other: [] for other in queue.others}
    while posted < CHARACTERS or any(len(each) < CHARACTERS for each in found.values()):
        if posted < CHARACTERS and not queue.behind() and dice.random() < 0.7:
            queue.post(torch.full((700,), 1000.0 * queue.rank + posted))
            posted += 1
            continue
        for other in queue.others:
            message = queue.next(other)
            if message is not None:
                assert len(message.unique()) == 1  # not torn
                found[other].append(message[0].item())
    queue.close()
    return type(queue).__name__, found


def _check(results):
    for rank, (_, found) in enumerate(results):
        for other, messages in found.items():
            assert other != rank
            assert messages == [1000.0 * other + number for number in range(CHARACTERS)]


@pytest.mark.parametrize("room", [1, 5, 64])
def test_all_messages_arrive_once_and_in_order(cluster, room):
    results = cluster.run(_correspond, room=room, timeout=60)
    _check(results)
    assert {name for name, _ in results} == {"SharedBroadcastQueue"}


def test_between_threads_of_a_rehearsal():
    _check(dlab.rehearse(_correspond, ranks=3))


def _mailed():
    from dlab.transports import broadcast_queue

    share_memory, broadcast_queue.share_memory = broadcast_queue.share_memory, lambda *_: None  # as between hosts
    try:
        return _correspond()
    finally:
        broadcast_queue.share_memory = share_memory


def test_between_hosts_messages_carry_them(cluster):
    results = cluster.run(_mailed, timeout=60)
    _check(results)
    assert {name for name, _ in results} == {"DistributedBroadcastQueue"}


def _fill():
    queue = open_broadcast_queue(dlab.transport(), 3, torch.float32, room=2)
    assert isinstance(queue, SharedBroadcastQueue)
    states = [queue.behind()]
    for _ in range(2):
        queue.post(torch.zeros(3))
        states.append(queue.behind())
    dlab.transport().barrier()  # all have posted, nobody has read
    others = set(queue.others)
    for other in sorted(others):
        queue.next(other)
    queue.behind()  # puts the last one down
    dlab.transport().barrier()
    return states == [set(), set(), others] and queue.behind() == set()


def test_who_has_too_many_unread_is_behind(cluster):
    assert cluster.run(_fill, timeout=30) == [True] * RANKS


class Loses:
    """Rank 1 posts two messages and dies; the others read them and then learn that it is gone."""

    survives = True

    def __call__(self):
        queue = open_broadcast_queue(dlab.transport(), 3, torch.float32, room=2)
        if queue.rank == 1:
            for number in range(2):
                queue.post(torch.full((3,), float(number)))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        messages = [queue.wait(1) for _ in range(2)]
        values = [each[0].item() for each in messages if each is not None]
        last = queue.wait(1)
        for _ in range(5):  # nobody waits for it to read, either
            while queue.behind():
                queue.pause(queue.behind())
            queue.post(torch.zeros(3))
            for other in set(queue.others) - {1}:
                queue.wait(other)
        return values, last, queue.gone


def test_the_messages_of_the_dead_can_be_read_and_nobody_waits_for_them(cluster):
    results = cluster.start(Loses()).wait(30)
    assert results[1] is None
    for rank in (0, 2, 3):
        values, last, gone = results[rank]
        assert last is None
        assert gone == {1}
        assert len(values) == 2  # a value seen again would be torn
