"""The workers of a cluster: they start, form a process group, report that they are ready, die, and are replaced.

Runs are not handled here: `supervisor` does that, and calls everything in this module from its thread.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path

from dlab.processes.between import errors, lifeline, messages
from dlab.processes.between.control import ControlBlock
from dlab.processes.between.errors import Report
from dlab.processes.between.roles import SharedFile
from dlab.processes.parent import output
from dlab.processes.parent.forkserver import directory
from dlab.processes.parent.handle import WorkerHandle
from dlab.processes.worker.main import FAILURE, JOIN, READY, Seat

FORM = {
    "gloo": 20.0,
    "dlab": 20.0,
    "nccl": 60.0,
}  # seconds to form a group; a rank that takes longer still hangs in the last run
SLOW = 5.0  # seconds to form a group, after which the missing ranks are named
STATES = defaultdict(
    lambda: "not heard from",
    {"D": "waits for a disk or a device", "R": "busy", "S": "waits", "t": "stopped by a debugger"},
)  # states of a process, as `lifeline.state_of` returns them
STARTS = 3  # workers that die this often in a row before they are ready will never start
_numbers = count(1)


class WorkerPool:
    """A worker on each seat. A run gets the events of a worker first: `answered(worker, message)` and `died(worker)`
    return whether it took them. `give_up(reason)` is called when the cluster cannot be used any more.
    """

    def __init__(
        self,
        seats: list[Seat],
        timeout: float | None,
        control: ControlBlock,
        desk: SharedFile | None,
        selector: selectors.BaseSelector,
        answered: Callable[[WorkerHandle, messages.Received], bool],
        died: Callable[[WorkerHandle], bool],
        give_up: Callable[[str], None],
    ) -> None:
        self.workers: list[WorkerHandle] = []
        self.came_up = threading.Event()  # for other threads: the first group is complete, or never will be
        self.lost: set[int] = set()  # ranks to be replaced between runs
        self._seats, self._timeout, self._control, self._desk, self._selector = seats, timeout, control, desk, selector
        self._answered, self._died, self._give_up = answered, died, give_up
        self._group = 0
        self._name = f"cluster-{next(_numbers)}"
        self._rendezvous = directory() / self._name  # raises OSError if it cannot be made
        self._met_in_file = False  # is the group complete, and does it need its file?
        self._began = 0.0  # when forming the group began
        self._told = False  # has it been reported that forming the group takes long?
        self._false_starts = 0

    # --- forming a group

    def form(self, fresh: list[int]) -> None:
        """Start new workers on these seats, and let all ranks form a new process group."""
        for rank in fresh:
            self._fill(rank)
        self._group += 1
        self._rendezvous = directory() / f"{self._name}-group-{self._group}"
        self._began, self._told, self._met_in_file = time.monotonic(), False, False
        with messages.Message(JOIN, self._group, (str(self._rendezvous), self._timeout)) as message:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    message.send(worker.channel)

    def _fill(self, rank: int) -> WorkerHandle:
        """Start a new worker on a seat."""
        worker = WorkerHandle(self._seats[rank], self._control, self._desk)
        self.workers[rank : rank + 1] = [worker]
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._on_message(worker))
        self._selector.register(worker.process.sentinel, selectors.EVENT_READ, lambda: self._on_death(worker))
        for reader in worker.readers:
            self._selector.register(reader.file, selectors.EVENT_READ, self.show_output)
        return worker

    def replace_server(self, rank: int) -> WorkerHandle:
        """Replace a server during a run; it is in no group, so the other processes are not affected."""
        self.show_output()
        self._forget(self.workers[rank])
        worker = self._fill(rank)
        worker.ready = self._group
        return worker

    @property
    def has_formed(self) -> bool:
        """Return whether all workers have joined the group."""
        return all(worker.ready == self._group for worker in self.workers)

    @property
    def _time_to_form(self) -> float:
        return FORM[self._seats[0].backend]

    def look_after_group(self) -> None:
        """Repair the group between runs: resume stopped workers, and replace those that do not join because they still
        wait for a collective of the last run. If the group's file was removed, all form a new group, because ranks look
        each other up in it when they first communicate.
        """
        if self.has_formed:
            if self._met_in_file and not self.lost and not self._rendezvous.exists():
                self.form([])
            return
        missing = [worker for worker in self.workers if worker.ready != self._group]
        for worker in missing:
            if lifeline.wake(worker.pid):
                name = errors.name_ranks([worker.rank], self._seats[0].ranks)
                output.say(f"{name} was stopped by a signal before it had joined the others: it is told to go on")
        seconds = time.monotonic() - self._began
        if seconds >= SLOW and not self._told:
            self._told = True
            self._say_who_is_missing(missing)
        if seconds >= self._time_to_form:
            self.lost |= {worker.rank for worker in missing}
            self._false_starts += 1
            if self._false_starts >= STARTS:
                names = errors.name_ranks(sorted(self.lost), self._seats[0].ranks)
                self._give_up(f"{names} did not join the group in {self._time_to_form:g} s, again and again")

    def _say_who_is_missing(self, missing: list[WorkerHandle]) -> None:
        names = errors.name_ranks([worker.rank for worker in missing], self._seats[0].ranks)
        states = sorted({STATES[lifeline.state_of(worker.pid)] for worker in missing})
        output.say(f"{names} {'have' if len(missing) > 1 else 'has'} not joined the others yet ({', '.join(states)}) …")

    def replace_lost(self) -> None:
        """Replace lost workers between runs, after all messages of this round, some of which may be theirs."""
        if self.lost:
            ranks, self.lost = sorted(self.lost), set()
            self.show_output()  # their last output
            for rank in ranks:
                self._forget(self.workers[rank])
            self.form(ranks)

    def _forget(self, worker: WorkerHandle) -> None:
        for file in (worker.channel, worker.process.sentinel, *(reader.file for reader in worker.readers)):
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
        worker.close()

    # --- hearing from workers

    def show_output(self) -> None:
        """Print the workers' new output."""
        for reader in output.relay([worker.readers for worker in self.workers]):
            with contextlib.suppress(KeyError):
                self._selector.unregister(reader.file)  # the stream has ended

    def _on_message(self, worker: WorkerHandle) -> None:
        message = messages.receive(worker.channel)
        if message is None:  # the process is ending; its sentinel reports how
            self._selector.unregister(worker.channel)
        elif message.tag == READY:
            self._on_ready(worker, message.number)
        elif not self._answered(worker, message):
            if message.tag == FAILURE and message.number == self._group:
                self._on_refusal(worker, message.load(private=False))
            message.close()

    def _on_ready(self, worker: WorkerHandle, group: int) -> None:
        worker.ready = group
        if self.has_formed:
            self._false_starts = 0
            self._met_in_file = self._rendezvous.exists()
            self.came_up.set()
            self._remove_rendezvous(keep=self._rendezvous)

    def _on_refusal(self, worker: WorkerHandle, report: Report) -> None:
        """Handle a worker that could not join: give up if it was the first group, otherwise replace this worker."""
        if not self.came_up.is_set():
            self._give_up(f"the workers could not form a group: {report.message}")
        self._lose_with_waiting_ranks(worker)

    def _on_death(self, worker: WorkerHandle) -> None:
        self._selector.unregister(worker.process.sentinel)
        worker.process.join()
        if self._died(worker):
            return
        self._lose_with_waiting_ranks(worker)
        self._false_starts += worker.ready != self._group
        if self._false_starts >= STARTS:
            where = "again and again while it started"
            self._give_up(str(errors.died(worker.rank, worker.process.exitcode, where, self._seats[0].ranks)))

    def _lose_with_waiting_ranks(self, worker: WorkerHandle) -> None:
        """Replace the worker, and the workers that still wait for it in a group that will never be complete."""
        self.lost |= {other.rank for other in self.workers if other is worker or other.ready != self._group}

    # --- the end

    def close(self) -> None:
        """Kill all workers, and leave nothing behind."""
        for worker in self.workers:
            worker.close()
        self._remove_rendezvous()

    def _remove_rendezvous(self, keep: Path | None = None) -> None:
        """Remove the files of groups, also of those that were never complete; only the current group needs its file."""
        for file in self._rendezvous.parent.glob(f"{self._name}-group-*"):
            if file != keep:
                file.unlink(missing_ok=True)
