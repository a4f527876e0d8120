"""All-reduce, float32, 4 KiB to 64 MiB: dlab's against gloo's and Open MPI's, and against the mere copying of memory.

All contenders take turns in the same workers, one thread each; Open MPI has processes of its own, in the same rounds.
A row shows the size that is nearest to missing its target. `python -m dlab.bench -k all-reduce` measures only this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dlab
from dlab.bench import mpi
from dlab.bench.measure import Moments, alternate, moments, span
from dlab.bench.rows import Grid, Row, faster, number, row
from dlab.collectives import ring_allreduce
from dlab.processes.cluster import Cluster
from dlab.transports import TorchTransport, connect

RANKS = (2, 4)
SIZES = {4 << 10: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 64 << 20: "64 MiB"}
SHARED, PRIVATE, RING = "dlab, shared tensor", "dlab, private tensor", "dlab's ring"
RING_OVER_GLOO, GLOO, OPEN_MPI, COPY = "dlab's ring over gloo", "gloo", "Open MPI", "copy"
CONTENDERS = (SHARED, PRIVATE, RING, RING_OVER_GLOO, GLOO, OPEN_MPI, COPY)

ROUNDS, PASSES = 4, 2  # each round counts twice: a pass through the contenders, and one back
SECONDS = 0.03  # a sample is as many calls as take this long, so that the naps of waiting ranks even out

Case = tuple[int, str]  # bytes, contender
Repeats = Mapping[Case, int]
Times = dict[Case, list[float]]  # microseconds per call; a number for each sample


class Comparison(NamedTuple):
    """How many times faster one contender should be than another: by ranks, then by size; None asks for nothing."""

    name: str
    ours: str
    theirs: str
    targets: dict[int, tuple[float | None, ...]]


COMPARISONS = (
    Comparison("shared tensor, against gloo", SHARED, GLOO, {2: (80, 40, 18, 7, None), 4: (50, 40, 14, 5, None)}),
    Comparison("private tensor, against gloo", PRIVATE, GLOO, dict.fromkeys(RANKS, (2, 2, 2, 2, 2))),
    Comparison("a ring written by hand, against gloo", RING, GLOO, dict.fromkeys(RANKS, (1, 1, 1, 1, 1))),
    Comparison("shared tensor, against Open MPI", SHARED, OPEN_MPI, dict.fromkeys(RANKS, (0.9, 1.7, 1.7, 1.7, 4))),
    Comparison("private tensor, against Open MPI", PRIVATE, OPEN_MPI, {2: (None,) * 5, 4: (None, 1, 1, 1, 1)}),
)


def grid(ranks: int, name: str, quick: bool) -> Grid:
    """Every contender at every size: the median of its samples."""
    times = measured(ranks, quick)
    there = [who for who in CONTENDERS if (min(SIZES), who) in times]
    lines = [(label, *(number(median(times[size, who])) for who in there)) for size, label in SIZES.items()]
    note = (
        "from the first rank's begin to the last rank's end; a shared tensor comes from dlab.shared_empty; "
        "copy is a bound: every rank copies as much once, all at the same time"
    )
    return Grid(name, ("", *there), lines, note if OPEN_MPI in there else f"{note}; {mpi.MISSING}")


def compare(comparison: Comparison, ranks: int, name: str, quick: bool) -> Row:
    """A row of the size that is nearest to missing its target; its note has the others."""
    times = measured(ranks, quick)
    rows = {}
    for (size, label), target in zip(SIZES.items(), comparison.targets[ranks], strict=True):
        rows[label] = faster(name, times[size, comparison.ours], times[size, comparison.theirs], target, "us")
    return nearest(rows)


def nearest(rows: Mapping[str, Row]) -> Row:
    """Of rows by size the one that misses its target by most, or has least to spare; without targets, the lowest."""
    asked = {label: row for label, row in rows.items() if row.target} or rows
    least = min(asked, key=lambda label: asked[label].ratio / _goal(asked[label]))
    each = [f"{label} {number(row.ratio)}x" + f" of {_goal(row):g}x" * bool(row.target) for label, row in rows.items()]
    return replace(rows[least], name=f"{rows[least].name}: {least}", note=f"{rows[least].note}; {', '.join(each)}")


def _goal(row: Row) -> float:
    return row.target.bound if row.target else 1.0


@cache
def measured(ranks: int, quick: bool) -> Times:
    """What all rows and the grid show, measured once. To be quick, the warm-up must do."""
    with Cluster(ranks, threads=1) as cluster:
        kinds: list[Callable[[Repeats, int], Times]] = [partial(_in_workers, cluster)]
        if mpi.installed():
            kinds.insert(0, partial(_in_open_mpi, ranks))  # first, to be told at once if it does not work
        few = {(size, who): max(1, min(10, (16 << 20) // size)) for size in SIZES for who in CONTENDERS}
        warm_up = _join(alternate(*(partial(kind, few, 1) for kind in kinds), rounds=1))
        if quick:
            return warm_up
        enough = {case: min(2000, round(1e6 * SECONDS / time) + 1) for case, (time,) in warm_up.items()}
        return _join(alternate(*(partial(kind, enough, PASSES) for kind in kinds), rounds=ROUNDS))


def _join(kinds: Sequence[Sequence[Times]]) -> Times:
    return {case: [time for times in rounds for time in times[case]] for rounds in kinds for case in rounds[0]}


def _in_open_mpi(ranks: int, repeats: Repeats, passes: int) -> Times:
    taken = mpi.seconds_per_call(ranks, {size: repeats[size, OPEN_MPI] for size in SIZES}, passes)
    return {(size, OPEN_MPI): [1e6 * time for time in times] for size, times in taken.items()}


def _in_workers(cluster: Cluster, repeats: Repeats, passes: int) -> Times:
    by_rank: list[dict[Case, list[Moments]]] = cluster.run(take_turns, repeats, passes)
    together = {case: zip(*(rank[case] for rank in by_rank), strict=True) for case in by_rank[0]}
    return {case: [1e6 * span(ranks) / repeats[case] for ranks in samples] for case, samples in together.items()}


def take_turns(repeats: Repeats, passes: int) -> dict[Case, list[Moments]]:
    """Every contender but Open MPI at every size, after a look at whether it sums rightly. Runs in a worker."""
    ring, over_gloo, taken = connect(), TorchTransport(), {}
    for size in dict.fromkeys(size for size, _ in repeats):
        shared, private, other = dlab.shared_empty(size // 4), torch.empty(size // 4), torch.empty(size // 4)
        reducers: dict[str, Callable[[], Any]] = {
            SHARED: partial(dlab.allreduce, shared),
            PRIVATE: partial(dlab.allreduce, private),
            RING: partial(ring_allreduce, private, ring),
            RING_OVER_GLOO: partial(ring_allreduce, private, over_gloo),
            GLOO: partial(dist.all_reduce, private),
        }
        for who, reduce in reducers.items():
            _check(reduce, shared if who == SHARED else private, f"{who}, {size} bytes")
        other.copy_(private)  # the first touch of its pages
        contenders = reducers | {COPY: partial(other.copy_, private)}
        turns = [partial(moments, work, repeats[size, who], ring.barrier) for who, work in contenders.items()]
        samples = alternate(*turns, rounds=passes)
        taken.update({(size, who): each for who, each in zip(contenders, samples, strict=True)})
    return taken


def _check(reduce: Callable[[], Any], tensor: torch.Tensor, what: str) -> None:
    tensor.fill_(dist.get_rank() + 1)
    reduce()
    size = dist.get_world_size()
    assert bool((tensor == size * (size + 1) / 2).all()), f"the sum is wrong: {what}"
    tensor.zero_()  # stays what it is, however often it is summed


for _ranks in RANKS:
    row(f"all-reduce, {_ranks} ranks, microseconds")(partial(grid, _ranks))
    for _comparison in COMPARISONS:
        if _comparison.theirs != OPEN_MPI or mpi.installed():
            row(f"all-reduce, {_ranks} ranks, {_comparison.name}")(partial(compare, _comparison, _ranks))
