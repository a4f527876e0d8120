"""A race: several runs side by side, one after another on the same workers or all at once."""

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
    """What `dlab.race` gives; as the last line of a cell it draws the losses of all runs on one chart."""

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
        self._delays: dict[int, float] = {}  # what was asked for, with which the runs to come begin
        self._knobs: dict[str, Any] = {}
        self.factors: dict[str, float] = {}
        self._turn = threading.Lock()  # held where a run begins: what is asked for meanwhile must not miss it
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
        """Start a run that has from its first step what was asked for; None if the race was stopped."""
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
        with self._turn:
            self._stopped = True
        for run in list(self.runs.values()):
            run.stop()

    def delay(self, rank: int, seconds: float) -> None:
        """Let a rank sleep so long in each step, in the run that goes on and in those to come."""
        if rank not in range(self.ranks):
            raise IndexError(f"there is no rank {rank!r} in this race: the ranks are 0 to {self.ranks - 1}")
        with self._turn:
            for run in self.going.values():
                run.delay(rank, seconds)
            self._delays[rank] = seconds

    def set(self, name: str, value: Any, to: Collection[str] | None = None) -> None:
        """Turn a knob, in the run that goes on and in those to come; `to` names the only ones of those that go on."""
        with self._turn:
            for run in self._chosen(to):
                run.set(name, value)
            self._knobs[name] = value
            self.factors.pop(name, None)

    def scale(self, name: str, factor: float, to: Collection[str] | None = None) -> None:
        """Multiply what each run itself has for a knob, in the run that goes on and in those to come."""
        check_factor(name, factor)
        with self._turn:
            for run in self._chosen(to):
                run.scale(name, factor)
            self.factors[name] = factor

    def pause(self) -> None:
        """Freeze the run that goes on, until `resume()`."""
        for run in self.going.values():
            run.pause()

    def resume(self) -> None:
        """Go on after `pause()`."""
        for run in self.going.values():
            run.resume()

    def _chosen(self, names: Collection[str] | None) -> list[Run]:
        return [run for name, run in self.going.items() if names is None or name in names]

    @property
    def going(self) -> dict[str, Run]:
        """The runs that are on, by name."""
        return {name: run for name, run in list(self.runs.items()) if not run.done}

    @property
    def paused(self) -> bool:
        """Are all runs that are on frozen?"""
        going = self.going.values()
        return bool(going) and all(run.paused for run in going)

    @property
    def delays(self) -> dict[int, float]:
        """By rank, in seconds, of the run that is on."""
        return next((run.delays for run in self.going.values()), self._delays)

    @property
    def done(self) -> bool:
        """Have all runs ended?"""
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """`running sync`, `paused sync`, or `finished`."""
        if going := self.going:
            return f"{'paused' if self.paused else 'running'} {', '.join(going)}"
        return "finished" if self.done else "starting"

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
    `race.delay(rank, seconds)` and `race.set(knob, value)` are for all of them; `race.scale(knob, factor)` multiplies
    what each of them has, as the sliders of the panel do.
    """
    if not isinstance(contenders, Mapping) or not contenders:
        raise TypeError("race takes a dictionary of functions or runs by name, as in dlab.race({'ring': train, …})")
    for name, each in contenders.items():
        if not isinstance(each, Run) and not callable(each):
            raise TypeError(f"{name!r} is neither a run nor a function, but {each!r}")
    if by not in ("step", "time"):
        raise ValueError(f"by={by!r}: a race is drawn by 'step' or by 'time'")
    return Race(contenders, workers, at_once, by)
