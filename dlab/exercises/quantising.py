"""The exercise of `06_gradient_compression.ipynb`, "write the quantiser": compared with answers known to the digit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Quantiser = Callable[[Tensor, Tensor, float], Any]

FIRST = 0.5  # the threshold of the cases that come first


def check_quantiser(my_quantise: Quantiser) -> str:
    """Try `my_quantise(gradient, residual, threshold)`: "well done …", or "not yet: …" with the first thing to mend.

    Asked for are two rows of numbers, as long as the gradient: the codes, 1 where gradient + residual reaches the
    threshold, -1 where it reaches -threshold, 0 elsewhere; and the new residual, what the codes do not say.

    >>> check_quantiser(lambda gradient, residual, threshold: (torch.sign(gradient), residual))
    'not yet: with the gradient 0.25, the residual 0 and the threshold 0.5, …'
    """
    for gradient, residual, threshold in _cases():
        given = gradient.clone()
        try:
            found = my_quantise(given, residual.clone(), threshold)
        except Exception as error:
            case = _case(gradient, residual, threshold, 0)
            return f"not yet: {case}, it ended in {type(error).__name__}: {error}."
        if not torch.equal(given, gradient):
            return "not yet: it has changed the gradient, which is not its own: write value = gradient + residual."
        if problem := _problem(found, gradient, residual, threshold):
            return f"not yet: {problem}."
    return (
        "well done: what is sent is right at, above and below the threshold, and what is not sent is kept, "
        "in MXNet's series of pushes too."
    )


def quantise(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Codes and new residual, as plainly as can be."""
    value = gradient + residual
    codes = (value >= threshold).float() - (value <= -threshold).float()
    return codes, value - threshold * codes


def _cases() -> list[tuple[Tensor, Tensor, float]]:
    """One thing after another: single values first. All but MXNet's are exact in binary, so that >= is no accident."""
    series = [(0.4, 0.0), (0.1, 0.4), (0.2, 0.0), (0.3, 0.2)]  # what everyone pushes, what is left from before
    single = [(0.25, 0.0), (0.75, 0.0), (-0.75, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.25, 0.375), (-0.25, -0.375)]
    single += [(0.75, -0.5), (2.0, 0.25), (-2.0, 0.0), *series]
    cases = [(torch.tensor([gradient]), torch.tensor([residual]), FIRST) for gradient, residual in single]
    dice = torch.Generator().manual_seed(6)
    for length, threshold in ((8, 0.25), (1000, 0.03125), (0, FIRST)):
        rows = torch.randint(-40, 41, (2, length), generator=dice) * threshold / 16
        cases.append((rows[0], rows[1] / 2, threshold))
    return cases


def _problem(found: Any, gradient: Tensor, residual: Tensor, threshold: float) -> str | None:
    if not isinstance(found, tuple | list) or len(found) != 2:
        return f"it gave {_short(found)}: give two things, return codes, new_residual"
    rows = []
    for name, row in zip(("codes", "new residual"), found, strict=True):
        try:
            row = torch.as_tensor(row).detach().to("cpu", torch.float32)
        except (TypeError, ValueError, RuntimeError):
            return f"the {name} {_is(name)} {_short(row)}: give a tensor of numbers"
        if row.shape != gradient.shape:
            return (
                f"the gradient has shape {tuple(gradient.shape)}, but the {name} {_has(name)} {tuple(row.shape)}: "
                "give a number for each value"
            )
        rows.append(row)
    codes, left = rows
    wanted, kept = quantise(gradient, residual, threshold)
    if not torch.equal(codes, wanted):
        wrong = int((codes != wanted).nonzero()[0])
        told = _wrong_code(float(codes[wrong]), rows, gradient, residual, threshold, wrong)
        return f"{_case(gradient, residual, threshold, wrong)}, {told}"
    if not torch.allclose(left, kept, rtol=0, atol=1e-6):
        wrong = int(((left - kept).abs() > 1e-6).logical_or(left.isnan()).nonzero()[0])
        told = _wrong_residual(float(left[wrong]), float(gradient[wrong]), float(residual[wrong]), threshold)
        return f"{_case(gradient, residual, threshold, wrong)}, {told}"
    return None


