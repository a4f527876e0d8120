"""The thread that supervises a cluster: it has a pool of workers, and starts, disturbs and ends runs on them.

Its state changes in this thread only; other threads send it calls through a mailbox and wait. It sleeps until a worker
answers, prints or dies, or a call arrives; during a run it also wakes up to collect events.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from dlab.backend import using
from dlab.events import Records, encode
from dlab.processes.between import errors, messages, roles
from dlab.processes.between.control import ControlBlock, Knobs
from dlab.processes.between.errors import Report
from dlab.processes.parent import output, stacks
from dlab.processes.parent.forkserver import ServerDied
from dlab.processes.parent.handle import WorkerHandle
from dlab.processes.parent.hangs import HangDetector
from dlab.processes.parent.mailbox import Mailbox
from dlab.processes.parent.pool import WorkerPool
from dlab.processes.parent.run import Run
from dlab.processes.parent.run_state import RunState
from dlab.processes.parent.waiting import wait_until
from dlab.processes.worker.main import Seat

EVENTS = 0.05  # seconds between two collections of events
LOOK = 0.25  # seconds between two checks of workers that have not joined their group


class Supervisor(threading.Thread):
    """Starts `ranks` workers and their servers, and supervises them until `close()`."""

    def __init__(
        self, ranks: int, servers: int, backend: str, plugin: using | None, threads: int, timeout: float | None
    ) -> None:
        super().__init__(name=f"dlab-supervisor-{ranks}", daemon=True)
        self.ranks, self._process = ranks, os.getpid()
        self.control = ControlBlock(ranks + servers)
        role = roles.find("server") if servers else None
        self.desk = role.share(ranks, servers, None) if role is not None else None
        self.failed: str | None = None  # why the cluster can no longer be used
        self._state: RunState | None = None
        self._watch: HangDetector | None = None  # watches the current run for hangs
        self._mailbox = Mailbox()
        self.check_process = self._mailbox.check_process
        self._selector = selectors.DefaultSelector()
        self._closing = False
        seats = [Seat(rank, ranks, servers, backend, plugin, threads, role) for rank in range(ranks + servers)]
        mine = (self._on_answer, self._on_death, self._give_up)
        self._pool = WorkerPool(seats, timeout, self.control, self.desk, self._selector, *mine)
        self._everybody = range(len(seats))
        self.workers = self._pool.workers

    # --- called by other threads

    def wait_until_ready(self) -> None:
        """Block until every worker has joined the first group."""
        wait_until(self._pool.came_up.wait)
        if self.failed:
            raise RuntimeError(self.failed)

    def launch(self, run: Run, message: messages.Message, again: Callable[[], messages.Message]) -> None:
        """Start a run; refused while another one is active. `again` makes the message once more, for a new server."""

        def begin() -> None:
            if self.failed:
                raise RuntimeError(self.failed)
            if self._state is not None:
                raise self._state.run.busy_error()
            self.control.clear()
            self.control.write(Knobs(run.knobs, run.factors))
            for rank, seconds in run.delays.items():
                self.control.delays[rank] = float(seconds)
            if self.desk is not None:
                self.desk.clear()
            run.cell.claim_thread()
            self._state = RunState(run, again)
            self._watch = HangDetector(self._state, self.control, self.workers)
            for worker in self.workers:
                with contextlib.suppress(OSError):  # it has just died, which its sentinel reports
                    message.send(worker.channel)
                worker.busy = True
            run._note(self._everybody, "running")
            for rank in run.delays:
                self._note_delay(run, rank)

        self._mailbox.ask(begin)

    @property
    def going(self) -> Run | None:
        """The active run, or None between runs."""
        state = self._state
        return None if state is None else state.run

    def stop(self, run: Run) -> bool:
        """Interrupt every rank that has not returned; returns False if the run never began or has ended."""

        def begin() -> None:
            if self._state is not None and self._state.stop_at is None:
                run._stopped = True
                self._state.stop_at = time.monotonic()

        return self._mailbox.ask(lambda: self._during(run, begin))

    def pause(self, run: Run, paused: bool) -> None:
        """Freeze or resume every busy rank."""

        def signal_all() -> None:
            run.paused = paused
            for worker in self._busy():
                worker.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
                if paused:
                    run._note([worker.rank], "paused")
                else:
                    self._note_delay(run, worker.rank)

        self._mailbox.ask(lambda: self._during(run, signal_all))

    def kill(self, run: Run, rank: int) -> None:
        """Kill one rank of an active run."""
        self._mailbox.ask(lambda: self._during(run, lambda: self.workers[rank].process.send_signal(signal.SIGKILL)))

    def delay(self, run: Run, rank: int, seconds: float) -> None:
        """Set the delay of one rank."""
        self._mailbox.ask(lambda: self._during(run, lambda: self._set_delay(run, rank, seconds)))

    def _set_delay(self, run: Run, rank: int, seconds: float) -> None:
        run.delays[rank] = seconds
        self.control.delays[rank] = float(seconds)
        if self.workers[rank].busy:  # a rank that has returned keeps that state
            self._note_delay(run, rank)

    def _note_delay(self, run: Run, rank: int) -> None:
        seconds = self.control.delays[rank]
        run._note([rank], *(("delayed", f"{seconds:g} s a step") if seconds else ("running",)))

    def turn(self, run: Run, values: dict[str, Any], factors: dict[str, float]) -> None:
        """Set some of the run's knobs."""

        def write() -> None:
            knobs = Knobs({**run.knobs, **values}, {**run.factors, **factors})
            self.control.write(knobs)
            run.knobs, run.factors = knobs

        self._mailbox.ask(lambda: self._during(run, write))

    def where(self, run: Run) -> dict[int, stacks.Where]:
        """Return where each rank that has not returned is now."""

        def look() -> dict[int, stacks.Where]:
            under_way = self._state is not None and self._state.run is run
            return self._watch.where() if under_way and self._watch is not None else {}

        return self._mailbox.ask(look)

    def drain(self, run: Run) -> None:
        """Collect the events that have arrived, if the run is still active."""
        if not run.done:
            self._mailbox.ask(lambda: self._during(run, self._collect_events))

    def close(self) -> None:
        """End the run, the workers and this thread. A fork of the process leaves them alone."""
        if os.getpid() != self._process:
            return
        self._closing = True
        self._mailbox.wake()
        if threading.current_thread() is not self:  # the garbage collector may close a cluster from this thread
            self.join()

    # --- the thread

    def run(self) -> None:
        """Serve until closed; even after an error, no caller is left waiting and no process is left behind."""
        try:
            self._selector.register(self._mailbox.wakeups, selectors.EVENT_READ, self._mailbox.clear_wakeups)
            self._pool.form(list(self._everybody))
            while not self._closing:
                for key, _ in self._selector.select(self._next_deadline()):
                    key.data()
                if self._state is None:
                    self._pool.look_after_group()
                self._replace_lost()
                self._mailbox.answer(self._may_begin)
                self._look_after_run()
        except ServerDied as problem:
            self.failed = str(problem)
        except BaseException as problem:
            self.failed = f"the cluster's supervisor failed ({type(problem).__name__}: {problem}): make a new cluster"
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        self._pool.close()
        if self._state is not None:
            run = self._state.run
            self._collect_events()
            if self.failed:
                run._error = errors.WorkerError(self.failed, [0])
            run._stopped, run.ended = True, time.time()
            run._results = self._state.results()
            self._state = self._watch = None
            run._done.set()
        self.failed = self.failed or "this cluster is closed: make a new one with dlab.Cluster(…)"
        self._mailbox.close()
        self._selector.close()
        os.close(self.control.file)
        if self.desk is not None:
            os.close(self.desk.file)
        self._pool.came_up.set()

    def _may_begin(self) -> bool:
        """Return whether the group is complete, so that whatever goes wrong afterwards belongs to the run."""
        return self._state is not None or self._pool.has_formed

    def _next_deadline(self) -> float | None:
        if self._state is None:
            return None if self._pool.has_formed else LOOK
        left = (self._state.next_deadline() or float("inf")) - time.monotonic()
        return min(EVENTS, left) if left > 0 else EVENTS

    def _during(self, run: Run, action: Callable[[], Any]) -> bool:
        under_way = self._state is not None and self._state.run is run
        if under_way:
            action()
        return under_way

    def _busy(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.busy]

    # --- called by the pool

    def _on_answer(self, worker: WorkerHandle, message: messages.Received) -> bool:
        """Record that a worker has returned or failed; False if there is no such run."""
        state = self._state
        if state is None or message.number != state.run.number:
            return False
        try:
            value = message.load(private=False)
        except Exception as problem:  # a class that exists only in the worker
            value = Report.of(problem)
        state.answered(worker.rank, message.tag, value)
        worker.busy = worker.rank not in state.ended
        return True

    def _on_death(self, worker: WorkerHandle) -> bool:
        """Record that a worker has died; False if it was in no run."""
        if self._state is None:
            return False
        worker.busy = False
        if self._state.may_revive(worker.rank):
            self._state.revived += 1
            self._state.run._note([worker.rank], "running", "in the place of one that has died")
            self._revive(worker.rank, self._state.again)
        else:
            self._state.died(worker.rank, worker.process.exitcode)
        return True

    def _revive(self, rank: int, again: Callable[[], messages.Message]) -> None:
        server = self._pool.replace_server(rank)
        with again() as message, contextlib.suppress(OSError):  # it has just died, which its sentinel reports
            message.send(server.channel)
        server.busy = True

    def _replace_lost(self) -> None:
        if self._state is None and not self._closing:
            self._pool.replace_lost()

    def _give_up(self, reason: str) -> None:
        self.failed = reason
        self._closing = True

    # --- the current run

    def _look_after_run(self) -> None:
        state = self._state
        if state is None:
            return
        self._collect_events()
        if state.alone and self.desk is not None:
            self.desk.end()
        if state.is_about_to_end(time.monotonic()) and state.late and self._watch is not None:
            state.missing = {rank: where.sentence for rank, where in self._watch.missing(state.late).items()}
        for number in state.signals(time.monotonic()):
            for worker in self._busy():
                worker.process.send_signal(number)
        if state.over:
            self._finish_run(state)
        elif self._watch is not None:
            self._watch.look()

    def _collect_events(self) -> None:
        if self._state is None:
            return
        for rank, ring in enumerate(self.control.rings):
            if records := ring.take(rank):
                self._state.run._history.add(records)

    def _finish_run(self, state: RunState) -> None:
        """Settle the result, since all ranks have returned or died, then make the cluster complete again."""
        run = state.run
        output.relay([worker.readers for worker in self.workers], to_the_end=True)
        self._report_drops(run)
        run._results = state.results()
        if not run._stopped:
            run._error = state.verdict()
        if self._watch is not None:
            self._watch.end()
        run.ended = time.time()
        self._state = self._watch = None
        run._done.set()
        self._pool.lost = {worker.rank for worker in self.workers if worker.process.exitcode is not None}
        self._replace_lost()
        if state.scattered and not state.deaths:
            self._pool.form([])  # a rank that reported an error has left the group, so all form a new one

    def _report_drops(self, run: Run) -> None:
        for rank, ring in enumerate(self.control.rings):
            if ring.dropped:
                run._history.add(Records(rank, encode(0, time.time(), "dropped", {"count": ring.dropped})))
                output.show([(rank, f"{ring.dropped} events did not fit and are lost: log less often")], error=True)
