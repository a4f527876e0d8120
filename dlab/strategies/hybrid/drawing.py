"""The cuts of a network as a picture: inside its layers (tp), between its layers (pp), and both, side by side.

Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from dlab.sharding.drawing import _EDGE, _FAINT, INK, _text, colour_of, ends, write_ranks
from dlab.strategies.hybrid.plan import HybridPlan, PlannedLayer, block_of

_ROWS = 14  # layers of a picture; of more, blocks are drawn, and of still more the first and the last half
_HIGH, _GAP = 34, 7  # pixels of a row; between rows, and between the parts of one
_BETWEEN = 30  # pixels between panels
_NARROW, _PART, _LETTER = 170, 48, 6.6  # pixels of a panel and of a part, at least; of a character
_UNCUT = "#F1F1F1"


class CutRow(NamedTuple):
    """A row of the picture: a layer, or a block of several."""

    name: str
    note: str
    stage: int
    cut: bool  # along tp


class CutCell(NamedTuple):
    """A part of a row: who holds it, and their colours; several where all of them hold the whole."""

    text: str
    colours: tuple[str, ...]


class CutPanel(NamedTuple):
    """One network with its cuts: what is above it, and the cells of each row."""

    title: str
    note: str
    cells: list[list[CutCell]]
    between: bool  # whether it is cut between layers


class CutPicture:
    """A network with a row for each layer, cut along tp by vertical lines, and along pp by horizontal ones."""

    def __init__(self, plan: HybridPlan, axes: Mapping[str, int], kind: str) -> None:
        self._plan, self._axes, self._kind = plan, dict(axes), kind
        rows = [self._row_of([layer], layer.name) for layer in plan.layers]
        if len(rows) > _ROWS:
            rows = self._blocks()
        self.rows = [None if place is None else rows[place] for place in ends(len(rows), _ROWS)]

    def _blocks(self) -> list[CutRow]:
        """Return a row for each block of layers in a stage."""
        groups: dict[tuple[int, str], list[PlannedLayer]] = {}
        for layer in self._plan.layers:
            groups.setdefault((layer.stage, block_of(layer.name)), []).append(layer)
        return [self._row_of(layers, name) for (_, name), layers in groups.items()]

    def _row_of(self, layers: Sequence[PlannedLayer], name: str) -> CutRow:
        entries = {each: self._plan.entries[each] for layer in layers for each in layer.parameters}
        cut = self._plan.lengths["tp"] > 1 and any(each.placed.used for each in entries.values())
        if len(layers) > 1:
            return CutRow(name, f"{len(layers)} layers", layers[0].stage, cut)
        shapes = [each.shape for each in entries.values() if len(each.shape) == 2]
        note = f"{shapes[0][1]} → {shapes[0][0]}" if shapes and layers[0].kind == "Linear" else layers[0].kind
        dims = {dim for each in entries.values() for dim, names in enumerate(each.placed.dims[:2]) if names}
        if cut and layers[0].kind == "Linear":
            note += ", cut by outputs" if 0 in dims else ", cut by inputs"
        return CutRow(name, note, layers[0].stage, cut)

    # what is in the rows

    @property
    def panels(self) -> list[CutPanel]:
        """The network cut along tp alone, along pp alone, and along both; only one where there is one cut, or none."""
        slices, stages = self._plan.lengths["tp"], self._plan.lengths["pp"]
        along, across = f"inside layers: tp {slices}", f"between layers: pp {stages}"
        if slices == 1 or stages == 1:
            title = along if slices > 1 else across if stages > 1 else "not cut"
            return [CutPanel(title, self._copies(), self._cells(self._both), stages > 1)]
        return [
            CutPanel(along, "tensor parallelism", self._cells(self._inside), False),
            CutPanel(across, "pipeline parallelism", self._cells(self._between), True),
            CutPanel("both, with ranks", self._copies(), self._cells(self._both), True),
        ]

    def _cells(self, of: Callable[[CutRow], list[CutCell]]) -> list[list[CutCell]]:
        return [[CutCell("⋮", ())] if row is None else of(row) for row in self.rows]

    def _copies(self) -> str:
        copies = self._plan.lengths["dp"]
        return f"dp {copies}: each part on {copies} ranks" if copies > 1 else "each part on one rank"

    def _inside(self, row: CutRow) -> list[CutCell]:
        count = self._plan.lengths["tp"]
        colours = [colour_of((place,), (count,)) for place in range(count)]
        if not row.cut:
            return [CutCell("whole on all", tuple(colours))]
        return [CutCell(f"tp {place}", (colour,)) for place, colour in enumerate(colours)]

    def _between(self, row: CutRow) -> list[CutCell]:
        schedule = self._plan.schedule
        place = schedule.rank_of(row.stage)
        stage = f", stage {row.stage}" if schedule.stages > schedule.ranks else ""
        return [CutCell(f"pp {place}{stage}", (colour_of((place,), (schedule.ranks,)),))]

    def _both(self, row: CutRow) -> list[CutCell]:
        stages, slices = self._plan.lengths["pp"], self._plan.lengths["tp"]
        at = self._plan.schedule.rank_of(row.stage)
        colours = [colour_of((at, place), (stages, slices)) for place in range(slices)]
        every = [self.ranks_of(row.stage, place) for place in range(slices)]
        if not row.cut:
            return [CutCell(_ranks(sorted(rank for ranks in every for rank in ranks), 14 * slices), tuple(colours))]
        return [CutCell(_ranks(ranks, 14), (colour,)) for ranks, colour in zip(every, colours, strict=True)]

    def ranks_of(self, stage: int, place: int) -> list[int]:
        """Return the ranks that hold the part of a stage at this place along tp: one for each copy along dp."""
        grid, pipeline = self._plan.grid, self._plan.schedule.rank_of(stage)
        return [grid.rank_at({"dp": copy, "tp": place, "pp": pipeline}) for copy in range(self._plan.lengths["dp"])]

    # as text

    @property
    def alt(self) -> str:
        """The alt text: the axes, the cuts, and who holds each part, as far as these are few."""
        axes = " × ".join(f"{name} {length}" for name, length in self._axes.items())
        slices, stages = self._plan.lengths["tp"], range(self._plan.schedule.stages)
        told = []
        for stage in stages[:4]:
            layers = [each.name for each in self._plan.layers if each.stage == stage]
            names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" if layers else "no weights"
            ranks = [_ranks(self.ranks_of(stage, place), 20) for place in range(min(slices, 4))]
            told.append(f"{names} on {' and '.join(ranks)}" + " and others" * (slices > 4))
        rest = f"; and {len(stages) - 4} more stages" if len(stages) > 4 else ""
        titles = "; ".join(panel.title for panel in self.panels)
        return f"{self._kind} on {axes} ranks, drawn as rows of layers ({titles}): {'; '.join(told)}{rest}."

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        coded = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{coded}">'

    # as a drawing

    @property
    def svg(self) -> str:
        """The picture as a file of its own."""
        left = _EDGE + max(_LETTER * max(len(row.name) * 1.1, len(row.note)) if row else 0 for row in self.rows) + 14
        left = max(left, _EDGE + 9.5 * len(self._kind) + 14)
        top, x = _EDGE + 46.0, left
        found = [_text(_EDGE, _EDGE + 9, self._kind, 14, "start", weight="bold")]
        for place, row in enumerate(self.rows):
            y = top + place * (_HIGH + _GAP)
            if row is None:
                found.append(_text(_EDGE, y + _HIGH / 2, "⋮", 13, "start", _FAINT))
                continue
            found.append(_text(_EDGE, y + 10, row.name, 12, "start", weight="bold"))
            found.append(_text(_EDGE, y + 25, row.note, 11, "start", _FAINT))
        for panel in self.panels:
            wide = _width_of(panel)
            found += self._draw(panel, x, top, wide)
            x += wide + _BETWEEN
        size = round(x - _BETWEEN + _EDGE), round(top + len(self.rows) * (_HIGH + _GAP) + _EDGE)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.alt)}" width="{size[0]}" '
            f'height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}" font-family="system-ui, sans-serif">'
            f'<rect width="{size[0]}" height="{size[1]}" rx="9" fill="#FFFFFF"/>{"".join(found)}</svg>'
        )

    def _draw(self, panel: CutPanel, left: float, top: float, wide: float) -> list[str]:
        found = [_text(left, _EDGE + 9, panel.title, 13, "start", weight="bold")]
        found.append(_text(left, _EDGE + 29, panel.note, 11, "start", _FAINT))
        for place, cells in enumerate(panel.cells):
            y = top + place * (_HIGH + _GAP)
            part = (wide + _GAP) / len(cells) - _GAP
            for number, cell in enumerate(cells):
                found += _draw_cell(cell, left + number * (part + _GAP), y, part)
            if panel.between and self._ends_stage(place):
                found.append(_line(left - _GAP, left + wide + _GAP, y + _HIGH + _GAP / 2))
        return found

    def _ends_stage(self, place: int) -> bool:
        """Return whether the next row is in another stage."""
        pair = self.rows[place : place + 2]
        return len(pair) == 2 and all(pair) and len({row.stage for row in pair if row}) == 2


def _draw_cell(cell: CutCell, x: float, y: float, wide: float) -> list[str]:
    """Draw a box of one colour, or, for what several ranks hold whole, a pale one with a stripe of each colour."""
    found = []
    if len(cell.colours) == 1:
        found.append(_box(x, y, wide, _HIGH, cell.colours[0]))
    elif cell.colours:
        found.append(_box(x, y, wide, _HIGH, _UNCUT))
        stripe = wide / len(cell.colours)
        found += [_box(x + n * stripe, y + _HIGH - 6, stripe, 6, each) for n, each in enumerate(cell.colours)]
    middle = y + _HIGH / 2 - (3 if len(cell.colours) > 1 else 0)
    return [*found, _text(x + wide / 2, middle, cell.text, 12)]


def _box(x: float, y: float, wide: float, high: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'


def _line(left: float, right: float, y: float) -> str:
    return f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{INK}" stroke-width="2" stroke-dasharray="6 4"/>'


def _width_of(panel: CutPanel) -> float:
    """Return the pixels that a panel needs: its title, and the text of every part."""
    most = max(
        len(cells) * (max(_PART, _LETTER * max(len(c.text) for c in cells) + 10) + _GAP) for cells in panel.cells
    )
    return max(_NARROW, most - _GAP, 7.6 * len(panel.title), 6.4 * len(panel.note))


def _ranks(ranks: Sequence[int], room: int) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {write_ranks(ranks, room)}"
