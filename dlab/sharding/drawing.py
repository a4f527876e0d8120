"""The drawing of a grid of blocks: its colours, the ranks as text of a given length, and the SVG.

It has a white background, so that it looks the same in light and dark themes, and goes into an `<img>`, which
JupyterLab shows even in a notebook that it does not trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hls_to_rgb
from html import escape
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlab.sharding.blocks import BlockPicture

# The colours of the views, which colour-blind readers can tell apart, mixed with white so that dark ink is readable.
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A800")
_WHITE = 0.45  # how much of each is white
INK = "#202020"
_FAINT = "#5C5C5C"
MOST = 16  # blocks along a dimension; of more, the first and the last half are shown
_GAP, _EDGE = 22, 14  # pixels: where blocks are left out; around the picture
_FONTS = range(14, 7, -1)  # sizes of text in a block, the largest that fits
_WIDE = 0.6  # width of a character, in its height


def colour_of(block: Sequence[int], cuts: Sequence[int]) -> str:
    """Return the colour of a block, given its place along each dimension and the number of blocks along each.

    Up to 8 blocks have colours that are easily told apart. Of more, the hue shows the place along the dimension with
    the most blocks (it repeats after 16), and the lightness the place along the others.
    """
    if prod(cuts) <= len(_HUES):
        number = _number(block, cuts)
        parts = [int(_HUES[number][at : at + 2], 16) for at in (1, 3, 5)]
        return _hex([(1 - _WHITE) * part / 255 + _WHITE for part in parts])
    most = max(reversed(range(len(cuts))), key=cuts.__getitem__)
    others = [dim for dim in range(len(cuts)) if dim != most]
    rest = [cuts[dim] for dim in others]
    lighter = 1 - _number([block[dim] for dim in others], rest) / max(prod(rest) - 1, 1)
    return _hex(hls_to_rgb(0.9 * (block[most] % MOST) / min(cuts[most], MOST), 0.68 + 0.2 * lighter, 0.6))


def _number(block: Sequence[int], cuts: Sequence[int]) -> int:
    number = 0
    for place, count in zip(block, cuts, strict=True):
        number = number * count + place
    return number


def _hex(parts: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02X}" for part in parts)


def write_ranks(ranks: Sequence[int], room: float = float("inf")) -> str:
    """Return ranks as text of at most about `room` characters, such as `0-15, 32, +240 more`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[tuple[str, int]] = []
    for run in runs:
        parts += [(f"{run[0]}-{run[-1]}", len(run))] if len(run) > 2 else [(str(rank), 1) for rank in run]
    if len(ranks) == 1:
        return parts[0][0]
    for kept in range(len(parts), 0, -1):
        hidden = len(ranks) - sum(count for _, count in parts[:kept])
        text = ", ".join([part for part, _ in parts[:kept]] + [f"+{hidden} more"] * (hidden > 0))
        if len(text) <= room:
            return text
    shorter = f"{parts[0][0]} +{len(ranks) - parts[0][1]}"
    return shorter if len(shorter) <= room else f"×{len(ranks)}"


