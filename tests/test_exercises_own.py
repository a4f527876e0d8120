"""dlab's own solution is noticed by whatever name, on threads and in workers, and only where a learner calls it."""

import sys
from functools import partial

import pytest
import torch

import dlab
from dlab import collectives
from dlab.collectives import ring_allreduce
from dlab.collectives import ring_allreduce as mine
from dlab.collectives.ring import collect_chunks, pass_chunks
from dlab.exercises.own import explain_own, noticing


class Ring:
    reduce = staticmethod(ring_allreduce)

    def step(self):
        """A method like those of dlab's strategies."""


WAYS = {
    "another name": mine,
    "an attribute": lambda tensor, transport: collectives.ring_allreduce(tensor, transport),
    "a partial": partial(ring_allreduce, op="sum"),
    "a class": lambda tensor, transport: Ring.reduce(tensor, transport),
    "a decorator": torch.no_grad()(lambda tensor, transport: ring_allreduce(tensor, transport)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_is_noticed_by_whatever_name_on_every_rank(way):
    def work(transport):
        with noticing(ring_allreduce) as called:
            way(torch.ones(4), transport)
        return called

    assert dlab.rehearse(work, 3) == [["ring_allreduce"]] * 3


def test_what_dlab_calls_itself_does_not_count():
    """`reduce_scatter` goes through `collect_chunks`, too."""

    def work(transport):
        with noticing(ring_allreduce, collect_chunks) as called:
            collectives.reduce_scatter(torch.ones(4), transport)
        return called

    assert dlab.rehearse(work, 2) == [[], []]


def test_a_function_of_the_same_name_does_not_count():
    def ring_allreduce(tensor, transport):
        pass

    with noticing(mine) as called:
        ring_allreduce(None, None)
    assert called == []


def test_a_call_that_fails_counts_and_nothing_stays_behind():
    before = sys.getprofile()
    with pytest.raises(AttributeError), noticing(pass_chunks, Ring.step) as called:
        Ring().step()
        pass_chunks([], None)
    assert called == ["Ring.step", "pass_chunks"]
    assert sys.getprofile() is before
    Ring().step()
    assert len(called) == 2


def test_it_is_noticed_in_worker_processes(cluster):
    def work():
        with noticing(ring_allreduce) as called:
            ring_allreduce(torch.ones(4), dlab.transport())
        return called

    assert cluster.run(work, timeout=60) == [["ring_allreduce"]] * 2


def test_the_sentence_says_what_to_do_instead():
    assert explain_own(["ring_allreduce", "pass_chunks"], "write the two rounds yourself") == (
        "this calls dlab's own ring_allreduce, which is the answer: write the two rounds yourself"
    )
