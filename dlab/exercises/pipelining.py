"""The exercise of `08_pipeline.ipynb`, "write 1F1B as a table": any notation is read, and mistakes are told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dlab.exercises.sandbox import count, join, name_ranks
from dlab.pipeline import Action, Schedule, schedule
from dlab.pipeline.actions import FORWARD, TRANSFERS

STAGES, MICROBATCHES = 3, 5
_BLANK = {"", ".", "·", "-", "_", "None"}  # of a cell in which a rank waits
_EXAMPLE = '["0F0", "0F1", …]'
Rows = list[list[Action]]


def check_1f1b(table: Any) -> str:
    """Judge a table for 1F1B with 3 stages and 5 micro-batches: "well done …", or "not yet: …".

    A row per rank: a list of actions, or a text with blanks or commas between them; cells in which a rank waits may be
    there or not. It must run, take the time of 1F1B, and keep as few activations.

    >>> check_1f1b([["0F0", "0B0"], ["1F0", "1B0"]])
    'not yet: there are 3 stages, each on a rank of its own, so the table has 3 rows, but here are 2.'
    """
    rows = read_table(table, STAGES)
    if isinstance(rows, str):
        return f"not yet: {rows}."
    problem = _wrong_cell(rows) or _wrong_size(rows)
    if problem is None:
        try:
            made = Schedule(rows)
        except ValueError as refused:
            return f"not yet: {(_in_order(rows) and _mistake(_kinds(rows))) or refused}."
        problem = _wrong_order(made)
    if problem:
        return f"not yet: {problem}."
    right = schedule("1f1b", STAGES, MICROBATCHES)
    peaks = join([str(peak) for peak in right.peak_activations])
    return (
        f"well done: it runs, takes {right.makespan():g} units of time, as GPipe does, and keeps the activations of "
        f"{peaks} micro-batches, where GPipe keeps {MICROBATCHES} on each rank."
    )


def read_table(table: Any, ranks: int) -> Rows | str:
    """Return the actions by rank, whatever the notation, or what is wrong, without "not yet" and full stop."""
    if isinstance(table, Schedule):
        if table.name:
            return f"this is dlab's own {table.name}, which is the answer: write the rows yourself"
        table = table.rows
    if isinstance(table, str):
        table = [line for line in table.splitlines() if line.strip()]
    if isinstance(table, Mapping):
        if set(table) != set(range(len(table))):
            return f"the rows are those of ranks {', '.join(map(str, table))}: number them from 0 to {ranks - 1}"
        table = [table[rank] for rank in range(len(table))]
    rows = _listed(table)
    if rows is None:
        return f"{table!r} is not a table: give a list with a row for each rank, such as {_EXAMPLE}"
    listed = [_cells(row) for row in rows]
    if all(row is not None and len(row) == 1 for row in listed) and len(listed) > ranks:
        return f"this is one long list: give a list with a row for each rank, such as [{_EXAMPLE}, …]"
    if len(listed) != ranks:
        more = ": rows are ranks, not micro-batches" if len(listed) == MICROBATCHES else ""
        found = "is 1" if len(listed) == 1 else f"are {len(listed)}"
        told = f"the table has {ranks} rows, but here {found}{more}"
        return f"there are {ranks} stages, each on a rank of its own, so {told}"
    read: Rows = []
    for rank, row in enumerate(listed):
        if row is None:
            return f"row {rank} is not a list of actions: write it as {_EXAMPLE}"
        try:
            read.append([Action(cell.upper()) for cell in row])
        except ValueError as problem:
            return f"in row {rank}, {problem}"
    return read


def _cells(row: Any) -> list[str] | None:
    """Return the cells of a row that are not blank."""
    if isinstance(row, str):
        row = re.split(r"[\s,;|]+", re.sub(r"^\s*rank \d+:?", "", row))
    cells = None if isinstance(row, Mapping) else _listed(row)
    return None if cells is None else [str(cell).strip() for cell in cells if str(cell).strip() not in _BLANK]


def _listed(thing: Any) -> list[Any] | None:
    """Return the items of a list, an array or an iterator, or None if it has none."""
    try:
        return list(thing)
    except TypeError:
        return None


# --------------------------------------------------------------------------------------- single cells


def _wrong_cell(rows: Rows) -> str | None:
    """Return what is wrong with single cells, before anybody asks for the order."""
    everything = [action for row in rows for action in row]
    if not everything:
        return f"the table is empty: rank 0 begins with {_EXAMPLE}"
    if message := next((action for action in everything if action.kind in TRANSFERS), None):
        return f"{message} is a message: this table has forwards and backwards only, and each result is sent at once"
    if half := next((action for action in everything if action.kind in "IW"), None):
        return f"{half} is half a backward, as in zero-bubble schedules: 1F1B has whole ones, {half.stage}B…"
    return _wrong_numbers(rows, everything)


def _wrong_numbers(rows: Rows, everything: Sequence[Action]) -> str | None:
    misplaced = [(rank, action) for rank, row in enumerate(rows) for action in row if action.stage != rank]
    microbatches = {action.microbatch for action in everything}
    if all(action.stage == rank + 1 for rank, row in enumerate(rows) for action in row):
        return f"stages are counted from 1 here: they are 0 to {STAGES - 1}, so row 0 begins with 0F0"
    if misplaced and all(action.microbatch == rank for rank, row in enumerate(rows) for action in row):
        rank, action = misplaced[0]
        return (
            f"stage and micro-batch have changed places: the number before F or B is the stage, so row {rank} has "
            f"{action.microbatch}{action.kind}{action.stage} and not {action}"
        )
    if misplaced and all(action.stage == STAGES - 1 - rank for rank, row in enumerate(rows) for action in row):
        return "the rows are upside down: row 0 is rank 0, which has stage 0"
    if misplaced:
        rank, action = misplaced[0]
        if action.stage >= STAGES:
            return f"row {rank} has {action}, but the stages are 0 to {STAGES - 1}"
        return f"row {rank} has {action}, of stage {action.stage}: stage {rank} is on rank {rank}, and it has no other"
    if microbatches == set(range(1, MICROBATCHES + 1)):
        return f"micro-batches are counted from 1 here: they are 0 to {MICROBATCHES - 1}"
    return None


def _wrong_size(rows: Rows) -> str | None:
    """Return which forwards and backwards are missing, there twice, or too many."""
    first, *others = [{action.microbatch for action in row} for row in rows]
    if first != set(range(MICROBATCHES)) and first == set(range(len(first))) and all(each == first for each in others):
        there = count(len(first), "micro-batch").replace("hs", "hes")
        return f"there are {MICROBATCHES} micro-batches, 0 to {MICROBATCHES - 1}, and this table is for {there}"
    if all(action.kind == FORWARD for row in rows for action in row):
        return "there are only forwards: each of them needs its backward, such as 0B0, later in the same row"
    for rank, row in enumerate(rows):
        twice = [action for place, action in enumerate(row) if action in row[:place]]
        if twice:
            return f"row {rank} has {twice[0]} twice"
        wanted = [f"{rank}{kind}{number}" for kind in "FB" for number in range(MICROBATCHES)]
        if missing := [action for action in wanted if action not in row]:
            return f"row {rank} has no {join(missing)}: each stage runs every micro-batch forward and backward"
        if more := [action for action in row if action not in wanted]:
            return f"row {rank} has {more[0]}: the micro-batches are 0 to {MICROBATCHES - 1}"
    return None


# --------------------------------------------------------------------------------------- the order


def _wrong_order(made: Schedule) -> str | None:
    """Explain a table that runs, but is another schedule."""
    right = schedule("1f1b", STAGES, MICROBATCHES)
    kinds, wanted = _kinds(made.rows), _kinds(right.rows)
    if made.makespan() == right.makespan() and made.peak_activations == right.peak_activations:
        return None  # only 1F1B is as fast with as little memory
    if name := _mistake(kinds):
        return name
    first = next((rank for rank in range(STAGES) if kinds[rank] != wanted[rank]), None)
    if first is None:
        return (
            f"forwards and backwards alternate as they should, but the micro-batches come in an order in which ranks "
            f"wait: it takes {made.makespan():g} units of time, and {right.makespan():g} are enough, in the order 0 to "
            f"{MICROBATCHES - 1}"
        )
    place = next(n for n, pair in enumerate(zip(kinds[first], wanted[first], strict=True)) if pair[0] != pair[1])
    return f"{_costs(made, right)}: look at row {first}, where {made.rows[first][place]} comes {_why(first, place)}"


def _costs(made: Schedule, right: Schedule) -> str:
    told = []
    if made.makespan() > right.makespan():
        told.append(f"it takes {made.makespan():g} units of time, and 1F1B takes {right.makespan():g}")
    pairs = enumerate(zip(made.peak_activations, right.peak_activations, strict=True))
    if more := next(((rank, here, least) for rank, (here, least) in pairs if here > least), None):
        told.append("rank {} keeps the activations of {} micro-batches, and with 1F1B of {}".format(*more))
    return f"it runs, but {', and '.join(told)}"


def _why(rank: int, place: int) -> str:
    ahead = STAGES - rank
    if place < ahead:
        return f"too early: rank {rank} begins with {count(ahead, 'forward')}"
    if place >= 2 * MICROBATCHES - ahead:
        return "too late: only backwards are left there"
    return f"out of turn: after the first {count(ahead, 'forward')}, a backward and a forward follow by turns"


def _kinds(rows: Sequence[Sequence[Action]]) -> list[str]:
    """Return for each rank what its actions do: `FFFBFBFBBB`."""
    return ["".join(action.kind for action in row) for row in rows]


def _in_order(rows: Rows) -> bool:
    """Whether forwards and backwards of each rank come in the order of the micro-batches."""
    each = [[action.microbatch for action in row if action.kind == kind] for row in rows for kind in "FB"]
    return all(numbers == sorted(numbers) for numbers in each)


def _alternating(ahead: int) -> str:
    """So many forwards, then a backward and a forward by turns, then the backwards that are left."""
    ahead = min(max(1, ahead), MICROBATCHES)
    return "F" * ahead + "BF" * (MICROBATCHES - ahead) + "B" * ahead


def _mistake(kinds: list[str]) -> str | None:
    """Return the sentence for rows that come from one misunderstanding."""
    torch_prints = [_alternating(STAGES - rank) for rank in range(STAGES - 1)] + [_alternating(2)]
    last = STAGES - 1
    ahead = ", ".join(f"rank {rank} with {STAGES - rank}" for rank in range(STAGES))
    known = {
        "this is GPipe, all forwards and then all backwards: a rank should begin with backwards as soon as it can": [
            _alternating(MICROBATCHES)
        ]
        * STAGES,
        "here one micro-batch after the other goes all the way, as in the naive pipeline, and only one rank computes "
        f"at a time: let rank 0 begin with {STAGES} forwards": [_alternating(1)] * STAGES,
        f"every rank begins with {STAGES} forwards here, but {name_ranks(list(range(1, STAGES)))} can have a backward "
        f"sooner, and keep fewer activations: begin {ahead}": [_alternating(STAGES)] * STAGES,
        f"each rank begins with one forward too few, and waits while the next one could have work: begin {ahead}": [
            _alternating(STAGES - 1 - rank) for rank in range(STAGES)
        ],
        f"each rank begins with one forward too many, which costs memory and saves no time: begin {ahead}": [
            _alternating(STAGES + 1 - rank) for rank in range(STAGES)
        ],
        f"the first ranks begin with few forwards and the last ones with many, but it is the other way round: the "
        f"first rank waits longest for its first backward. Begin {ahead}": [
            _alternating(rank + 1) for rank in range(STAGES)
        ],
        f"rank {last}, which has the last stage, has its first backward one forward too late: nobody is behind it, so "
        f"{last}B0 follows {last}F0 at once": torch_prints,
    }
    return next((sentence for sentence, table in known.items() if table == kinds), None)
