"""Tables that show which rank holds what: aligned text in a terminal, HTML with small bars in a notebook.

Taught in `01_data_partitioning.ipynb`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_SHOWN = 8  # rows at each end of a long table
_MOST_BARS = 20  # with more classes than this a row of bars is unreadable
_BLOCKS = "▁▂▃▄▅▆▇█"


class Table(ABC):
    """Rows with a heading. Of more than 16 rows it shows the first 8, one line about those between, and the last 8.

    A subclass defines the cells; `rows` holds all rows as plain data, for further computation.
    """

    rows: Sequence[Any]

    @abstractmethod
    def heading(self) -> list[str]:
        """Return the names of the columns."""

    @abstractmethod
    def cells(self, row: Any) -> list[int | str | Bars]:
        """Return what to show of one row; numbers are aligned to the right, everything else to the left."""

    @abstractmethod
    def between(self, hidden: Sequence[Any]) -> str:
        """Return one line about the rows that are not shown."""

    def _folded(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        if len(self.rows) <= 2 * _SHOWN:
            return self.rows, [], []
        return self.rows[:_SHOWN], self.rows[_SHOWN:-_SHOWN], self.rows[-_SHOWN:]

    def __repr__(self) -> str:
        first, hidden, last = self._folded()
        body = [self.cells(row) for row in [*first, *last]]
        widths = [max(len(str(cell)) for cell in column) for column in zip(self.heading(), *body, strict=True)]
        numeric = [isinstance(cell, int) for cell in body[0]] if body else [False] * len(widths)

        def line(cells: Sequence[object]) -> str:
            padded = zip(cells, widths, numeric, strict=True)
            return "  ".join(f"{cell!s:{'>' if right else '<'}{width}}" for cell, width, right in padded).rstrip()

        lines = [line(self.heading()), *map(line, body)]
        if hidden:
            lines.insert(1 + len(first), self.between(hidden))
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the table as Markdown; a long one is shortened as in a terminal."""
        first, hidden, last = self._folded()
        lines: list[Sequence[object]] = [self.heading(), *map(self.cells, [*first, *last])]
        if hidden:
            lines.insert(1 + len(first), [self.between(hidden), *[""] * (len(self.heading()) - 1)])
        texts = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([texts[0], "|" + "---|" * len(self.heading()), *texts[1:]])

    def _repr_html_(self) -> str:
        first, hidden, last = self._folded()
        heading = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in self.heading())
        lines = [self._html_row(row) for row in first]
        if hidden:
            lines.append(f"<tr><td colspan='{len(self.heading())}'>{escape(self.between(hidden))}</td></tr>")
        lines += [self._html_row(row) for row in last]
        return f"<table><thead><tr>{heading}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def _html_row(self, row: Any) -> str:
        texts = []
        for cell in self.cells(row):
            side = "right" if isinstance(cell, int) else "left"
            inside = cell.html() if isinstance(cell, Bars) else escape(str(cell))
            texts.append(f"<td style='text-align:{side}'>{inside}</td>")
        return f"<tr>{''.join(texts)}</tr>"


@dataclass(frozen=True)
class Bars:
    """A small bar per name, scaled to the largest value.

    >>> print(Bars({0: 3, 1: 24, 2: 0}))
    ▁█·
    """

    values: dict[int, int]

    def __str__(self) -> str:
        top = max(self.values.values(), default=0)
        # A dot for zero, so that a small value never looks like nothing.
        return "".join(_BLOCKS[value * 7 // top] if value else "·" for value in self.values.values())

    def html(self) -> str:
        # A plain colour that is readable on light and dark pages, because JupyterLab removes everything else
        # (currentColor, variables) from a notebook that is not trusted yet.
        top = max(self.values.values(), default=0) or 1
        style = "display:inline-block;vertical-align:bottom;width:0.5em;margin:0 1px;background-color:#3d85c6;height:"
        bars = "".join(
            f"<span title='{name}: {value}' style='{style}{1.5 * value / top:.2f}em'></span>"
            for name, value in self.values.items()
        )
        text = ", ".join(f"{name}: {value}" for name, value in self.values.items())
        return (
            f"<span role='img' aria-label='samples per label: {text}' style='display:inline-block;white-space:nowrap;"
            f"line-height:1;border-bottom:1px solid #3d85c6'>{bars}</span>"
        )


@dataclass(frozen=True)
class ShardRow:
    """One row: the samples of one rank. `histogram` is label: count, or None for data without labels."""

    rank: int
    count: int
    first: tuple[int, ...]
    histogram: dict[int, int] | None = None


class ShardTable(Table):
    """A table with a row per shard: rank, number of samples, first indices and the distribution of labels.

    >>> ShardTable([ShardRow(0, 7, (2, 8, 3)), ShardRow(1, 2, (0, 1))])
    rank  count  first indices
       0      7  2, 8, 3, …
       1      2  0, 1
    """

    def __init__(self, rows: Sequence[ShardRow]) -> None:
        self.rows = list(rows)
        labels = self.rows[0].histogram if self.rows else None
        self.labels = list(labels) if labels and len(labels) <= _MOST_BARS else []

    def heading(self) -> list[str]:
        plain = ["rank", "count", "first indices"]
        if not self.labels:
            return plain
        dense = self.labels == list(range(self.labels[0], self.labels[-1] + 1)) and len(self.labels) > 2
        names = f"{self.labels[0]}..{self.labels[-1]}" if dense else ", ".join(map(str, self.labels))
        return [*plain, f"labels {names}", "per label"]

    def cells(self, row: ShardRow) -> list[int | str | Bars]:
        first = [str(index) for index in row.first] + ["…"] * (row.count > len(row.first))
        plain: list[int | str | Bars] = [row.rank, row.count, ", ".join(first)]
        if not self.labels or row.histogram is None:
            return plain
        return [*plain, Bars(row.histogram), _span(row.histogram.values())]

    def between(self, hidden: Sequence[ShardRow]) -> str:
        plural = "s" if len(hidden) > 1 else ""
        return f"… {len(hidden)} more shard{plural}, {_span([row.count for row in hidden])} samples each"


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}..{high}"
