"""What it costs to look: training under the live panel, against the same training that nobody looks at."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from IPython.display import DisplayHandle

from dlab.bench.measure import alternate
from dlab.bench.rows import AtMost, Row, row
from dlab.demo import average_gradients, train
from dlab.processes.cluster import Cluster
from dlab.views.panel import Live, Panel, controls

WORKERS = 4


@row("training under the panel, against training that nobody looks at")
def training_under_the_panel(name: str, quick: bool) -> Row:
    """The time of a step, in four workers, while the kernel draws ten frames a second or none."""
    steps, rounds = (10, 1) if quick else (40, 6)
    shares: list[float] = []
    with Cluster(WORKERS) as cluster:
        seconds_per_step(cluster, steps)  # the first run has something to import
        watched, alone = alternate(
            lambda: seconds_per_step(cluster, steps, shares), lambda: seconds_per_step(cluster, steps), rounds=rounds
        )
    note = f"{rounds} rounds of {steps} steps of SimpleCNN; drawing takes {100 * median(shares):.1f} % of a core"
    ours, theirs = median(watched), median(alone)
    return Row(name, 1e3 * ours, 1e3 * theirs, ours / theirs, AtMost(1.02), "ms", note)


def seconds_per_step(cluster: Cluster, steps: int, shares: list[float] | None = None) -> float:
    """Train; with a list, under a panel, whose share of a core is put there."""
    run = cluster.start(train, average_gradients, steps)
    if shares is not None:
        shares.append(_share_of_a_core(run))
    run.wait()
    times = [event.time for event in run.events if event.kind == "log" and event.rank == 0]
    return (times[-1] - times[0]) / (len(times) - 1)


def _share_of_a_core(run: Any) -> float:
    """Let a panel follow the run to its end; without a notebook its messages go nowhere, but they are made."""
    live = Live(Panel(run), DisplayHandle(), controls)
    begun, before = time.perf_counter(), time.thread_time()
    live.keep_up()
    share = (time.thread_time() - before) / (time.perf_counter() - begun)
    live.close()
    return share
