"""Which tables can run: exactly those that a plain executor can carry out; the others are refused with the cell."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlab

# ------------------------------------------------------------------------------------- an executor that only tries


def parts(action):
    kind = action.strip("0123456789")
    stage, microbatch = action.split(kind)
    return int(stage), kind, int(microbatch)


def other_end(action):
    stage, kind, microbatch = parts(action)
    step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[kind]
    return f"{stage + step}{'RECV' if kind[0] == 'S' else 'SEND'}{kind[4:]}{microbatch}"


def can_run(action, done, homes, messages):
    """Whether everything is there that an action needs; a message needs only what it carries."""
    stage, kind, microbatch = parts(action)
    last = max(homes)

    def here(other, kinds):  # what a neighbour has done, on this rank or received from there
        if messages and homes[other] != homes[stage]:
            return f"{stage}RECV_{'F' if kinds == 'F' else 'B'}{microbatch}" in done
        return any(f"{other}{each}{microbatch}" in done for each in kinds)

    forward, gradient = f"{stage}F{microbatch}" in done, any(f"{stage}{each}{microbatch}" in done for each in "BI")
    return {
        "F": lambda: stage == 0 or here(stage - 1, "F"),
        "B": lambda: forward and (stage == last or here(stage + 1, "BI")),
        "I": lambda: forward and (stage == last or here(stage + 1, "BI")),
        "W": lambda: f"{stage}I{microbatch}" in done,
        "SEND_F": lambda: forward,
        "SEND_B": lambda: gradient,
        "RECV_F": lambda: True,
        "RECV_B": lambda: True,
    }[kind]()


def runs(rows):
    """Whether every rank gets to the end of its row: each tries its next action, again and again."""
    homes = {parts(action)[0]: rank for rank, row in enumerate(rows) for action in row}
    messages = any("_" in action for row in rows for action in row)
    left, done, moved = [list(row) for row in rows], set(), True
    while moved:
        moved = False
        for row in left:
            while row and can_run(row[0], done, homes, messages):
                if "_" in row[0]:
                    end = other_end(row[0])
                    other = next((each for each in left if each and each[0] == end), None)
                    if other is None or not can_run(end, done, homes, messages):
                        break
                    done.add(other.pop(0))
                done.add(row.pop(0))
                moved = True
    return not any(left)


def actions_of(stages, microbatches, halves, homes, messages):
    """All actions, a message as both of its ends."""
    found = []
    for stage in range(stages):
        for microbatch in range(microbatches):
            found += [(f"{stage}{kind}{microbatch}",) for kind in ("FIW" if (stage, microbatch) in halves else "FB")]
            if messages and stage + 1 < stages and homes[stage] != homes[stage + 1]:
                for send in (f"{stage}SEND_F{microbatch}", f"{stage + 1}SEND_B{microbatch}"):
                    found.append((send, other_end(send)))
    return found


def random_table(dice, messages):
    """Rows in an order in which somebody has carried them out."""
    ranks, microbatches = dice.randint(1, 4), dice.randint(1, 4)
    stages = ranks * dice.randint(1, 2) if messages else ranks + dice.randint(0, 3)
    homes = [*range(ranks), *(dice.randrange(ranks) for _ in range(stages - ranks))]
    dice.shuffle(homes)
    homes = dict(enumerate(homes))
    halves = {(stage, m) for stage in range(stages) for m in range(microbatches) if dice.random() < 0.4}
    left, done, rows = actions_of(stages, microbatches, halves, homes, messages), set(), [[] for _ in range(ranks)]
    has_messages = any(len(each) > 1 for each in left)
    while left:
        ready = [each for each in left if can_run(each[0], done, homes, has_messages)]
        chosen = dice.choice(ready)
        left.remove(chosen)
        for action in chosen:
            done.add(action)
            rows[homes[parts(action)[0]]].append(action)
    return rows


def swapped(rows, dice, times):
    """The rows with some pairs of cells of a row exchanged."""
    rows = [list(row) for row in rows]
    for _ in range(times):
        row = dice.choice(rows)
        one, other = dice.randrange(len(row)), dice.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    return rows


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9), messages=st.booleans(), times=st.integers(0, 3))
def test_a_table_is_refused_if_and_only_if_nobody_can_carry_it_out(seed, messages, times):
    dice = random.Random(seed)
    rows = random_table(dice, messages)
    assert runs(rows)
    assert dlab.Schedule(rows).rows == tuple(map(tuple, rows))
    changed = swapped(rows, dice, times)
    if runs(changed):
        assert dlab.Schedule(changed).makespan() > 0
    else:
        with pytest.raises(ValueError, match=r"^row \d+, column \d+: \d+\w+ (comes before|waits for) "):
            dlab.Schedule(changed)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), messages=st.booleans())
def test_a_table_in_which_an_action_is_missing_or_twice_is_refused(seed, messages):
    dice = random.Random(seed)
    rows = random_table(dice, messages)
    less, more = [list(row) for row in rows], [list(row) for row in rows]
    row = dice.choice(less)
    row.pop(dice.randrange(len(row)))
    row = dice.choice(more)
    row.insert(dice.randrange(len(row) + 1), dice.choice(row))
    for broken in (less, more):
        with pytest.raises(ValueError, match=r"^row \d+"):
            dlab.Schedule(broken)


def test_among_random_tables_are_both_sorts():
    """Else the property above would say little."""
    dice = random.Random(0)
    found = [runs(swapped(random_table(dice, messages), dice, 1)) for messages in (False, True) for _ in range(200)]
    assert 0.1 < sum(found) / len(found) < 0.9


# ------------------------------------------------------------------------------------- the sentences


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        # uses what is not there yet
        ("0F0 0B0|1B0 1F0", "row 1, column 0: 1B0 comes before 1F0 (row 1, column 1), and uses the activation that it"),
        ("1F0 0F0 0B0 1B0", "row 0, column 0: 1F0 comes before 0F0 (row 0, column 1), and uses the activation that"),
        ("0F0 1F0 0B0 1B0", "row 0, column 2: 0B0 comes before 1B0 (row 0, column 3), and uses the gradient that it"),
        ("0F0 0W0 0I0", "row 0, column 1: 0W0 comes before 0I0 (row 0, column 2), and uses the gradient that it makes"),
        # twice, or never
        ("0F0 0F0 0B0", "row 0, column 1: 0F0 is there twice, also in row 0, column 0"),
        ("0F0 0B0 . 0B0", "row 0, column 3: 0B0 is there twice, also in row 0, column 1"),
        (
            "0F0 0B0 0W0",
            "row 0, column 2: 0W0 is a half of 0B0 (row 0, column 1): it would run twice; leave one of them",
        ),
        ("0F0", "row 0, column 0: 0F0 never gets its backward: add 0B0 to row 0, or 0I0 and 0W0"),
        ("0F0 . 0I0", "row 0, column 2: 0I0 is one half of a backward: add 0W0, the other one, to row 0"),
        ("0F0 0B0 0B1", "row 0, column 2: 0B1 is a backward without its forward: add 0F1 to row 0"),
        ("0F0 0F1 0B0 0B1|1F0 1B0", "row 0, column 1: 0F1 is of micro-batch 1, which stage 1 never runs: add 1F1"),
        ("0F1 0B1", "row 0, column 0: 0F1 is of micro-batch 1, but there is no micro-batch 0"),
        # stages
        ("0F0 0B0|2F0 2B0", "row 1, column 0: 2F0 is of stage 2, but no row has stage 1"),
        ("0F0 0B0|0F1 0B1", "row 1, column 0: 0F1 is of stage 0, which is on another rank: 0F0 (row 0, column 0)"),
        ("0F0 0B0|", "row 1 has no action: every rank has at least one stage"),
        (
            "0F0 xx",
            "row 0, column 1: 'xx' is no action: write the number of the stage, what it does (F, B, I, W, SEND_F",
        ),
        # nobody can go on
        (
            "0F0 0B0 0F1 0B1|1F1 1B1 1F0 1B0",
            "row 0, column 1: 0B0 waits for 1B0 (row 1, column 3), which comes after 1F1 (row 1, column 0), which "
            "waits for 0F1 (row 0, column 2), which comes after 0B0 (row 0, column 1): a deadlock",
        ),
        # messages
        (
            "0F0 0SEND_F0 0SEND_F9 0RECV_B0 0B0|1RECV_F0 1RECV_F9 1F0 1B0 1SEND_B0",
            "row 0, column 2: 0SEND_F9 is of micro-batch 9, with which no stage computes",
        ),
        ("0SEND_F0|1RECV_F0", "row 0, column 0: 0SEND_F0 is of micro-batch 0, which stage 0 never runs: add 0F0"),
        ("0F0 0SEND_F0 0B0|1F0 1B0", "row 0, column 1: 0SEND_F0 would wait forever: add 1RECV_F0 to row 1"),
        ("0F0 0SEND_F0 0RECV_B0 0B0|1RECV_F0 1F0 1B0", "row 0, column 2: 0RECV_B0 would wait forever: add 1SEND_B0 to"),
        (
            "0F0 0SEND_F0 0B0|1RECV_F0 1F0 1B0",
            "row 0, column 2: 0B0 uses a result of another rank, which never arrives",
        ),
        ("0F0 0B0 0SEND_B0", "row 0, column 2: 0SEND_B0 is a message of stage 0 with a stage before the first one"),
        ("0F0 0B0 0SEND_F0", "row 0, column 2: 0SEND_F0 is a message of stage 0 with a stage after the last one"),
        (
            "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0",
            "row 0, column 1: 0SEND_F0 and 1RECV_F0 (row 0, column 2) are on one rank",
        ),
        (
            "0SEND_F0 0F0 0RECV_B0 0B0|1RECV_F0 1F0 1B0 1SEND_B0",
            "row 0, column 0: 0SEND_F0 comes before 0F0 (row 0, col",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0|1F0 1RECV_F0 1B0 1SEND_B0",
            "row 1, column 0: 1F0 comes before 1RECV_F0 (row 1, co",
        ),
    ],
)
def test_the_cell_and_the_reason_are_told(rows, words):
    table = [[None if cell == "." else cell for cell in row.split()] for row in rows.split("|")]
    with pytest.raises(ValueError) as problem:
        dlab.Schedule(table)
    assert str(problem.value).startswith(words), str(problem.value)
    assert str(problem.value).endswith("(rows and columns are counted from 0)")


@pytest.mark.parametrize(
    ("rows", "words"), [("0F0,0B0", "a list with a list"), (["0F0"], "a list with"), ([], "has none")]
)
def test_what_is_no_table_is_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        dlab.Schedule(rows)


def test_a_long_circle_is_told_in_short():
    """The last stage is on the first rank, which wants to begin with it."""
    rows = [["16F0", "0F0", "16B0", "0B0"], *([f"{stage}F0", f"{stage}B0"] for stage in range(1, 16))]
    with pytest.raises(ValueError) as problem:
        dlab.Schedule(rows)
    assert str(problem.value).startswith(
        "row 0, column 0: 16F0 waits for 15F0 (row 15, column 0), which waits for 14F0 (row 14, column 0), which waits "
        "for 13F0 (row 13, column 0), which waits for 12F0 (row 12, column 0), and so on, over 12 more ranks: a dead"
    )


# ------------------------------------------------------------------------------------- deadlocks of real users

FIRST = [
    "0F0 0SEND_F0 0F1 {} 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1"
    " 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 3RECV_F0 3F0 1SEND_F1 3RECV_F1 3F1 3B0 3SEND_B0 1RECV_B0 1B0 3B1 3SEND_B1"
    " 1RECV_B1 1B1 1SEND_B0 1SEND_B1",
]
SECOND = [
    "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 0F2 {} 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2"
    " 2RECV_B1 2B1 2SEND_B1 2RECV_B2 2B2 2SEND_B2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
    "1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 3RECV_F0 1SEND_F1 3F0 3B0 {} 3F1 3B1 1RECV_F2 1F2 1RECV_B0 1B0 1SEND_F2"
    " 3RECV_F2 3F2 3B2 3SEND_B1 1RECV_B1 1B1 3SEND_B2 1RECV_B2 1B2 1SEND_B0 1SEND_B1 1SEND_B2",
]


def filled(rows, *cells):
    return [row.format(cell).split() for row, cell in zip(rows, cells, strict=True)]


def test_two_ranks_that_send_first_wait_for_each_other():
    """Rank 0 sends to rank 1 before it receives, and rank 1 does the same (pytorch#172668)."""
    rows = filled(FIRST, "0SEND_F1 2RECV_F0", "")
    assert not runs(rows)
    with pytest.raises(ValueError) as problem:
        dlab.Schedule(rows)
    assert str(problem.value).startswith(
        "row 0, column 3: 0SEND_F1 waits for 1RECV_F1 (row 1, column 3), which comes after 1SEND_F0 (row 1, column 2), "
        "which waits for 2RECV_F0 (row 0, column 4), which comes after 0SEND_F1 (row 0, column 3): a deadlock"
    )


def test_swapping_the_order_on_odd_ranks_is_no_cure_for_every_deadlock():
    sends_first = "0SEND_F2 2RECV_B0"
    for odd in ("3RECV_F1 3SEND_B0", "3SEND_B0 3RECV_F1"):
        rows = filled(SECOND, sends_first, odd)
        assert not runs(rows)
        with pytest.raises(ValueError, match=r"3SEND_B0 .*: a deadlock, since each waits for the next"):
            dlab.Schedule(rows)


@pytest.mark.parametrize(
    "rows",
    [filled(FIRST, "2RECV_F0 0SEND_F1", ""), filled(SECOND, "2RECV_B0 0SEND_F2", "3RECV_F1 3SEND_B0")],
    ids=["first", "second"],
)
def test_where_the_lower_rank_receives_first_both_can_run(rows):
    assert runs(rows)
    schedule = dlab.Schedule(rows)
    assert schedule.computations == tuple(tuple(each for each in row if "_" not in each) for row in rows)
    assert schedule.makespan() >= dlab.Schedule(schedule.computations).makespan()
    assert "0SEND_F0" in str(schedule) and schedule == dlab.Schedule.from_csv(schedule.csv())
    assert len(schedule.figure().axes[0].collections[1].get_paths()) == sum(map(len, schedule.computations))
