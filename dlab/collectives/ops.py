"""The operations of a reduction, and the checks that every collective starts with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from dlab.transports.base import Transport

Combine = Callable[[torch.Tensor, torch.Tensor], object]  # puts the combination of both into the first

COMBINE: dict[str, Combine] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,  # divided once, at the end
    "product": torch.Tensor.mul_,
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "and": torch.Tensor.bitwise_and_,  # these three are for integers
    "or": torch.Tensor.bitwise_or_,
    "xor": torch.Tensor.bitwise_xor_,
}
OPS = tuple(COMBINE)  # numbered in the same way on all ranks

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# A sum beyond the range of floats is infinite, and torch says nothing of it; numpy would warn with a line of dlab.
warnings.filterwarnings("ignore", "(overflow|invalid value) encountered", RuntimeWarning, r"dlab\.collectives\.")
_PLAIN = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}


class Tools(NamedTuple):
    """Functions that work on the numbers of a tensor in memory."""

    view: Callable[[torch.Tensor], Any]
    combine: Callable[[Any, Any, Any], object]  # puts the combination of the first two into the third
    copy: Callable[[Any, Any], object]  # into the first


@cache
def tools(dtype: torch.dtype, op: str) -> Tools:
    """Return numpy's functions if it knows the type, since a call takes a tenth of torch's overhead, else torch's."""
    if dtype in _PLAIN:
        return Tools(torch.Tensor.numpy, _UFUNCS[op], np.copyto)
    combine = COMBINE[op]
    return Tools(torch.Tensor.detach, lambda one, two, into: combine(into.copy_(one), two), torch.Tensor.copy_)


def prepare(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, Combine]:
    """Return the tensor as a flat row, and the operation; refuses what cannot be reduced in place."""
    if op not in COMBINE:
        raise ValueError(f"there is no op {op!r}: use {', '.join(COMBINE)}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError("a collective takes only a dense, contiguous tensor: call .contiguous() first")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} tensors is not whole: use op='sum', or floats")
    if op in ("and", "or", "xor") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{tensor.dtype} has no bits for {op!r} to combine: use whole numbers or bool")
    row = tensor.detach() if tensor.requires_grad else tensor
    return (row if row.dim() == 1 else row.view(-1)), COMBINE[op]


def finish(row: Any, op: str, size: int) -> None:
    """Divide the sum by the number of ranks if the operation is a mean."""
    if op == "mean":
        row /= size


def check_root(root: int, transport: Transport) -> None:
    """Check that the root is one of the ranks."""
    if not 0 <= root < transport.size:
        raise IndexError(f"there is no rank {root}: the ranks are 0 to {transport.size - 1}")