def ends(count: int, most: int) -> list[int | None]:
    """Return the places to show of this many: all, or the first and the last ones with None between them."""
    if count <= most:
        return list(range(count))
    return [*range(most // 2), None, *range(count - most // 2, count)]


def draw(picture: BlockPicture) -> str:
    """Return the picture as SVG: a title, the axes that cut it, the bounds of the blocks, and the blocks."""
    grid = [ends(count, MOST) for count in picture.grid]
    width, height = _size(([1, 1, *picture.shape])[-2:], [len(shown) for shown in grid])
    rows, columns = _places(grid[0], height), _places(grid[1], width)
    bounds = [_bounds(picture, dim, places) for dim, places in ((-2, rows), (-1, columns))]
    names = [_axes(picture, dim) for dim in (-2, -1)]
    left = _EDGE + (18 if names[0] else 0) + max((7 * len(text) + 8 for _, text in bounds[0]), default=0)
    top = _EDGE + 22 + (18 if names[1] else 0) + (16 if bounds[1] else 0)
    parts = [_text(left, _EDGE + 9, picture.title, 14, "start", weight="bold")]
    if names[1]:
        parts.append(_text(left + width / 2, _EDGE + 31, names[1], 12))
    if names[0]:
        middle = top + height / 2
        parts.append(_text(_EDGE + 6, middle, names[0], 12, turned=True))
    parts += [_text(left + at, top - 9, text, 11, fill=_FAINT) for at, text in _spread(bounds[1], 7 * 11 / 12)]
    parts += [_text(left - 6, top + at, text, 11, "end", fill=_FAINT) for at, text in _spread(bounds[0], 0, 13)]
    parts += _cells(picture, rows, columns, left, top)
    note = _note(picture)
    parts.append(_text(left, top + height + 16, note, 12, "start", fill=_FAINT))
    widest = max(7.2 * len(note), 9 * len(picture.title), width + 20)
    size = round(left + widest + _EDGE), round(top + height + 28 + _EDGE / 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(picture.alt)}" width="{size[0]}" '
        f'height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}" font-family="system-ui, sans-serif">'
        f'<rect width="{size[0]}" height="{size[1]}" rx="9" fill="#FFFFFF"/>{"".join(parts)}</svg>'
    )


Places = list[tuple[int | None, float, float]]


def _size(shape: Sequence[int], shown: Sequence[int]) -> tuple[float, float]:
    """Return width and height in pixels; wide matrices are drawn wider, but not in proportion (784 to 32)."""
    ratio = min(max((max(shape[1], 1) / max(shape[0], 1)) ** 0.5, 0.6), 2.4)
    if shape[0] == 1:
        return max(420.0, 34.0 * shown[1]), 46.0
    width, height = 280 * ratio**0.5, 210 / ratio**0.5
    return max(width, 36.0 * shown[1]), max(height, 19.0 * shown[0])


def _places(shown: list[int | None], length: float) -> Places:
    """Return each shown block with where it begins and ends in the picture; None is the gap for those left out."""
    gap = _GAP if None in shown else 0
    each = (length - gap) / (len(shown) - (gap > 0))
    found, at = [], 0.0
    for block in shown:
        end = at + (gap if block is None else each)
        found.append((block, at, end))
        at = end
    return found


def _bounds(picture: BlockPicture, dim: int, places: Places) -> list[tuple[float, str]]:
    """Return where blocks begin and end, in the picture and in the tensor."""
    if len(picture.shape) < -dim:
        return []
    found = {}
    for block, begin, end in places:
        if block is not None:
            found[begin], found[end] = block * picture.part[dim], (block + 1) * picture.part[dim]
    return [(at, str(index)) for at, index in found.items()]


def _spread(labels: list[tuple[float, str]], wide: float, high: float = 0) -> list[tuple[float, str]]:
    """Return the labels that fit beside each other; the first and the last always do."""
    kept: list[tuple[float, str]] = []
    for at, text in labels:
        room = wide * (len(text) + 2.2) if wide else high
        last = (at, text) == labels[-1]
        while last and len(kept) > 1 and at - kept[-1][0] < room:
            kept.pop()
        if last or not kept or (at - kept[-1][0] >= room):
            kept.append((at, text))
    return kept


def _axes(picture: BlockPicture, dim: int) -> str:
    names = picture.placed.dims[dim] if len(picture.shape) >= -dim else ()
    return f"cut along {', then '.join(names)}" if names else ""


def _note(picture: BlockPicture) -> str:
    layout, partial = picture.placed.layout, picture.placed.partial
    copies = len(next(iter(picture.owners.values())))
    free = [name for name in layout.names if name not in (*picture.placed.used, *partial) and layout.lengths[name] > 1]
    what = "each block is" if prod(picture.grid) > 1 else "it is"
    text = f"{what} on {copies} of {layout.size} ranks"
    text += f": copies along {', '.join(free)}" if free and copies > 1 else ""
    return text + (f"; a sum over {' and '.join(partial)}" if partial else "")


def _cells(picture: BlockPicture, rows: Places, columns: Places, left: float, top: float) -> list[str]:
    """Return the blocks, with as much text about their ranks as fits."""
    wide, high = (next(end - begin for block, begin, end in places if block == 0) for places in (columns, rows))
    longest = len(str(picture.placed.layout.size - 1))
    copies = len(next(iter(picture.owners.values())))
    least = longest if copies == 1 else max(longest, len(f"×{copies}"))
    font = next((size for size in _FONTS if size + 3 <= high and _WIDE * size * least + 6 <= wide), 0)
    room = (wide - 6) / (_WIDE * font) if font else 0
    word = ("ranks " if copies > 1 else "rank ") if room >= longest + 8 else ""
    found = []
    for row, begin, end in rows:
        for column, start, stop in columns:
            x, y, middle = left + start, top + begin, (left + (start + stop) / 2, top + (begin + end) / 2)
            if row is None or column is None:
                sign = "⋱" if row is column else "⋮" if row is None else "…"
                found.append(_text(*middle, sign, 12, fill=_FAINT))
                continue
            block, ranks = picture.ranks_of(row, column)
            found.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{stop - start:.1f}" height="{end - begin:.1f}" '
                f'fill="{colour_of(block, picture.cuts)}" stroke="#FFFFFF" stroke-width="1.5"/>'
            )
            if font:
                found.append(_text(*middle, word + write_ranks(ranks, room - len(word)), font))
    return found


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    anchor: str = "middle",
    fill: str = INK,
    weight: str = "",
    turned: bool = False,
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'dominant-baseline="central"{bold}{turn}>{escape(text)}</text>'
    )
