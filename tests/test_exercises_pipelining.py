"""The exercises of the lesson on pipelines: right answers in any notation pass, and each mistake is told apart."""

import json
import random
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import dlab
from dlab.exercises import check_1f1b, check_bubbles, check_deadlock, check_microbatches
from dlab.exercises.deadlocks import TABLE, stands_at

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "08_pipeline.ipynb"


def is_one_sentence(answer):
    return answer.startswith(("well done: ", "not yet: ")) and answer.endswith(".") and "\n" not in answer


# ------------------------------------------------------------------------------------- 1F1B as a table

# by hand, from the picture in the lesson; not from `dlab.schedule`
ROW0 = "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4"
ROW1 = "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4"
ROW2 = "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4"
ROWS = [row.split() for row in (ROW0, ROW1, ROW2)]


def with_row(rank, row):
    return [row.split() if number == rank else each for number, each in enumerate(ROWS)]


def renamed(change):
    return [[change(cell) for cell in row] for row in ROWS]


def by_kinds(*rows, order=range(5)):
    """Rows from what their actions do, with the micro-batches in this order."""
    found = []
    for rank, row in enumerate(rows):
        numbers = {"F": iter(order), "B": iter(order)}
        found.append([f"{rank}{kind}{next(numbers[kind])}" for kind in row])
    return found


RIGHT_TABLES = {
    "lists": ROWS,
    "texts": [ROW0, ROW1, ROW2],
    "tuples": tuple(map(tuple, ROWS)),
    "commas": [row.replace(" ", ", ") for row in (ROW0, ROW1, ROW2)],
    "bars": [row.replace(" ", " | ") for row in (ROW0, ROW1, ROW2)],
    "lower case": renamed(str.lower),
    "spaces in cells": renamed(lambda cell: f" {cell} "),
    "one text": f"{ROW0}\n{ROW1}\n{ROW2}\n",
    "csv": "\n".join(",".join(row) for row in ROWS),
    "blanks": [ROWS[0], ["", *ROWS[1]], [None, ".", "2F0", "-", *ROWS[2][1:], "·"]],
    "by rank": dict(enumerate(ROWS)),
    "by rank in any order": {2: ROW2, 0: ROW0, 1: ROW1},
    "actions": [[dlab.Schedule(ROWS).rows[rank][place] for place in range(10)] for rank in range(3)],
    "a schedule": dlab.Schedule(ROWS),
    "the grid": str(dlab.Schedule(ROWS)),
    "arrays": [np.array(row) for row in ROWS],
    "an array": np.array(ROWS),
    "iterators": (iter(row) for row in ROWS),
    "other order of micro-batches": by_kinds("FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB", order=(2, 0, 1, 4, 3)),
}


@pytest.mark.parametrize("right", RIGHT_TABLES.values(), ids=RIGHT_TABLES)
def test_right_tables_pass(right):
    answer = check_1f1b(right)
    assert answer.startswith("well done: it runs, takes 21 units of time") and is_one_sentence(answer)
    assert "keeps the activations of 3, 2 and 1 micro-batches" in answer


