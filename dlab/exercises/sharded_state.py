"""The exercise of `09_sharded_optimizers.ipynb`, "predict what a rank holds" in each stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dlab.cost import zero_memory

MODEL, RANKS = 3e9, 6  # parameters; in bfloat16, with a float32 copy and a float32 momentum for each
KEPT = 8  # bytes per parameter of the optimizer
STAGES = (1, 2, 3)
_NEAR = 0.005  # predictions may be rounded by so much of themselves
GB = 1e9


def check_held_bytes(gigabytes: Any) -> str:
    """Judge the gigabytes that a rank holds in stages 1, 2 and 3: "well done …", or "not yet: …".

    A model of 3 billion parameters on 6 ranks. Parameters and gradients are bfloat16; the optimizer is SGD with
    momentum, on float32 copies of the parameters. A dictionary from the stage to a number of 10**9 bytes.

    >>> check_held_bytes({1: 18, 2: 12, 3: 8})
    'not yet: in stage 1 a rank does not hold 18 GB: …'
    """
    given = gigabytes
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(STAGES):
        given = dict(zip(STAGES, given, strict=True))
    if not isinstance(given, Mapping):
        return f"not yet: {_short(gigabytes)} is not a prediction: give a dictionary, as in {{1: 20, 2: 15, 3: 10}}."
    if missing := [str(stage) for stage in STAGES if stage not in given]:
        return f"not yet: stage {missing[0]} is missing: give a number for each of 1, 2 and 3."
    for stage in STAGES:
        value = given[stage]
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"not yet: in stage {stage} it is {_short(value)}: give a number of gigabytes."
    for stage in STAGES:
        if problem := _wrong_held(stage, float(given[stage])):
            return f"not yet: in stage {stage} a rank does not hold {given[stage]:,.12g} GB: {problem}."
    return (
        "well done: 36 GB without ZeRO, then 16, 11 and 6: each stage cuts one more of the three into sixths, and "
        "the optimizer, with 8 of 12 bytes per parameter, is the largest."
    )


@dataclass(frozen=True)
class _BytesEach:
    """Bytes per parameter of the three, and by how much each of them is divided."""

    bytes: tuple[float, float, float]  # of parameters, gradients, and the optimizer
    share: tuple[float, float, float]

    @property
    def gigabytes(self) -> float:
        return sum(each * share for each, share in zip(self.bytes, self.share, strict=True)) * MODEL / GB

    def with_bytes(self, *given: float | None) -> _BytesEach:
        """Return the same with other bytes per parameter; None leaves them."""
        first, second, third = (own if new is None else new for own, new in zip(self.bytes, given, strict=True))
        return replace(self, bytes=(first, second, third))

    def with_share(self, share: float) -> _BytesEach:
        """Return the same with another share for whatever is cut."""
        first, second, third = (1.0 if each == 1 else share for each in self.share)
        return replace(self, share=(first, second, third))


def _held(stage: int) -> _BytesEach:
    return _BytesEach((2, 2, KEPT), tuple(1 / RANKS if stage >= first else 1.0 for first in (3, 2, 1)))  # type: ignore[arg-type]


Change = Callable[[_BytesEach], _BytesEach]
_BYTES: dict[str, Change] = {
    "that is with the 12 bytes of Adam, but momentum and the float32 copy are 4 bytes each, 8 in all": (
        lambda held: held.with_bytes(None, None, 12)
    ),
    "that is with 4 bytes per parameter for the optimizer, but it keeps two numbers of 4 bytes, the momentum and the "
    "float32 copy": lambda held: held.with_bytes(None, None, 4),
    "that is with 6 bytes per parameter for the optimizer, but the momentum and the copy are both float32": (
        lambda held: held.with_bytes(None, None, 6)
    ),
    "that is with 16 bytes per parameter for the optimizer, but its momentum and the copy are 8": (
        lambda held: held.with_bytes(None, None, 16)
    ),
    "that is with 4 bytes for each parameter and each gradient, but in bfloat16 they have 2": (
        lambda held: held.with_bytes(4, 4, None)
    ),
    "that is with gradients of 4 bytes, but they are bfloat16 as the parameters are": (
        lambda held: held.with_bytes(None, 4, None)
    ),
    "that is with parameters of 4 bytes, but the model computes with bfloat16; the float32 copy counts as a part of "
    "the optimizer": lambda held: held.with_bytes(4, None, None),
    "that is without the gradients": lambda held: held.with_bytes(None, 0, None),
    "that is without the bfloat16 parameters, which are there beside their float32 copies": (
        lambda held: held.with_bytes(0, None, None)
    ),
    "that is without the optimizer, of which each rank keeps a sixth": lambda held: held.with_bytes(None, None, 0),
    "that is the optimizer alone: parameters and gradients are there, too": lambda held: held.with_bytes(0, 0, None),
    "that is the parameters alone: gradients and the optimizer are there, too": lambda held: held.with_bytes(2, 0, 0),
}
_SHARES: dict[str, Change] = {
    "a rank keeps a sixth of what is cut, and does without the other five": (
        lambda held: held.with_share((RANKS - 1) / RANKS)
    ),
    "there are 6 ranks, so a rank's part is a sixth, not a fifth": lambda held: held.with_share(1 / (RANKS - 1)),
    "there are 6 ranks, so a rank's part is a sixth, not a half": lambda held: held.with_share(1 / 2),
    "there are 6 ranks here, not 4": lambda held: held.with_share(1 / 4),
    "there are 6 ranks here, not 64": lambda held: held.with_share(1 / 64),
}
_UNITS = {
    "that is in bytes: divide by 10**9": GB,
    "that is in megabytes": 1e3,
    "that is in GiB, of 2**30 bytes: a GB has 10**9": GB / 2**30,
    "that is in bits: a byte has 8 of them": 8.0,
    "that is of all 6 ranks together, and the question is for one": float(RANKS),
    "that is the bytes per parameter: there are 3 billion of them": GB / MODEL,
}


def _wrong_held(stage: int, found: float) -> str | None:
    """Explain a number that is not what a rank holds, by the mistake or the two that lead to it; None if it is."""
    right = _held(stage)
    if _close(found, zero_memory(MODEL, RANKS, stage, optimizer_bytes=KEPT) / GB):
        return None
    if found <= 0:
        return "that is nothing: add up parameters, gradients and the optimizer"
    for told, wrong in _wrong_cuts(stage).items():
        if _close(found, wrong.gigabytes):
            return told
    for changes in (_BYTES, _SHARES):
        if fitting := [told for told, change in changes.items() if _close(found, change(right).gigabytes)]:
            return "; or ".join(fitting[:2])  # one number may come from two mistakes
    for told, factor in _UNITS.items():
        if _close(found, right.gigabytes * factor):
            return told
    for first, second in product(_BYTES, _SHARES):
        if _close(found, _SHARES[second](_BYTES[first](right)).gigabytes):
            return f"{first}; and {second}"
    for told, wrong in _wrong_cuts(stage).items():
        for also, change in _BYTES.items():
            if _close(found, change(wrong).gigabytes):
                return f"{told}; and {also}"
    whole = ["the optimizer's state", "gradients", "parameters"]
    cut, left = " and ".join(whole[:stage]), " and ".join(whole[stage:])
    parts = "parameters 2, gradients 2, momentum 4, float32 copy 4"
    return f"of each parameter there are {parts} bytes; stage {stage} cuts {cut} into sixths" + (
        f", and leaves {left} whole" if left else ""
    )


def _wrong_cuts(stage: int) -> dict[str, _BytesEach]:
    """Return what a rank would hold if something else were cut, by the sentence for it."""
    right, part = _held(stage), 1 / RANKS
    wrong = {"that is without ZeRO, where nothing is cut": replace(right, share=(1.0, 1.0, 1.0))}
    if stage == 2:
        told = "stage 2 cuts the gradients as well, and leaves the optimizer's state cut as in stage 1"
        wrong[told] = replace(right, share=(1.0, part, 1.0))
    if stage == 3:
        told = "stage 3 cuts the parameters as well, and leaves gradients and optimizer cut as in stage 2"
        wrong[told] = replace(right, share=(part, 1.0, 1.0))
    for other in STAGES:
        if other != stage:
            wrong[f"that is what stage {other} leaves"] = _held(other)
    return wrong


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * abs(other)


def _short(thing: Any) -> str:
    words = " ".join(repr(thing).split())
    return words if len(words) <= 60 else f"{words[:57]}..."
