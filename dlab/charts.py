"""Charts of pipelines: a lane per rank, and a box for each action in the time that it takes.

A schedule draws its plan with it, and a view draws what was measured below the plan. Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlab.kinds import ACTION_FORM

# what an action does: its colour and its name
LOOK = {
    "F": ("#0072B2", "F: forward"),
    "B": ("#E69F00", "B: backward"),
    "I": ("#D55E00", "I: backward, inputs"),
    "W": ("#009E73", "W: backward, weights"),
}
IDLE = "#E4E4E4"
_LIGHTEST = 0.6  # how much white is in the colour of a rank's last stage
_HIGH, _THICK = 30, 0.88  # pixels of a lane, and how much of it a box takes
_NARROW, _WIDE, _LABELLED = 7.0, 13.0, 0.36  # inches of a figure, and of a box with a label, if there is room
_LEFT, _DPI = 1.1, 100  # inches beside the lanes; pixels of an inch
_FONTS, _READABLE = (9, 8, 7, 6), 7  # sizes of labels, in points; the least one for whole actions
_BRIGHTNESS = (0.21, 0.72, 0.07)  # how bright red, green and blue are
_CHARACTER = 0.62  # the width of a digit, in sizes of the font


class ActionBox(NamedTuple):
    """An action in its lane: what a stage does with a micro-batch, and when it began and ended."""

    lane: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float

    @property
    def action(self) -> str:
        """The action as text: `2F0`."""
        return f"{self.stage}{self.kind}{self.microbatch}"


def action_box(lane: int, action: str, start: float, end: float) -> ActionBox:
    """Return the box of an action such as `2F0`."""
    stage, kind, microbatch = ACTION_FORM.fullmatch(action).groups()  # type: ignore[union-attr]  # dlab has read it
    return ActionBox(lane, int(stage), kind, int(microbatch), start, end)


class ChartPart(NamedTuple):
    """A part of a chart with a title of its own: the plan, or what was measured; boxes in which ranks compute."""

    title: str
    boxes: Sequence[ActionBox]


def computing(boxes: Sequence[ActionBox]) -> list[ActionBox]:
    """Return the boxes in which a rank computes, without messages."""
    return [box for box in boxes if box.kind in LOOK]


def bubble(boxes: Sequence[ActionBox], lanes: int) -> float:
    """Return the time in which ranks wait, from the first start to the last end, divided by that in which they compute.

    >>> bubble([action_box(0, "0F0", 0, 1), action_box(1, "1F0", 1, 2)], lanes=2)
    1.0
    """
    busy = sum(box.end - box.start for box in boxes)
    whole = lanes * (max(box.end for box in boxes) - min(box.start for box in boxes)) if boxes else 0.0
    return (whole - busy) / busy if busy > 0 else 0.0


def lightness(parts: Sequence[ChartPart]) -> dict[int, float]:
    """Return by stage how much white its colour gets: none for a rank's first stage, and most for its last."""
    stages: dict[int, set[int]] = {}
    for part in parts:
        for box in part.boxes:
            stages.setdefault(box.lane, set()).add(box.stage)
    most = max(map(len, stages.values()), default=1)
    places = {stage: place for own in stages.values() for place, stage in enumerate(sorted(own))}
    return {stage: _LIGHTEST * place / max(1, most - 1) for stage, place in places.items()}


def colour_of(kind: str, light: float) -> str:
    """Return the colour of an action whose stage is this light."""
    red, green, blue = (light + (1 - light) * part for part in to_rgb(LOOK[kind][0]))
    return to_hex((red, green, blue))