def _wrong_code(
    code: float, rows: list[Tensor], gradient: Tensor, residual: Tensor, threshold: float, place: int
) -> str:
    """Which misunderstanding gives this code?"""
    wanted, kept = quantise(gradient, residual, threshold)
    value, right = float(gradient[place] + residual[place]), int(wanted[place])
    alone = float(quantise(gradient, torch.zeros_like(residual), threshold)[0][place])
    expected = f"the code is {code:g}, but should be {right}"
    if torch.equal(rows[1], wanted) and torch.allclose(rows[0], kept, rtol=0, atol=1e-6):
        return "codes and residual have changed places: return the codes first"
    if threshold != FIRST and torch.equal(rows[0], quantise(gradient, residual, FIRST)[0]):
        return f"{expected}: that is the code for a threshold of {FIRST:g}; use the one that is given"
    if code == threshold * right:
        return f"{expected}: a code only says which way; the receiver multiplies it by the threshold"
    if code not in (-1.0, 0.0, 1.0):
        return f"{expected}: there are only the codes -1, 0 and 1; what is too much for one step stays in the residual"
    if right and code == -right:
        return f"{expected}: values of at most -threshold send -1, so mind the sign"
    if code == 0 and abs(value) == threshold:
        return f"{expected}: a value that just reaches the threshold is sent, so compare by >= and <="
    if code == alone and float(residual[place]):
        return f"{expected}: add the residual to the gradient before you compare"
    if code == 0:
        return f"{expected}: {value:g} {_reaches(value)}, and that is sent"
    return f"{expected}: {value:g} does not reach the threshold, so nothing is sent yet"


def _wrong_residual(left: float, gradient: float, residual: float, threshold: float) -> str:
    """Which misunderstanding leaves this?"""
    value = gradient + residual
    code = float(quantise(torch.tensor([gradient]), torch.tensor([residual]), threshold)[0])
    right = value - threshold * code
    expected = f"the code is right, but the new residual is {left:g} and should be {right:g}"
    if code and _close(left, value):
        return f"{expected}: take off what was sent, threshold times code"
    if code and _close(left, value - code):
        return f"{expected}: what was sent is threshold times code, not the code itself"
    if code and left == 0:
        return f"{expected}: only the threshold was sent; what {value:g} has beyond it is kept"
    if _close(left, gradient - threshold * code):
        return f"{expected}: the old residual is a part of it"
    if not code and left == 0:
        return f"{expected}: nothing was sent, so all of it is kept"
    if _close(left, residual):
        return f"{expected}: it is still the old one; keep gradient + residual less what was sent"
    if _close(left, -right):
        return f"{expected}: it is gradient + residual less what was sent, not the other way round"
    return f"{expected}: it is gradient + residual, less threshold times code"


def _case(gradient: Tensor, residual: Tensor, threshold: float, place: int) -> str:
    """Names the value that it is about."""
    if not len(gradient):
        return "with an empty gradient"
    which = "" if len(gradient) == 1 else f"value {place} of {len(gradient)}, "
    numbers = f"{which}the gradient {float(gradient[place]):g}, the residual {float(residual[place]):g}"
    return f"with {numbers} and the threshold {threshold:g}"


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6


def _reaches(value: float) -> str:
    return "reaches the threshold" if value > 0 else "is as low as -threshold"


def _short(thing: Any) -> str:
    words = " ".join(repr(thing).split())
    return words if len(words) <= 60 else f"{words[:57]}..."


def _is(name: str) -> str:
    return "are" if name == "codes" else "is"


def _has(name: str) -> str:
    return "have" if name == "codes" else "has"
