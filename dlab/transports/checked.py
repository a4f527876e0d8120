"""What every transport that carries bytes sends in front of a message: how many items, of which type."""

from __future__ import annotations

import torch

from dlab.transports.base import describe, mismatch

# in an order that never changes: both ends number the types alike
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def header(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of items and the number of their type."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"tensors of {tensor.dtype} cannot be sent: convert to one of {', '.join(map(str, DTYPES))}")
    return tensor.numel(), DTYPES.index(tensor.dtype)


def compare(found: tuple[int, int], incoming: torch.Tensor, source: int, rank: int) -> None:
    """Raise, naming both ends, if what comes is not what the receiver has room for."""
    if found != header(incoming):
        sent = describe(torch.empty(found[0], dtype=DTYPES[found[1]], device="meta"))
        raise mismatch(source, sent, rank, describe(incoming))
