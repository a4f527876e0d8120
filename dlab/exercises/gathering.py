"""The exercise of `09_sharded_optimizers.ipynb`, "count what stage 3 sends": a formula, tried on several networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlab.exercises.calling import Unfinished, call
from dlab.exercises.sandbox import count

_ALL = "all layers are gathered for the forward pass, and the gradients of all are reduced"
# bytes of the layers, and ranks
CASES: list[tuple[list[int], int]] = [
    *(([4096] * 4, 4), ([1200, 4800, 2400], 2), ([2400, 1200, 3600, 600, 4800], 3), ([1200, 2400], 4)),
    *(([6000], 4), ([4096] * 4, 1), ([2400] * 12, 8)),
]


def check_sent_bytes(my_bytes: Any) -> str:
    """Judge a function `my_bytes(layers, ranks)`: "well done …", or "not yet: …" with the first thing to fix.

    `layers` are the bytes of each layer's weights; it returns the bytes that each rank sends in a step of stage 3, in
    which the last layer is still there when the backward pass begins, and the first is not needed in it.

    >>> check_sent_bytes(lambda layers, ranks: 3 * sum(layers))
    'not yet: with 4 layers of 4,096 bytes on 4 ranks, …'
    """
    if not callable(my_bytes):
        return f"not yet: {my_bytes!r} is not a function: write def my_bytes(layers, ranks)."
    found: list[float] = []
    for layers, ranks in CASES:
        case = _describe(layers, ranks)
        try:
            value = call(my_bytes, list(layers), ranks, own=(), instead="")
        except Unfinished as problem:
            return f"not yet: with {case}, {problem}."
        if value is None:
            return f"not yet: with {case}, it returns nothing: end with return …."
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"not yet: with {case}, it returns {value!r}: return one number, the bytes that a rank sends."
        found.append(float(value))
    for number, (layers, ranks) in enumerate(CASES):
        if not _close(found[number], sent_in_stage_3(layers, ranks)):
            return f"not yet: with {_describe(layers, ranks)}, {_wrong_sent(found, number)}."
    return (
        "well done: two of the three rounds take all layers, and one all but the first and the last, so that a step of "
        "many layers comes close to 3P(n-1)/n."
    )


def sent_in_stage_3(layers: Sequence[float], ranks: int) -> float:
    """Return the bytes that each rank sends in a step; `dlab.ZeRO(stage=3)` sends as many.

    >>> sent_in_stage_3([4096, 4096, 4096, 4096], ranks=4)
    30720.0
    """
    return _usual(ranks) * (2 * sum(layers) + sum(layers[1:-1]))


def _usual(ranks: int) -> float:
    return (ranks - 1) / ranks


_LAYERS: dict[str, Callable[[Sequence[float]], float]] = {
    "": lambda each: 2 * sum(each) + sum(each[1:-1]),
    "that has each layer three times, as in the formula 3P. The last layer is still there when the backward pass "
    "begins, and nothing needs the first one's weights in it": lambda each: 3 * sum(each),
    "that gathers the first layer once more: its weights would only be needed for the gradient of the images": (
        lambda each: 3 * sum(each) - each[-1]
    ),
    "that gathers the last layer once more: it is still there when the backward pass begins": (
        lambda each: 3 * sum(each) - each[0]
    ),
    "that is stage 2, or stage 3 without the gathers of the backward pass": lambda each: 2 * sum(each),
    "that has each layer once only. There are three rounds: gathers forward, gathers backward, and the gradients": sum,
    f"one of the three rounds is missing: {_ALL}": lambda each: sum(each) + sum(each[1:-1]),
    f"the first and the last layer are missing where they count: {_ALL}": lambda each: 3 * sum(each[1:-1]),
    "that all-reduces the gradients, but each rank needs those of its own part only: a reduce-scatter": (
        lambda each: 3 * sum(each) + sum(each[1:-1])
    ),
    "that takes all layers to be as large as the first": lambda each: (2 * len(each) + len(each[1:-1])) * each[0],
    "this layer is the first and the last in one, and is taken away twice": (
        lambda each: 3 * sum(each) - each[0] - each[-1]
    ),
}
_FACTORS: dict[str, Callable[[int], float]] = {
    "": _usual,
    "a rank has its own part already, so that a gather or a reduce-scatter sends (n-1)/n of a layer": lambda n: 1.0,
    "a rank sends its part, one n-th, to each of the n-1 others": lambda n: 1 / n,
    "that is what all ranks send together": lambda n: n - 1.0,
    "a gather sends (n-1)/n of a layer: 2(n-1)/n is an all-reduce, a reduce-scatter and a gather": (
        lambda n: 2 * (n - 1) / n
    ),
    "the layers are given in bytes, so do not multiply by 4": lambda n: 4 * (n - 1) / n,
    "the layers are given in bytes, so do not divide by 4": lambda n: (n - 1) / n / 4,
    "(n-1)/n is upside down": lambda n: n / max(n - 1, 0.5),
}


def _wrong_sent(found: list[float], number: int) -> str:
    """Explain the first wrong answer by one mistake or two, best those that explain all other answers as well."""
    begin = f"it is not {found[number]:,.10g} bytes"
    if CASES[number][1] == 1:
        return f"{begin}: one rank has nobody to send to"
    fitting = [
        [bool(told) for told in pair].count(True) + 10 * wrong
        for pair, wrong in ((pair, _misses(pair, found)) for pair in _PAIRS)
    ]
    for pair in (_PAIRS[place] for place in sorted(range(len(_PAIRS)), key=fitting.__getitem__)):
        layers, ranks = CASES[number]
        if any(pair) and _close(found[number], _LAYERS[pair[0]](layers) * _FACTORS[pair[1]](ranks)):
            return f"{begin}: {'; and '.join(filter(None, pair))}"
    if found[number] < 0:
        return f"{begin}: a rank cannot send less than nothing"
    return (
        f"{begin}: add up three rounds, the gathers of the forward pass, those of the backward pass without the first "
        "and the last layer, and the reduce-scatters of the gradients; each sends (n-1)/n of a layer"
    )


_PAIRS = [(layers, factor) for layers in _LAYERS for factor in _FACTORS]


def _misses(pair: tuple[str, str], found: list[float]) -> int:
    layers_of, factor = _LAYERS[pair[0]], _FACTORS[pair[1]]
    pairs = zip(found, CASES, strict=True)
    return sum(not _close(value, layers_of(layers) * factor(ranks)) for value, (layers, ranks) in pairs)


def _describe(layers: Sequence[int], ranks: int) -> str:
    """`4 layers of 4,096 bytes on 4 ranks`."""
    if len(set(layers)) == 1:
        words = f"{count(len(layers), 'layer')} of {layers[0]:,} bytes"
    else:
        words = f"layers of {', '.join(f'{each:,}' for each in layers[:-1])} and {layers[-1]:,} bytes"
    return f"{words} on {count(ranks, 'rank')}"


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other) + 1e-9
