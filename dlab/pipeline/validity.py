"""Which tables can run: every forward and backward once, in an order in which nobody waits forever.

A table that cannot is refused before anything runs, with the cell and the reason. Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlab.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    WEIGHT,
    Action,
)
from dlab.pipeline.execution import Execution, Needs, Result, Row, results

_COUNTED = "(rows and columns are counted from 0)"
_SHOWN = 4  # waits of a circle that are told
_WHAT = {FORWARD: "activation", INPUT: "gradient"}  # what an action makes for others


class CellIndex:
    """The cells of a table and where they stand, which `refuse_impossible` needs to name them."""

    def __init__(self, rows: Sequence[Row], columns: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.cells: dict[Action, tuple[int, int]] = {}  # by action: its row and column
        for rank, (row, places) in enumerate(zip(rows, columns, strict=True)):
            for action, column in zip(row, places, strict=True):
                if action in self.cells:
                    raise refused(rank, column, f"{action} is there twice, also in {_cell(self.cells[action])}")
                self.cells[action] = rank, column

    def at(self, action: str) -> str:
        """`1F0 (row 1, column 0)`"""
        return f"{action} ({_cell(self.cells[Action(action)])})"

    def refused(self, action: str, why: str) -> ValueError:
        """Return the error for the cell of this action."""
        return refused(*self.cells[Action(action)], f"{action} {why}")


def _cell(place: tuple[int, int]) -> str:
    return f"row {place[0]}, column {place[1]}"


def refused(row: int, column: int, why: str) -> ValueError:
    """Return the error for a cell."""
    return ValueError(f"{_cell((row, column))}: {why} {_COUNTED}")


def refuse_impossible(rows: Sequence[Row], columns: Sequence[Sequence[int]]) -> None:
    """Raise `ValueError` for the first cell that makes the table impossible. It costs microseconds per action.

    >>> refuse_impossible([(Action("0B0"), Action("0F0"))], [(0, 1)])
    ValueError: row 0, column 0: 0B0 comes before 0F0 (row 0, column 1), and uses the activation that it makes …
    """
    index = CellIndex(rows, columns)
    _refuse_places(index)
    _refuse_incomplete(index)
    needs = Needs(rows)
    if needs.transfers:
        _refuse_transfers(index, needs)
    _refuse_own_order(index, needs)
    _refuse_deadlock(index, Execution(rows, {}))


def _refuse_places(index: CellIndex) -> None:
    """A stage is on one rank, and stages are numbered without gaps."""
    homes: dict[int, Action] = {}
    for rank, row in enumerate(index.rows):
        if not row:
            raise ValueError(f"row {rank} has no action: every rank has at least one stage {_COUNTED}")
        for action in row:
            first = homes.setdefault(action.stage, action)
            if index.cells[first][0] != rank:
                raise index.refused(action, f"is of stage {action.stage}, which is on another rank: {index.at(first)}")
    last = max(homes)
    for stage in range(last):
        if stage not in homes:
            raise index.refused(homes[last], f"is of stage {last}, but no row has stage {stage}")


def _refuse_incomplete(index: CellIndex) -> None:
    """Each stage does the forward and the backward of each micro-batch."""
    computing = [action for action in index.cells if not action.is_transfer]
    witness: dict[int, Action] = {}  # of each micro-batch, an action
    for action in computing or index.cells:
        witness.setdefault(action.microbatch, action)
    for microbatch in range(max(witness)):
        if microbatch not in witness:
            last = witness[max(witness)]
            raise index.refused(last, f"is of micro-batch {last.microbatch}, but there is no micro-batch {microbatch}")
    homes = {action.stage: rank for action, (rank, _) in index.cells.items()}
    for stage, rank in sorted(homes.items()):
        for microbatch, seen in sorted(witness.items()):
            _refuse_unless_once(index, stage, microbatch, rank, seen)


def _refuse_unless_once(index: CellIndex, stage: int, microbatch: int, rank: int, seen: Action) -> None:
    """One forward, and one whole backward or both halves of it."""
    forward, whole, inputs, weights = (f"{stage}{kind}{microbatch}" for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))
    there = [half for half in (inputs, weights) if half in index.cells]
    if forward not in index.cells:
        own = [each for each in (whole, *there) if each in index.cells]
        if own:
            raise index.refused(own[0], f"is a backward without its forward: add {forward} to row {rank}")
        raise index.refused(seen, f"is of micro-batch {microbatch}, which stage {stage} never runs: add {forward}")
    if whole in index.cells:
        if there:
            raise index.refused(there[0], f"is a half of {index.at(whole)}: it would run twice; leave one of them out")
    elif not there:
        wanted = f"add {whole} to row {rank}, or {inputs} and {weights}"
        raise index.refused(forward, f"never gets its backward: {wanted}")
    elif len(there) == 1:
        missing = weights if there == [inputs] else inputs
        raise index.refused(there[0], f"is one half of a backward: add {missing}, the other one, to row {rank}")


def _refuse_transfers(index: CellIndex, needs: Needs) -> None:
    """Between ranks each result is sent once and received once; within a rank nothing is sent."""
    for action in index.cells:
        if action.is_transfer:
            _refuse_unpaired(index, needs, action)
        for stage, kind, microbatch in needs(action):
            receive = f"{stage}{kind}{microbatch}"
            if kind in (RECEIVE_FORWARD, RECEIVE_BACKWARD) and receive not in index.cells:
                send = Action(receive).partner
                raise index.refused(
                    action,
                    f"uses a result of another rank, which never arrives: add {receive} before it and {send} to the "
                    "other row (where a table has sends and receives, it has all of them)",
                )


def _refuse_unpaired(index: CellIndex, needs: Needs, action: Action) -> None:
    """The other end of a message exists, on another rank, and what it carries is computed."""
    if f"{action.stage}{FORWARD}{action.microbatch}" not in index.cells:
        raise index.refused(action, f"is of micro-batch {action.microbatch}, with which no stage computes")
    if action.partner not in index.cells:
        stage = action.stage + action.step
        if stage not in needs.ranks:
            where = "before the first one" if stage < 0 else "after the last one"
            raise index.refused(action, f"is a message of stage {action.stage} with a stage {where}: leave it out")
        raise index.refused(action, f"would wait forever: add {action.partner} to row {needs.ranks[stage]}")
    if index.cells[Action(action.partner)][0] == index.cells[action][0]:
        raise index.refused(action, f"and {index.at(action.partner)} are on one rank, which sends nothing to itself")


def _refuse_own_order(index: CellIndex, needs: Needs) -> None:
    """Within a row, an action comes after those of the same rank that it needs."""
    for row in index.rows:
        producers = {result: action for action in row for result in results(action)}
        there = set[Result]()
        for action in row:
            for need in needs(action):
                if need in producers and need not in there:
                    what = _WHAT.get(need[1], "message")
                    why = f"comes before {index.at(producers[need])}, and uses the {what} that it makes"
                    raise index.refused(action, why)
            there.update(results(action))


def _refuse_deadlock(index: CellIndex, execution: Execution) -> None:
    """Nobody waits for somebody who waits for them."""
    rows, done = index.rows, execution.done
    heads = {rank: row[count] for rank, (row, count) in enumerate(zip(rows, done, strict=True)) if count < len(row)}
    if not heads:
        return
    over = {result for row, count in zip(rows, done, strict=True) for each in row[:count] for result in results(each)}
    producers = {result: action for row in rows for action in row for result in results(action)}

    def awaited(head: Action) -> Action:
        unmet = [producers[need] for need in execution.needs(head) if need not in over]
        return unmet[0] if unmet else Action(head.partner)

    circle = [min(heads)]  # ranks, each of which waits for the next one
    while (following := index.cells[awaited(heads[circle[-1]])][0]) not in circle:
        circle.append(following)
    circle = circle[circle.index(following) :]
    told = []
    for place, rank in enumerate(circle):
        head, other = awaited(heads[rank]), heads[circle[(place + 1) % len(circle)]]
        after = "" if head == other else f", which comes after {index.at(other)}"
        told.append(f"waits for {index.at(head)}{after}")
    hidden = len(told) - _SHOWN
    chain = ", which ".join(told[:_SHOWN]) + (f", and so on, over {hidden} more ranks" if hidden > 0 else "")
    raise index.refused(heads[circle[0]], f"{chain}: a deadlock, since each waits for the next")