WRONG_TABLES = [
    # other schedules
    (by_kinds(*["FFFFFBBBBB"] * 3), "this is GPipe, all forwards and then all backwards"),
    ([row.replace(" ", "") for row in (ROW0, ROW1, ROW2)], "in row 0, '0F00F10F20B00F30B10F40B20B30B4' is no action"),
    (
        by_kinds(*["FBFBFBFBFB"] * 3),
        "as in the naive pipeline, and only one rank computes at a time: let rank 0 begi",
    ),
    (by_kinds(*["FFFBFBFBBB"] * 3), "every rank begins with 3 forwards here, but ranks 1 and 2 can have a backward"),
    (by_kinds("FFBFBFBFBB", "FBFBFBFBFB", "FBFBFBFBFB"), "begins with one forward too few, and waits while the next"),
    (by_kinds("FFFFBFBBBB", "FFFBFBFBBB", "FFBFBFBFBB"), "begins with one forward too many, which costs memory and"),
    (by_kinds("FBFBFBFBFB", "FFBFBFBFBB", "FFFBFBFBBB"), "first ranks begin with few forwards and the last ones w"),
    (by_kinds("FFFBFBFBBB", "FFBFBFBFBB", "FFBFBFBFBB"), "rank 2, which has the last stage, has its first backward"),
    (
        with_row(0, "0F0 0F1 0B0 0F2 0F3 0B1 0F4 0B2 0B3 0B4"),
        "look at row 0, where 0B0 comes too early: rank 0 begins with 3 for",
    ),
    (
        with_row(0, "0F0 0F1 0F2 0F3 0B0 0B1 0F4 0B2 0B3 0B4"),
        "it runs, but rank 0 keeps the activations of 4 micro-batches, and with 1F1B of 3: look at row 0, where 0F3 "
        "comes out of turn: after the first 3 forwards, a backward and a forward follow by turns",
    ),
    (
        with_row(1, "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1F4 1B3 1B4"),
        "takes 24 units of time, and 1F1B takes 21: look at row 1, where 1B1 comes out of turn: after the first 2 forw",
    ),
    (
        [ROW0, ROW1, "2F0 2F1 2B1 2B0 2F2 2B2 2F3 2B3 2F4 2B4"],
        "units of time, and 1F1B takes 21, and rank 2 keeps the activations of 2",
    ),
    (
        [ROW0, "1F1 1F0 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4", ROW2],
        "alternate as they should, but the micro-batches come in an order in which ranks wait: it takes 23 units",
    ),
    # tables that cannot run
    (with_row(2, "2B0 2F0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4"), "row 2, column 0: 2B0 comes before 2F0 (row 2, column 1)"),
    (with_row(2, "2F4 2B4 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"), "waits for 2B0 (row 2, column 3), which comes after 2F4"),
    (with_row(0, "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4"), ": a deadlock, since each waits for the next"),
    # missing, twice, too many
    (with_row(1, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3"), "row 1 has no 1B4: each stage runs every micro-batch forward"),
    (with_row(0, "0F0 0F1 0F2 0B0 0B1 0F4 0B2 0B4"), "row 0 has no 0F3 and 0B3: each stage"),
    (with_row(1, ROW1 + " 1B4"), "row 1 has 1B4 twice"),
    (with_row(2, ROW2.replace("2F3", "2F2")), "row 2 has 2F2 twice"),
    (with_row(2, ROW2 + " 2F5 2B5"), "row 2 has 2F5: the micro-batches are 0 to 4"),
    (by_kinds(*["FFFF"] * 3), "there are 5 micro-batches, 0 to 4, and this table is for 4 micro-batches"),
    (by_kinds(*["FFFFFF"] * 3, order=range(6)), "and this table is for 6 micro-batches"),
    ([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]], "and this table is for 1 micro-batch."),
    (by_kinds(*["FFFFF"] * 3), "there are only forwards: each of them needs its backward, such as 0B0"),
    # numbers and actions
    (
        renamed(lambda cell: f"{cell[0]}{cell[1]}{int(cell[2]) + 1}"),
        "micro-batches are counted from 1 here: they are 0 t",
    ),
    (
        renamed(lambda cell: f"{int(cell[0]) + 1}{cell[1:]}"),
        "stages are counted from 1 here: they are 0 to 2, so row 0",
    ),
    (
        renamed(lambda cell: cell[::-1]),
        "stage and micro-batch have changed places: the number before F or B is the st",
    ),
    (ROWS[::-1], "the rows are upside down: row 0 is rank 0"),
    ([ROWS[0], ROWS[2], ROWS[1]], "row 1 has 2F0, of stage 2: stage 1 is on rank 1, and it has no other"),
    (with_row(0, ROW0 + " 3F0"), "row 0 has 3F0, but the stages are 0 to 2"),
    (with_row(1, ROW1.replace("1F3", "0F3")), "row 1 has 0F3, of stage 0"),
    (renamed(lambda cell: cell.replace("B", "I")), "0I0 is half a backward, as in zero-bubble schedules: 1F1B has who"),
    (with_row(0, "0F0 0SEND_F0 0F1 0F2 0B0"), "0SEND_F0 is a message: this table has forwards and backwards only, and"),
    (renamed(lambda cell: cell[1:]), "in row 0, 'F0' is no action: write the number of the stage, what it does"),
    (renamed(lambda cell: cell.replace("F", "forward")), "in row 0, '0FORWARD0' is no action"),
    # no tables
    (ROWS[:2], "so the table has 3 rows, but here are 2"),
    (list(map(list, zip(*ROWS, strict=True)))[:5], "but here are 5: rows are ranks, not micro-batches"),
    ([ROW0], "so the table has 3 rows, but here is 1."),
    ([*ROWS[0], *ROWS[1], *ROWS[2]], "this is one long list: give a list with a row for each rank, such as [["),
    ([], "so the table has 3 rows, but here are 0"),
    ([[], [], []], 'the table is empty: rank 0 begins with ["0F0", "0F1", …]'),
    ({1: ROW0, 2: ROW1, 3: ROW2}, "the rows are those of ranks 1, 2, 3: number them from 0 to 2"),
    (None, "None is not a table: give a list with a row for each rank"),
    (7, "7 is not a table"),
    (np.array(7), "array(7) is not a table"),
    ([ROW0, 5, ROW2], "row 1 is not a list of actions: write it as"),
    (dlab.schedule("1f1b", 3, 5), "this is dlab's own 1f1b, which is the answer: write the rows yourself"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_TABLES, ids=[sentence for _, sentence in WRONG_TABLES])
def test_each_mistake_in_a_table_gets_its_own_sentence(wrong, sentence):
    answer = check_1f1b(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer, answer


def test_no_other_order_passes():
    """Any forwards and backwards of a rank in their orders: only 1F1B is as fast with as little memory."""
    dice, sentences = random.Random(0), set()
    for _ in range(600):
        kinds = []
        for rank in range(3):
            ahead = [0]
            while len(ahead) <= 10:
                ready = [move for move in (1, -1) if 0 <= ahead[-1] + move <= min(4 - rank, 10 - len(ahead))]
                ahead.append(ahead[-1] + dice.choice(ready))
            kinds.append("".join("F" if after > before else "B" for before, after in pairwise(ahead)))
        answer = check_1f1b(by_kinds(*kinds))
        assert answer.startswith("well done") == (kinds == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"])
        assert is_one_sentence(answer)
        sentences.add(re.sub(r"\d", "", answer)[:40])
    assert len(sentences) > 3


# ------------------------------------------------------------------------------------- a deadlock

STUCK = ["0SEND_F1", "1SEND_B0"]


def exchanged(rank, *places):
    """A row of the table, in which the first action of each place comes last there."""
    row = TABLE[rank]
    for place in places:
        first, *others = place.split()
        assert place in row
        row = row.replace(place, " ".join([*others, first]))
    return row


LOWER_FIRST = [exchanged(0, "0SEND_F1 0RECV_B0", "0SEND_F2 0RECV_B1"), TABLE[1]]
HIGHER_FIRST = [TABLE[0], exchanged(1, "1SEND_B0 1RECV_F1", "1SEND_B1 1RECV_F2")]


def test_the_table_of_the_exercise_deadlocks_where_one_finds_it_by_hand():
    rows = dlab.Schedule([row.split() for row in LOWER_FIRST]).rows  # the same actions
    table = [row.split() for row in TABLE]
    assert [sorted(row) for row in rows] == [sorted(row) for row in table]
    with pytest.raises(ValueError, match=r"row 0, column 3: 0SEND_F1 waits for 1RECV_F1 .* deadlock"):
        dlab.Schedule(table)
    assert stands_at([list(row) for row in rows]) == [None, None]


RIGHT_ANSWERS = {
    "the lower rank receives first": (STUCK, LOWER_FIRST),
    "the higher rank receives first": (STUCK, HIGHER_FIRST),
    "one and the other": (STUCK, [exchanged(0, "0SEND_F1 0RECV_B0"), exchanged(1, "1SEND_B1 1RECV_F2")]),
    "by rank": (dict(enumerate(STUCK)), {0: LOWER_FIRST[0].split(), 1: LOWER_FIRST[1].split()}),
    "one text": ("0SEND_F1, 1SEND_B0", "\n".join(LOWER_FIRST)),
    "lower case": ("0send_f1 1send_b0", [row.lower() for row in LOWER_FIRST]),
    "a schedule": (tuple(STUCK), dlab.Schedule([row.split() for row in LOWER_FIRST])),
    "gradients are sent late": (STUCK, [TABLE[0], exchanged(1, "1SEND_B0 1RECV_F1 1F1", "1SEND_B1 1RECV_F2")]),
}


@pytest.mark.parametrize(("stuck", "mended"), RIGHT_ANSWERS.values(), ids=RIGHT_ANSWERS)
def test_places_and_tables_that_are_right(stuck, mended):
    answer = check_deadlock(stuck, mended)
    assert answer.startswith("well done: rank 0 stands at its send and rank 1 at its own") and is_one_sentence(answer)


WRONG_PLACES = [
    (["1SEND_B0", "0SEND_F1"], "the two have changed places: give the action of rank 0 first"),
    (["1RECV_F1", "0RECV_B0"], "1RECV_F1 is what rank 0 waits for, and it stands at the other end of that message"),
    (["0SEND_F1", "0RECV_B0"], "0RECV_B0 is what rank 1 waits for"),
    (["0F1", "1B0"], "rank 0 gets past 0F1, which needs nothing but 0SEND_F0: it computes that, and waits at a mess"),
    (["0F0", "1SEND_B0"], "rank 0 gets past 0F0: it computes that"),
    (["0SEND_F0", "1RECV_F0"], "rank 0 gets past 0SEND_F0, because rank 1 comes to 1RECV_F0 and the message goes over"),
    (["0SEND_F1", "1RECV_F0"], "rank 1 gets past 1RECV_F0, because rank 0 comes to 0SEND_F0"),
    (["0RECV_B0", "1RECV_F1"], "rank 0 never gets as far as 0RECV_B0: go through both rows"),
    (["0SEND_F1", "1RECV_F1"], "rank 1 never gets as far as 1RECV_F1"),
    (["0SEND_F2", "1SEND_B1"], "rank 0 never gets as far as 0SEND_F2"),
    (["0SEND_F1", "1F1"], "rank 1 never gets as far as 1F1"),
    (["1F0", "1SEND_B0"], "rank 0 does not have 1F0, which is in the row of rank 1: take an action of row 0"),
    (["0SEND_F7", "1SEND_B0"], "rank 0 does not have 0SEND_F7: take an action of row 0"),
    (["0SEND_F1"], "['0SEND_F1'] are not two actions: give that of rank 0 and that of rank 1"),
    ("everywhere", "are not two actions"),
    ({0: "0SEND_F1"}, "say for rank 0 and for rank 1 at which action it waits"),
    ([3, 3], "of the places where ranks wait, '3' is no action"),
    (None, "None are not two actions"),
]
WRONG_MENDS = [
    (TABLE, "the table is as it was: let one of the two ranks receive before it sends"),
    (
        [exchanged(0, "0SEND_F1 0RECV_B0"), TABLE[1]],
        "the first deadlock is gone, but a second one of the same kind follows: rank 0 waits at 0SEND_F2",
    ),
    (
        [TABLE[0], exchanged(1, "1SEND_B0 1RECV_F1")],
        "but a second one of the same kind follows",
    ),
    (
        [LOWER_FIRST[0], HIGHER_FIRST[1]],
        "but now both ranks receive first, and nobody sends: exchange send and receive",
    ),
    (
        [" ".join(cell for cell in row.split() if "_" not in cell) for row in TABLE],
        "your table has no messages: without them nothing arrives",
    ),
    ([LOWER_FIRST[0].replace(" 0SEND_F2", ""), TABLE[1]], "0SEND_F2 has gone from row 0: move it, and keep it"),
    ([LOWER_FIRST[0] + " 0F3", TABLE[1]], "row 0 has 0F3 more than before: only move actions"),
    (
        [LOWER_FIRST[0].replace("0SEND_F2", "1RECV_F2"), TABLE[1].replace("1RECV_F2", "0SEND_F2")],
        "row 0 has 1RECV_F2, which is of rank 1",
    ),
    (
        [LOWER_FIRST[0].replace("0F1", "0f9").replace("0F2", "0F1").replace("0f9", "0F2"), TABLE[1]],
        "in row 0 0F2 comes before 0F1, which is no longer 1F1B: leave the computations in their order",
    ),
    (
        ["0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0F2 0SEND_F2 0RECV_B2 0B2", TABLE[1]],
        "in row 0 0B0 comes before 0F1, which is no longer 1F1B",
    ),
    (
        [TABLE[0].replace("0F1 0SEND_F1", "0SEND_F1 0F1"), TABLE[1]],
        "the table cannot run: row 0, column 2: 0SEND_F1 comes before 0F1 (row 0, column 3), and uses the activation",
    ),
    (
        [TABLE[0]],
        "of the mended table, there are 2 stages, each on a rank of its own, so the table has 2 rows, but here",
    ),
    ([TABLE[0], TABLE[1].replace("1B0", "xx")], "of the mended table, in row 1, 'XX' is no action"),
    (None, "of the mended table, None is not a table"),
]


@pytest.mark.parametrize(("stuck", "sentence"), WRONG_PLACES, ids=[sentence for _, sentence in WRONG_PLACES])
def test_places_where_a_rank_does_not_wait(stuck, sentence):
    answer = check_deadlock(stuck, LOWER_FIRST)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer, answer


@pytest.mark.parametrize(("mended", "sentence"), WRONG_MENDS, ids=[sentence for _, sentence in WRONG_MENDS])
def test_tables_that_are_not_mended(mended, sentence):
    answer = check_deadlock(STUCK, mended)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer, answer


# ------------------------------------------------------------------------------------- predictions

PREDICTED = {"gpipe": (7 / 32, 32), "1f1b": (7 / 32, 8), "interleaved": (7 / 128, 39)}


def test_the_predictions_are_those_of_the_schedules():
    for name, virtual in {"gpipe": 1, "1f1b": 1, "interleaved": 4}.items():
        plan = dlab.schedule(name, 8, 32, virtual)
        assert (pytest.approx(plan.bubble), plan.peak_activations[0]) == PREDICTED[name]


@pytest.mark.parametrize(
    "right",
    [
        PREDICTED,
        {"gpipe": (0.21875, 32), "1f1b": (0.219, 8.0), "interleaved": (0.0547, 39)},
        {"interleaved": [Fraction(7, 128), 39], "1f1b": [0.22, np.int64(8)], "gpipe": [Fraction(7, 32), 32]},
        {name: (np.float64(bubble), peak) for name, (bubble, peak) in PREDICTED.items()},
    ],
)
def test_right_predictions_pass(right):
    answer = check_bubbles(right)
    assert answer.startswith("well done: GPipe and 1F1B wait equally long") and is_one_sentence(answer)


WRONG_BUBBLES = [
    (
        "gpipe",
        7 / 39,
        "that is the share of the whole time, (p-1)/(m+p-1): divide the waiting by the time of computing",
    ),
    ("gpipe", 8 / 32, "the first micro-batch passes p-1 other ranks, not p"),
    ("gpipe", 31 / 8, "ranks and micro-batches have changed places"),
    ("gpipe", 7, "that is the naive pipeline's, where nothing else is under way"),
    ("gpipe", 21.875, "that is in percent: give the fraction itself"),
    ("gpipe", 21, "that is how long a rank waits, in units of time: divide it by how long it computes"),
    ("gpipe", 117, "that is the time of the whole step"),
    ("gpipe", 39 / 32, "that is bubble and computing together: leave the 1 out"),
    ("gpipe", 32 / 7, "that is its inverse"),
    ("gpipe", 32, "the peak comes second"),
    ("gpipe", 7 / 128, "that is with 4 stages on each rank, and gpipe has one"),
    ("gpipe", -1, "count the units in which rank 0 waits"),
    ("1f1b", 0, "1F1B saves memory and no time: its bubble is GPipe's"),
    ("1f1b", 8, "the peak comes second"),
    ("1f1b", 0.5, "the bubble of 1f1b is not 0.5: count the units"),
    ("interleaved", 7 / 32, "takes only a quarter of the time of a rank's whole part, so divide by v as well"),
    ("interleaved", 7 / 8, "more and smaller stages make the bubble smaller: divide by v"),
    ("interleaved", 7 / 135, "that is the share of the whole time"),
    ("interleaved", 8 / 128, "passes p-1 other ranks, not p"),
    ("interleaved", 5.46875, "that is in percent"),
]
WRONG_PEAKS = [
    ("gpipe", 8, "GPipe keeps all micro-batches until the first backward; that is 1F1B's"),
    ("gpipe", 1, "the last rank, too, keeps all m of them"),
    ("gpipe", 31, "count the forwards of rank 0 before its first backward"),
    ("1f1b", 32, "that is GPipe's: with 1F1B, rank 0 has its first backward long before its last forward"),
    ("1f1b", 7, "the forward of a last one comes before the first backward: one more"),
    ("1f1b", 1, "that is the last rank's: rank 0 waits longest for its first backward"),
    ("1f1b", 15, "2(p-1)+1 is with several stages on a rank"),
    ("1f1b", 0, "its peak on rank 0 is not 0: count the forwards"),
    ("interleaved", 38, "the forward before the first backward is missing: one more"),
    ("interleaved", 128, "that would be all forwards of all stages: backwards begin before"),
    ("interleaved", 8, "that is the peak of 1F1B, and here a rank has 4 stages"),
    ("interleaved", 32, "that is the forwards of v stages"),
    ("interleaved", 47, "the last of the v stages gets only as far as the first backward"),
    ("interleaved", 25, "that is the last rank's"),
    ("interleaved", 9.75, "that is in activations of a whole rank: count those of each stage"),
    ("interleaved", 3 * 8 + 7 + 1, "that is the forwards of v stages"),
]


@pytest.mark.parametrize(("name", "bubble", "sentence"), WRONG_BUBBLES)
def test_wrong_bubbles(name, bubble, sentence):
    answer = check_bubbles(PREDICTED | {name: (bubble, PREDICTED[name][1])})
    assert answer.startswith(f"not yet: the bubble of {name} is not ") and is_one_sentence(answer)
    assert sentence in answer, answer


@pytest.mark.parametrize(("name", "peak", "sentence"), WRONG_PEAKS)
def test_wrong_peaks(name, peak, sentence):
    answer = check_bubbles(PREDICTED | {name: (PREDICTED[name][0], peak)})
    assert answer.startswith(f"not yet: the bubble of {name} is right, but its peak on rank 0 is not ")
    assert is_one_sentence(answer) and sentence in answer, answer


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (None, "give a dictionary with a pair for each of gpipe, 1f1b, interleaved"),
        ({"gpipe": (0.2, 32)}, "give a dictionary with a pair for each"),
        (PREDICTED | {"zbv": (0, 8)}, "give a dictionary with a pair for each"),
        (PREDICTED | {"gpipe": 0.2}, "for gpipe you have 0.2: give two numbers"),
        (PREDICTED | {"1f1b": (0.2,)}, "for 1f1b you have (0.2,): give two numbers"),
        (PREDICTED | {"1f1b": "7/32, 8"}, "for 1f1b you have '7/32, 8': give two numbers"),
        (PREDICTED | {"1f1b": ("7/32", 8)}, "the bubble of 1f1b is '7/32' here: give a number"),
        (PREDICTED | {"1f1b": (7 / 32, None)}, "the peak of 1f1b is None here: give a number"),
        (PREDICTED | {"1f1b": (True, 8)}, "the bubble of 1f1b is True here: give a number"),
    ],
)
def test_what_is_no_prediction(wrong, sentence):
    answer = check_bubbles(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer, answer


# ------------------------------------------------------------------------------------- how many micro-batches


def test_the_smallest_number_with_a_bubble_below_a_tenth():
    assert [dlab.schedule("1f1b", 8, m).bubble < 0.1 for m in (70, 71)] == [False, True]
    for right in (71, np.int64(71), 71.0):
        answer = check_microbatches(right)
        assert answer.startswith("well done: with 71 micro-batches the bubble is 0.09859") and is_one_sentence(answer)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (8, "with 8 micro-batches the bubble is 0.875: use more"),
        (1, "with 1 micro-batch the bubble is 7: use more"),
        (63, "with 63 micro-batches the bubble is 0.1111: use more"),
        (64, "below 0.1 is only the share of the whole time, 0.09859: use more"),
        (70, "with 70 micro-batches the bubble is 0.1, and it is to be below 0.1: one more"),
        (72, "which is below 0.1, but fewer do as well."),
        (80, "but fewer do as well"),
        (81, "but fewer do as well: it is (p-1)/m, not p/m"),
        (128, "but fewer do as well"),
        (0, "0 micro-batches are no batch: give 1 or more"),
        (-4, "-4 micro-batches are no batch"),
        (70.5, "70.5 is not a number of micro-batches: give a whole number"),
        ("71", "'71' is not a number of micro-batches"),
        (True, "True is not a number of micro-batches"),
        (10**400, "is not a number of micro-batches"),
        (float("inf"), "inf is not a number of micro-batches"),
        (None, "None is not a number of micro-batches"),
    ],
)
def test_other_numbers_of_micro_batches(wrong, sentence):
    answer = check_microbatches(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer, answer


# ------------------------------------------------------------------------------------- the notebook

STUBS = {
    "my_rows": lambda found: check_1f1b(found["my_rows"]),
    "stuck": lambda found: check_deadlock(found["stuck"], found["my_table"]),
    "predictions": lambda found: check_bubbles(found["predictions"]),
    "my_microbatches": lambda found: check_microbatches(found["my_microbatches"]),
}


def define(source):
    names = {"dlab": dlab}
    exec("\n".join(line for line in source.splitlines() if not line.startswith("print(")), names)
    return names


def test_the_hidden_solutions_pass_and_the_stubs_do_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    shown = "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
    (hidden,) = [text for text in sources if "<details>" in text]
    solutions = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert len(solutions) == len(STUBS)
    for begins, check in STUBS.items():
        (solution,) = [text for text in solutions if text.startswith(begins)]
        assert check(define(solution)).startswith("well done")
        (stub,) = [text for text in sources if text.startswith(begins)]
        answer = check(define(stub))
        assert answer.startswith("not yet") and f"{answer}\n" in shown


def test_the_table_in_the_notebook_is_that_of_the_checker():
    sources = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    (stub,) = [text for text in sources if text.startswith("stuck")]
    assert tuple(define(stub)["my_table"]) == TABLE
