"""The exercise of `10_hybrid.ipynb`, "who holds what": layers, outputs and samples of three ranks on a mesh."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

from dlab.exercises.calling import shorten
from dlab.exercises.sandbox import name_ranks
from dlab.mesh import RankGrid

AXES = {"dp": 2, "pp": 3, "tp": 2}  # slowest first
RANKS = (3, 6, 10)  # that are asked for
COUNTS = {"layers": 6, "outputs": 10, "samples": 24}
_GRID = RankGrid(tuple(AXES.values()), tuple(AXES))
_EXAMPLE = '("0:3", "0:5", "0:6")'

Indices = tuple[int, ...]


def check_holdings(holdings: Any) -> str:
    """Judge who holds what on a mesh of dp 2, pp 3 and tp 2, slowest first: "well done …", or "not yet: …".

    Six layers of ten outputs each, and a batch of 24 samples, on 12 ranks. A dictionary has for each of the ranks 3, 6
    and 10 its layers, which of the outputs of each of them, and its samples: as text, slices, ranges or pairs of ends.

    >>> check_holdings({3: ("2:4", "5:10", "0:12"), 6: ("0:2", "0:5", "12:24")})
    'not yet: rank 10 is missing: give its layers, outputs and samples.'
    """
    found = _read(holdings)
    if isinstance(found, str):
        return f"not yet: {found}."
    if found == {rank: _holding(rank, _RIGHT) for rank in RANKS}:
        return (
            "well done: of the coordinates of a rank, pp says which layers, tp which outputs of them, and dp which "
            "samples; ranks 6 and 10 have the same samples, because they are in the same copy of the network."
        )
    if told := _find_mistakes(found):
        return f"not yet: {told}."
    rank, name = next(
        (rank, name)
        for rank in RANKS
        for name, mine, right in zip(COUNTS, found[rank], _holding(rank, _RIGHT), strict=True)
        if mine != right
    )
    return f"not yet: {_wrong_entry(rank, name, found[rank][list(COUNTS).index(name)])}."


# ------------------------------------------------------------------- reading


def _read(holdings: Any) -> dict[int, tuple[Indices, ...]] | str:
    """Return the indices by rank, or a sentence about what cannot be read."""
    if isinstance(holdings, Sequence) and not isinstance(holdings, str) and len(holdings) == len(RANKS):
        holdings = dict(zip(RANKS, holdings, strict=True))
    if not isinstance(holdings, Mapping):
        return f"{shorten(holdings)} is no dictionary: give one with an entry for each rank, as in {{3: {_EXAMPLE}, …}}"
    given = {_rank(key): entry for key, entry in holdings.items()}
    if missing := [rank for rank in RANKS if rank not in given]:
        whose = "its" if len(missing) == 1 else "their"
        verb = "is" if len(missing) == 1 else "are"
        return f"{name_ranks(missing)} {verb} missing: give {whose} layers, outputs and samples"
    found = {}
    for rank in RANKS:
        entry = given[rank]
        if isinstance(entry, Mapping) and set(entry) == set(COUNTS):
            entry = [entry[name] for name in COUNTS]
        entry = entry.tolist() if hasattr(entry, "tolist") else entry
        if isinstance(entry, str | bytes) or not isinstance(entry, Sequence) or len(entry) != len(COUNTS):
            return f"rank {rank} has {shorten(entry)}: give three things, its layers, outputs and samples: {_EXAMPLE}"
        parts = []
        for name, part in zip(COUNTS, entry, strict=True):
            indices = _indices(part, COUNTS[name])
            if indices is None:
                return f"the {name} of rank {rank} are {shorten(part)}: give first and end as in a slice, such as '0:3'"
            parts.append(indices)
        found[rank] = tuple(parts)
    return found


def _rank(key: Any) -> Any:
    """Return the rank that a key means: `3`, `"3"` or `"rank 3"`."""
    text = re.fullmatch(r"\s*(?:rank\s*)?(\d+)\s*", key) if isinstance(key, str) else None
    return int(text[1]) if text else key


def _indices(part: Any, count: int) -> Indices | None:
    """Return the indices that text, a slice, a range, a pair of ends, a set or a longer list mean."""
    part = part.tolist() if hasattr(part, "tolist") else part
    if isinstance(part, str):
        text = re.fullmatch(r"\s*[a-z]*\s*\[?\s*(\d*)\s*:\s*(\d*)\s*\]?\s*", part)
        part = slice(*(int(end) if end else None for end in text.groups())) if text else None
    if isinstance(part, slice):
        part = [part.start or 0, count if part.stop is None else part.stop]
    if not isinstance(part, Collection) or not all(type(each) is int for each in part):
        return None
    is_pair = isinstance(part, Sequence) and not isinstance(part, range) and len(part) == 2
    return tuple(range(*part)) if is_pair else tuple(sorted(part))


# ------------------------------------------------------- what a rank holds, rightly or by a mistake


class _Way(NamedTuple):
    """A way to find out what a rank holds: an order of the axes, what cuts what, and how ends are written."""

    order: tuple[str, ...]  # slowest first
    layers: tuple[str, ...]  # axes that cut the layers, and so on
    outputs: tuple[str, ...]
    samples: tuple[str, ...]
    turns: bool  # whether stages take the layers in turn
    shift: tuple[int, int]  # what is added to the first index, and to the end


_RIGHT = _Way(("dp", "pp", "tp"), ("pp",), ("tp",), ("dp",), False, (0, 0))
_CUT = {"layers": "pp", "outputs": "tp", "samples": "dp"}
_REASON = {
    "layers": "only pp, whose ranks hold stages, says which layers a rank has",
    "outputs": "each layer of a stage is cut along tp, and along no other axis",
    "samples": "only copies of the network, which are along dp, have different samples",
}
_WRONG_CUTS: dict[str, dict[tuple[str, ...], str]] = {
    "layers": {
        (): "every rank has all layers here, but pp cuts them into 3 stages",
        ("tp",): "tp cuts the layers here, but it cuts inside of them: the stages are along pp",
        ("dp",): "dp cuts the layers here, but its ranks hold copies of the same: the stages are along pp",
        ("dp", "pp"): f"the layers are cut along dp and pp here: {_REASON['layers']}",
        ("pp", "tp"): f"the layers are cut along pp and tp here: {_REASON['layers']}",
    },
    "outputs": {
        (): "every rank has all outputs of its layers here, but tp cuts each layer into 2",
        ("pp",): "pp cuts the outputs here, but it cuts between the layers: inside of them the axis is tp",
        ("dp",): "dp cuts the outputs here, but its ranks hold copies of the same: inside of layers the axis is tp",
    },
    "samples": {
        (): "every rank has all samples here, but the two copies of the network, along dp, share them",
        ("dp", "pp", "tp"): "the samples are cut over all 12 ranks here, but the ranks of one copy, which differ in pp "
        "and tp only, work on the same samples",
        ("dp", "pp"): "the samples are cut along dp and pp here, but all stages of a copy work on the same samples",
        ("dp", "tp"): "the samples are cut along dp and tp here, but ranks of a tp group have the same samples",
        ("pp",): "the samples are cut along pp here, but all stages of a copy work on the same samples: it is dp",
        ("tp",): "the samples are cut along tp here, but ranks of a tp group have the same samples: it is dp",
    },
}
_WRONG_ENDS = {
    (0, -1): "each end is one too early: it is the first index that does not belong to the part, as in a Python slice",
    (1, 1): "indices begin with 1 here, but they begin with 0, as in Python",
    (1, 0): "indices begin with 1 here and the last one belongs to the part: they begin with 0, and an end does not",
}


def _holding(rank: int, way: _Way) -> tuple[Indices, ...]:
    """Return the layers, outputs and samples that a rank has in this way."""
    at = RankGrid([AXES[name] for name in way.order], way.order).coordinates_of(rank)
    held = []
    for name, axes in zip(COUNTS, (way.layers, way.outputs, way.samples), strict=True):
        part, parts = 0, 1
        for axis in axes:
            part, parts = part * AXES[axis] + at[axis], parts * AXES[axis]
        each = COUNTS[name] // parts
        begin, end = part * each + way.shift[0], (part + 1) * each + way.shift[1]
        is_spread = name == "layers" and way.turns
        held.append(tuple(range(part, COUNTS[name], parts)) if is_spread else tuple(range(begin, end)))
    return tuple(held)


def _find_mistakes(found: Mapping[int, tuple[Indices, ...]]) -> str:
    """Return what is wrong if the whole answer follows from a few mistakes, the fewest possible; else nothing."""
    cuts = [[(_CUT[name],), *_WRONG_CUTS[name]] for name in COUNTS]
    ends = [(0, 0), *_WRONG_ENDS]
    best: list[str] = []
    for way in map(_Way._make, product(permutations(AXES), *cuts, (False, True), ends)):
        told = _tell(way)
        if (not best or len(told) < len(best)) and all(_holding(rank, way) == found[rank] for rank in RANKS):
            best = told
    return "; and ".join(best)


def _tell(way: _Way) -> list[str]:
    """Return a sentence for each mistake of a way."""
    told = []
    if way.order == tuple(reversed(_RIGHT.order)):
        told.append("the first axis is the fastest here, but it is the slowest: rank = 6 dp + 2 pp + tp")
    elif way.order != _RIGHT.order:
        order = ", ".join(way.order)
        told.append(f"this is the order {order}, but here it is dp, pp, tp, slowest first: rank = 6 dp + 2 pp + tp")
    for name, axes in zip(COUNTS, (way.layers, way.outputs, way.samples), strict=True):
        if axes != (_CUT[name],):
            told.append(_WRONG_CUTS[name][axes])
    if way.turns:
        told.append("the stages take the layers in turn here, but a stage is consecutive layers")
    if way.shift != (0, 0):
        told.append(_WRONG_ENDS[way.shift])
    return told


def _wrong_entry(rank: int, name: str, found: Indices) -> str:
    """Say what is wrong with one entry, and how to find it."""
    at = _GRID.coordinates_of(rank)
    where = ", ".join(f"{axis} {value}" for axis, value in at.items())
    axis, each = _CUT[name], COUNTS[name] // AXES[_CUT[name]]
    begin = f"the {name} of rank {rank} are not {_write(found)}"
    if found and not 0 <= min(found) <= max(found) < COUNTS[name]:
        return f"{begin}: there are {COUNTS[name]} {name}, counted from 0"
    if len(found) != each:
        return f"{begin}: {axis} cuts {COUNTS[name]} {name} into {AXES[axis]}, so a rank has {each}"
    return f"{begin}: rank = 6 dp + 2 pp + tp, so it is at {where}, and of these {axis} says which {each} {name} it has"


def _write(indices: Indices) -> str:
    """`2:4`, or `0, 3` where they are not consecutive."""
    if indices and indices == tuple(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}:{indices[-1] + 1}"
    return ", ".join(map(str, indices)) or "none at all"
