"""The one thread that starts, watches, stops and replaces the workers of a cluster.

Everything it knows changes in this thread only; others ask it through its inbox and wait. It sleeps until a worker
answers, prints or dies, or somebody asks; while a run goes on it also wakes to collect events.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from dlab.backend import using
from dlab.events import Event
from dlab.processes import errors, output, stacks, wire
from dlab.processes.board import Board
from dlab.processes.errors import Report
from dlab.processes.flight import Flight
from dlab.processes.forkserver import directory
from dlab.processes.handle import Worker
from dlab.processes.inbox import Inbox
from dlab.processes.run import Run
from dlab.processes.worker import FAILURE, JOIN, READY, WHERE, Seat

FORM = {
    "gloo": 20.0,
    "dlab": 20.0,
    "nccl": 60.0,
}  # seconds to form a group; a rank that takes longer hangs in the one before
EVENTS = 0.05  # seconds between two collections of events
STARTS = 3  # workers that die this often in a row before they are ready will not come up at all
_numbers = count(1)


class Supervisor(threading.Thread):
    """Starts `ranks` workers and looks after them until `close()`."""

    def __init__(self, ranks: int, backend: str, plugin: using | None, threads: int, timeout: float | None) -> None:
        super().__init__(name=f"dlab-supervisor-{ranks}", daemon=True)
        self.ranks, self.backend, self.plugin, self.threads, self.timeout = ranks, backend, plugin, threads, timeout
        self.board = Board(ranks)
        self.workers: list[Worker] = []
        self.failed: str | None = None  # why the cluster cannot be used any more
        self._group = 0
        self._form_by = 0.0
        self._rendezvous = directory() / f"cluster-{next(_numbers)}"
        self._all_ready = threading.Event()
        self._false_starts = 0
        self._flight: Flight | None = None
        self._inbox = Inbox()
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._lost: set[int] = set()  # ranks to be replaced between runs

    # --- asked by other threads

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
            run._note(range(self.ranks), "running")

        self._inbox.ask(begin)

    def stop(self, run: Run) -> bool:
        """Interrupt every rank that has not returned. False if the run never began or has ended."""

        def begin() -> None:
            if self._flight is not None and self._flight.stop_at is None:
                run._stopped = True
                self._flight.stop_at = time.monotonic()

        return self._inbox.ask(lambda: self._during(run, begin))

    def pause(self, run: Run, paused: bool) -> None:
        """Freeze or thaw every rank that is still busy."""

        def signal_all() -> None:
            run.paused = paused
            for worker in self._busy():
                worker.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
                if paused:
                    run._note([worker.rank], "paused")
                else:
                    self._note_delay(run, worker.rank)

        self._inbox.ask(lambda: self._during(run, signal_all))

    def kill(self, run: Run, rank: int) -> None:
        """Kill one rank of a run that goes on."""
        self._inbox.ask(lambda: self._during(run, lambda: self.workers[rank].process.send_signal(signal.SIGKILL)))

    def delay(self, run: Run, rank: int, seconds: float) -> None:
        """Set the delay of one rank."""

        def write() -> None:
            self.board.delays[rank] = float(seconds)
            self._note_delay(run, rank)

        self._inbox.ask(lambda: self._during(run, write))

    def _note_delay(self, run: Run, rank: int) -> None:
        seconds = self.board.delays[rank]
        run._note([rank], *(("delayed", f"{seconds:g} s in each step") if seconds else ("running",)))

    def set_knobs(self, run: Run, knobs: dict[str, Any]) -> None:
        """Replace the run's knobs."""

        def write() -> None:
            self.board.write(knobs)
            run.knobs = knobs

        self._inbox.ask(lambda: self._during(run, write))

    def where(self, run: Run) -> dict[int, stacks.Where]:
        """Where each rank that has not returned is now."""

        def look() -> dict[int, stacks.Where]:
            if self._flight is None or self._flight.run is not run:
                return {}
            busy = [worker for worker in self._busy() if worker.process.exitcode is None]
            files = {worker.rank: worker.stack for worker in busy}
            return stacks.ask(files, {worker.rank: worker.pid for worker in busy}, WHERE)

        return self._inbox.ask(look)

    def drain(self, run: Run) -> None:
        """Collect the events that have arrived, if the run still goes on."""
        if not run.done:
            self._inbox.ask(lambda: self._during(run, self._collect_events))

    def close(self) -> None:
        """End the run, the workers and this thread."""
        self._closing = True
        self._inbox.ring()
        if threading.current_thread() is not self:  # as it is when the garbage collector closes a cluster from here
            self.join()

    # --- the thread

    def run(self) -> None:
        """Serve until closed; whatever happens, nobody is left waiting and no process is left behind."""
        try:
            self._selector.register(self._inbox.bell, selectors.EVENT_READ, self._inbox.hush)
            self._form(list(range(self.ranks)))
            while not self._closing:
                for key, _ in self._selector.select(self._next_deadline()):
                    key.data()
                self._look_after_group()
                self._replace_lost()
                self._inbox.answer(self._may_begin)
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
            run._results = self._flight.results()
            self._flight = None
            run._done.set()
        self.failed = self.failed or "this cluster is closed: make a new one with dlab.Cluster(…)"
        self._inbox.close()
        self._selector.close()
        os.close(self.board.file)
        self._remove_rendezvous()
        self._all_ready.set()

    def _may_begin(self) -> bool:
        """A run begins on a group that stands, so that whatever goes wrong in it is the run's own."""
        return self._flight is not None or self._has_formed()

    def _next_deadline(self) -> float | None:
        if self._flight is None:
            return None if self._has_formed() else max(0.0, self._form_by - time.monotonic())
        left = (self._flight.next_deadline() or float("inf")) - time.monotonic()
        return min(EVENTS, left) if left > 0 else EVENTS

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
            worker = Worker(Seat(rank, self.ranks, self.backend, self.plugin, self.threads), self.board)
            self.workers[rank : rank + 1] = [worker]
            self._selector.register(worker.channel, selectors.EVENT_READ, lambda w=worker: self._on_message(w))
            self._selector.register(worker.process.sentinel, selectors.EVENT_READ, lambda w=worker: self._on_death(w))
            for reader in worker.readers:
                self._selector.register(reader.file, selectors.EVENT_READ, self._show_output)
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

    def _show_output(self) -> None:
        for reader in output.relay([worker.readers for worker in self.workers]):
            with contextlib.suppress(KeyError):
                self._selector.unregister(reader.file)  # it has ended

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
            if message.tag == FAILURE and message.number == self._group:
                self._on_refusal(worker, message.load(private=False))
            message.close()
            return
        try:
            value = message.load(private=False)
        except Exception as problem:  # a class that exists in the worker only
            value = Report.of(problem)
        flight.answered(worker.rank, message.tag, value)
        worker.busy = worker.rank not in flight.ended

    def _on_refusal(self, worker: Worker, report: Report) -> None:
        """A worker could not join: hopeless if it is the first time, else a matter of this one worker."""
        if not self._all_ready.is_set():
            self._give_up(f"the workers could not form a group: {report.message}")
        self._lost |= {other.rank for other in self.workers if other is worker or other.ready != self._group}

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
            flight.died(worker.rank, worker.process.exitcode)
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
        for number in flight.signals(time.monotonic()):
            for worker in self._busy():
                worker.process.send_signal(number)
        if flight.over:
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
        output.relay([worker.readers for worker in self.workers], to_the_end=True)
        self._report_drops(run)
        run._results = flight.results()
        if not run._stopped:
            run._error = flight.verdict()
        run.ended = time.time()
        self._flight = None
        run._done.set()
        self._lost = {worker.rank for worker in self.workers if worker.process.exitcode is not None}
        self._replace_lost()
        if flight.scattered and not flight.deaths:
            self._form([])  # whoever reported an error has left the group: all form a new one

    def _report_drops(self, run: Run) -> None:
        for rank, ring in enumerate(self.board.rings):
            if ring.dropped:
                run._events.append(Event(time.time(), rank, "dropped", {"count": ring.dropped}))
                output.show([(rank, f"{ring.dropped} events did not fit and are lost: log less often")], error=True)
