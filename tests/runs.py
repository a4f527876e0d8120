"""A function that runs until it is told to end, and what it has logged; for tests."""

from __future__ import annotations

import time

import dlab


def steps() -> int:
    """Log step after step until the knob `enough` is turned."""
    step = 0
    while not dlab.knob("enough"):
        dlab.log(step=step)
        step += 1
        time.sleep(0.005)
    return step


def logged(run: dlab.Run, rank: int) -> list[dlab.Event]:
    """What a rank has logged so far."""
    return [event for event in run.events if event.kind == "log" and event.rank == rank]
