"""The memory of a worker: forked from a server that has imported torch, or spawned to import it alone."""

from __future__ import annotations

import os
from statistics import mean, median

from dlab.bench.measure import alternate, in_fresh_process, megabytes
from dlab.bench.rows import AtMost, Row, row
from dlab.bench.spawned import WORKERS, rank_after_all_reduce, rank_after_collection, spawned
from dlab.processes.parent.cluster import Cluster


@row("memory per worker, against mp.spawn")
def memory_per_worker(name: str, quick: bool) -> Row:
    """Measure workers that have formed a group and done one all_reduce."""
    return _memory(name, quick, collect=False)


@row("memory per worker after a garbage collection, against mp.spawn")
def memory_after_collection(name: str, quick: bool) -> Row:
    """Measure after a garbage collection, which may write to every object; a written page is no longer shared."""
    return _memory(name, quick, collect=True)


def _memory(name: str, quick: bool, collect: bool) -> Row:
    servers: list[float] = []

    def ours() -> float:
        worker, server = in_fresh_process(cluster_megabytes, collect)
        servers.append(server)
        return worker

    # in separate processes, so that the two kinds of workers never run at once and share nothing
    kinds = alternate(ours, lambda: in_fresh_process(spawned_megabytes, collect), rounds=1 if quick else 2)
    worker, other = map(median, kinds)
    note = f"PSS, mean of {WORKERS} workers; the fork server itself takes {median(servers):.0f} MB more, once"
    return Row(name, worker, other, worker / other, AtMost(0.3), "MB", note)


def cluster_megabytes(collect: bool) -> tuple[float, float]:
    """Return the mean memory of dlab's workers, and the memory of their fork server."""
    with Cluster(WORKERS) as cluster:
        cluster.run(rank_after_collection if collect else rank_after_all_reduce)
        server = cluster.run(os.getppid)[0]
        return mean(map(megabytes, cluster.pids)), megabytes(server)


def spawned_megabytes(collect: bool) -> float:
    """Return the mean memory of mp.spawn's workers."""
    with spawned(rank_after_collection if collect else rank_after_all_reduce) as pids:
        return mean(map(megabytes, pids))
