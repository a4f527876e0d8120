"""The table, for a terminal and for a README."""

from __future__ import annotations

from collections.abc import Sequence

from dlab.bench.rows import AtMost, Row, number

HEADINGS = ("what", "dlab", "against", "ratio", "target", "")


def as_text(rows: Sequence[Row], machine: str) -> str:
    """Aligned columns, and below them what there is to know about each row."""
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    notes = [f"{row.name}:\n    {row.note}" for row in rows if row.note]
    return "\n".join([machine, "", *table, "", *notes])


def as_markdown(rows: Sequence[Row], machine: str) -> str:
    """A table that GitHub draws, with the machine below it."""
    lines = [(*HEADINGS, "how"), ("---",) * (len(HEADINGS) + 1), *((*_cells(row), row.note) for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", f"Measured on {machine}."])


def _cells(row: Row) -> tuple[str, ...]:
    ratio = f"{number(100 * row.ratio)} %" if isinstance(row.target, AtMost) else f"{number(row.ratio)}x"
    ours, theirs = (f"{number(value)} {row.unit}" for value in (row.ours, row.theirs))
    return row.name, ours, theirs, ratio, str(row.target or "-"), row.verdict
