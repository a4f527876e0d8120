"""A run: one function on all ranks of a cluster, and the ways to observe and disturb it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlab.events import Event, Records, save_events
from dlab.kinds import KNOB, STATE, StateData
from dlab.processes.between.control import Knobs
from dlab.processes.between.errors import Stopped, WorkerError, WorkerTimeout, name_ranks
from dlab.processes.parent.history import EventHistory
from dlab.processes.parent.notebook import Cell, variable_of
from dlab.processes.parent.stacks import Where, culprits, explain, in_order
from dlab.processes.parent.waiting import controls_wait, end_of, interruptible, wait_until
from dlab.trace import save_trace

if TYPE_CHECKING:
    from dlab.processes.parent.cluster import Cluster

STILL = 20.0  # seconds allowed for the last picture
DECLARE = 0.5  # seconds that ranks which use other knobs have to ask for this one, before its name is questioned
_ENDS = {"returned": "returned", "dead": "died", "failed": "failed"}  # words for a rank that has ended


class Run:
    """The result of `cluster.start(fn)`: the function runs in the background and the notebook stays free.

    `wait()` returns the results by rank. Meanwhile there are `pause`, `resume`, `stop`, `kill(rank)`,
    `delay(rank, seconds)`, `set(knob, value)`, and `events`, everything that the workers have logged so far.
    """

    def __init__(self, cluster: Cluster, number: int, name: str, survives: bool = False, revives: bool = False) -> None:
        self._cluster = cluster  # keeps the cluster alive, which closes itself when it is no longer referenced
        self._supervisor = cluster._supervisor
        self.number, self.name = number, name
        self.survives = survives  # does the function continue without ranks that have died?
        self.revives = revives  # does it continue with a new server after one has died?
        self.ranks, self.servers = cluster.workers, cluster.servers
        self.cell = Cell()
        self.part_of: Any = None  # the race that it belongs to
        self.started = time.time()
        self.ended: float | None = None
        self.knobs: dict[str, Any] = {}  # values that were set
        self.factors: dict[str, float] = {}  # factors of knobs
        self.checks: dict[str, Callable[[Any], object]] = {}  # raise ValueError for bad values of knobs
        self.delays: dict[int, float] = {}  # by rank, in seconds
        self.paused = False
        self._done = threading.Event()
        self._results: list[Any] = [None] * self.ranks
        self._result: Any = None  # what the function given to `then` made of the results
        self._make: Callable[[list[Any]], Any] | None = None
        self._error: WorkerError | None = None
        self._stopped = False
        self._history = EventHistory()
        self._declared: dict[str, Any] = {}  # knobs found in the part of the history searched so far
        self._searched = 0
        self.pictures: list[threading.Thread] = []  # the threads that draw it, and leave a still picture at the end
        self.states: list[Event] = []  # events of kind `state`, for each rank, and `hang`

    # --- waiting

    def then(self, make: Callable[[list[Any]], Any]) -> Run:
        """Let `wait()` return `make(results by rank)`, computed once, when all ranks have returned."""
        self._make = make
        return self

    def wait(self, timeout: float | None = None, *, partial: bool = False) -> Any:
        """Wait until all ranks have returned, and return their results by rank.

        Raises `WorkerError` if a rank failed, and `WorkerTimeout` after `timeout` seconds (the run then continues).
        Interrupting the kernel during the wait stops the run. After `stop()` it raises `Stopped`; `partial=True`
        returns instead what there is, with None for each rank that had not returned. If the run is being drawn, the
        last picture is complete when this returns.
        """
        try:
            try:
                with interruptible():
                    results = self._wait(timeout, then_stop=False)
            finally:
                if self.done:
                    finish(self.pictures)
        except KeyboardInterrupt:
            self._on_interrupt()
            raise
        if self._stopped and not partial:
            raise self._stopped_error()
        if self._make is None:
            return results
        if self._result is None:
            self._result = self._make(results)
        return self._result

    def _wait(self, timeout: float | None, then_stop: bool) -> list[Any]:
        if not self.done:
            self._supervisor.check_process()
        if not wait_until(self._done.wait, timeout):
            places = self._supervisor.where(self)
            if places:
                if then_stop:
                    self.stop()
                raise self._timeout_error(
                    places, timeout or 0.0, "" if then_stop else "; it goes on: run.stop() ends it"
                )
            self._done.wait()  # the last ranks returned just now
        if self._error is not None:
            raise self._error.with_traceback(None)  # without the traceback of an earlier wait
        return self._results

    def _on_interrupt(self) -> None:
        """Print where each rank is, then stop them."""
        places: dict[int, Where] = {}
        why = ""
        try:
            places = self._supervisor.where(self)
            why = explain(places, self._ends(places), self.ranks)
        finally:  # also after a second interrupt
            self.stop()
        if places:
            print("\n".join(filter(None, [f"{self.name} was stopped:", self._describe(places), why])))

    def _timeout_error(self, places: dict[int, Where], timeout: float, rest: str) -> WorkerTimeout:
        late = sorted(rank for rank in places if rank < self.ranks)
        message = f"{name_ranks(late)} did not finish {self.name} within {timeout:g} s{rest}"
        if why := explain(places, self._ends(places), self.ranks):
            message += f"; {why}"
        named = culprits(places)
        ranks = [rank for rank in in_order(places) if rank < self.ranks or rank in named or places[rank].stopped]
        return WorkerTimeout(message, ranks, self._describe(places))

    def _describe(self, places: dict[int, Where]) -> str:
        return "\n".join(f"{name_ranks([rank], self.ranks)}: {places[rank].sentence}" for rank in in_order(places))

    def _stopped_error(self) -> Stopped:
        seconds = (self.ended or self.started) - self.started
        return Stopped(
            f"{self.name} was stopped after {seconds:.1f} s, before its end: "
            "wait(partial=True) returns what its ranks had returned by then"
        )

    def _ends(self, places: Collection[int]) -> dict[int, str]:
        """Return how the other ranks have ended."""
        last = {event.rank: event.data["state"] for event in list(self.states) if event.kind == STATE}
        others = {rank: state for rank, state in last.items() if rank < self.ranks and rank not in places}
        return {rank: _ENDS.get(state, "ended") for rank, state in others.items()}

    @property
    def done(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self._done.is_set()

    @property
    def state(self) -> str:
        """One of `running`, `paused`, `finished`, `failed` and `stopped`."""
        if not self.done:
            return "paused" if self.paused else "running"
        if self._error is not None:
            return "failed"
        return "stopped" if self._stopped else "finished"

    def busy_error(self) -> RuntimeError:
        """Return the error for a second run on the same workers: it names this run and what to type."""
        whole = self.part_of or self
        name = variable_of(whole) or whole.__class__.__name__.lower()
        return RuntimeError(
            f"{self.name} has been running on this cluster for {time.time() - self.started:.0f} s: "
            f"wait for it ({name}.wait()) or end it ({name}.stop()) first, or use another cluster"
        )

    @property
    def controls_wait(self) -> bool:
        """Whether the controls of the panel must wait until the current cell has ended."""
        return controls_wait()

    # --- disturbing

    def stop(self) -> None:
        """End the function on every rank within a second; the cluster stays usable. No effect after the end."""
        if not self.done and self._supervisor.stop(self):
            self._done.wait()

    def pause(self) -> None:
        """Freeze every rank where it is, until `resume()`."""
        self._supervisor.pause(self, True)

    def resume(self) -> None:
        """Let every rank continue after `pause()`."""
        self._supervisor.pause(self, False)

    def kill(self, rank: int) -> None:
        """Kill the process of one rank, as a crash would. Servers are numbered after the workers."""
        self._check(rank, self.ranks + self.servers)
        self._supervisor.kill(self, rank)

    def delay(self, rank: int, seconds: float) -> None:
        """Make a rank sleep this long at each `dlab.log`, as a straggler would. 0 removes the delay."""
        self._check(rank, self.ranks)
        if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ValueError(f"a delay of {seconds!r} s is not possible: give a number of seconds, 0 or more")
        self._supervisor.delay(self, rank, seconds)

    def set(self, name: str, value: Any) -> None:
        """Set a knob: `dlab.knob(name, default)` in the workers returns this value from now on.

        If the ranks use other knobs but not this one, a warning is printed; the value is kept nevertheless.
        """
        if not isinstance(name, str):
            raise TypeError(f"a knob's name is a string, as in run.set('lr', 0.05), not {name!r}")
        if name in self.checks:
            self.checks[name](value)  # raises ValueError, before any rank sees it
        self._supervisor.turn(self, {name: value}, {name: 1})
        self._note_unknown_knob(name)

    def scale(self, name: str, factor: float) -> None:
        """Multiply a knob: `dlab.knob(name, default)` returns its own value, set or default, times this from now on."""
        check_factor(name, factor)
        self._supervisor.turn(self, {}, {name: factor})

    def value(self, name: str, default: Any = None) -> Any:
        """Return the current result of `dlab.knob(name, default)` in the workers."""
        return Knobs(self.knobs, self.factors).get(name, default)

    @property
    def declared(self) -> dict[str, Any]:
        """The knobs that the ranks have asked for so far, with their defaults."""
        records, self._searched = self.since(self._searched)
        for each in records:
            if KNOB.encode() in each.written:  # otherwise there is no need to read it
                told = [data for (_, _, kind), data in each.read().items() if kind == KNOB]
                self._declared.update({data["name"]: data["default"] for data in told})
        return dict(self._declared)

    def _note_unknown_knob(self, name: str) -> None:
        """Warn if the ranks ask only for other knobs: the name may be misspelt, or be asked for later."""
        give_up = time.monotonic() + DECLARE
        while (known := self.declared) and name not in known and not self.done:
            if time.monotonic() > give_up:
                print(
                    f"no rank of {self.name} has asked for a knob {name!r} so far, only for "
                    f"{', '.join(map(repr, sorted(known)))}: the value is kept in case dlab.knob({name!r}) asks for it",
                    file=sys.stderr,
                )
                return
            time.sleep(0.02)

    def _check(self, rank: int, ranks: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < ranks:
            raise IndexError(f"there is no rank {rank}: this run has ranks 0 to {ranks - 1}")

    # --- looking

    @property
    def events(self) -> list[Event]:
        """The events of all workers so far, each rank's in order."""
        self._supervisor.drain(self)
        return self._history.events

    def since(self, place: int) -> tuple[list[Records], int]:
        """Return the records after a place, and the place to continue from; for repeated reading, starting at 0."""
        self._supervisor.drain(self)
        return self._history.since(place)

    def _note(self, ranks: Iterable[int], state: str, why: str = "") -> None:
        now = time.time()
        for rank in ranks:
            told: StateData = {"state": state, "why": why}
            if rank >= self.ranks:
                told["name"] = name_ranks([rank], self.ranks)
            self.states.append(Event(now, rank, STATE, dict(told)))

    def save(self, path: str | Path) -> None:
        """Write the events and the states of all ranks, sorted by time, as JSON lines for `dlab.load_events`."""
        save_events(self._told(), path)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: steps, messages and collectives."""
        save_trace(self._told(), path)

    def _told(self) -> list[Event]:
        return sorted([*self.states, *self.events], key=lambda event: event.time)

    def __repr__(self) -> str:
        return f"<Run {self.name} on {self.ranks} workers: {self.state}, {len(self.events)} events>"


def check_factor(name: str, factor: object) -> None:
    """Raise ValueError unless a knob can be multiplied by this factor."""
    if not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ValueError(f"{name} cannot be multiplied by {factor!r}: give a number above 0")


def finish(pictures: Iterable[threading.Thread]) -> None:
    """Wait until the pictures are complete: an executed notebook keeps only what arrives while the cell runs."""
    for each in pictures:
        wait_until(end_of(each), STILL)
