"""A pipeline's schedule is a table: a row per rank, with its actions in their order. Taught in `08_pipeline.ipynb`.

It can be printed, drawn, timed and counted before anything runs, and a runner carries it out as it stands.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dlab.kinds import ScheduleData
from dlab.pipeline.actions import BACKWARD, COMPUTATIONS, FORWARD, WEIGHT, Action
from dlab.pipeline.drawing import draw_schedule, write_grid, write_html, write_text
from dlab.pipeline.execution import Execution, Row, TimeSlot
from dlab.pipeline.validity import refuse_impossible, refused

if TYPE_CHECKING:  # matplotlib takes a while, and workers draw nothing
    from matplotlib.figure import Figure

Cell = str | None


class Schedule:
    """A table of actions with a row per rank: `dlab.schedule("1f1b")`, or a learner's own rows.

    A cell is an action such as "2F0" (stage 2, forward, micro-batch 0), or empty. A table that cannot run is refused
    with the cell and the reason: a deadlock, a result that is used before it is there, a forward or backward that is
    missing or there twice. Rows may contain sends and receives; then a send waits until its receiver is there.

    >>> Schedule([["0F0", "0B0"], ["1F0", "1B0"]]).makespan(forward=1, backward=2)
    6.0
    >>> Schedule([["0F0", "0B0"], ["1B0", "1F0"]])
    ValueError: row 1, column 0: 1B0 comes before 1F0 (row 1, column 1), and uses the activation that it makes …
    """

    def __init__(self, rows: Sequence[Sequence[Cell]], name: str = "") -> None:
        self.name = name  # of the schedule, if it has one
        self.rows, columns = _read(rows)
        refuse_impossible(self.rows, columns)
        self._homes = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages the model has."""
        return len(self._homes)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches a step has."""
        return 1 + max(action.microbatch for action in self.rows[0])

    @property
    def virtual(self) -> int:
        """How many stages a rank has; if they differ, the most."""
        return max(len(self.stages_of(rank)) for rank in range(self.ranks))

    def rank_of(self, stage: int) -> int:
        """Return the rank that has this stage."""
        return self._homes[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that this rank has, in the order of the model."""
        return tuple(sorted(stage for stage, home in self._homes.items() if home == rank))

    @cached_property
    def computations(self) -> tuple[Row, ...]:
        """The rows without sends and receives."""
        return tuple(tuple(action for action in row if not action.is_transfer) for row in self.rows)

    def slots(
        self, forward: float = 1, backward: float = 2, input: float | None = None, weight: float | None = None
    ) -> list[TimeSlot]:
        """Return when each action begins and ends, if messages take no time: (rank, action, start, end), by start.

        `forward` and `backward` are the times of a rank's share of the model, 1/p of it; a stage takes 1/v of them if a
        rank has v. `input` and `weight` are the times of the two halves of a backward: half of it each, or what the
        other one leaves.
        """
        given = {"forward": forward, "backward": backward, "input": input, "weight": weight}
        for what, value in given.items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{what}={value!r}: an action takes a time from 0 on")
        if input is None:
            input = backward / 2 if weight is None else max(0, backward - weight)
        if weight is None:
            weight = max(0, backward - input)
        lengths = dict(zip(COMPUTATIONS, (forward, backward, input, weight), strict=True))
        share = self.ranks / self.stages  # of the time of a whole rank
        slots = Execution(self.rows, lengths).slots
        scaled = [TimeSlot(rank, action, start * share, end * share) for rank, action, start, end in slots]
        return sorted(scaled, key=lambda slot: (slot.start, slot.rank))

    def makespan(
        self, forward: float = 1, backward: float = 2, input: float | None = None, weight: float | None = None
    ) -> float:
        """Return how long a step takes, in the unit of the arguments, which are those of `slots`."""
        return max(slot.end for slot in self.slots(forward, backward, input, weight))

    @cached_property
    def _busy(self) -> tuple[float, float]:
        """The makespan with F=1 and B=2, and how much of it a rank computes on the average."""
        slots = self.slots()
        return max(slot.end for slot in slots), sum(slot.end - slot.start for slot in slots) / self.ranks

    @property
    def bubble(self) -> float:
        """The time that a rank waits in a step, divided by the time that it computes, with F=1 and B=2.

        This is the (p-1)/m of textbooks. `idle_share` divides by the whole time instead.
        """
        makespan, busy = self._busy
        return (makespan - busy) / busy

    @property
    def idle_share(self) -> float:
        """The part of the whole time in which a rank waits, with F=1 and B=2."""
        makespan, busy = self._busy
        return (makespan - busy) / makespan

    @cached_property
    def peak_activations(self) -> list[int]:
        """By rank: of how many micro-batches it keeps activations at the same time, each of its stages counted.

        They are kept from the forward to the end of the backward, or of its second half, which computes the gradients
        of weights from them.
        """
        peaks = []
        for row in self.rows:
            held = peak = 0
            for action in row:
                held += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
                peak = max(peak, held)
            peaks.append(peak)
        return peaks

    def csv(self) -> str:
        """Return the table as text that `from_csv` and PyTorch's schedules read: a line per rank."""
        return "".join(",".join(row) + "\n" for row in self.rows)

    @classmethod
    def from_csv(cls, source: str | Path) -> Schedule:
        """Read a table from CSV text, or from the file at a path: a line per rank, a cell per action."""
        if isinstance(source, Path) or not {",", "\n"}.intersection(source):
            source = Path(source).read_text(encoding="utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(source))]
        while rows and not any(rows[-1]):
            rows.pop()
        return cls(rows)

    def planned(self, rank: int) -> ScheduleData:
        """Return a rank's row as the data of an event, from which `dlab.PipelineChart` draws the plan."""
        own = [slot for slot in self.slots() if slot.rank == rank]
        return {
            "name": self.name,
            "actions": [str(slot.action) for slot in own],
            "starts": [float(slot.start) for slot in own],
            "ends": [float(slot.end) for slot in own],
        }

    def figure(
        self, forward: float = 1, backward: float = 2, input: float | None = None, weight: float | None = None
    ) -> Figure:
        """Draw the chart: a lane per rank, and a box for each action. The arguments are those of `slots`."""
        return draw_schedule(self, self.slots(forward, backward, input, weight))

    def __str__(self) -> str:
        return write_grid(self)

    def __repr__(self) -> str:
        return write_text(self)

    def _repr_html_(self) -> str:
        return write_html(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)


def _read(rows: Sequence[Sequence[Cell]]) -> tuple[tuple[Row, ...], list[list[int]]]:
    """Return the actions of each row, and the column of each."""
    if isinstance(rows, str) or not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        raise ValueError("a schedule is a list with a list of actions for each rank; dlab.Schedule.from_csv reads text")
    if not rows:
        raise ValueError("a schedule has a row for each rank, and this one has none")
    read, columns = [], []
    for rank, row in enumerate(rows):
        there = [(column, cell) for column, cell in enumerate(row) if cell is not None and str(cell).strip()]
        actions = []
        for column, cell in there:
            try:
                actions.append(cell if isinstance(cell, Action) else Action(cell))
            except ValueError as problem:
                raise refused(rank, column, str(problem)) from None
        read.append(tuple(actions))
        columns.append([column for column, _ in there])
    return tuple(read), columns
