"""The chart of a pipeline: what each rank was to do, and below it what it did, on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dlab.charts import (
    IDLE,
    LOOK,
    ActionBox,
    ChartPart,
    action_box,
    bubble,
    colour_of,
    computing,
    draw_chart,
    lightness,
)
from dlab.events import Event
from dlab.kinds import ACTION, SCHEDULE
from dlab.views.base import View
from dlab.views.columns import Arrivals
from dlab.views.totals import write_time

_LANES = 64  # ranks that are drawn
_STEPS = 8  # latest steps that are kept: ranks are not always in the same one
_PLANNED, _MEASURED = "time: 1 is a forward of all stages of a rank", "time, ms"
# the bubble by formula, with the numbers of ranks (p), of stages on each (v) and of micro-batches (m)
_FORMULAS: dict[str, tuple[str, Callable[[int, int, int], float]]] = {
    "naive": ("p-1", lambda p, v, m: p - 1),
    "gpipe": ("(p-1)/m", lambda p, v, m: (p - 1) / m),
    "1f1b": ("(p-1)/m", lambda p, v, m: (p - 1) / m),
    "interleaved": ("(p-1)/(v m)", lambda p, v, m: (p - 1) / (v * m)),
    "zb1p": ("(p-1)/(3 v m)", lambda p, v, m: (p - 1) / (3 * v * m)),
    "zbv": ("(p-1)/(6 m)", lambda p, v, m: (p - 1) / (6 * m)),
}


class DrawnStep(NamedTuple):
    """The measured step, or None; the plan; and what was measured, in seconds since the step began."""

    step: int | None
    planned: list[ActionBox]
    measured: list[ActionBox]


class PipelineChart(View):
    """A lane per rank: the schedule as it was planned, and the last step as it was measured, on one time axis.

    The plan is drawn in the time in which the ranks would have done the same work without waiting for messages, so
    that boxes above and below have the same unit. The caption has the bubble of both: the time in which ranks wait,
    divided by the time in which they compute. A plan alone is drawn in its own unit.

    >>> PipelineChart(run.events)
    1f1b on 2 ranks, 8 micro-batches, step 40: 31 ms; bubble 0.16 measured, 0.125 by the formula (p-1)/m
    rank 0  computes 27 ms  waits 4.2 ms
    rank 1  computes 26 ms  waits 4.8 ms
    """

    script, title = "pipeline", "Pipeline"
    reads = (ACTION, SCHEDULE)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._plan: dict[int, list[ActionBox]] = {}  # by rank, in units of the schedule
        self._name = ""
        self._steps: dict[int, dict[int, list[ActionBox]]] = {}  # by step and rank, in seconds since 1970
        self._drawn: DrawnStep | None = None  # what is drawn, until more events arrive
        super().__init__(events)

    def add(self, events: Iterable[Event] | Arrivals) -> None:
        """Add more events; of the steps, only the latest are kept."""
        for _, rank, kind, data in self.take(events).others:
            if kind in self.reads:
                self._drawn = None
            if kind == SCHEDULE:
                self._name = data["name"]
                boxes = zip(data["actions"], data["starts"], data["ends"], strict=True)
                self._plan[rank] = computing([action_box(rank, *box) for box in boxes])
            elif kind == ACTION:
                own = self._steps.setdefault(data["step"], {}).setdefault(rank, [])
                own += computing([action_box(rank, data["action"], data["start"], data["end"])])
        for step in sorted(self._steps)[:-_STEPS]:
            del self._steps[step]

    @property
    def empty(self) -> bool:
        """Whether there is neither a plan nor a measured action."""
        return not self.drawn.planned and self.drawn.step is None

    def _latest(self) -> int | None:
        """Return the latest step that is complete, or else the latest one; None if no action was measured."""
        there = [step for step, ranks in self._steps.items() if any(ranks.values())]
        complete = [step for step in there if self._is_complete(self._steps[step])]
        return max(complete or there, default=None)

    def _is_complete(self, ranks: dict[int, list[ActionBox]]) -> bool:
        return all(len(ranks.get(rank, [])) >= len(plan) for rank, plan in self._plan.items())

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a plan, or have done something."""
        return sorted({*self._plan, *(rank for ranks in self._steps.values() for rank in ranks)})

    @property
    def drawn(self) -> DrawnStep:
        """What is drawn. Plan and step get the same unit from the work that they share."""
        if self._drawn is None:
            step = self._latest()
            planned, measured = self._in_lanes(self._plan), self._in_lanes({} if step is None else self._steps[step])
            lanes = {box.lane for box in measured}
            busy = _work([box for box in planned if box.lane in lanes])
            unit = _work(measured) / busy if busy and measured else 1.0
            self._drawn = DrawnStep(step, _scaled(planned, unit), measured)
        return self._drawn

    def _in_lanes(self, ranks: dict[int, list[ActionBox]]) -> list[ActionBox]:
        """The boxes in which ranks compute, with their places in the picture; time begins with the first of them."""
        lanes = {rank: lane for lane, rank in enumerate(self.ranks[:_LANES])}
        boxes = [box for rank, own in ranks.items() if rank in lanes for box in own]
        begun = min((box.start for box in boxes), default=0.0)
        return [
            ActionBox(lanes[rank], stage, kind, microbatch, start - begun, max(start, end) - begun)
            for rank, stage, kind, microbatch, start, end in boxes
        ]

    def formula(self) -> tuple[float, str]:
        """The bubble of the plan, and where it comes from: a formula if its schedule has one that gives the same."""
        boxes = self.drawn.planned
        plan = bubble(boxes, len({box.lane for box in boxes}))
        by_lane: dict[int, set[int]] = {}
        for box in boxes:
            by_lane.setdefault(box.lane, set()).add(box.stage)
        if self._name in _FORMULAS and boxes:
            text, value = _FORMULAS[self._name]
            most = max(map(len, by_lane.values()))
            stages, microbatches = set[int]().union(*by_lane.values()), {box.microbatch for box in boxes}
            if abs(plan - value(len(stages) // most, most, len(microbatches))) < 1e-6:
                return plan, f"by the formula {text}"
        return plan, "by the schedule"

    def bubbles(self) -> str:
        """The bubble in words: `bubble 0.16 measured, 0.125 by the formula (p-1)/m`."""
        _, planned, measured = self.drawn
        told = [f"{bubble(measured, len(self.ranks[:_LANES])):.3g} measured"] if measured else []
        if planned:
            value, source = self.formula()
            told.append(f"{value:.4g} {source}")
        return f"bubble {', '.join(told)}"

    @property
    def remark(self) -> str:
        """What it is, how long the step took, and the bubble."""
        if self.empty:
            return ""
        step, planned, measured = self.drawn
        batches = len({box.microbatch for box in [*planned, *measured]})
        what = (
            f"{self._name or 'a schedule'} on {_count(len(self.ranks), 'rank')}, {_count(batches, 'micro-batch', 'es')}"
        )
        if measured:
            what += f", step {step}: {write_time(max(box.end for box in measured))}"
        return f"{what}; {self.bubbles()}{self._crowd}"

    @property
    def _crowd(self) -> str:
        return f"; {_LANES} of {len(self.ranks)} ranks" if len(self.ranks) > _LANES else ""

    def _parts(self) -> list[ChartPart]:
        """The plan and what was measured, as far as they are there; seconds have become milliseconds."""
        step, planned, measured = self.drawn
        value, source = self.formula()
        parts = []
        if planned:
            parts.append(ChartPart(f"planned: bubble {value:.4g} {source}", planned))
        if measured:
            share = bubble(measured, len(self.ranks[:_LANES]))
            parts.append(ChartPart(f"measured in step {step}: bubble {share:.3g}", measured))
        return [ChartPart(title, _scaled(boxes, 1000)) for title, boxes in parts] if measured else parts

    @property
    def _unit(self) -> str:
        return _MEASURED if self.drawn.measured else _PLANNED

    def figure(self) -> Figure:
        """Draw the plan above what was measured, with one time axis."""
        names = [str(rank) for rank in self.ranks[:_LANES]]
        return draw_chart(self._parts() or [ChartPart("", [])], names or ["0"], self._unit)

    def data(self) -> dict[str, Any]:
        """Return the boxes of both parts as columns, and the colours that they point to."""
        parts = self._parts()
        light = lightness(parts)
        looks = dict.fromkeys((box.kind, box.stage) for part in parts for box in part.boxes)
        places = {look: place for place, look in enumerate(looks)}
        return {
            "lanes": [f"rank {rank}" for rank in self.ranks[:_LANES]],
            "unit": self._unit,
            "measured": bool(self.drawn.measured),
            "colours": [colour_of(kind, light[stage]) for kind, stage in places],
            "idle": IDLE,
            "key": [[name, colour] for kind, (colour, name) in LOOK.items() if kind in {kind for kind, _ in places}],
            "parts": [_columns(part, places) for part in parts],
        }

    def sentence(self) -> str:
        """Describe the picture in one sentence."""
        if self.empty:
            return "Pipeline: no rank has told of its schedule or of an action yet."
        both = "the plan above what was measured" if len(self._parts()) == 2 else "a lane per rank"
        return f"Chart of a pipeline, {both}: {self.remark}."

    def text(self) -> str:
        """Return the caption, and how long each rank computes and waits."""
        if self.empty:
            return "no rank has told of its schedule or of an action yet"
        measured = self.drawn.measured
        boxes = measured or self.drawn.planned
        whole = max((box.end for box in boxes), default=0.0)
        write = write_time if measured else "{:g}".format
        rows = []
        for lane, rank in enumerate(self.ranks[:_LANES]):
            busy = _work([box for box in boxes if box.lane == lane])
            rows.append((f"rank {rank}", f"computes {write(busy)}", f"waits {write(max(0.0, whole - busy))}"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.remark, *(line.rstrip() for line in lines)])


def _work(boxes: Sequence[ActionBox]) -> float:
    return sum(box.end - box.start for box in boxes)


def _count(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural * (count != 1)}"


def _scaled(boxes: Sequence[ActionBox], factor: float) -> list[ActionBox]:
    return [box._replace(start=factor * box.start, end=factor * box.end) for box in boxes]


def _columns(part: ChartPart, places: dict[tuple[str, int], int]) -> dict[str, Any]:
    """The boxes of a part as the browser reads them."""
    return {
        "title": part.title,
        "lane": np.array([box.lane for box in part.boxes], dtype=np.int32),
        "start": np.array([box.start for box in part.boxes], dtype=np.float32),
        "end": np.array([box.end for box in part.boxes], dtype=np.float32),
        "colour": np.array([places[box.kind, box.stage] for box in part.boxes], dtype=np.int32),
        "microbatch": np.array([box.microbatch for box in part.boxes], dtype=np.int32),
        "action": " ".join(box.action for box in part.boxes),
    }
