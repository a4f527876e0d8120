"""A race: several runs are compared, one after another on the same workers or all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dlab.events import Event
from dlab.processes.between.errors import Stopped
from dlab.processes.parent.cluster import Cluster, cluster, make_room
from dlab.processes.parent.notebook import Cell
from dlab.processes.parent.run import Run, check_factor, finish
from dlab.processes.parent.waiting import controls_wait, end_of, wait_until


class Race:
    """The result of `dlab.race`; as the last line of a cell it draws the losses of all runs in one chart."""

    def __init__(self, contenders: Mapping[str, Any], workers: int, at_once: bool, by: str) -> None:
        self.name, self.ranks, self.servers, self.by = "race", workers, 0, by
        self.runs: dict[str, Run] = {name: run for name, run in contenders.items() if isinstance(run, Run)}
        self._functions = {name: each for name, each in contenders.items() if not isinstance(each, Run)}
        self._workers, self._stopped = workers, False
        self._cell = Cell()
        if not at_once:
            for function in self._functions.values():
                make_room(workers, _servers(function), self._cell)
        self._error: Exception | None = None
        self._delays: dict[int, float] = {}  # requested delays, which later runs also begin with
        self._knobs: dict[str, Any] = {}
        self.factors: dict[str, float] = {}
        self._turn = threading.Lock()  # held while a run begins, so that a request at that moment is not lost
        self.pictures: list[threading.Thread] = []  # the threads that draw it
        self._clusters = (
            [Cluster(workers, servers=_servers(each)) for each in self._functions.values()] if at_once else []
        )
        self._thread = threading.Thread(target=self._go, name="dlab-race", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        self._cell.claim_thread()
        try:
            for number, (name, function) in enumerate(self._functions.items()):
                on = self._clusters[number] if self._clusters else cluster(self._workers, _servers(function))
                run = self._begin(name, on, function)
                if run is None:
                    return
                if not self._clusters:
                    run._done.wait()
            for run in list(self.runs.values()):
                run._done.wait()
        except Exception as problem:
            self._error = problem
        finally:
            for each in self._clusters:
                each.close()

    def _begin(self, name: str, on: Cluster, function: Callable[[], Any]) -> Run | None:
        """Start a run with the requested delays and knobs; None if the race was stopped."""
        run = on._new_run(function)
        run.part_of = self
        with self._turn:
            if self._stopped:
                return None
            run.knobs, run.factors, run.delays = dict(self._knobs), dict(self.factors), dict(self._delays)
            on._launch(run, function, (), {})
            self.runs[name] = run
        return run

    def wait(self, *, partial: bool = False) -> dict[str, list[Any]]:
        """Wait for all runs and return their results by name; raises what a run raised.

        After `stop()` it raises `Stopped`; `partial=True` returns instead what the started runs have returned, with
        None for each rank that had not.
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
                "wait(partial=True) returns what the others had returned by then"
            )
        return {name: run.wait(partial=partial) for name, run in self.runs.items()}

    def stop(self) -> None:
        """End the current run, and begin no other."""
        with self._turn:
            self._stopped = True
        for run in list(self.runs.values()):
            run.stop()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank sleep this long in each step, in the current run and in those that follow."""
        if rank not in range(self.ranks):
            raise IndexError(f"there is no rank {rank!r} in this race: the ranks are 0 to {self.ranks - 1}")
        with self._turn:
            for run in self.going.values():
                run.delay(rank, seconds)
            self._delays[rank] = seconds

    def set(self, name: str, value: Any, to: Collection[str] | None = None) -> None:
        """Set a knob, in the current run and in those that follow; `to` restricts it to some of the current runs."""
        with self._turn:
            for run in self._chosen(to):
                run.set(name, value)
            self._knobs[name] = value
            self.factors.pop(name, None)

    def scale(self, name: str, factor: float, to: Collection[str] | None = None) -> None:
        """Multiply each run's own value of a knob, in the current run and in those that follow."""
        check_factor(name, factor)
        with self._turn:
            for run in self._chosen(to):
                run.scale(name, factor)
            self.factors[name] = factor

    def pause(self) -> None:
        """Freeze the current run, until `resume()`."""
        for run in self.going.values():
            run.pause()

    def resume(self) -> None:
        """Let the current run continue after `pause()`."""
        for run in self.going.values():
            run.resume()

    def _chosen(self, names: Collection[str] | None) -> list[Run]:
        return [run for name, run in self.going.items() if names is None or name in names]

    @property
    def going(self) -> dict[str, Run]:
        """The active runs, by name."""
        return {name: run for name, run in list(self.runs.items()) if not run.done}

    @property
    def paused(self) -> bool:
        """Whether all active runs are frozen."""
        going = self.going.values()
        return bool(going) and all(run.paused for run in going)

    @property
    def delays(self) -> dict[int, float]:
        """The delays of the active run by rank, in seconds."""
        return next((run.delays for run in self.going.values()), self._delays)

    @property
    def done(self) -> bool:
        """Whether all runs have ended."""
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """The state: `running sync`, `paused sync`, or `finished`."""
        if going := self.going:
            return f"{'paused' if self.paused else 'running'} {', '.join(going)}"
        return "finished" if self.done else "starting"

    @property
    def controls_wait(self) -> bool:
        """Whether the controls of the panel must wait until the current cell has ended."""
        return controls_wait()

    @property
    def events(self) -> dict[str, list[Event]]:
        """The events of every run so far, by name."""
        return {name: run.events for name, run in list(self.runs.items())}

    def __repr__(self) -> str:
        return f"<Race of {', '.join([*self.runs, *(set(self._functions) - set(self.runs))])}: {self.state}>"


def _servers(function: Callable[[], Any]) -> int:
    """Return the number of servers that the function needs."""
    return getattr(function, "servers", 0)


def race(
    contenders: Mapping[str, Run | Callable[[], Any]], workers: int = 4, at_once: bool = False, by: str = "step"
) -> Race:
    """Let runs compete: `dlab.race({"ring": train_with_ring, "gloo": train_with_gloo})`.

    A contender is a function, which runs on each of `workers` workers, or a run that already exists. They run one after
    another on the same workers, so that none takes time from the others; `at_once=True` gives each its own cluster.
    `by="time"` draws the losses against the wall clock instead of steps. During the race, `race.delay(rank, seconds)`
    and `race.set(knob, value)` apply to all runs; `race.scale(knob, factor)` multiplies each run's own value, as the
    sliders of the panel do.
    """
    if not isinstance(contenders, Mapping) or not contenders:
        raise TypeError("race takes a dictionary of functions or runs by name, as in dlab.race({'ring': train, …})")
    for name, each in contenders.items():
        if not isinstance(each, Run) and not callable(each):
            raise TypeError(f"{name!r} is neither a run nor a function, but {each!r}")
    if by not in ("step", "time"):
        raise ValueError(f"by={by!r}: a race is drawn by 'step' or by 'time'")
    return Race(contenders, workers, at_once, by)
