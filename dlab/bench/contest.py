"""A contest for one collective, float32, 4 KiB to 64 MiB: the contenders take turns in the same workers.

Open MPI runs in its own processes, in the same rounds. A row shows the size that is closest to missing its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

from dlab.bench import mpi
from dlab.bench.measure import Moments, alternate, moments, span
from dlab.bench.rows import Grid, Row, faster, number, row
from dlab.processes.parent.cluster import Cluster
from dlab.transports import connect

RANKS = (2, 4)
SIZES = {4 << 10: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 64 << 20: "64 MiB"}
SHARED, PRIVATE, GLOO = "dlab, shared tensor", "dlab, private tensor", "gloo"
OPEN_MPI, COPY = "Open MPI", "copy"

ROUNDS, PASSES = 4, 2  # each round counts twice: once through the contenders, and once back
SECONDS = 0.03  # a sample has as many calls as take this long, so that the naps of waiting ranks average out

Case = tuple[int, str]  # bytes, contender
Repeats = Mapping[Case, int]
Times = dict[Case, list[float]]  # microseconds per call; one number per sample
Entries = Callable[[int], dict[str, Callable[[], Any]]]  # makes the contenders' calls for this many bytes


class Comparison(NamedTuple):
    """How many times faster one contender should be than another, by ranks and then by size; None sets no target."""

    name: str
    ours: str
    theirs: str
    targets: dict[int, tuple[float | None, ...]]


@dataclass(frozen=True, eq=False)
class Contest:
    """One collective: its name, the contenders and the targets. `entries` runs in every worker."""

    name: str
    contenders: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    entries: Entries
    note: str

    def register(self) -> None:
        """Register its rows and grids, for 2 and 4 ranks."""
        for ranks in RANKS:
            row(f"{self.name}, {ranks} ranks, microseconds")(partial(grid, self, ranks))
            for comparison in self.comparisons:
                if comparison.theirs != OPEN_MPI or mpi.installed():
                    row(f"{self.name}, {ranks} ranks, {comparison.name}")(partial(compare, self, comparison, ranks))


def grid(contest: Contest, ranks: int, name: str, quick: bool) -> Grid:
    """Show the median of every contender at every size."""
    times = measured(contest, ranks, quick)
    there = [who for who in contest.contenders if (min(SIZES), who) in times]
    lines = [(label, *(number(median(times[size, who])) for who in there)) for size, label in SIZES.items()]
    return Grid(name, ("", *there), lines, contest.note if OPEN_MPI in there else f"{contest.note}; {mpi.MISSING}")


def compare(contest: Contest, comparison: Comparison, ranks: int, name: str, quick: bool) -> Row:
    """Make a row for the size that is closest to missing its target; its note has the others."""
    times = measured(contest, ranks, quick)
    rows = {}
    for (size, label), target in zip(SIZES.items(), comparison.targets[ranks], strict=True):
        rows[label] = faster(name, times[size, comparison.ours], times[size, comparison.theirs], target, "us")
    return nearest(rows)


def nearest(rows: Mapping[str, Row]) -> Row:
    """Return the row that misses its target most, or meets it most narrowly; without targets, the lowest ratio."""
    asked = {label: row for label, row in rows.items() if row.target} or rows
    least = min(asked, key=lambda label: asked[label].ratio / _goal(asked[label]))
    each = [f"{label} {number(row.ratio)}x" + f" of {_goal(row):g}x" * bool(row.target) for label, row in rows.items()]
    return replace(rows[least], name=f"{rows[least].name}: {least}", note=f"{rows[least].note}; {', '.join(each)}")


def _goal(row: Row) -> float:
    return row.target.bound if row.target else 1.0


@cache
def measured(contest: Contest, ranks: int, quick: bool) -> Times:
    """Measure everything that the rows and the grid show, once; in quick mode the warm-up round counts."""
    with Cluster(ranks, threads=1) as cluster:
        kinds: list[Callable[[Repeats, int], Times]] = [partial(_in_workers, cluster, contest)]
        if mpi.installed():
            kinds.insert(0, partial(_in_open_mpi, contest, ranks))  # first, to report a broken installation at once
        few = {(size, who): max(1, min(10, (16 << 20) // size)) for size in SIZES for who in contest.contenders}
        warm_up = _join(alternate(*(partial(kind, few, 1) for kind in kinds), rounds=1))
        if quick:
            return warm_up
        enough = {case: min(2000, round(1e6 * SECONDS / time) + 1) for case, (time,) in warm_up.items()}
        return _join(alternate(*(partial(kind, enough, PASSES) for kind in kinds), rounds=ROUNDS))


def _join(kinds: Sequence[Sequence[Times]]) -> Times:
    return {case: [time for times in rounds for time in times[case]] for rounds in kinds for case in rounds[0]}


def _in_open_mpi(contest: Contest, ranks: int, repeats: Repeats, passes: int) -> Times:
    asked = {size: repeats[size, OPEN_MPI] for size in SIZES}
    taken = mpi.seconds_per_call(contest.name, ranks, asked, passes)
    return {(size, OPEN_MPI): [1e6 * time for time in times] for size, times in taken.items()}


def _in_workers(cluster: Cluster, contest: Contest, repeats: Repeats, passes: int) -> Times:
    by_rank: list[dict[Case, list[Moments]]] = cluster.run(take_turns, contest.entries, repeats, passes)
    together = {case: zip(*(rank[case] for rank in by_rank), strict=True) for case in by_rank[0]}
    return {case: [1e6 * span(ranks) / repeats[case] for ranks in samples] for case, samples in together.items()}


def take_turns(entries: Entries, repeats: Repeats, passes: int) -> dict[Case, list[Moments]]:
    """Measure every contender except Open MPI at every size. Runs in a worker."""
    barrier, taken = connect().barrier, {}
    for size in dict.fromkeys(size for size, _ in repeats):
        contenders = entries(size)
        turns = [partial(moments, work, repeats[size, who], barrier) for who, work in contenders.items()]
        samples = alternate(*turns, rounds=passes)
        taken.update({(size, who): each for who, each in zip(contenders, samples, strict=True)})
    return taken
