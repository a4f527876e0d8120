"""Slice tables: which part of each tensor every rank holds, a row per rank. Taught in `07_operator_parallel.ipynb`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from dlab.data.table import Bars, Table
from dlab.layout import Placed, _count, check_shape, whole_numbers
from dlab.sharding.blocks import BlockPicture, BlockPictures, block_picture
from dlab.sharding.drawing import INK, colour_of


class SliceRow(NamedTuple):
    """What one rank holds: a tuple of slices of each tensor."""

    rank: int
    coordinates: tuple[int, ...]
    slices: tuple[tuple[slice, ...], ...]


class SliceTable(Table):
    """A row for each rank: its coordinates in the device matrix, and its slice of each tensor.

    In a notebook, slices that are the same block of a tensor have the same colour, here and in `picture()`. `rows` has
    all ranks, also those that a long table leaves out.
    """

    def __init__(self, placed: Sequence[Placed], shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
        self.placed, self.shapes, self.names = tuple(placed), tuple(shapes), tuple(names)
        layouts = [each.layout for each in placed]
        self.layout = layouts[0]
        # Ranks have coordinates only where all tensors lie on the same device matrix.
        self.shared = len({(layout.device_matrix, layout.names) for layout in layouts}) == 1
        held = zip(*(each.slices(shape) for each, shape in zip(placed, shapes, strict=True)), strict=True)
        self.rows = [SliceRow(rank, self.layout.coordinates(rank), slices) for rank, slices in enumerate(held)]

    def heading(self) -> list[str]:
        place = f"({', '.join(self.layout.names)})" if self.shared else "rank"
        partial = [f", partial over {', '.join(each.partial)}" if each.partial else "" for each in self.placed]
        return [place, *(name + more for name, more in zip(self.names, partial, strict=True))]

    def cells(self, row: SliceRow) -> list[int | str | Bars]:
        place = f"({','.join(map(str, row.coordinates))})" if self.shared else row.rank
        return [place, *(write_slices(name, held) for name, held in zip(self.names, row.slices, strict=True))]

    def between(self, hidden: Sequence[SliceRow]) -> str:
        return f"… ranks {hidden[0].rank} to {hidden[-1].rank}: {len(hidden)} more"

    def _html_row(self, row: SliceRow) -> str:
        place, *texts = self.cells(row)
        cells = [f"<td style='text-align:left' title='rank {row.rank}'>{escape(str(place))}</td>"]
        for placed, shape, text in zip(self.placed, self.shapes, texts, strict=True):
            cuts = [placed.cuts(dim) for dim in range(len(shape))]
            block = [placed.layout.block(row.rank, names) for names in placed.dims]
            style = f"text-align:left;background-color:{colour_of(block, cuts)};color:{INK}"
            cells.append(f"<td style='{style}'>{escape(str(text))}</td>")
        return f"<tr>{''.join(cells)}</tr>"

    def picture(self, name: str | None = None, at: int | Sequence[int] = ()) -> BlockPicture | BlockPictures:
        """Draw a tensor as a grid of blocks with their ranks: the one of this name, or all of them side by side.

        `at` chooses the slice of a tensor that has more than two dimensions.
        """
        if name is not None and name not in self.names:
            raise ValueError(f"this table has no tensor {name!r}: it has {', '.join(map(repr, self.names))}")
        drawn = [
            block_picture(placed, shape, each, at if len(shape) > 2 else ())
            for placed, shape, each in zip(self.placed, self.shapes, self.names, strict=True)
            if name in (None, each)
        ]
        return drawn[0] if len(drawn) == 1 else BlockPictures(drawn)


def write_slices(name: str, held: Sequence[slice]) -> str:
    """Return a rank's part of a tensor as one writes it: `x[0:16, 0:196]`."""
    return f"{name}[{', '.join(f'{each.start}:{each.stop}' for each in held)}]" if held else name


def slice_table(placed: Placed | Sequence[Placed], shape: Sequence[Any], name: str | Sequence[str] = "x") -> SliceTable:
    """Return a table with a row for each rank and its slice of a tensor, or of several tensors side by side.

    For several, give a sequence of layouts, of shapes (or one shape for all) and of names.

    >>> layout = dlab.Layout((2, 2), ("dp", "tp"))
    >>> dlab.slice_table((layout("dp", "None"), layout("None", "tp")), shape=((8, 4), (4, 6)), name=("x", "w"))
    (dp, tp)  x            w
    (0,0)     x[0:4, 0:4]  w[0:4, 0:3]
    (0,1)     x[0:4, 0:4]  w[0:4, 3:6]
    (1,0)     x[4:8, 0:4]  w[0:4, 0:3]
    (1,1)     x[4:8, 0:4]  w[0:4, 3:6]
    """
    several: list[Any] = list(placed) if isinstance(placed, (tuple, list)) else [placed]
    shapes = _shapes(several, shape)
    names = [name] * (len(several) == 1) if isinstance(name, str) else list(name) if isinstance(name, Sequence) else []
    if len(names) != len(several):
        raise ValueError(f"name={name!r} does not name {_count(len(several), 'tensor')}: give a name for each")
    if len({each.layout.size for each in several}) > 1:
        sizes = " and ".join(f"{each.layout} is for {each.layout.size} ranks" for each in several)
        raise ValueError(f"{sizes}: tensors side by side are on the same ranks")
    return SliceTable(several, shapes, names)


def _shapes(several: list[Any], shape: Any) -> list[tuple[int, ...]]:
    """Return a shape for each tensor, from one of them or one for all."""
    for each in several:
        if not isinstance(each, Placed):
            raise ValueError(f"{each!r} is not the layout of a tensor: give what a Layout returns when it is called")
    if not several:
        raise ValueError("a slice table of no tensor is not possible: give at least one layout")
    if isinstance(shape, int):
        raise ValueError(
            f"shape={shape} is a number: give a tuple with a length for each dimension, such as ({shape},)"
        )
    if not isinstance(shape, Sequence) or whole_numbers(shape) is not None:
        return [check_shape(shape)] * len(several)
    if len(shape) != len(several):
        raise ValueError(
            f"shape={tuple(shape)!r} has {len(shape)} shapes for {len(several)} layouts: give one for each tensor"
        )
    return [check_shape(each) for each in shape]
