"""The one thread that starts, watches, stops and replaces the workers of a cluster.

Everything it knows changes in this thread only; others ask it by `_ask` and wait. It sleeps until a worker answers,
prints or dies, or somebody asks; while a run goes on it also wakes to collect events.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from dlab.events import Event
from dlab.processes import errors, output, stacks, wire
from dlab.processes.board import Board
from dlab.processes.errors import Report
from dlab.processes.forkserver import directory
from dlab.processes.handle import Worker
from dlab.processes.run import Run
from dlab.processes.worker import FAILURE, JOIN, LEFT, READY, STOP, WHERE, Seat

T = TypeVar("T")

GRACE = 0.5  # seconds in which a stopped function may return before its process is killed
GOSSIP = 0.2  # seconds to wait for the real culprit when a rank reports only that another one is gone
FORM = {"gloo": 5.0, "nccl": 60.0}  # seconds to form a group; a rank that takes longer hangs in the one before
EVENTS = 0.05  # seconds between two collections of events
_numbers = count(1)
STARTS = 3  # workers that die this often in a row before they are ready will not come up at all


@dataclass
class Flight:
    """The run in progress: who has come back, and with what."""

    run: Run
    returned: dict[int, Any] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    deaths: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    scattered: bool = False  # has a rank left the process group?
    stop_at: float | None = None  # when to interrupt the rest
    kill_at: float | None = None  # when to kill who did not react


class Supervisor(threading.Thread):
    """Starts `ranks` workers and looks after them until `close()`."""

    def __init__(self, ranks: int, backend: str, threads: int, timeout: float | None) -> None:
        super().__init__(name=f"dlab-supervisor-{ranks}", daemon=True)
        self.ranks, self.backend, self.threads, self.timeout = ranks, backend, threads, timeout
        self.board = Board(ranks)
        self.workers: list[Worker] = []
        self.failed: str | None = None  # why the cluster cannot be used any more
        self._group = 0
        self._form_by = 0.0
        self._rendezvous = directory() / f"cluster-{next(_numbers)}"
        self._all_ready = threading.Event()
        self._false_starts = 0
        self._flight: Flight | None = None
        self._requests: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake_r, self._wake_w = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._lost: set[int] = set()  # ranks to be replaced between runs

    # --- asked by other threads

    def _ask(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._requests.append((future, function))
        try:
            self._wake_w.send(b"!")
        except OSError:
            raise RuntimeError("this cluster is closed: make a new one with dlab.Cluster(…)") from None
        return future.result()

    def wait_until_ready(self) -> None:
        """Block until every worker has joined the first group."""
        self._all_ready.wait()
        if self.failed:
            raise RuntimeError(self.failed)

    def launch(self, run: Run, message: wire.Message) -> None:
        """Begin a run. Refused while another one goes on."""
        cell = output.Cell()

        def begin() -> None:
            if self.failed:
                raise RuntimeError(self.failed)
            if self._flight is not None:
                other = self._flight.run
                raise RuntimeError(
                    f"{other.name} has been running on this cluster for {time.time() - other.started:.0f} s: "
                    "wait for it (run.wait()) or end it (run.stop()) first, or use another cluster"
                )
            self.board.clear()
            cell.claim_thread()
            self._flight = Flight(run)
            for worker in self.workers:
                with contextlib.suppress(OSError):  # it has just died: its sentinel tells
                    message.send(worker.channel)
                worker.busy = True

        self._ask(begin)

    def stop(self, run: Run) -> bool:
        """Interrupt every rank that has not returned. False if the run never began or has ended."""

        def begin() -> None:
            if self._flight is not None and self._flight.stop_at is None:
                run._stopped = True
                self._flight.stop_at = time.monotonic()

        return self._ask(lambda: self._during(run, begin))

    def pause(self, run: Run, paused: bool) -> None:
        """Freeze or thaw every rank that is still busy."""

        def signal_all() -> None:
            run.paused = paused
            for worker in self._busy():
                worker.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

        self._ask(lambda: self._during(run, signal_all))

    def kill(self, run: Run, rank: int) -> None:
        """Kill one rank of a run that goes on."""
        self._ask(lambda: self._during(run, lambda: self.workers[rank].process.send_signal(signal.SIGKILL)))

    def delay(self, run: Run, rank: int, seconds: float) -> None:
        """Set the delay of one rank."""
        self._ask(lambda: self._during(run, lambda: self.board.delays.__setitem__(rank, float(seconds))))

    def set_knobs(self, run: Run, knobs: dict[str, Any]) -> None:
        """Replace the run's knobs."""

        def write() -> None:
            self.board.write(knobs)
            run.knobs = knobs

        self._ask(lambda: self._during(run, write))

    def where(self, run: Run) -> dict[int, stacks.Where]:
        """Where each rank that has not returned is now."""

        def look() -> dict[int, stacks.Where]:
            if self._flight is None or self._flight.run is not run:
                return {}
            busy = [worker for worker in self._busy() if worker.process.exitcode is None]
            files = {worker.rank: worker.stack for worker in busy}
            return stacks.ask(files, {worker.rank: worker.pid for worker in busy}, WHERE)

        return self._ask(look)

    def drain(self, run: Run) -> None:
        """Collect the events that have arrived, if the run still goes on."""
        if not run.done:
            self._ask(lambda: self._during(run, self._collect_events))

    def close(self) -> None:
        """End the run, the workers and this thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake_w.send(b"!")
        if threading.current_thread() is not self:  # as it is when the garbage collector closes a cluster from here
            self.join()

    # --- the thread

    def run(self) -> None:
        """Serve until closed; whatever happens, nobody is left waiting and no process is left behind."""
        try:
            self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
            self._form(list(range(self.ranks)))
            while not self._closing:
                for key, _ in self._selector.select(self._next_deadline()):
                    key.data()
                self._look_after_group()
                self._replace_lost()
                self._answer_requests()
                self._look_after_flight()
        except BaseException as problem:
            self.failed = f"the cluster's supervisor failed ({type(problem).__name__}: {problem}): make a new cluster"
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.close()
        if self._flight is not None:
            run = self._flight.run
            self._collect_events()
            if self.failed:
                run._error = errors.WorkerError(self.failed, [0])
            run._stopped, run.ended = True, time.time()
            run._results = [self._flight.returned.get(rank) for rank in range(self.ranks)]
            self._flight = None
            run._done.set()
        self.failed = self.failed or "this cluster is closed: make a new one with dlab.Cluster(…)"
        self._wake_w.close()
        self._answer_requests()
        self._wake_r.close()
        self._selector.close()
        os.close(self.board.file)
        self._remove_rendezvous()
        self._all_ready.set()

    def _on_wake(self) -> None:
        self._wake_r.recv(1 << 12)

    def _answer_requests(self) -> None:
        # a run begins on a group that stands, so that whatever goes wrong in it is the run's own
        while self._requests and (self._flight is not None or self._has_formed() or self._closing):
            future, function = self._requests.popleft()
            try:
                future.set_result(function())
            except BaseException as problem:
                future.set_exception(problem)

    def _next_deadline(self) -> float | None:
        if self._flight is None:
            return None if self._has_formed() else max(0.0, self._form_by - time.monotonic())
        times = [when for when in (self._flight.stop_at, self._flight.kill_at) if when is not None]
        return max(0.0, min([EVENTS, *(when - time.monotonic() for when in times)]))

    def _during(self, run: Run, action: Callable[[], Any]) -> bool:
        in_flight = self._flight is not None and self._flight.run is run
        if in_flight:
            action()
        return in_flight

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.busy]

    # --- workers come and go

    def _form(self, fresh: list[int]) -> None:
        """Put new workers on these seats, and let all ranks form a new process group."""
        for rank in fresh:
            worker = Worker(Seat(rank, self.ranks, self.backend, self.threads), self.board)
            self.workers[rank : rank + 1] = [worker]
            self._selector.register(worker.channel, selectors.EVENT_READ, lambda w=worker: self._on_message(w))
            self._selector.register(worker.process.sentinel, selectors.EVENT_READ, lambda w=worker: self._on_death(w))
            for reader in worker.readers:
                self._selector.register(reader.file, selectors.EVENT_READ, self._on_output)
        self._group += 1
        self._form_by = time.monotonic() + FORM[self.backend]
        rendezvous = f"{self._rendezvous}-group-{self._group}"
        with wire.Message(JOIN, self._group, (rendezvous, self.timeout)) as message:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    message.send(worker.channel)

    def _has_formed(self) -> bool:
        return all(worker.ready == self._group for worker in self.workers)

    def _look_after_group(self) -> None:
        """Replace who does not join: it waits for a collective that nobody else takes part in."""
        if self._flight is None and not self._has_formed() and time.monotonic() >= self._form_by:
            self._lost |= {worker.rank for worker in self.workers if worker.ready != self._group}
            self._false_starts += 1
            if self._false_starts >= STARTS:
                names = errors.name_ranks(sorted(self._lost))
                self._give_up(f"{names} did not join the group in {FORM[self.backend]:g} s, again and again")

    def _forget(self, worker: Worker) -> None:
        for file in (worker.channel, worker.process.sentinel, *(reader.file for reader in worker.readers)):
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
        worker.close()

    def _on_output(self) -> None:
        self._show_output()

    def _show_output(self) -> None:
        """Print what has come in, by rank: what was written earlier is never shown later than what followed it."""
        for stream in (0, 1):
            lines = []
            for worker in self.workers:
                reader = worker.readers[stream]
                texts, open_ = reader.read()
                if not open_:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(reader.file)
                lines += [(worker.rank, text) for text in texts]
            output.show(lines, error=stream == 1)

    def _on_message(self, worker: Worker) -> None:
        message = wire.receive(worker.channel)
        if message is None:  # the process is gone or going: its sentinel tells how
            self._selector.unregister(worker.channel)
            return
        if message.tag == READY:
            self._on_ready(worker, message.number)
            return
        flight = self._flight
        if flight is None or message.number != flight.run.number:
            if message.tag == FAILURE and message.number == self._group and not self._all_ready.is_set():
                self._give_up(f"the workers could not form a group: {message.load(private=False).message}")
            message.close()
            return
        flight.scattered |= message.tag in (FAILURE, LEFT)
        try:
            value = message.load(private=False)
        except Exception as problem:  # a class that exists in the worker only
            value = Report.of(problem)
        if isinstance(value, Report):
            flight.reports[worker.rank] = value
        elif worker.rank not in flight.reports:
            flight.returned[worker.rank] = value
        if message.tag != FAILURE:  # after which it still has to leave the group
            worker.busy = False
            flight.ended.add(worker.rank)

    def _on_ready(self, worker: Worker, group: int) -> None:
        worker.ready = group
        if self._has_formed():
            self._false_starts = 0
            self._all_ready.set()
            self._remove_rendezvous(keep=group)

    def _remove_rendezvous(self, keep: int = 0) -> None:
        """Groups leave a file behind, also those that never came together; only the present one needs it."""
        for file in self._rendezvous.parent.glob(f"{self._rendezvous.name}-group-*"):
            if not file.name.endswith(f"-{keep}"):
                file.unlink(missing_ok=True)

    def _on_death(self, worker: Worker) -> None:
        self._selector.unregister(worker.process.sentinel)
        worker.process.join()
        flight = self._flight
        if flight is not None:
            worker.busy = False
            flight.ended.add(worker.rank)
            if worker.rank not in flight.returned and worker.rank not in flight.reports:
                flight.deaths[worker.rank] = (time.monotonic(), worker.process.exitcode)
            return
        # between runs: replace it, and with it those that still wait for it in a group that will not come
        self._lost |= {other.rank for other in self.workers if other is worker or other.ready != self._group}
        self._false_starts += worker.ready != self._group
        if self._false_starts >= STARTS:
            self._give_up(str(errors.died(worker.rank, worker.process.exitcode, "again and again while it started")))

    def _replace_lost(self) -> None:
        """After all messages of this round, some of which may have come from those that are replaced."""
        if self._lost and self._flight is None and not self._closing:
            ranks, self._lost = sorted(self._lost), set()
            self._show_output()  # their last words
            for rank in ranks:
                self._forget(self.workers[rank])
            self._form(ranks)

    def _give_up(self, reason: str) -> None:
        self.failed = reason
        self._closing = True

    # --- a run in flight

    def _look_after_flight(self) -> None:
        flight = self._flight
        if flight is None:
            return
        self._collect_events()
        now = time.monotonic()
        if flight.stop_at is None and (flight.reports or flight.deaths):
            only_gossip = not flight.deaths and all(report.connection for report in flight.reports.values())
            flight.stop_at = now + GOSSIP if only_gossip else now
        elif flight.stop_at is not None and flight.deaths and flight.kill_at is None:
            flight.stop_at = min(flight.stop_at, now)
        if flight.stop_at is not None and flight.kill_at is None and now >= flight.stop_at:
            flight.kill_at = now + GRACE
            for worker in self._busy():
                worker.process.send_signal(STOP)
                worker.process.send_signal(signal.SIGCONT)  # in case it was paused
        if flight.kill_at is not None and now >= flight.kill_at:
            for worker in self._busy():
                worker.process.send_signal(signal.SIGKILL)
        if len(flight.ended) == self.ranks:
            self._land(flight)

    def _collect_events(self) -> None:
        if self._flight is None:
            return
        run = self._flight.run
        fresh = [event for rank, ring in enumerate(self.board.rings) for event in ring.drain(rank)]
        if fresh:
            with run._events_lock:
                run._events += fresh

    def _land(self, flight: Flight) -> None:
        """All ranks have come back or died: settle the result, then make the cluster whole again."""
        run = flight.run
        self._show_output()
        for worker in self.workers:
            for stream, reader in enumerate(worker.readers):
                output.show([(worker.rank, text) for text in reader.flush()], error=stream == 1)
        self._report_drops(run)
        run._results = [flight.returned.get(rank) for rank in range(self.ranks)]
        if not run._stopped:
            run._error = self._verdict(flight)
        run.ended = time.time()
        self._flight = None
        run._done.set()
        self._lost = {worker.rank for worker in self.workers if worker.process.exitcode is not None}
        self._replace_lost()
        if flight.scattered and not flight.deaths:
            self._form([])  # whoever reported an error has left the group: all form a new one

    def _verdict(self, flight: Flight) -> errors.WorkerError | None:
        """Who was it? Not those who were interrupted, nor, if anyone else did, those who lost a connection."""
        deaths = {rank: death for rank, death in flight.deaths.items() if not self._killed_by_us(flight, death)}
        real = {rank: report for rank, report in flight.reports.items() if report.kind != "Stopped"}
        direct = {rank: report for rank, report in real.items() if not report.connection}
        if direct and (not deaths or min(r.time for r in direct.values()) < min(when for when, _ in deaths.values())):
            real = direct
        elif deaths:
            rank, (_, code) = min(deaths.items(), key=lambda item: item[1][0])
            return errors.died(rank, code, f"while it ran {flight.run.name}; a new worker takes its place")
        if not real:
            return None
        first = min(real.values(), key=lambda report: report.time)
        return errors.failed(sorted(rank for rank, report in real.items() if report.message == first.message), first)

    def _killed_by_us(self, flight: Flight, death: tuple[float, int | None]) -> bool:
        return flight.kill_at is not None and death[0] >= flight.kill_at and death[1] == -signal.SIGKILL

    def _report_drops(self, run: Run) -> None:
        for rank, ring in enumerate(self.board.rings):
            if ring.dropped:
                run._events.append(Event(time.time(), rank, "dropped", {"count": ring.dropped}))
                output.show([(rank, f"{ring.dropped} events did not fit and are lost: log less often")], error=True)
