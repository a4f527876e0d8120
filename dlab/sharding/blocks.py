"""A tensor as a grid of blocks, with the ranks that hold each. Taught in `07_operator_parallel.ipynb`.

A notebook shows it as a picture (`drawing.py`), a terminal as text.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from html import escape

from dlab.layout import Placed
from dlab.sharding.drawing import MOST, draw, ends, write_ranks

_MOST_IN_TEXT = 8  # columns of blocks in a terminal; of more, the first and the last half are shown


def block_picture(placed: Placed, shape: Sequence[int], name: str = "x", at: int | Sequence[int] = ()) -> BlockPicture:
    """Draw a tensor of this shape as a grid of blocks, each with the ranks that hold it.

    A tensor of three or more dimensions is drawn a slice at a time, its last two dimensions: `at` has the indices of
    the dimensions before them, 0 unless given.

    >>> layout = dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> block_picture(layout("mp", ("sp", "dp")), shape=(32, 784))
    x[32, 784] is cut into 2 × 4 = 8 blocks of 16 × 196, each on 1 of 8 ranks.
           0:196  196:392  392:588  588:784
    0:16   0      4        2        6
    16:32  1      5        3        7
    """
    return BlockPicture(placed, shape, name, (at,) if isinstance(at, int) else tuple(at))


class BlockPicture:
    """The blocks of a tensor, or of a slice of it, and their ranks: an image in a notebook, a grid in a terminal."""

    def __init__(self, placed: Placed, shape: Sequence[int], name: str, at: tuple[int, ...]) -> None:
        self.placed, self.shape, self.name = placed, tuple(shape), name
        self.part = placed.local_shape(self.shape)
        self.cuts = [placed.cuts(dim) for dim in range(len(self.shape))]
        self.at = self._check(at)

    def _check(self, at: tuple[int, ...]) -> tuple[int, ...]:
        before = self.shape[:-2]
        at = at or (0,) * len(before)
        if len(at) != len(before):
            raise ValueError(
                f"at={at} does not choose a slice of {self.name}, whose shape is {self.shape}: the picture shows its "
                f"last two dimensions, so give {len(before)} indices, one for each dimension before them"
            )
        for dim, (index, length) in enumerate(zip(at, before, strict=True)):
            if index not in range(length):
                raise IndexError(
                    f"dimension {dim} of {self.name} has no index {index}: its indices are 0 to {length - 1}"
                )
        return at

    @cached_property
    def owners(self) -> dict[tuple[int, ...], list[int]]:
        """The ranks that hold each block of this slice, by the place of the block along each dimension."""
        fixed = tuple(index // part for index, part in zip(self.at, self.part, strict=False))
        found = defaultdict(list)
        for rank in range(self.placed.layout.size):
            block = tuple(self.placed.layout.block(rank, names) for names in self.placed.dims)
            if block[: len(fixed)] == fixed:
                found[block].append(rank)
        return dict(found)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of rows and of columns of blocks."""
        rows, columns = [1, 1, *self.cuts][-2:]
        return rows, columns

    def ranks_of(self, row: int, column: int) -> tuple[tuple[int, ...], list[int]]:
        """Return the place of a block of the grid in the tensor, and its ranks."""
        before = tuple(index // part for index, part in zip(self.at, self.part, strict=False))
        block = (*before, *(row, column)[2 - min(len(self.shape), 2) :])
        return block, self.owners[block]

    def _span(self, dim: int, block: int) -> str:
        """Return the slice of a block along the rows (-2) or the columns (-1); "" if there is none."""
        if len(self.shape) < -dim:
            return ""
        return f"{block * self.part[dim]}:{(block + 1) * self.part[dim]}"

    @property
    def title(self) -> str:
        """What is drawn: `x[32, 784]`, or `w[3, :, :] of 8 × 1024 × 1024`."""
        if not self.at:
            return f"{self.name}[{', '.join(map(str, self.shape))}]" if self.shape else self.name
        return f"{self.name}[{', '.join(map(str, self.at))}, :, :] of {_times(self.shape)}"

    def sentence(self) -> str:
        """Describe the picture in one sentence: how many blocks, their size, and on how many ranks each is."""
        rows, columns = self.grid
        copies, ranks = len(next(iter(self.owners.values()))), self.placed.layout.size
        if rows * columns == 1:
            text = f"{self.title} is not cut: it is on {copies} of {ranks} ranks"
        else:
            counts = f"{rows} × {columns} = {rows * columns}" if min(rows, columns) > 1 else f"{rows * columns}"
            size = _times(self.part[-2:]) + (" numbers" if len(self.part) == 1 else "")
            text = f"{self.title} is cut into {counts} blocks of {size}, each on {copies} of {ranks} ranks"
        partial = self.placed.partial
        return text + (f", and is the sum over {' and '.join(partial)} of what they hold." if partial else ".")

    @property
    def alt(self) -> str:
        """The alt text: the sentence, and the ranks of up to 8 blocks."""
        blocks = [(row, column) for row in range(self.grid[0]) for column in range(self.grid[1])]
        shown = blocks if len(blocks) <= 8 else [blocks[0], blocks[-1]]
        told = []
        for row, column in shown:
            spans = ", ".join(filter(None, [self._span(-2, row), self._span(-1, column)]))
            ranks = self.ranks_of(row, column)[1]
            told.append(f"[{spans}] on {'ranks' if len(ranks) > 1 else 'rank'} {write_ranks(ranks, 40)}")
        between = " to " if len(shown) < len(blocks) else "; "
        return f"{self.sentence()} {between.join(told)}."

    def __repr__(self) -> str:
        rows, columns = ends(self.grid[0], MOST), ends(self.grid[1], _MOST_IN_TEXT)
        lines = [["", *("…" if column is None else self._span(-1, column) for column in columns)]]
        for row in rows:
            line = ["…" if row is None else self._span(-2, row)]
            for column in columns:
                line.append("…" if row is None or column is None else write_ranks(self.ranks_of(row, column)[1], 20))
            lines.append(line)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.sentence(), *(text.rstrip() for text in texts if text.strip())])

    def _repr_html_(self) -> str:
        coded = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{coded}">'

    @property
    def svg(self) -> str:
        """The picture as a file of its own."""
        return draw(self)


class BlockPictures(tuple[BlockPicture, ...]):
    """Pictures of several tensors, side by side in a notebook."""

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self))

    def _repr_html_(self) -> str:
        return "<div>" + " ".join(picture._repr_html_() for picture in self) + "</div>"


def _times(lengths: Sequence[int]) -> str:
    return " × ".join(map(str, lengths))
