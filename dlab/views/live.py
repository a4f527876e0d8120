"""A picture that follows its run: drawn anew a few times a second, and kept as a still when the run has ended."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from IPython.display import DisplayHandle

from dlab.events import Event
from dlab.views.curves import LossCurves

PERIOD = 0.4  # seconds between two pictures: drawing one takes the kernel about 0.08 s


class Follows(Protocol):
    """What a live view needs to know of a run."""

    name: str

    @property
    def events(self) -> list[Event]: ...
    @property
    def done(self) -> bool: ...
    @property
    def state(self) -> str: ...


def show_live(run: Follows) -> threading.Thread | None:
    """Show the run's loss curves below the cell and keep them up to date; the cell returns at once."""
    handle = DisplayHandle()
    handle.display(_bundle(run), raw=True)
    if run.done:
        return None
    thread = threading.Thread(target=_follow, args=(run, handle), name="dlab-view", daemon=True)
    thread.start()
    return thread


def _follow(run: Follows, handle: DisplayHandle) -> None:
    done = False
    while not done:
        time.sleep(PERIOD)
        done = run.done  # asked before the events are read: the last picture must be complete
        handle.update(_bundle(run), raw=True)


def _bundle(run: Follows) -> dict[str, object]:
    view = LossCurves(run.events)
    title = f"{run.name}: {run.state}"
    if not view.losses:
        return {"text/plain": f"{title}\n{view}"}
    bundle = view.bundle()
    return {**bundle, "text/html": f"<div>{title}</div>{bundle['text/html']}", "text/plain": f"{title}\n{view}"}
