"""On the threads of a rehearsal torch.distributed works as in a worker, and nowhere else is anything changed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce

import dlab
from dlab.collectives import ring_allreduce
from dlab.exercises.groups import process_groups


def mine(transport):
    return torch.full((2, 3), transport.rank + 1.0)


def by_torch(transport):
    all_reduce(row := mine(transport))
    return row


def in_the_background(transport):
    dist.all_reduce(row := mine(transport), async_op=True).wait()
    return row


def by_way_of_a_root(transport):
    dist.reduce(row := mine(transport), dst=1)
    dist.broadcast(row, src=1)
    return row


def gathered(transport):
    parts = [torch.empty(2, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine(transport))
    return sum(parts)


def by_dlab(transport):
    dlab.allreduce(row := mine(transport))
    return row


def by_the_transport_of_dlab(transport):
    ring_allreduce(row := mine(transport), dlab.transport())
    return row


WAYS = [by_torch, in_the_background, by_way_of_a_root, gathered, by_dlab, by_the_transport_of_dlab]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_sum_is_that_of_the_rehearsal(way):
    with process_groups() as join:

        def work(transport):
            join(transport)
            return way(transport), dlab.rank(), dlab.world_size(), dist.get_backend()

        for rank, (row, *told) in enumerate(dlab.rehearse(work, 3)):
            assert torch.equal(row, torch.full((2, 3), 6.0))
            assert told == [rank, 3, "dlab"]


def test_other_threads_and_what_comes_after_know_nothing_of_it():
    with process_groups() as join:
        dlab.rehearse(join, 2)
        assert not dist.is_initialized() and dlab.world_size() == 1
    assert dlab.rehearse(lambda transport: dlab.world_size(), 2) == [1, 1]
    with pytest.raises(RuntimeError, match="there is no process group here"):
        dlab.transport()


def test_who_stays_away_is_noticed_at_once():
    with process_groups() as join:

        def work(transport):
            join(transport)
            if transport.rank:
                dist.all_reduce(mine(transport))

        with pytest.raises(dlab.Deadlock, match=r"rank [12] waits to (receive from|send to) 0, which has returned"):
            dlab.rehearse(work, 3)


REFUSED = [
    (
        lambda: dist.isend(torch.ones(2), 1 - dist.get_rank()),
        "no point-to-point calls of torch.distributed: use transport.exchange",
    ),
]


@pytest.mark.parametrize(("ask", "sentence"), REFUSED, ids=["message"])
def test_what_would_not_work_with_gloo_or_could_block_is_refused(ask, sentence):
    with process_groups() as join:

        def work(transport):
            join(transport)
            ask()

        with pytest.raises(RuntimeError, match=sentence):
            dlab.rehearse(work, 2)
