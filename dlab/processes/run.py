"""A run: one function on all ranks of a cluster, and the handles on it while it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlab.events import Event, Records, save_events
from dlab.processes.board import Knobs
from dlab.processes.errors import WorkerError, WorkerTimeout, name_ranks
from dlab.processes.journal import Journal
from dlab.processes.stacks import Where

if TYPE_CHECKING:
    from dlab.processes.cluster import Cluster

STILL = 20.0  # seconds that a last picture may take


class Run:
    """What `cluster.start(fn)` gives: the function runs, the notebook stays free.

    `wait()` gives the results by rank. In between: `pause`, `resume`, `stop`, `kill(rank)`, `delay(rank, seconds)`,
    `set(knob, value)`, and `events`, what the workers have logged so far.
    """

    def __init__(self, cluster: Cluster, number: int, name: str, survives: bool = False, revives: bool = False) -> None:
        self._cluster = cluster  # a cluster closes itself when nobody holds it: a run does
        self._supervisor = cluster._supervisor
        self.number, self.name = number, name
        self.survives = survives  # does the function go on without ranks that have died?
        self.revives = revives  # does it go on with a new server in the place of one that has died?
        self.ranks, self.servers = cluster.workers, cluster.servers
        self.started = time.time()
        self.ended: float | None = None
        self.knobs: dict[str, Any] = {}  # those that were set
        self.factors: dict[str, float] = {}  # by which knobs are multiplied
        self.delays: dict[int, float] = {}  # by rank, in seconds
        self.paused = False
        self._done = threading.Event()
        self._results: list[Any] = [None] * self.ranks
        self._result: Any = None  # made of them by what `then` was given
        self._make: Callable[[list[Any]], Any] | None = None
        self._error: WorkerError | None = None
        self._stopped = False
        self._journal = Journal()
        self.pictures: list[threading.Thread] = []  # those who draw it, and leave a still when it has ended
        self.states: list[Event] = []  # what became of each rank, as the supervisor saw it: events of kind `state`

    # --- waiting

    def then(self, make: Callable[[list[Any]], Any]) -> Run:
        """Let `wait()` give `make(results by rank)`, made once, when all ranks have returned."""
        self._make = make
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """The results by rank, when all ranks have returned.

        Raises `WorkerError` if a rank failed, and `WorkerTimeout` after `timeout` seconds (the run then goes on).
        Interrupting the kernel while it waits stops the run. After `stop()`, the ranks that had not returned give
        None. Where the run is being drawn, the last picture is there when this returns.
        """
        try:
            try:
                results = self._wait(timeout, then_stop=False)
            finally:
                if self.done:
                    finish(self.pictures)
            if self._make is None:
                return results
            if self._result is None:
                self._result = self._make(results)
            return self._result
        except KeyboardInterrupt:
            self._on_interrupt()
            raise

    def _wait(self, timeout: float | None, then_stop: bool) -> list[Any]:
        if not self._done.wait(timeout):
            places = self._supervisor.where(self)
            if places:
                if then_stop:
                    self.stop()
                raise self._timeout_error(
                    places, timeout or 0.0, "" if then_stop else "; it goes on: run.stop() ends it"
                )
            self._done.wait()  # the last ranks came back just now
        if self._error is not None:
            raise self._error
        return self._results

    def _on_interrupt(self) -> None:
        """Say where everybody was, then stop them."""
        places: dict[int, Where] = {}
        try:
            places = self._supervisor.where(self)
        finally:  # also when it is interrupted again
            self.stop()
        if places:
            print(f"{self.name} was stopped; " + _tell(places))

    def _timeout_error(self, places: dict[int, Where], timeout: float, rest: str) -> WorkerTimeout:
        # whoever is not waiting in a collective is probably the one the others wait for
        ranks = sorted(places, key=lambda rank: (places[rank].collective is not None, rank))
        waiting = [rank for rank in ranks if places.get(rank) and places[rank].collective]
        busy = [rank for rank in ranks if rank not in waiting]
        message = f"{name_ranks(sorted(ranks))} did not finish {self.name} within {timeout:g} s{rest}"
        if waiting and busy:
            message += f"; {name_ranks(waiting)} waited for {name_ranks(busy)}"
        return WorkerTimeout(message, ranks, _tell(places))

    @property
    def done(self) -> bool:
        """Has it ended, in whatever way?"""
        return self._done.is_set()

    @property
    def state(self) -> str:
        """running, paused, finished, failed or stopped."""
        if not self.done:
            return "paused" if self.paused else "running"
        if self._error is not None:
            return "failed"
        return "stopped" if self._stopped else "finished"

    # --- disturbing

    def stop(self) -> None:
        """End the function on every rank, within a second; the cluster stays usable. A run that has ended stays so."""
        if not self.done and self._supervisor.stop(self):
            self._done.wait()

    def pause(self) -> None:
        """Freeze every rank where it is, until `resume()`."""
        self._supervisor.pause(self, True)

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._supervisor.pause(self, False)

    def kill(self, rank: int) -> None:
        """Kill the process of one rank, as a crash would. Servers count on after the workers."""
        self._check(rank, self.ranks + self.servers)
        self._supervisor.kill(self, rank)

    def delay(self, rank: int, seconds: float) -> None:
        """Make a rank sleep this long at each `dlab.log`: a straggler. 0 ends it."""
        self._check(rank, self.ranks)
        if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ValueError(f"a delay of {seconds!r} s is not possible: give a number of seconds, 0 or more")
        self._supervisor.delay(self, rank, seconds)

    def set(self, name: str, value: Any) -> None:
        """Turn a knob: `dlab.knob(name, default)` in the workers gives this value from now on."""
        if not isinstance(name, str):
            raise TypeError(f"a knob's name is a string, as in run.set('lr', 0.05), not {name!r}")
        self._supervisor.turn(self, {name: value}, {name: 1})

    def scale(self, name: str, factor: float) -> None:
        """Multiply a knob: `dlab.knob(name, default)` gives its own value, set or default, times this from now on."""
        check_factor(name, factor)
        self._supervisor.turn(self, {}, {name: factor})

    def value(self, name: str, default: Any = None) -> Any:
        """What `dlab.knob(name, default)` gives in the workers now."""
        return Knobs(self.knobs, self.factors).get(name, default)

    def _check(self, rank: int, ranks: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < ranks:
            raise IndexError(f"there is no rank {rank}: this run has ranks 0 to {ranks - 1}")

    # --- looking

    @property
    def events(self) -> list[Event]:
        """What the workers have told so far, each rank's in order."""
        self._supervisor.drain(self)
        return self._journal.events

    def since(self, place: int) -> tuple[list[Records], int]:
        """What was told after a place, and the place to go on from, for those who look again and again; 0 at first."""
        self._supervisor.drain(self)
        return self._journal.since(place)

    def _note(self, ranks: Iterable[int], state: str, why: str = "") -> None:
        now = time.time()
        for rank in ranks:
            told = {"state": state, "why": why}
            if rank >= self.ranks:
                told["name"] = name_ranks([rank], self.ranks)
            self.states.append(Event(now, rank, "state", told))

    def save(self, path: str | Path) -> None:
        """Write what the ranks have told and what became of them, by time, as JSON lines for `dlab.load_events`."""
        save_events(sorted([*self.states, *self.events], key=lambda event: event.time), path)

    def __repr__(self) -> str:
        return f"<Run {self.name} on {self.ranks} workers: {self.state}, {len(self.events)} events>"


def check_factor(name: str, factor: object) -> None:
    """Refuse what no knob can be multiplied by."""
    if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ValueError(f"{name} cannot be multiplied by {factor!r}: give a number above 0")


def finish(pictures: Iterable[threading.Thread]) -> None:
    """Wait until they are complete: a notebook that is executed as a whole keeps only what comes while a cell runs."""
    for each in pictures:
        each.join(STILL)


def _tell(places: dict[int, Where]) -> str:
    return "\n".join(f"rank {rank}: {where.sentence}" for rank, where in sorted(places.items()))
