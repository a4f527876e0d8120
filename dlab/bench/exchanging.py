"""Reduce-scatter, all-gather and all-to-all: dlab's against gloo's and Open MPI's.

A size is that of the whole tensor: a rank's input of a reduce-scatter, its output of an all-gather, and both for an
all-to-all. `python -m dlab.bench -k gather` measures only all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import dlab
from dlab.bench.contest import GLOO, OPEN_MPI, PRIVATE, RANKS, SHARED, Comparison, Contest

Call = Callable[[], Any]


def gathering(size: int) -> dict[str, Call]:
    """Return the contenders' all-gathers whose result has this many bytes."""
    ranks, output = dlab.world_size(), torch.empty(size // 4)
    shared, private, rows = (
        dlab.shared_empty(size // 4 // ranks),
        torch.empty(size // 4 // ranks),
        output.view(ranks, -1),
    )
    for tensor in (shared, private):
        tensor.fill_(dlab.rank() + 1)
    calls: dict[str, Call] = {
        SHARED: partial(dlab.all_gather, shared, out=rows),
        PRIVATE: partial(dlab.all_gather, private, out=rows),
        GLOO: partial(dist.all_gather_single, output, private),
    }
    return checked(calls, output, torch.arange(1.0, ranks + 1).repeat_interleave(size // 4 // ranks))


def scattering(size: int) -> dict[str, Call]:
    """Return the contenders' reduce-scatters of this many bytes."""
    ranks = dlab.world_size()
    shared, private, output = dlab.shared_empty(size // 4), torch.empty(size // 4), torch.empty(size // 4 // ranks)
    for tensor in (shared, private):
        tensor.fill_(dlab.rank() + 1)
    calls: dict[str, Call] = {
        SHARED: partial(dlab.reduce_scatter, shared, out=output),
        PRIVATE: partial(dlab.reduce_scatter, private, out=output),
        GLOO: partial(dist.reduce_scatter_single, output, private),
    }
    return checked(calls, output, torch.full_like(output, ranks * (ranks + 1) / 2))


def swapping(size: int) -> dict[str, Call]:
    """Return the contenders' all-to-alls of this many bytes."""
    ranks, rank = dlab.world_size(), dlab.rank()
    shared, private, output = dlab.shared_empty(size // 4), torch.empty(size // 4), torch.empty(size // 4)
    for tensor in (shared, private):  # part s of rank r is 10 r + s
        tensor.view(ranks, -1).copy_((10 * rank + torch.arange(float(ranks)))[:, None])
    calls: dict[str, Call] = {
        SHARED: partial(dlab.all_to_all, shared.view(ranks, -1), out=output.view(ranks, -1)),
        PRIVATE: partial(dlab.all_to_all, private.view(ranks, -1), out=output.view(ranks, -1)),
        GLOO: partial(dist.all_to_all_single, output, private),
    }
    return checked(calls, output, (10 * torch.arange(float(ranks)) + rank).repeat_interleave(size // 4 // ranks))


def checked(calls: dict[str, Call], output: torch.Tensor, expected: torch.Tensor) -> dict[str, Call]:
    """Return the calls after checking the result of each."""
    for who, call in calls.items():
        output.zero_()
        call()
        assert torch.equal(output, expected), f"the result is wrong: {who}, {output.nbytes} bytes"
    return calls


_COMPARISONS = (  # half of the targets of all-reduce
    Comparison("shared tensor, against gloo", SHARED, GLOO, {2: (40, 20, 9, 3.5, None), 4: (25, 20, 7, 2.5, None)}),
    Comparison("private tensor, against gloo", PRIVATE, GLOO, dict.fromkeys(RANKS, (1, 1, 1, 1, 1))),
    Comparison("shared tensor, against Open MPI", SHARED, OPEN_MPI, dict.fromkeys(RANKS, (0.45, 0.85, 0.85, 0.85, 2))),
    Comparison("private tensor, against Open MPI", PRIVATE, OPEN_MPI, {2: (None,) * 5, 4: (None, 0.5, 0.5, 0.5, 0.5)}),
)
_NOTE = "of the whole: what a rank has before a reduce-scatter, after an all-gather, and both in an all-to-all"
CONTESTS = tuple(
    Contest(name, (SHARED, PRIVATE, GLOO, OPEN_MPI), _COMPARISONS, entries, _NOTE)
    for name, entries in (("reduce-scatter", scattering), ("all-gather", gathering), ("all-to-all", swapping))
)
for _contest in CONTESTS:
    _contest.register()