def draw_chart(parts: Sequence[ChartPart], names: Sequence[str], unit: str, lanes: str = "rank") -> Figure:
    """Draw the parts below each other, on one time axis; `names` are those of the lanes.

    A box has the text of its action if all fit, else the number of its micro-batch, else nothing.
    """
    last = max((box.end for part in parts for box in part.boxes), default=0.0) or 1.0
    lengths = [box.end - box.start for box in parts[0].boxes if box.end > box.start] or [last]
    width = min(max(_NARROW, _LEFT + _LABELLED * last / float(np.median(lengths))), _WIDE)
    high = min(_HIGH, max(8, 900 // (len(names) * len(parts))))
    figure = Figure(figsize=(width, 1.2 + len(parts) * (0.35 + high * len(names) / _DPI)), layout="constrained")
    everywhere = figure.subplots(len(parts), sharex=True, squeeze=False)[:, 0]
    light, scale = lightness(parts), (width - _LEFT) * _DPI / last
    whole = all(_font_for([box.action for box in part.boxes], part.boxes, scale, high) >= _READABLE for part in parts)
    for axes, part in zip(everywhere, parts, strict=True):
        axes.set(xlim=(0, last), ylim=(len(names) - 0.5, -0.5), ylabel=lanes)
        axes.set_title(part.title, fontsize=10, loc="left", parse_math=False)
        every = -(-14 // high)  # of so many lanes, one has its name
        axes.set_yticks(range(0, len(names), every), names[::every], fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        _draw_boxes(axes, part.boxes, light, scale, high)
        _write_labels(axes, part.boxes, light, whole, scale, high)
    everywhere[-1].set_xlabel(unit)
    kinds = {box.kind for part in parts for box in part.boxes}
    handles = [Patch(facecolor=colour, label=name) for kind, (colour, name) in LOOK.items() if kind in kinds]
    handles.append(Patch(facecolor=IDLE, label="bubble: the rank waits"))
    if any(light.values()):
        handles.append(Patch(facecolor=colour_of("F", _LIGHTEST), label="lighter: a later stage of the rank"))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=5 if width > 9 else 3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_boxes(axes: Axes, boxes: Sequence[ActionBox], light: dict[int, float], scale: float, high: int) -> None:
    """Draw boxes of this many pixels per unit of time, on the grey of the time in which nobody computes."""
    if not boxes:
        return
    begin, end = min(box.start for box in boxes), max(box.end for box in boxes)
    lanes = sorted({box.lane for box in boxes})
    axes.add_collection(PolyCollection([_corners(lane, begin, end) for lane in lanes], color=IDLE, linewidth=0))
    looks = [(box.kind, light[box.stage]) for box in boxes]
    colours = {look: colour_of(*look) for look in set(looks)}
    corners = [_corners(box.lane, box.start, box.end) for box in boxes]
    edges = 0.6 if scale * float(np.median([box.end - box.start for box in boxes])) > 4 else 0
    faces = [colours[look] for look in looks]
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=edges))


def _corners(lane: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = lane - _THICK / 2, lane + _THICK / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _write_labels(
    axes: Axes, boxes: Sequence[ActionBox], light: dict[int, float], whole: bool, scale: float, high: int
) -> None:
    """Write the whole action or the number of its micro-batch into each box that has room for it."""
    texts = [box.action if whole else str(box.microbatch) for box in boxes]
    size = _font_for(texts, boxes, scale, high)
    for box, text in zip(boxes, texts, strict=True):
        if size and _wide(text, size) <= scale * (box.end - box.start):
            colour = to_rgb(colour_of(box.kind, light[box.stage]))
            ink = "white" if np.dot(colour, _BRIGHTNESS) < 0.5 else "black"
            place = (box.start + box.end) / 2, box.lane
            axes.text(*place, text, fontsize=size, color=ink, ha="center", va="center_baseline", clip_on=True)


def _font_for(texts: Sequence[str], boxes: Sequence[ActionBox], scale: float, high: int) -> int:
    """Return the largest size in which nine of ten texts fit into their boxes, or 0."""
    for size in _FONTS:
        fitting = sum(
            _wide(text, size) <= scale * (box.end - box.start) for text, box in zip(texts, boxes, strict=True)
        )
        if fitting >= 0.9 * len(boxes) and size * _DPI / 72 <= _THICK * high:
            return size
    return 0


def _wide(text: str, size: int) -> float:
    return (_CHARACTER * len(text) + 0.5) * size * _DPI / 72
