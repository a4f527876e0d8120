"""The order of messages is recovered, however far ahead of each other the ranks that recorded them were."""

import random

import numpy as np
import pytest
import torch

import dlab
from dlab.collectives import broadcast, ring_allreduce
from dlab.views.steps import Steps

PLAN = [("reduce-scatter", 0), ("reduce-scatter", 1), ("reduce-scatter", 2), ("all-gather", 0), ("all-gather", 1)]
RANKS = 4


def messages(rounds, labelled=True, ahead=0.3):
    """Of a ring, each rank's own in order; a rank may be ahead of the others by so much of a step."""
    own = {rank: [] for rank in range(RANKS)}
    for moment in range(rounds * len(PLAN)):
        phase, step = PLAN[moment % len(PLAN)] if labelled else ("", 0)
        for rank in range(RANKS):
            start = 100 + moment + ahead * random.random()
            message = {
                "source": rank,
                "destination": (rank + 1) % RANKS,
                "bytes": 8,
                "start": start,
                "end": start + 0.5,
            }
            own[rank].append({**message, "phase": phase, "step": step})
    return own


def mixed(own):
    """In one list, as a run's events come: whole pieces of one rank, then of another."""
    own, told = {rank: list(some) for rank, some in own.items()}, []
    while left := [rank for rank, some in own.items() if some]:
        rank = random.choice(left)
        count = random.randrange(1, 8)
        told += own[rank][:count]
        del own[rank][:count]
    return told


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_found_again(seed):
    random.seed(seed)
    rounds = random.randrange(1, 5)
    steps = Steps()
    for message in mixed(messages(rounds)):
        steps.add(message)
    assert steps.pairs() == PLAN * rounds and len(steps) == len(PLAN) * rounds
    assert all(len(titled.step) == RANKS for titled in steps.first(100))
    assert [titled.round for titled in steps.first(100)] == [number for number in range(rounds) for _ in PLAN]
    assert [titled.step for titled in steps.last(3)] == [titled.step for titled in steps.first(100)][-3:]


def test_a_step_has_the_name_that_its_algorithm_gives_it_and_the_round_if_there_are_several():
    random.seed(0)
    once, twice = Steps(), Steps()
    for steps, rounds in ((once, 1), (twice, 2)):
        for message in mixed(messages(rounds)):
            steps.add(message)
    assert [titled.title for titled in once.first(100)] == [
        *("reduce-scatter 0", "reduce-scatter 1", "reduce-scatter 2"),
        *("all-gather 0", "all-gather 1"),
    ]
    assert twice.first(100)[-1].title == "round 2, all-gather 1"
    assert [titled.colour for titled in once.first(100)] == [0, 0, 0, 1, 1]


def test_without_labels_every_round_is_a_step():
    random.seed(1)
    steps = Steps()
    for message in mixed(messages(2, labelled=False)):
        steps.add(message)
    assert steps.pairs() == [("", number) for number in range(2 * len(PLAN))]


def test_a_step_is_complete_when_as_many_have_told_of_it_as_in_the_round_before():
    own = messages(2)
    steps = Steps()
    for rank in range(RANKS):
        for message in own[rank] if rank else own[rank][: len(PLAN) + 2]:  # rank 0 is behind
            steps.add(message)
    assert [steps.is_complete(titled) for titled in steps.first(100)] == [True] * 7 + [False] * 3


def test_a_table_has_the_messages_by_source_and_those_that_came_later():
    steps = Steps()
    own = messages(1)
    steps.add(own[2][0])
    (titled,) = steps.first(1)
    assert titled.step.table[:, 0].tolist() == [2]
    steps.add(own[0][0])
    plain = [[own[rank][0][name] for name in ("source", "destination", "bytes", "start", "end")] for rank in (0, 2)]
    assert titled.step.table[:, :5].tolist() == plain
    assert np.isnan(titled.step.table[:, 5:]).all(), "nothing was told of what is in them"


def test_collectives_in_which_ranks_send_unequally_often_do_not_shift_the_rounds():
    """Broadcasts, in which some ranks send more than others, and then rings, as recorded on threads."""

    def work(transport):
        tensor = torch.ones(8)
        for _ in range(3):
            broadcast(tensor, transport)
        for _ in range(2):
            ring_allreduce(tensor, transport)

    steps = Steps()
    for event in dlab.rehearse(work, ranks=4).messages:
        steps.add(event.data)
    by_phase = {}
    for each in steps.first(100):
        by_phase.setdefault(each.step.phase, []).append(len(each.step))
    assert by_phase == {"broadcast": [1, 2] * 3, "reduce-scatter": [4] * 6, "all-gather": [4] * 6}
