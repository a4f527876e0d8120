"""A race: several runs side by side, one after another on the same workers or all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dlab.events import Event
from dlab.processes.cluster import Cluster, cluster, make_room
from dlab.processes.errors import Stopped
from dlab.processes.notebook import Cell
from dlab.processes.run import Run, finish
from dlab.processes.waiting import controls_wait, end_of, wait_until


class Race:
    """What `dlab.race` gives; as the last line of a cell it draws the losses of all runs on one chart."""

    def __init__(self, contenders: Mapping[str, Any], workers: int, at_once: bool, by: str) -> None:
        self.name, self.ranks, self.by = "race", workers, by
        self.runs: dict[str, Run] = {name: run for name, run in contenders.items() if isinstance(run, Run)}
        self._functions = {name: each for name, each in contenders.items() if not isinstance(each, Run)}
        self._workers, self._stopped = workers, False
        self._cell = Cell()
        if not at_once:
            for function in self._functions.values():
                make_room(workers, _servers(function), self._cell)
        self._error: Exception | None = None
        self._delays: dict[int, float] = {}  # that were asked for, and knobs that were turned
        self._knobs: dict[str, Any] = {}
        self.pictures: list[threading.Thread] = []  # those who draw it
        self._clusters = (
            [Cluster(workers, servers=_servers(each)) for each in self._functions.values()] if at_once else []
        )
        self._thread = threading.Thread(target=self._go, name="dlab-race", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        self._cell.claim_thread()
        try:
            for number, (name, function) in enumerate(self._functions.items()):
                if self._stopped:
                    return
                on = self._clusters[number] if self._clusters else cluster(self._workers, _servers(function))
                self._begin(name, function, on)
                if not self._clusters:
                    self.runs[name]._done.wait()
            for run in list(self.runs.values()):
                run._done.wait()
        except Exception as problem:
            self._error = problem
        finally:
            for each in self._clusters:
                each.close()

    def _begin(self, name: str, function: Callable[[], Any], on: Cluster) -> None:
        run = self.runs[name] = on.start(function)
        run.part_of = self
        for rank, seconds in list(self._delays.items()):
            run.delay(rank, seconds)
        for knob, value in list(self._knobs.items()):
            run.set(knob, value)
        if self._stopped:  # meanwhile
            run.stop()

    def wait(self, *, partial: bool = False) -> dict[str, list[Any]]:
        """The results of every run, by name; raises what a run raised.

        After `stop()` it raises `Stopped`; `partial=True` gives what there is of the runs that had begun, with None
        for each rank that had not returned.
        """
        try:
            wait_until(end_of(self._thread))
        except KeyboardInterrupt:
            self.stop()
            raise
        finish(self.pictures)
        if self._error is not None:
            raise self._error
        missing = [name for name in self._functions if name not in self.runs]
        if missing and not partial:
            raise Stopped(
                f"the race was stopped before {' and '.join(missing)} had begun: "
                "wait(partial=True) gives what the others had returned by then"
            )
        return {name: run.wait(partial=partial) for name, run in self.runs.items()}

    def stop(self) -> None:
        """End the run that goes on, and begin no other."""
        self._stopped = True
        for run in list(self.runs.values()):
            run.stop()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank sleep so long in each step, in the run that goes on and in those to come."""
        if rank not in range(self.ranks):
            raise IndexError(f"there is no rank {rank!r} in this race: the ranks are 0 to {self.ranks - 1}")
        self._delays[rank] = seconds
        for run in self._going():
            run.delay(rank, seconds)

    def set(self, name: str, value: Any) -> None:
        """Turn a knob, in the run that goes on and in those to come."""
        self._knobs[name] = value
        for run in self._going():
            run.set(name, value)

    def _going(self) -> list[Run]:
        return [run for run in list(self.runs.values()) if not run.done]

    @property
    def done(self) -> bool:
        """Have all runs ended?"""
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """`running sync`, or `finished`."""
        going = [name for name, run in list(self.runs.items()) if not run.done]
        return f"running {', '.join(going)}" if going else "finished" if self.done else "starting"

    @property
    def controls_wait(self) -> bool:
        """Does the cell that runs keep the kernel from hearing what is done to the panel?"""
        return controls_wait()

    @property
    def events(self) -> dict[str, list[Event]]:
        """What the workers of every run have told so far, by name."""
        return {name: run.events for name, run in list(self.runs.items())}

    def __repr__(self) -> str:
        return f"<Race of {', '.join([*self.runs, *(set(self._functions) - set(self.runs))])}: {self.state}>"


def _servers(function: Callable[[], Any]) -> int:
    """How many it needs."""
    return getattr(function, "servers", 0)


def race(
    contenders: Mapping[str, Run | Callable[[], Any]], workers: int = 4, at_once: bool = False, by: str = "step"
) -> Race:
    """Let runs compete: `dlab.race({"ring": train_with_ring, "gloo": train_with_gloo})`.

    A contender is a function, which then runs on every one of `workers` workers, or a run that is there already. They
    run one after another on the same workers, so that none takes time from the others; `at_once=True` gives each a
    cluster of its own. `by="time"` draws the losses by the wall clock instead of by step. While they run,
    `race.delay(rank, seconds)` and `race.set(knob, value)` are for all of them, as are the sliders of the panel.
    """
    if not isinstance(contenders, Mapping) or not contenders:
        raise TypeError("race takes a dictionary of functions or runs by name, as in dlab.race({'ring': train, …})")
    for name, each in contenders.items():
        if not isinstance(each, Run) and not callable(each):
            raise TypeError(f"{name!r} is neither a run nor a function, but {each!r}")
    if by not in ("step", "time"):
        raise ValueError(f"by={by!r}: a race is drawn by 'step' or by 'time'")
    return Race(contenders, workers, at_once, by)
