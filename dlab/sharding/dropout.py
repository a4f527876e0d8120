"""Dropout on a tensor of which each rank holds a part: all ranks draw the same mask, and each uses its part of it.

So a cut network drops what one process would drop, and copies of a tensor stay equal. The random number generators must
be in the same state on all ranks, as `dlab.train` seeds them; every rank draws the numbers of the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dlab.sharding.operation import Operation
from dlab.sharding.state import state
from dlab.sharding.tensor import RULES, ShardedTensor


def dropout(x: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Operation:
    """Sets elements to zero at random, and scales the others by 1/(1-p); every dimension can be cut."""
    if inplace:
        raise NotImplementedError("Dropout: dlab does not change sharded tensors in place: leave out inplace=True")
    subscripts = "abcdmnopqruwxyz"[: x.dim()]

    def compute(parts: list[Any], _: dict[str, int]) -> Any:
        part, world = parts[0], state.world
        if not training or p == 0 or part.is_meta:
            return part.view_as(part)
        assert world is not None and state.found is not None
        if world.size > 1 and world.transport is not None and not world.transport.processes:
            raise NotImplementedError(
                "the threads of a rehearsal share one random number generator, so that each would drop other numbers: "
                "run a network with dropout in a cluster, or call eval() on it"
            )
        mask = F.dropout(torch.ones(x.whole_shape, dtype=part.dtype, device=part.device), p)
        return part * mask[state.found.inputs[0].slices_of(world.rank, x.whole_shape)]

    return Operation("Dropout", [x], [subscripts], subscripts, compute)


RULES[F.dropout] = dropout
