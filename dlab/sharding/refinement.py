"""One device matrix for several layouts: the finer one, of whose axes the axes of each of them consist.

Layouts that have one in common can follow each other without gathering a tensor in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

from dlab.layout import Layout, Placed


@lru_cache(maxsize=4096)
def refine(*layouts: Layout) -> Layout | None:
    """Return one device matrix whose axes, alone or several together, are the axes of all of these.

    (2, 4) and (4, 2) have (2, 2, 2) in common. Some have none, such as (2, 3) and (3, 2): then it is None. An axis
    keeps the name of the first layout that has it whole; one that is cut has numbered parts.
    """
    total = layouts[0].size
    for layout in layouts:
        layout.check_ranks(total)
    bounds = sorted({1, total} | {stride for layout in layouts for stride in layout.strides.values()})
    if any(high % low for low, high in pairwise(bounds)):
        return None
    shape: list[int] = []
    names: list[str] = []
    for low, high in reversed(list(pairwise(bounds))):
        shape.append(high // low)
        names.append(_name_between(low, high, layouts, names))
    return Layout(tuple(shape), tuple(names)) if shape else Layout((1,), layouts[0].names[:1])


def _name_between(low: int, high: int, layouts: Sequence[Layout], taken: Sequence[str]) -> str:
    covering = ""
    for layout in layouts:
        for name, stride in layout.strides.items():
            end = stride * layout.lengths[name]
            if (stride, end) == (low, high) and name not in taken:
                return name
            if stride <= low and high <= end and not covering:
                covering = name
    number = 0
    while (name := f"{covering}.{number}") in taken:
        number += 1
    return name


def within(placed: Placed, fine: Layout) -> Placed:
    """Return the same placement, written with the axes of a finer device matrix."""
    if placed.layout is fine:
        return placed
    fine.check_ranks(placed.layout.size)

    def parts(name: str) -> tuple[str, ...]:
        low, length = placed.layout.strides[name], placed.layout.lengths[name]
        found = [axis for axis in fine.names if fine.lengths[axis] > 1 and low <= fine.strides[axis] < low * length]
        if prod(fine.lengths[axis] for axis in found) != length or (found and fine.strides[found[-1]] != low):
            raise ValueError(
                f"{fine} has no axes that together are {name!r} of {placed.layout}: use refine({placed.layout!r}, "
                f"{fine!r}), if that is not None"
            )
        return tuple(found)

    dims = tuple(tuple(part for name in dim for part in parts(name)) for dim in placed.dims)
    return Placed(fine, dims, tuple(part for name in placed.partial for part in parts(name)))
