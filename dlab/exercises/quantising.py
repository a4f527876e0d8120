"""The exercise of `06_gradient_compression.ipynb`, "write the quantiser": compared with answers known to the digit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlab.exercises.calling import Unfinished, call
from dlab.kvstore.compression import Compression, TwoBit

Quantiser = Callable[[Tensor, Tensor, float], Any]
Rows = tuple[Tensor, Tensor]  # the codes and the new residual

FIRST = 0.5  # the threshold of the first cases
INSTEAD = "compare with the threshold yourself, and subtract what is sent"


def check_quantiser(my_quantise: Any) -> str:
    """Try `my_quantise(gradient, residual, threshold)`: "well done …", or "not yet: …" with the first thing to fix.

    It must return two tensors as long as the gradient. The codes are 1 where gradient + residual reaches the threshold,
    -1 where it reaches -threshold, and 0 elsewhere; the new residual is what the codes do not carry.

    >>> check_quantiser(lambda gradient, residual, threshold: (torch.sign(gradient), residual))
    'not yet: with the gradient 0.25, the residual 0 and the threshold 0.5, …'
    """
    if not callable(my_quantise):
        return (
            f"not yet: {_short(my_quantise)} is not a function: write def my_quantise(gradient, residual, threshold)."
        )
    for case in _cases():
        try:
            problem = _problem(my_quantise, *case)
        except Unfinished as reason:
            problem = f"{_case(*case)}, {reason}{_hint(reason)}"
        if problem:
            return f"not yet: {problem}."
    return (
        "well done: what is sent is right at, above and below the threshold, and what is not sent is kept, "
        "in MXNet's series of pushes too."
    )


def _ask(my_quantise: Quantiser, gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Any]:
    """Return the gradient tensor that was passed, as it is after the call, and the function's result."""
    given, own = gradient.clone(), (quantise, Compression.encode, TwoBit._pack)
    return given, call(my_quantise, given, residual.clone(), threshold, own=own, instead=INSTEAD)


