"""A schedule as text and as a picture: a row per rank, and time from left to right. Taught in `08_pipeline.ipynb`."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from dlab.data.table import Bars, Table
from dlab.pipeline.actions import TRANSFERS
from dlab.pipeline.execution import Execution, TimeSlot

if TYPE_CHECKING:  # matplotlib takes a while, and workers draw nothing
    from matplotlib.figure import Figure

    from dlab.pipeline.schedules import Schedule

_STEPS = {"F": 1, "B": 2, "I": 1, "W": 1} | dict.fromkeys(TRANSFERS, 1)  # columns of the grid
_CHARACTERS, _ROWS = 110, 16  # of a grid in a notebook


def write_grid(schedule: Schedule, characters: int | None = None, rows: int | None = None) -> str:
    """Return a line per rank, with a column for each unit of time: F, I and W take one, B takes two, · waits.

    Sends and receives take a column, too, in which both ends of the message stand. A long grid is cut.
    """
    slots = Execution(schedule.rows, _STEPS).slots
    width = max(len(slot.action) for slot in slots)
    last = int(max(slot.end for slot in slots))
    cells = [["·"] * last for _ in schedule.rows]
    for rank, action, start, end in slots:
        cells[rank][int(start) : int(end)] = [action, *[""] * (int(end) - int(start) - 1)]
    columns = last if characters is None else min(last, characters // (width + 1))
    lines = []
    for rank, row in enumerate(cells):
        shown = " ".join(f"{cell:<{width}}" for cell in row[:columns]).rstrip()
        lines.append(f"rank {rank:<{len(str(len(cells) - 1))}}  {shown}{' …' * (columns < last)}")
    if rows is not None and len(lines) > rows:
        hidden = len(lines) - rows
        lines[rows // 2 : len(lines) - rows // 2] = [f"… {hidden} more ranks"]
    return "\n".join(lines)


def write_summary(schedule: Schedule) -> str:
    """Return its size, its time, its bubble and its memory in one line."""
    sizes = [(schedule.ranks, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "micro-batch")]
    plural = {"micro-batch": "es"}
    told = ", ".join(f"{count} {what}{plural.get(what, 's') * (count > 1)}" for count, what in sizes)
    peaks = schedule.peak_activations
    peak = ", ".join(map(str, peaks)) if len(peaks) <= _ROWS else f"{min(peaks)} to {max(peaks)}"
    time = f"makespan {schedule.makespan():g} (F=1, B=2), bubble {schedule.bubble:.4g}"
    return f"{schedule.name or 'a schedule'}: {told}: {time}, peak activations {peak}"


def write_text(schedule: Schedule) -> str:
    """Return the line and the grid, which is cut if it is long."""
    return f"{write_summary(schedule)}\n{write_grid(schedule, _CHARACTERS, _ROWS)}"


def draw_schedule(schedule: Schedule, slots: Sequence[TimeSlot]) -> Figure:
    """Draw these slots of the schedule."""
    from dlab.charts import ChartPart, action_box, computing, draw_chart

    several = schedule.stages > schedule.ranks
    names = [
        f"{rank} ({', '.join(map(str, schedule.stages_of(rank)))})" if several else str(rank)
        for rank in range(schedule.ranks)
    ]
    part = ChartPart(schedule.name, computing([action_box(*slot) for slot in slots]))
    unit = "time: 1 is a forward of all stages of a rank"
    return draw_chart([part], names, unit, "rank (its stages)" if several else "rank")


class RankLoad(NamedTuple):
    """What a rank has to do and to keep in a step."""

    rank: int
    stages: tuple[int, ...]
    busy: float
    idle: float
    peak: int


class RankLoads(Table):
    """A row per rank: its stages, how long it computes and waits in a step, and its peak of activations."""

    def __init__(self, schedule: Schedule) -> None:
        busy = [0.0] * schedule.ranks
        for rank, _, start, end in schedule.slots():
            busy[rank] += end - start
        makespan, peaks = schedule.makespan(), schedule.peak_activations
        self.rows = [
            RankLoad(rank, schedule.stages_of(rank), busy[rank], makespan - busy[rank], peaks[rank])
            for rank in range(schedule.ranks)
        ]

    def heading(self) -> list[str]:
        return ["rank", "stages", "computes", "waits", "peak activations"]

    def cells(self, row: RankLoad) -> list[int | str | Bars]:
        return [row.rank, ", ".join(map(str, row.stages)), f"{row.busy:g}", f"{row.idle:g}", row.peak]

    def between(self, hidden: Sequence[RankLoad]) -> str:
        return f"… {len(hidden)} more ranks"


def write_html(schedule: Schedule) -> str:
    """Return the line, the chart and the table of the ranks; the chart's alt text is the line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(schedule.figure()).print_png(file)
    png, summary = base64.b64encode(file.getvalue()).decode(), escape(write_summary(schedule))
    picture = f'<img alt="Chart of the schedule {summary}" src="data:image/png;base64,{png}">'
    return f"<div>{summary}</div><div>{picture}</div>{RankLoads(schedule)._repr_html_()}"
