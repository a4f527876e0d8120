"""The table of results, for a terminal and for the page of figures; grids follow it, each under its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlab.bench.rows import AtMost, Grid, Row, number

INTRODUCTION = (
    "Written by one run of `make bench`. Contenders take turns, each figure is a median, and a ratio says how many",
    "times faster dlab is, or which share it takes. A row of several sizes shows the one nearest to missing its",
    "target; its last column has the others. On a machine that others use as well, ratios differ from run to run.",
    "",
)
HEADINGS = ("what", "dlab", "against", "ratio", "target", "")


def as_text(measured: Sequence[Row | Grid], machine: str) -> str:
    """Return aligned columns, and below them the notes of each row."""
    rows = [row for row in measured if isinstance(row, Row)]
    notes = [f"{row.name}:\n    {row.note}" for row in rows if row.note]
    lines = [machine, "", *_aligned([HEADINGS, *map(_cells, rows)]), "", *notes]
    for grid in _grids(measured):
        lines += ["", f"{grid.name}:", *_aligned([grid.headings, *grid.lines]), f"    {grid.note}"]
    return "\n".join(lines)


def as_page(measured: Sequence[Row | Grid], machine: str) -> str:
    """Return tables in Markdown, after a description of the machine."""
    rows = [(*_cells(row), row.note) for row in measured if isinstance(row, Row)]
    lines = ["# Figures", "", *INTRODUCTION, f"Measured on {machine}.", "", *_piped([(*HEADINGS, "how"), *rows]), ""]
    for grid in _grids(measured):
        lines += [f"## {grid.name}", "", f"({grid.note})", "", *_piped([grid.headings, *grid.lines]), ""]
    return "\n".join(lines)


def _grids(measured: Sequence[Row | Grid]) -> Iterator[Grid]:
    return (grid for grid in measured if isinstance(grid, Grid))


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _piped(lines: Sequence[tuple[str, ...]]) -> list[str]:
    heading, *others = lines
    return [f"| {' | '.join(line)} |" for line in (heading, ("---",) * len(heading), *others)]


def _cells(row: Row) -> tuple[str, ...]:
    ratio = f"{number(100 * row.ratio)} %" if isinstance(row.target, AtMost) else f"{number(row.ratio)}x"
    ours, theirs = (f"{number(value)} {row.unit}" for value in (row.ours, row.theirs))
    return row.name, ours, theirs, ratio, str(row.target or "-"), row.verdict
