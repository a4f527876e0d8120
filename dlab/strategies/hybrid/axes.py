"""The axes of a hybrid: dp for copies with other samples, tp for layers in parts, pp for stages.

Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlab.mesh import RankGrid

AXES = {"dp": "copies with other samples", "tp": "layers in parts", "pp": "stages"}


def check_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of the axes, slowest first; raise an error for axes that no hybrid has."""
    if not isinstance(axes, Mapping) or not axes:
        raise ValueError(f"axes={axes!r}: give the length of each axis, slowest first, as in {{'dp': 2, 'pp': 2}}")
    for name, length in axes.items():
        if name not in AXES:
            known = ", ".join(f"{each!r} ({what})" for each, what in AXES.items())
            raise ValueError(f"a hybrid has no axis {name!r}: its axes are {known}")
        if type(length) is not int or length < 1:
            raise ValueError(f"the axis {name!r} has the length {length!r}: give a number of ranks, 1 or more")
    return dict(axes)


def grid_of(axes: Mapping[str, int]) -> RankGrid:
    """Return the grid of ranks; an axis that is missing has the length 1, and changes no rank's place."""
    whole = dict.fromkeys(AXES.keys() - axes.keys(), 1) | dict(axes)
    return RankGrid(tuple(whole.values()), tuple(whole))
