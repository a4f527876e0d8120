"""Two exercises of `10_hybrid.ipynb`: choose a mesh that fits and sends least, and the order of axes on two hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite, prod
from numbers import Real
from typing import Any

from dlab.exercises.calling import shorten
from dlab.exercises.sandbox import join
from dlab.mesh import RankGrid

RANKS = 8
LAYERS, WIDTH, TOKENS, BATCH = 12, 512, 128, 32  # of a transformer, and samples in a step
NUMBER = 4  # bytes of a float32
HELD = 16  # bytes that are held for each parameter, with Adam
LIMIT = 200  # megabytes on a rank
PARAMETERS = 12 * WIDTH**2 * LAYERS
MB = 1e6
_NEAR = 0.01  # predictions may be rounded by so much of themselves
_NAMES = ("dp", "tp", "pp")


def sent_megabytes(axes: Mapping[str, int]) -> dict[str, float]:
    """Return what the busiest rank sends along each axis in a step, in megabytes.

    >>> {axis: round(each, 1) for axis, each in sent_megabytes({"dp": 2, "tp": 2, "pp": 2}).items()}
    {'dp': 37.7, 'tp': 100.7, 'pp': 4.2}
    """
    dp, tp, pp = (axes.get(name, 1) for name in _NAMES)
    activations = BATCH / dp * TOKENS * WIDTH * NUMBER / MB  # of the samples of a copy, between two layers
    neighbours = min(pp - 1, 2)  # a stage in the middle sends activations on, and gradients back
    return {
        "dp": 2 * (dp - 1) / dp * PARAMETERS * NUMBER / (tp * pp) / MB,
        "tp": 4 * LAYERS / pp * 2 * (tp - 1) / tp * activations,
        "pp": neighbours * activations,
    }


def held_megabytes(axes: Mapping[str, int]) -> float:
    """Return what a rank holds, in megabytes: parameters, gradients, and the state of Adam."""
    return PARAMETERS * HELD / (axes.get("tp", 1) * axes.get("pp", 1)) / MB


def _possible() -> list[dict[str, int]]:
    """Return all meshes of 8 ranks on which a rank has whole layers, and which fit."""
    lengths = product((1, 2, 4, 8), repeat=3)
    meshes = [dict(zip(_NAMES, each, strict=True)) for each in lengths if prod(each) == RANKS]
    return [each for each in meshes if LAYERS % each["pp"] == 0 and held_megabytes(each) <= LIMIT]


BEST = min(_possible(), key=lambda axes: sum(sent_megabytes(axes).values()))


def check_mesh(axes: Any, megabytes: Any) -> str:
    """Judge a mesh for a transformer on 8 ranks that fits and sends least, and the megabytes: "well done …".

    12 layers, of 12 h² parameters each, with h = 512; 32 samples of 128 tokens in a step; float32, with 16 bytes held
    per parameter, 200 MB at most. `megabytes` is what a rank in the middle of it sends in a step.

    >>> check_mesh({"dp": 8}, 264)
    'not yet: dp 8 does not fit: …'
    """
    read = _read_axes(axes)
    if isinstance(read, str):
        return f"not yet: {read}."
    if problem := _wrong_mesh(read):
        return f"not yet: {problem}."
    if isinstance(megabytes, bool) or not isinstance(megabytes, Real) or not isfinite(megabytes):
        return f"not yet: the mesh is the right one, but {shorten(megabytes)} is not a number of megabytes: give one."
    if problem := _wrong_sent(float(megabytes)):
        return f"not yet: the mesh is the right one, but a rank does not send {float(megabytes):,.10g} MB: {problem}."
    other = {"dp": 2, "tp": 4}
    return (
        f"well done: with {_write(BEST)} a rank holds {held_megabytes(BEST):.0f} MB and sends {_DP + _PP:.1f}, "
        f"{_DP:.1f} along dp and {_PP:.1f} along pp; with {_write(other)} it would hold as much and send "
        f"{sum(sent_megabytes(other).values()):.0f}."
    )


def _read_axes(axes: Any) -> dict[str, int] | str:
    """Return the lengths of all three axes, or a sentence about what is wrong with them."""
    axes = getattr(axes, "axes", axes)  # of a dlab.Hybrid
    if not isinstance(axes, Mapping) or not axes:
        return f"{shorten(axes)} is not a mesh: give the length of each axis, as in {{'dp': 4, 'tp': 2}}"
    if strange := [name for name in axes if name not in _NAMES]:
        return f"there is no axis {strange[0]!r} here: the axes are dp, tp and pp"
    for name, length in axes.items():
        if type(length) is not int or length < 1:
            return f"the axis {name} has the length {shorten(length)}: give a number of ranks, 1 or more"
    if prod(axes.values()) != RANKS:
        return f"{_write(axes)} needs {prod(axes.values())} ranks, and there are {RANKS}: the product must be {RANKS}"
    return {name: axes.get(name, 1) for name in _NAMES}


def _wrong_mesh(axes: Mapping[str, int]) -> str:
    """Say why this mesh is not the one; nothing if it is."""
    if LAYERS % axes["pp"]:
        return (
            f"{LAYERS} layers cannot be divided among {axes['pp']} stages: use a number of stages that divides {LAYERS}"
        )
    held, cut = held_megabytes(axes), axes["tp"] * axes["pp"]
    if held > LIMIT:
        have = "all" if cut == 1 else f"1/{cut}"
        return (
            f"{_write(axes)} does not fit: a rank has {have} of {PARAMETERS / MB:.1f} million parameters, {HELD} bytes "
            f"for each, which are {held:.0f} MB, and there is room for {LIMIT}; only tp and pp divide them"
        )
    if axes == BEST:
        return ""
    sent = sent_megabytes(axes)
    most = max(sent, key=sent.__getitem__)
    return (
        f"{_write(axes)} fits, with {held:.0f} MB, but a rank sends {sum(sent.values()):.1f} MB in a step, "
        f"{sent[most]:.1f} of them along {most}: another mesh that fits sends less"
    )


def _write(axes: Mapping[str, int]) -> str:
    """`dp 2 × pp 4`."""
    return " × ".join(f"{name} {length}" for name, length in axes.items() if length > 1) or "a mesh of length 1"


# ------------------------------------------------------------------------------ predictions of bytes

_DP, _PP = sent_megabytes(BEST)["dp"], sent_megabytes(BEST)["pp"]
_GRADIENTS = {  # what somebody may take for the bytes along dp, by the sentence for it
    "": _DP,
    "along dp nothing is counted: the two copies of each stage average their gradients, once in a step": 0.0,
    "an all-reduce over n ranks sends 2(n-1)/n of the gradients, which is once with 2 ranks": 2 * _DP,
    "an all-reduce is a reduce-scatter and an all-gather, so 2(n-1)/n of the gradients, not (n-1)/n": _DP / 2,
    "along dp a rank sends gradients of its own stage only, a quarter of all, of 4 bytes each": 4 * _DP,
    "a layer has 12 h² parameters, 4 h² of them in attention and 8 h² in the MLP": _DP * 8 / 12,
    "a layer has 12 h² parameters, and these are those of attention only": _DP * 4 / 12,
    "a layer has 12 h² parameters, and there are 3 layers in a stage, not 1": _DP / 3,
}
_ACTIVATIONS = {  # and along pp
    "": _PP,
    "along pp nothing is counted: a rank in the middle sends activations on and gradients back": 0.0,
    "a stage in the middle sends in both directions: activations forward, and as much backward": _PP / 2,
    "each copy has half of the batch, 16 samples": 2 * _PP,
    "a rank sends to its own neighbours only, not at all three boundaries": 3 * _PP,
    "that is what all four stages of a copy send together, and the question is for one rank": 4 * _PP,
    "micro-batches make messages smaller, and all together have the same bytes: count all 16 samples": _PP / 16,
    "each sample has 128 tokens, and each token 512 numbers": _PP / TOKENS,
    "each token has 512 numbers, the width of a layer": _PP / WIDTH,
}
_UNITS = {
    "": 1.0,
    "that is in bytes: a megabyte has 10**6": MB,
    "that is in MiB, of 2**20 bytes: a megabyte has 10**6": MB / 2**20,
    "that is in numbers, and each has 4 bytes": 1 / NUMBER,
    "numbers have 4 bytes here, not 2": 2 / NUMBER,
    "that is in gigabytes": 1e-3,
    "that is in bits: a byte has 8": 8.0,
}


def _wrong_sent(found: float) -> str:
    """Explain a wrong number by the fewest mistakes that lead to it; return nothing if it is right."""
    if _close(found, _DP + _PP):
        return ""
    if found <= 0:
        return "gradients go along dp, and activations along pp"
    for told, value in _OTHERS.items():
        if _close(found, value):
            return told
    for most, near in ((1, 0.005), (2, 0.0005)):  # two mistakes only where the number is just theirs
        fitting = [
            "; and ".join(filter(None, way))
            for way in product(_GRADIENTS, _ACTIVATIONS, _UNITS)
            if 0 < len(way) - way.count("") <= most
            and _close(found, (_GRADIENTS[way[0]] + _ACTIVATIONS[way[1]]) * _UNITS[way[2]], near)
        ]
        if fitting:
            return "; or ".join(fitting[:2])
    return (
        "add up 2(n-1)/n of the gradients of a stage, for the all-reduce along dp, and the activations of 16 samples, "
        "on to the next stage and back to the one before"
    )


_OTHERS = {
    "that is what a rank holds, not what it sends": held_megabytes(BEST),
    "that is what all 8 ranks send together, and the question is for one": 8 * _DP + 2 * 3 * 2 * _PP / 2,
    "that is for dp 2 × tp 4": sum(sent_megabytes({"dp": 2, "tp": 4}).values()),
    "that is for dp 2 × tp 2 × pp 2": sum(sent_megabytes({"dp": 2, "tp": 2, "pp": 2}).values()),
}


def _close(one: float, other: float, near: float = _NEAR) -> bool:
    return abs(one - other) <= near * abs(other)


# -------------------------------------------------------------------------------- the order on two hosts

_CUBE = {"dp": 2, "tp": 2, "pp": 2}


def check_order(order: Any) -> str:
    """Judge the order of the axes, slowest first, with which least goes between two hosts of 4 ranks: "well done …".

    The transformer of `check_mesh` on a mesh of 2 × 2 × 2. An order is a sequence of names, or a dictionary of axes.

    >>> check_order(("tp", "dp", "pp"))
    'not yet: with tp first, …'
    """
    names = getattr(order, "axes", order)
    if isinstance(names, str):
        names = names.replace(",", " ").split()
    if not isinstance(names, Sequence | Mapping) or not all(isinstance(name, str) for name in names):
        return f"not yet: {shorten(order)} is not an order: give the names of the axes, slowest first."
    names = tuple(names)
    if sorted(names) != sorted(_CUBE):
        return f"not yet: {join(list(names)) if names else 'nothing'}: give each of dp, tp and pp once, slowest first."
    crossing, sent = names[0], sent_megabytes(_CUBE)
    least = min(sent, key=sent.__getitem__)
    across = f"{RankGrid((2, 2, 2), names).line(0, crossing)} is a group along {crossing}, with a rank on each host"
    if crossing == least:
        return (
            f"well done: {across}, and {sent[least]:.1f} MB per rank go from one host to the other; groups along "
            f"{names[1]} and {names[2]} are inside of a host."
        )
    turned = "this is the right order, fastest first: turn it round"
    advice = turned if names[2] == least else "along another axis it is less"
    told = f"with {crossing} first, {across}, and each sends {sent[crossing]:.1f} MB to the other host"
    return f"not yet: {told}; {advice}."
