"""All-reduce: dlab's against gloo's and Open MPI's, and against merely copying memory.

`python -m dlab.bench -k all-reduce` measures only this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import dlab
from dlab.bench.contest import COPY, GLOO, OPEN_MPI, PRIVATE, RANKS, SHARED, Comparison, Contest
from dlab.collectives import ring_allreduce
from dlab.transports import TorchTransport, connect

RING, RING_OVER_GLOO = "dlab's ring", "dlab's ring over gloo"


def entries(size: int) -> dict[str, Callable[[], Any]]:
    """Return every contender's call for a tensor of this many bytes, after checking that it sums correctly."""
    shared, private, other = dlab.shared_empty(size // 4), torch.empty(size // 4), torch.empty(size // 4)
    reducers: dict[str, Callable[[], Any]] = {
        SHARED: partial(dlab.allreduce, shared),
        PRIVATE: partial(dlab.allreduce, private),
        RING: partial(ring_allreduce, private, connect()),
        RING_OVER_GLOO: partial(ring_allreduce, private, TorchTransport()),
        GLOO: partial(dist.all_reduce, private),
    }
    for who, reduce in reducers.items():
        check(reduce, shared if who == SHARED else private, f"{who}, {size} bytes")
    other.copy_(private)  # touch its pages once before measuring
    return reducers | {COPY: partial(other.copy_, private)}


def check(reduce: Callable[[], Any], tensor: torch.Tensor, what: str) -> None:
    """Check that the tensors of all ranks are summed. Leaves zeros, which stay zeros however often they are summed."""
    tensor.fill_(dist.get_rank() + 1)
    reduce()
    size = dist.get_world_size()
    assert bool((tensor == size * (size + 1) / 2).all()), f"the sum is wrong: {what}"
    tensor.zero_()


ALL_REDUCE = Contest(
    "all-reduce",
    (SHARED, PRIVATE, RING, RING_OVER_GLOO, GLOO, OPEN_MPI, COPY),
    (
        Comparison("shared tensor, against gloo", SHARED, GLOO, {2: (80, 40, 18, 7, None), 4: (50, 40, 14, 5, None)}),
        Comparison("private tensor, against gloo", PRIVATE, GLOO, dict.fromkeys(RANKS, (2, 2, 2, 2, 2))),
        Comparison("a ring written by hand, against gloo", RING, GLOO, dict.fromkeys(RANKS, (1, 1, 1, 1, 1))),
        Comparison("shared tensor, against Open MPI", SHARED, OPEN_MPI, dict.fromkeys(RANKS, (0.9, 1.7, 1.7, 1.7, 4))),
        Comparison("private tensor, against Open MPI", PRIVATE, OPEN_MPI, {2: (None,) * 5, 4: (None, 1, 1, 1, 1)}),
    ),
    entries,
    "from the first rank's begin to the last rank's end; a shared tensor comes from dlab.shared_empty; "
    "copy is a bound: every rank copies as much once, all at the same time",
)
ALL_REDUCE.register()
