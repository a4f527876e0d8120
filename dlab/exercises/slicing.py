"""The exercise of `07_operator_parallel.ipynb`, "fill in the slice table": which rank holds which part of a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlab.exercises.calling import shorten
from dlab.exercises.sandbox import name_ranks
from dlab.layout import Layout, Placed

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))
PLACED = LAYOUT(("mp", "sp"), "dp")
SHAPE = (16, 6)

Ends = tuple[int, int]  # where a slice begins and ends
Part = tuple[Ends, ...]
EXAMPLE = "'w[0:4, 0:3]' or (slice(0, 4), slice(0, 3))"


def check_slices(table: Any) -> str:
    """Judge a slice table of w[16, 6] in `layout(("mp", "sp"), "dp")` with `Layout((2, 2, 2), ("dp", "sp", "mp"))`.

    The table gives for each rank, or for the coordinates of each rank, what it holds: as text, as slices, or as pairs
    of a first index and the one after the last. A list is in the order of the ranks.

    >>> check_slices({0: "w[0:4, 0:3]"})
    'not yet: ranks 1, 2, 3, 4, 5, 6 and 7 are missing: there are 8 of them.'
    """
    found = _read(table)
    if isinstance(found, str):
        return f"not yet: {found}."
    right = _table(PLACED)
    if found == right:
        return "well done: the first name of a tuple is the major one, and each of the 96 numbers is on one rank."
    for sentence, wrong in _mistakes(right).items():
        if found == wrong:
            return f"not yet: {sentence}."
    rank = next(rank for rank in right if found[rank] != right[rank])
    return f"not yet: {_wrong_rank(rank, found[rank], right[rank])}."


def _table(placed: Placed) -> dict[int, Part]:
    return {rank: tuple((each.start, each.stop) for each in part) for rank, part in enumerate(placed.slices(SHAPE))}


def _read(table: Any) -> dict[int, Part] | str:
    """Return the parts by rank, or a sentence if there is something that cannot be read."""
    table = table.tolist() if hasattr(table, "tolist") else table  # an array, a tensor
    if isinstance(table, Mapping):
        rows = dict(table)
    elif isinstance(table, Sequence) and not isinstance(table, str):
        rows = dict(enumerate(table))
    else:
        return (
            f"{shorten(table)} is not a table: give a dictionary with the part of each rank, as in {{0: {EXAMPLE}, …}}"
        )
    rows = {_rank(key): row for key, row in rows.items()}
    strange = [key for key in rows if key not in range(LAYOUT.size)]
    if strange:
        return f"there is no rank {strange[0]!r}: the ranks are 0 to {LAYOUT.size - 1}"
    missing = [rank for rank in range(LAYOUT.size) if rank not in rows]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"{name_ranks(missing)} {verb} missing: there are {LAYOUT.size} of them"
    found = {}
    for rank in range(LAYOUT.size):
        part = _part(rows[rank])
        if part is None:
            return (
                f"rank {rank} has {shorten(rows[rank])}: give a slice for the rows and one for the columns, {EXAMPLE}"
            )
        found[rank] = part
    return found


def _rank(key: Any) -> Any:
    """Return the rank that a key means, `3`, `"rank 3"`, `(0, 1, 1)` or `"(0,1,1)"`; another key as it is."""
    numbers = tuple(map(int, re.findall(r"\d+", key))) if isinstance(key, str) else key
    if isinstance(numbers, tuple) and len(numbers) == 1:
        return numbers[0]
    coordinates = {LAYOUT.coordinates(rank): rank for rank in range(LAYOUT.size)}
    return coordinates.get(numbers, key) if isinstance(numbers, tuple) else key


def _part(entry: Any) -> Part | None:
    """Read one entry: text, slices or pairs."""
    if isinstance(entry, str):
        inside = re.fullmatch(r"\s*(?:\w*\s*\[)?([^][]*)\]?\s*", entry)
        entry = inside[1].split(",") if inside else ()
    entry = entry.tolist() if hasattr(entry, "tolist") else entry
    if not isinstance(entry, Sequence) or len(entry) != len(SHAPE):
        return None
    read = [_ends(each, length) for each, length in zip(entry, SHAPE, strict=True)]
    return None if None in read else tuple(ends for ends in read if ends)


def _ends(entry: Any, length: int) -> Ends | None:
    """Read a slice, or a pair of its ends, of a dimension of this length; a negative end counts from the last index."""
    if isinstance(entry, str):
        text = re.fullmatch(r"\s*(-?\d*)\s*:\s*(-?\d*)\s*", entry)
        entry = [end or None for end in text.groups()] if text else ()
    if isinstance(entry, slice | range):
        if entry.step not in (None, 1):
            return None
        entry = entry.start, entry.stop
    if not isinstance(entry, Sequence) or len(entry) != 2:
        return None
    try:
        start, stop = (default if end is None else int(end) for end, default in zip(entry, (0, length), strict=True))
        if any(end is not None and float(end) != int(end) for end in entry):
            return None
    except (TypeError, ValueError, OverflowError):
        return None
    return start + length * (start < 0), stop + length * (stop < 0)


def _mistakes(right: dict[int, Part]) -> dict[str, dict[int, Part]]:
    """Return whole tables that come from one misunderstanding, by the sentence that explains it."""
    reverse = Layout((2, 2, 2), ("mp", "sp", "dp"))  # as if the first axis were the fastest

    def each(change: Callable[[int, int], Ends]) -> dict[int, Part]:
        return {rank: tuple(change(*ends) for ends in part) for rank, part in right.items()}

    return {
        "the last name of the tuple is the major one here: of ('mp', 'sp') the first is, so the block of rows is "
        "2 * mp + sp": _table(LAYOUT(("sp", "mp"), "dp")),
        "the blocks follow the numbers of the ranks, as if dp were the fastest axis: the first axis is the slowest, "
        "rank = 4 * dp + 2 * sp + mp": _table(reverse(("mp", "sp"), "dp")),
        "rows and columns have changed places: the first entry of a layout is for the first dimension": {
            rank: (columns, rows) for rank, (rows, columns) in right.items()
        },
        "every slice ends one too early: a slice ends with the first index that is not in it, as in Python": each(
            lambda start, stop: (start, stop - 1)
        ),
        "indices begin with 1 here: they begin with 0, as in Python": each(lambda start, stop: (start + 1, stop + 1)),
        "indices begin with 1 and the last one is in the slice: here they begin with 0, and it is not in it": each(
            lambda start, stop: (start + 1, stop)
        ),
        "each pair is a first index and a length: give the index after the last one instead of the length": each(
            lambda start, stop: (start, stop - start)
        ),
        "every rank holds the whole tensor: each name in the layout cuts a dimension": _table(LAYOUT(None, None)),
        "the rows are cut along mp only: both names of ('mp', 'sp') cut them": _table(LAYOUT("mp", "dp")),
        "the rows are cut along sp only: both names of ('mp', 'sp') cut them": _table(LAYOUT("sp", "dp")),
        "the columns are whole: dp cuts them into 2": _table(LAYOUT(("mp", "sp"), None)),
    }


def _wrong_rank(rank: int, found: Part, right: Part) -> str:
    where = ", ".join(f"{name} {value}" for name, value in zip(LAYOUT.names, LAYOUT.coordinates(rank), strict=True))
    if found == tuple(reversed(right)):
        return f"rank {rank} has rows and columns in changed places: rows come first"
    dim = next(dim for dim in range(len(SHAPE)) if found[dim] != right[dim])
    block = LAYOUT.block(rank, PLACED.dims[dim])
    rule = ("rows is block 2 * mp + sp", "columns is block dp")[dim]
    (start, stop), (begin, end) = found[dim], right[dim]
    what = f"rank {rank} has {start}:{stop}, but it is ({where}), and its part of the {rule} = {block}"
    if (start, stop) == (begin, end - 1):
        return f"{what}: the block is right, but a slice ends with the first index that is not in it"
    if start == begin:
        return f"{what}: it begins at the right place, but a block has {end - begin} {('rows', 'columns')[dim]}"
    return f"{what}, {begin}:{end}"