def quantise(gradient: Tensor, residual: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the codes and the new residual, computed in the plainest way."""
    value = gradient + residual
    codes = (value >= threshold).float() - (value <= -threshold).float()
    return codes, value - threshold * codes


def _cases() -> list[tuple[Tensor, Tensor, float]]:
    """List the cases, single values first. All but MXNet's are exact in binary, so rounding cannot decide a >=."""
    series = [(0.4, 0.0), (0.1, 0.4), (0.2, 0.0), (0.3, 0.2)]  # each push and the residual left from the one before
    single = [(0.25, 0.0), (0.75, 0.0), (-0.75, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.25, 0.375), (-0.25, -0.375)]
    single += [(0.75, -0.5), (2.0, 0.25), (-2.0, 0.0), *series]
    cases = [(torch.tensor([gradient]), torch.tensor([residual]), FIRST) for gradient, residual in single]
    dice = torch.Generator().manual_seed(6)
    for length, threshold in ((8, 0.25), (1000, 0.03125), (0, FIRST)):
        rows = torch.randint(-40, 41, (2, length), generator=dice) * threshold / 16
        cases.append((rows[0], rows[1] / 2, threshold))
    return cases


def _problem(my_quantise: Quantiser, gradient: Tensor, residual: Tensor, threshold: float) -> str | None:
    case = gradient, residual, threshold
    given, found = _ask(my_quantise, *case)
    if not torch.equal(given, gradient):
        return "it has changed the gradient, which is not its own: write value = gradient + residual"
    rows, (wanted, kept) = _rows(found, gradient), quantise(*case)
    if isinstance(rows, str):
        return rows
    codes, left = rows
    differs = (left - kept).abs().nan_to_num(nan=torch.inf) > 1e-6
    if torch.equal(codes, wanted) and not differs.any():
        return None
    again = _rows(_ask(my_quantise, *case)[1], gradient)
    if not isinstance(again, str) and not all(map(_same, rows, again)):
        return (
            f"{_case(*case)}, it gives another answer the second time: keep nothing outside of the function; what was "
            "left over is given to it, as the residual"
        )
    if _share_memory(*found):
        return (
            f"{_case(*case)}, codes and new residual lie in the same memory, so that writing one overwrites the other: "
            "make the codes a new tensor"
        )
    if not torch.equal(codes, wanted):
        wrong = int((codes != wanted).nonzero()[0])
        told = _wrong_code(rows, *case, wrong, my_quantise)
    else:
        wrong = int(differs.nonzero()[0])
        told = _wrong_residual(float(left[wrong]), float(gradient[wrong]), float(residual[wrong]), threshold)
    return f"{_case(*case, wrong)}, {told}"


def _rows(found: Any, gradient: Tensor) -> Rows | str:
    """Return the codes and the new residual as tensors, or a sentence if they are not."""
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
    return rows[0], rows[1]


def _wrong_code(
    rows: Rows, gradient: Tensor, residual: Tensor, threshold: float, place: int, my_quantise: Quantiser
) -> str:
    """Explain a wrong code by the misunderstanding that leads to it."""
    wanted, kept = quantise(gradient, residual, threshold)
    code, value, right = float(rows[0][place]), float(gradient[place] + residual[place]), int(wanted[place])
    alone = float(quantise(gradient, torch.zeros_like(residual), threshold)[0][place])
    expected = f"the code is {code:g}, but should be {right}"
    if torch.equal(rows[1], wanted) and _same(rows[0], kept):
        return "codes and residual have changed places: return the codes first"
    if threshold != FIRST and torch.equal(rows[0], quantise(gradient, residual, FIRST)[0]):
        return f"{expected}: that is the code for a threshold of {FIRST:g}; use the one that is given"
    if code == threshold * right:
        return f"{expected}: a code only says which way; the receiver multiplies it by the threshold"
    if code in {1: (3, 11), -1: (2, 10)}.get(right, ()):
        return f"{expected}: how codes are packed into bits is another matter; give -1, 0 and 1"
    if code not in (-1.0, 0.0, 1.0):
        return f"{expected}: there are only the codes -1, 0 and 1; what is too much for one step stays in the residual"
    if right and code == -right:
        bound = "at least the threshold send 1" if right > 0 else "at most -threshold send -1"
        return f"{expected}: values of {bound}, so mind the sign"
    if code == 0 and abs(value) == threshold:
        return f"{expected}: a value that just reaches the threshold is sent, so compare by >= and <="
    if float(residual[place]) and code in (alone, -alone) and _is_subtracted(my_quantise):
        return f"{expected}: the residual is subtracted from the gradient; add it, since it was not sent yet"
    if code == alone and float(residual[place]):
        return f"{expected}: add the residual to the gradient before you compare"
    if code == 0:
        return f"{expected}: {value:g} {_reaches(value)}, and that is sent"
    return f"{expected}: {value:g} does not reach the threshold, so nothing is sent yet"


def _is_subtracted(my_quantise: Quantiser) -> bool:
    """Return whether the codes are those of gradient - residual, judged on many values."""
    gradient, residual, threshold = max(_cases(), key=lambda case: len(case[0]))
    rows = _rows(_ask(my_quantise, gradient, residual, threshold)[1], gradient)
    return not isinstance(rows, str) and torch.equal(rows[0], quantise(gradient, -residual, threshold)[0])


def _wrong_residual(left: float, gradient: float, residual: float, threshold: float) -> str:
    """Explain a wrong residual by the misunderstanding that leads to it."""
    value = gradient + residual
    code = float(quantise(torch.tensor([gradient]), torch.tensor([residual]), threshold)[0])
    right = value - threshold * code
    expected = f"the code is right, but the new residual is {left:g} and should be {right:g}"
    if code and _close(left, value):
        return f"{expected}: subtract what was sent, threshold times code"
    if code and _close(left, value - code):
        return f"{expected}: what was sent is threshold times code, not the code itself"
    if code and _close(left, value + threshold * code):
        return f"{expected}: what was sent is subtracted, not added"
    if residual and _close(left, right + residual):
        return f"{expected}: the old residual is in it twice; it is a part of the value that you have compared"
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


def _case(gradient: Tensor, residual: Tensor, threshold: float, place: int | None = None) -> str:
    """Describe the case, for one value if `place` is given and otherwise for all values."""
    if not len(gradient):
        return "with an empty gradient"
    if place is None and len(gradient) > 1:
        return f"with a gradient of {len(gradient)} values"
    place = place or 0
    which = "" if len(gradient) == 1 else f"value {place} of {len(gradient)}, "
    numbers = f"{which}the gradient {float(gradient[place]):g}, the residual {float(residual[place]):g}"
    return f"with {numbers} and the threshold {threshold:g}"


def _hint(reason: Unfinished) -> str:
    """Return advice for an `if` that works only with a single value."""
    if "Boolean value of Tensor" in str(reason) or "cannot be converted to Scalar" in str(reason):
        return ": work on all values at once, as value >= threshold does"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-6, equal_nan=True)


def _share_memory(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor) and one.numel() > 0
    return tensors and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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
