"""The cost of the live panel: training while it is drawn, against the same training without it."""

from __future__ import annotations

import time
from statistics import median

from IPython.display import DisplayHandle

import dlab
from dlab.bench.measure import alternate
from dlab.bench.rows import AtMost, Row, row
from dlab.kinds import LOG
from dlab.processes.parent.cluster import Cluster
from dlab.processes.parent.run import Run
from dlab.strategies import AllReduceSGD
from dlab.views.panel import LivePanel, Panel

WORKERS, WINDOW = 4, 1.5  # seconds


@row("training under the panel, against training that nobody looks at")
def training_under_the_panel(name: str, quick: bool) -> Row:
    """Measure a step in four workers while the kernel draws ten frames a second, and while it draws none, in turn."""
    rounds = 1 if quick else 30
    with Cluster(WORKERS) as cluster:
        run = dlab.train(dlab.SimpleCNN, strategy=AllReduceSGD(), epochs=100, watch=10, test=False, on=cluster)
        watched, alone, share = look_now_and_then(run, rounds)
        run.stop()
    ratio = median(ours / theirs for ours, theirs in zip(watched, alone, strict=True))
    note = (
        f"{rounds} times {WINDOW} s of each, SimpleCNN by AllReduceSGD, gradients watched; the ratio is the median of "
        f"all rounds'; drawing takes {100 * share:.1f} % of a core"
    )
    return Row(name, 1e3 * median(watched), 1e3 * median(alone), ratio, AtMost(1.02), "ms", note)


def look_now_and_then(run: Run, rounds: int) -> tuple[list[float], list[float], float]:
    """Return the seconds per step with and without a panel, and the panel's share of a core.

    Without a notebook the panel's messages are made, but not delivered.
    """
    live = LivePanel(Panel(run), DisplayHandle())
    live.keep_up(time.monotonic() + WINDOW)  # the first steps are slow
    before = time.thread_time()
    watched, alone = alternate(lambda: _look(live), _look_away, rounds=rounds)
    share = (time.thread_time() - before) / (rounds * WINDOW)
    live.close()
    steps = [event.time for event in run.events if event.kind == LOG and event.rank == 0]
    return [_step(steps, *each) for each in watched], [_step(steps, *each) for each in alone], share


def _look(live: LivePanel) -> tuple[float, float]:
    begin = time.time()
    live.keep_up(time.monotonic() + WINDOW)
    return begin, time.time()


def _look_away() -> tuple[float, float]:
    begin = time.time()
    time.sleep(WINDOW)
    return begin, time.time()


def _step(times: list[float], begin: float, end: float) -> float:
    within = [moment for moment in times if begin <= moment <= end]
    return (within[-1] - within[0]) / (len(within) - 1)
