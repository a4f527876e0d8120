"""The exercise of the fourth lesson: right counts pass, and each mistake is told apart."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dlab
from dlab.exercises import calling, check_staleness
from dlab.exercises.staleness import EXAMPLE, count_versions

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "04_async_sgd.ipynb"

# ------------------------------------------------------------------------------------------------ right


def by_versions(ends):
    read, staleness = {}, []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version + 1
    return staleness


def by_looking_back(ends):
    staleness = []
    for place, (_, rank) in enumerate(ends):
        last = max((earlier for earlier in range(place) if ends[earlier][1] == rank), default=-1)
        staleness.append(place - last - 1)
    return staleness


def by_counters(ends):
    """Every update makes the gradients of all others staler."""
    stale = {rank: 0 for _, rank in ends}
    found = []
    for _, rank in ends:
        found.append(stale[rank])
        for each in stale:
            stale[each] += 1
        stale[rank] = 0
    return found


def in_numpy(ends):
    return np.array(by_counters(ends), dtype=np.int64)


def as_small_tensors(ends):
    return [torch.tensor(each) for each in by_versions(ends)]


RIGHT = [by_versions, by_looking_back, by_counters, in_numpy, as_small_tensors]
RIGHT += [lambda ends: tuple(by_looking_back(ends)), lambda ends: torch.tensor(by_versions(ends), dtype=torch.int32)]


@pytest.mark.parametrize("right", RIGHT, ids=lambda each: each.__name__)
def test_right_counts_pass(right):
    assert check_staleness(right).startswith("well done: ")


def test_the_checker_counts_as_one_would_by_hand():
    assert count_versions(EXAMPLE) == [0, 1, 1, 0, 2, 5, 2]
    dice = random.Random(1)
    ends = sorted((dice.random(), dice.randrange(5)) for _ in range(300))
    assert count_versions(ends) == by_looking_back(ends)


# ------------------------------------------------------------------------------------------------ wrong


def first_is_fresh(ends):
    seen, counts = set(), []
    for (_, rank), each in zip(ends, by_versions(ends), strict=True):
        counts.append(each if rank in seen else 0)
        seen.add(rank)
    return counts


def seconds(ends):
    last, found = {}, []
    for moment, rank in ends:
        found.append(moment - last.get(rank, 0.0))
        last[rank] = moment
    return found


def own_one_counted(ends):
    """The weights that it reads do have its own update."""
    read, staleness = {}, []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version
    return staleness


def gaps(ends):
    last, found = {}, []
    for place, (_, rank) in enumerate(ends):
        found.append(place - last.get(rank, place))
        last[rank] = place
    return found


def begins_before_the_first(ends):
    last, found = {}, []
    for place, (_, rank) in enumerate(ends):
        found.append(place - last.get(rank, -2) - 1)
        last[rank] = place
    return found


def between(ends, place):
    """The ranks of the updates that make this one stale."""
    return [rank for _, rank in ends[place - by_versions(ends)[place] : place]]


def each_rank_once(ends):
    return [len(set(between(ends, place))) for place in range(len(ends))]


def of_the_fastest_other(ends):
    found = []
    for place in range(len(ends)):
        others = between(ends, place)
        found.append(max((others.count(rank) for rank in others), default=0))
    return found


def others_from_the_beginning(ends):
    return [sum(other != rank for _, other in ends[:place]) for place, (_, rank) in enumerate(ends)]


def steps_of_its_own(ends):
    """Which gradient of its rank is it?"""
    return [sum(other == rank for _, other in ends[:place]) for place, (_, rank) in enumerate(ends)]


def until_the_next(ends):
    return [each - 1 for each in gaps(ends[::-1])[::-1]]


def only_ranks_seen_before(ends):
    seen, found = [], []
    for place, (_, rank) in enumerate(ends):
        seen.append(rank)
        begin = place - by_versions(ends)[place]
        found.append(sum(other in seen[:begin] for other in seen[begin:place]))
    return found


def remembers(ends, read={}):  # noqa: B006
    staleness = []
    for version, (_, rank) in enumerate(ends):
        staleness.append(version - read.get(rank, 0))
        read[rank] = version + 1
    return staleness


def spoils_the_long_ones(ends):
    return [min(each, 6) for each in by_versions(ends)]


def calls_the_checkers(ends):
    return count_versions(ends)


STALE = [
    (lambda ends: [0 for _ in ends], "with 7 updates of 3 ranks, every update got 0: that would be so if nobody else"),
    (lambda ends: [each + 1 for each in by_versions(ends)], "every number is too large by 1: an update does not make"),
    (lambda ends: [each - 1 for each in by_versions(ends)], "every number is too small by 1: where nobody else has"),
    (own_one_counted, "too large by 1, but for the first of each rank: a rank reads the weights after its own update"),
    (begins_before_the_first, "the first update of each rank is too large by 1: at the beginning there are 0 updates"),
    (gaps, "you have given the distance to the same rank's previous update"),
    (
        lambda ends: [-each for each in by_versions(ends)],
        "the numbers are negative: take the updates made so far, minus",
    ),
    (lambda ends: list(range(len(ends))), "you have counted all updates from the beginning"),
    (others_from_the_beginning, "you have counted all updates of other ranks from the beginning: a rank reads the"),
    (steps_of_its_own, "you have counted the updates of the same rank: those of the others make a gradient stale"),
    (each_rank_once, "you have counted each of the other ranks once: a fast one may have made several updates"),
    (of_the_fastest_other, "you have given the updates of one other rank, the one that made most: add up those of all"),
    (until_the_next, "you have counted the updates that come after each: they make the rank's next update stale"),
    (first_is_fresh, "the first update of each rank got 0: it was computed on the weights of the very beginning"),
    (only_ranks_seen_before, "update 1, by rank 1, got 0, but its staleness is 1: rank 1 had read the weights at the"),
    (seconds, "you have measured seconds: staleness counts updates"),
    (lambda ends: [int(each) for each in seconds(ends)], "you have measured seconds: staleness counts updates"),
    (
        lambda ends: [len({rank for _, rank in ends}) - 1 for _ in ends],
        "every update got the number of the other ranks",
    ),
    (lambda ends: sorted(by_versions(ends)), "the numbers are right, but in another order"),
    (lambda ends: by_versions(ends)[:-1], "it gave 6 numbers: give one for each of the 7 updates"),
    (lambda ends: max(by_versions(ends), default=0), "it gave 5: give a list of whole numbers, one for each update"),
    (lambda ends: [float(each) for each in by_versions(ends)], "update 0 got 0.0: staleness is a count, so give whole"),
    (
        lambda ends: np.array(by_versions(ends), dtype=float),
        "update 0 got 0.0: staleness is a count, so give whole num",
    ),
    (lambda ends: torch.tensor(by_versions(ends)).float(), "update 0 got 0.0: staleness is a count, so give whole num"),
    (lambda ends: [each / 2 for each in by_versions(ends)], "update 0 got 0.0: staleness is a count"),
    (lambda ends: [each > 0 for each in by_versions(ends)], "update 0 got False: staleness is a count"),
    (lambda ends: [str(each) for each in by_versions(ends)], "update 0 got '0': staleness is a count"),
    (lambda ends: "0110252", "it gave '0110252': give a list of whole numbers, one for each update"),
    (
        lambda ends: dict(enumerate(by_versions(ends))),
        "it gave {0: 0, 1: 1, 2: 1, 3: 0, 4: 2, 5: 5, 6: 2}: give a list",
    ),
    (lambda ends: [[each] for each in by_versions(ends)], "update 0 got [0]: staleness is a count"),
    (lambda ends: None, "it gave None: give a list of whole numbers, one for each update"),
    (lambda ends: [None] * len(ends), "update 0 got None: staleness is a count"),
    (lambda ends: (each for each in by_versions(ends)), "it gave a generator, which has done nothing yet"),
    (lambda ends: ends[99], "it ended in IndexError: list index out of range, in the line `(lambda ends: ends[99]"),
    (lambda ends, ranks: [0], "it ended in TypeError: <lambda>() missing 1 required positional argument: 'ranks'"),
    (lambda ends: sys.exit(), "it called exit(), which ends a whole program: use return"),
    (lambda ends: [min(each, 2) for each in by_versions(ends)], "update 5, by rank 2, got 2, but its staleness is 5"),
    (spoils_the_long_ones, "with 40 updates of 4 ranks, update"),
    (remembers, "a second call with the same updates gives different numbers: start afresh in each call"),
    (lambda ends: by_versions(ends) if ends else 1 / 0, "with 0 updates of 0 ranks, it ended in ZeroDivisionError"),
    (by_versions(EXAMPLE), "[0, 1, 1, 0, 2, 5, 2] is not a function: give the function itself, without calling it"),
    (calls_the_checkers, "this calls dlab's own count_versions, which is the answer: count the updates yourself"),
    (count_versions, "this calls dlab's own count_versions, which is the answer: count the updates yourself"),
]


@pytest.mark.parametrize(("wrong", "sentence"), STALE, ids=[str(number) for number in range(len(STALE))])
def test_each_mistake_in_counting_gets_its_own_sentence(wrong, sentence):
    answer = check_staleness(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_loop_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(calling, "LIMIT", 0.3)

    def spin(ends):
        while ends:
            pass

    assert "updates of 3 ranks, it had not returned after 0.3 s: look for a loop that does not end" in check_staleness(
        spin
    )


# ------------------------------------------------------------------------------------------ the notebook


def test_the_hidden_solution_passes_and_the_stub_does_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]

    def define(source):
        names = {"torch": torch, "dlab": dlab}
        exec(source, names)
        return names["my_staleness"]

    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_staleness(define(solution)).startswith("well done")
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def my_staleness")]
    answer = check_staleness(define(stub))
    assert "every update got 0" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
