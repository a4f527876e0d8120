"""The header that every transport of bytes sends before a message: the number of items, and their type."""

from __future__ import annotations

import torch

from dlab.transports.base import describe, mismatch

# in a fixed order, so that both ends number the types in the same way
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
    """Return the header of a tensor: its number of items, and the number of their type."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"tensors of {tensor.dtype} cannot be sent: convert to one of {', '.join(map(str, DTYPES))}")
    return tensor.numel(), DTYPES.index(tensor.dtype)


def compare(found: tuple[int, int], incoming: torch.Tensor, source: int, rank: int) -> None:
    """Raise an error that names both ends if a header does not fit the receiver's tensor."""
    if found != header(incoming):
        sent = describe(torch.empty(found[0], dtype=DTYPES[found[1]], device="meta"))
        raise mismatch(source, sent, rank, describe(incoming))
