"""The protocol between workers and servers: the requests, and how their data are laid out in memory.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from dlab.memory.gradient_slot import GradientSlot

DENSE, CODED, ROWS = range(3)  # the form of a gradient: as it is, compressed, or some rows of it
VALUE, SLOT = 3, 4  # not gradients, but the weights themselves, and the optimizer's state
ROUND = 0  # the bound of a push that waits for the pushes of all workers
AT_ONCE = 1  # the bound of a push that is applied without waiting


class Op(IntEnum):
    """The requests that a worker can send."""

    INIT = 1  # keep this key; the text describes it and the worker's gradient slot
    PUSH = 2
    PULL = 3
    SET = 4  # an optimizer, a compression, a learning rate (in the text)
    CLOCK = 5  # begin step n; answered when no worker is too far behind


def rows_in(
    place: GradientSlot, rows: int, shape: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where so many rows of a table are in a slot: the row numbers (rows,), and the values (rows, columns)."""
    columns = torch.Size(shape[1:]).numel()
    values = place.raw[8 * rows :][: rows * columns * dtype.itemsize].view(dtype)
    return place.raw[: 8 * rows].view(torch.int64), values.view(rows, columns)
