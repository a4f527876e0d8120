"""The operations of a reduction, and the checks that every collective begins with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dlab.transports.base import Transport

Combine = Callable[[torch.Tensor, torch.Tensor], object]  # puts the combination of both into the first

COMBINE: dict[str, Combine] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,  # divided once, at the end
    "product": torch.Tensor.mul_,
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "and": torch.Tensor.bitwise_and_,  # these three are for whole numbers
    "or": torch.Tensor.bitwise_or_,
    "xor": torch.Tensor.bitwise_xor_,
}
OPS = tuple(COMBINE)  # numbered alike on all ranks


def prepare(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, Combine]:
    """The tensor as one row of numbers, and the operation; refuses what cannot be reduced in place."""
    if op not in COMBINE:
        raise ValueError(f"there is no op {op!r}: use {', '.join(COMBINE)}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError("a collective works in place on a dense, contiguous tensor: call .contiguous() first")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} tensors is not whole: use op='sum', or floats")
    if op in ("and", "or", "xor") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{tensor.dtype} has no bits for {op!r} to combine: use whole numbers or bool")
    return tensor.detach().view(-1), COMBINE[op]


def finish(row: torch.Tensor, op: str, size: int) -> None:
    """A mean is a sum, divided."""
    if op == "mean":
        row /= size


def check_root(root: int, transport: Transport) -> None:
    """The root must be one of the ranks."""
    if not 0 <= root < transport.size:
        raise IndexError(f"there is no rank {root}: the ranks are 0 to {transport.size - 1}")
