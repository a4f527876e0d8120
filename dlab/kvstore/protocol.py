"""What workers and servers agree on: what can be asked, and how what belongs to a request is laid down.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from dlab.memory.gradient_slot import GradientSlot

DENSE, CODED, ROWS = range(3)  # how a gradient is laid down: as it is, compressed, or some rows of it
VALUE, SLOT = 3, 4  # no gradients, but the weights themselves, and what the optimizer remembers of them
ROUND = 0  # the bound of a push that waits for those of all workers
AT_ONCE = 1  # the bound of a push that waits for nobody


class Op(IntEnum):
    """What a worker may ask for."""

    INIT = 1  # keep this key (in the text) and show me where to lay what
    PUSH = 2
    PULL = 3
    SET = 4  # an optimizer, a compression, a learning rate (in the text)
    CLOCK = 5  # I begin step n: let me wait until nobody is too far behind


def rows_in(
    place: GradientSlot, rows: int, shape: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where so many rows of a table are laid down: their numbers, and what is in them, flat."""
    columns = torch.Size(shape[1:]).numel()
    values = place.raw[8 * rows :][: rows * columns * dtype.itemsize].view(dtype)
    return place.raw[: 8 * rows].view(torch.int64), values.view(rows, columns)
