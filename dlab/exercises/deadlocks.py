"""The exercise of `08_pipeline.ipynb`, "find why it deadlocks, and mend it": a table with sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dlab.exercises.pipelining import Rows, read_table
from dlab.pipeline import Action, Schedule
from dlab.pipeline.execution import Execution

# 1F1B for two stages and three micro-batches, in which every message is sent as soon as it is there
TABLE = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
)
_ROWS: Rows = [[Action(cell) for cell in row.split()] for row in TABLE]
_RANKS = len(_ROWS)


def check_deadlock(stuck: Any, mended: Any) -> str:
    """Judge who waits in the table of the exercise, and a table that runs: "well done …", or "not yet: …".

    `stuck` names for each rank the action at which it waits forever. `mended` has the same actions in an order that
    runs; computations stay in their order, sends and receives may move.

    >>> check_deadlock(["0F1", "1B0"], TABLE)
    'not yet: rank 0 gets past 0F1, which needs nothing but 0F0 …'
    """
    problem = _wrong_places(stuck) or _wrong_table(mended)
    if problem:
        return f"not yet: {problem}."
    return (
        "well done: rank 0 stands at its send and rank 1 at its own, and each would receive only after that; in your "
        "table, whenever the two send to each other, one of them receives first."
    )


def stands_at(rows: Rows) -> list[Action | None]:
    """Return for each rank the action that it cannot carry out, or None if it gets to the end."""
    done = Execution([tuple(row) for row in rows], {}).done
    return [row[place] if place < len(row) else None for row, place in zip(rows, done, strict=True)]


# --------------------------------------------------------------------------------------- who waits


def _wrong_places(stuck: Any) -> str | None:
    if isinstance(stuck, Mapping):
        if set(stuck) != set(range(_RANKS)):
            return "say for rank 0 and for rank 1 at which action it waits"
        stuck = [stuck[rank] for rank in range(_RANKS)]
    if isinstance(stuck, str):
        stuck = stuck.replace(",", " ").split()
    if not isinstance(stuck, Sequence) or len(stuck) != _RANKS:
        return f"{stuck!r} are not two actions: give that of rank 0 and that of rank 1, as in ['0F0', '1F0']"
    try:
        found = [Action(str(each).upper()) for each in stuck]
    except ValueError as problem:
        return f"of the places where ranks wait, {problem}"
    right = stands_at(_ROWS)
    if found == right:
        return None
    if found == right[::-1]:
        return "the two have changed places: give the action of rank 0 first"
    for rank, action in enumerate(found):
        if action != right[rank]:
            return _explain_place(rank, action)
    return None


def _explain_place(rank: int, action: Action) -> str:
    """Why the rank does not wait forever at this action."""
    own, stands = _ROWS[rank], stands_at(_ROWS)[rank]
    assert stands is not None, "the table of the exercise deadlocks on both ranks"
    if action not in own:
        where = f", which is in the row of rank {1 - rank}" if action in _ROWS[1 - rank] else ""
        if action == stands.partner:
            return (
                f"{action} is what rank {rank} waits for, and it stands at the other end of that message, in its own "
                "row"
            )
        return f"rank {rank} does not have {action}{where}: take an action of row {rank}"
    place, right = own.index(action), own.index(stands)
    if place > right:
        return f"rank {rank} never gets as far as {action}: go through both rows, and let each rank do what it can"
    if action.is_transfer:
        return (
            f"rank {rank} gets past {action}, because rank {1 - rank} comes to {action.partner} and the message goes "
            "over: find the first one whose other end is never reached"
        )
    needs = f", which needs nothing but {own[place - 1]}" if place else ""
    return (
        f"rank {rank} gets past {action}{needs}: it computes that, and waits at a message, the action after the last "
        "one that it can do"
    )


# --------------------------------------------------------------------------------------- the mended table


def _wrong_table(mended: Any) -> str | None:
    rows = read_table(mended, _RANKS)
    if isinstance(rows, str):
        return f"the places are right; of the mended table, {rows}"
    return _other_actions(rows) or _other_order(rows) or _still_waits(rows)


def _other_actions(rows: Rows) -> str | None:
    """The same actions on each rank."""
    if not any(action.is_transfer for row in rows for action in row):
        return (
            "the places are right, but your table has no messages: without them nothing arrives, so move the sends and "
            "receives, and leave none out"
        )
    for rank, (row, original) in enumerate(zip(rows, _ROWS, strict=True)):
        missing, more = Counter(original) - Counter(row), Counter(row) - Counter(original)
        if missing and more and all(action in _ROWS[1 - rank] for action in more):
            return f"the places are right, but row {rank} has {next(iter(more))}, which is of rank {1 - rank}"
        if missing:
            return f"the places are right, but {next(iter(missing))} has gone from row {rank}: move it, and keep it"
        if more:
            return f"the places are right, but row {rank} has {next(iter(more))} more than before: only move actions"
    return None


def _other_order(rows: Rows) -> str | None:
    """Computations in their order."""
    for rank, (row, original) in enumerate(zip(rows, _ROWS, strict=True)):
        for action, before in zip(_computations(row), _computations(original), strict=True):
            if action != before:
                return (
                    f"the places are right, but in row {rank} {action} comes before {before}, which is no longer 1F1B: "
                    "leave the computations in their order, and move sends and receives"
                )
    return None


def _computations(row: Sequence[Action]) -> list[Action]:
    return [action for action in row if not action.is_transfer]


def _still_waits(rows: Rows) -> str | None:
    """It runs."""
    try:
        Schedule(rows)
    except ValueError as refused:
        if rows == _ROWS:
            return "the places are right, but the table is as it was: let one of the two ranks receive before it sends"
        if stands_at(rows) == [Action("0SEND_F2"), Action("1SEND_B1")]:
            return (
                "the places are right, and the first deadlock is gone, but a second one of the same kind follows: "
                "rank 0 waits at 0SEND_F2, and rank 1 at 1SEND_B1"
            )
        if _receives_first(rows[0]) and _receives_first(rows[1]):
            return (
                "the places are right, but now both ranks receive first, and nobody sends: exchange send and receive "
                "on one of the two ranks only"
            )
        return f"the places are right, but the table cannot run: {refused}"
    return None


def _receives_first(row: Sequence[Action]) -> bool:
    """Whether it has exchanged its first send and receive that wait for each other in the table of the exercise."""
    send, receive = (("0SEND_F1", "0RECV_B0"), ("1SEND_B0", "1RECV_F1"))[row[-1].stage]
    return row.index(Action(receive)) < row.index(Action(send))
