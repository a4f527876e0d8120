"""The time from a call to its results on four ranks: a warm and a cold cluster, against mp.spawn."""

from __future__ import annotations

import time
from collections.abc import Callable

import cloudpickle

import dlab.bench.spawned
from dlab.bench.measure import alternate, in_fresh_process, seconds
from dlab.bench.rows import Row, faster, row
from dlab.bench.spawned import WORKERS, rank, rank_after_all_reduce, seconds_to_spawn
from dlab.processes.parent.cluster import Cluster

# A function from a notebook cell is pickled by value, which takes longer than by name. Here it is, too.
cloudpickle.register_pickle_by_value(dlab.bench.spawned)


@row("warm run, against mp.spawn")
def warm_run(name: str, quick: bool) -> Row:
    """Measure a function that returns its rank."""
    return _warm(name, rank, quick)


@row("warm run with an all_reduce, against mp.spawn")
def warm_run_with_all_reduce(name: str, quick: bool) -> Row:
    """Measure a function that all-reduces one number over gloo and returns its rank."""
    return _warm(name, rank_after_all_reduce, quick)


def _warm(name: str, function: Callable[[], int], quick: bool) -> Row:
    rounds, repeats = (1, 20) if quick else (5, 100)
    with Cluster(WORKERS) as cluster:
        assert cluster.run(function) == list(range(WORKERS))  # the first run may import something
        ours, theirs = alternate(
            lambda: 1e3 * seconds(lambda: cluster.run(function), repeats),
            lambda: 1e3 * seconds_to_spawn(function),
            rounds=rounds,
        )
    return faster(name, ours, theirs, 300, "ms", f"each round the median of {repeats} warm runs, and one spawn")


@row("cold cluster to its first result, against mp.spawn")
def cold_cluster(name: str, quick: bool) -> Row:
    """Measure in a fresh Python each time, where nothing of dlab runs yet."""
    ours, theirs = alternate(
        lambda: in_fresh_process(first_result),
        lambda: in_fresh_process(first_result_of_spawn),
        rounds=1 if quick else 5,
    )
    return faster(name, ours, theirs, 2, "s", "each in a fresh Python that has imported torch and dlab before")


def first_result() -> float:
    """Return the seconds from the call of `Cluster` to the results of its first run."""
    start = time.perf_counter()
    with Cluster(WORKERS) as cluster:
        cluster.run(rank)
        return time.perf_counter() - start


def first_result_of_spawn() -> float:
    """Return the seconds until the first result of `torch.multiprocessing.spawn`."""
    return seconds_to_spawn(rank)
