"""The workers of a cluster: they start, form a process group, tell that they are ready, die, and are replaced.

What they do in a run is none of its business: `supervisor` looks after that, and calls everything here from its thread.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable
from itertools import count

from dlab.processes import errors, output, wire
from dlab.processes.board import Board, Desk
from dlab.processes.errors import Report
from dlab.processes.forkserver import directory
from dlab.processes.handle import Worker
from dlab.processes.worker import FAILURE, JOIN, READY, Seat

FORM = {
    "gloo": 20.0,
    "dlab": 20.0,
    "nccl": 60.0,
}  # seconds to form a group; a rank that takes longer hangs in the one before
STARTS = 3  # workers that die this often in a row before they are ready will not come up at all
_numbers = count(1)


class Crew:
    """A worker on each seat. What happens to one is given to a run first, if one is there to take it:
    `answered(worker, message)` and `died(worker)` say whether it was. `give_up(reason)` is called when it is hopeless.
    """

    def __init__(
        self,
        seats: list[Seat],
        timeout: float | None,
        board: Board,
        desk: Desk,
        selector: selectors.BaseSelector,
        answered: Callable[[Worker, wire.Received], bool],
        died: Callable[[Worker], bool],
        give_up: Callable[[str], None],
    ) -> None:
        self.workers: list[Worker] = []
        self.came_up = threading.Event()  # for other threads: the first group stands, or never will
        self.lost: set[int] = set()  # ranks to be replaced between runs
        self.form_by = 0.0  # when who has not joined the group will be replaced
        self._seats, self._timeout, self._board, self._desk, self._selector = seats, timeout, board, desk, selector
        self._answered, self._died, self._give_up = answered, died, give_up
        self._group = 0
        self._rendezvous = directory() / f"cluster-{next(_numbers)}"
        self._false_starts = 0

    # --- forming a group

    def form(self, fresh: list[int]) -> None:
        """Put new workers on these seats, and let all ranks form a new process group."""
        for rank in fresh:
            self._fill(rank)
        self._group += 1
        self.form_by = time.monotonic() + self._time_to_form
        rendezvous = f"{self._rendezvous}-group-{self._group}"
        with wire.Message(JOIN, self._group, (rendezvous, self._timeout)) as message:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    message.send(worker.channel)

    def _fill(self, rank: int) -> Worker:
        """Put a new worker on a seat."""
        worker = Worker(self._seats[rank], self._board, self._desk)
        self.workers[rank : rank + 1] = [worker]
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._on_message(worker))
        self._selector.register(worker.process.sentinel, selectors.EVENT_READ, lambda: self._on_death(worker))
        for reader in worker.readers:
            self._selector.register(reader.file, selectors.EVENT_READ, self.show_output)
        return worker

    def replace_server(self, rank: int) -> Worker:
        """In the middle of a run: it is in no group, so nobody else need know."""
        self.show_output()
        self._forget(self.workers[rank])
        worker = self._fill(rank)
        worker.ready = self._group
        return worker

    @property
    def has_formed(self) -> bool:
        """Has everybody joined the group?"""
        return all(worker.ready == self._group for worker in self.workers)

    @property
    def _time_to_form(self) -> float:
        return FORM[self._seats[0].backend]

    def look_after_group(self) -> None:
        """Between runs: replace who does not join, because it waits for a collective that nobody else takes part in."""
        if not self.has_formed and time.monotonic() >= self.form_by:
            self.lost |= {worker.rank for worker in self.workers if worker.ready != self._group}
            self._false_starts += 1
            if self._false_starts >= STARTS:
                names = errors.name_ranks(sorted(self.lost), self._seats[0].ranks)
                self._give_up(f"{names} did not join the group in {self._time_to_form:g} s, again and again")

    def replace_lost(self) -> None:
        """Between runs, after all messages of a round, some of which may have come from those that are replaced."""
        if self.lost:
            ranks, self.lost = sorted(self.lost), set()
            self.show_output()  # their last words
            for rank in ranks:
                self._forget(self.workers[rank])
            self.form(ranks)

    def _forget(self, worker: Worker) -> None:
        for file in (worker.channel, worker.process.sentinel, *(reader.file for reader in worker.readers)):
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
        worker.close()

    # --- hearing from workers

    def show_output(self) -> None:
        """Print what they have printed."""
        for reader in output.relay([worker.readers for worker in self.workers]):
            with contextlib.suppress(KeyError):
                self._selector.unregister(reader.file)  # it has ended

    def _on_message(self, worker: Worker) -> None:
        message = wire.receive(worker.channel)
        if message is None:  # the process is gone or going: its sentinel tells how
            self._selector.unregister(worker.channel)
        elif message.tag == READY:
            self._on_ready(worker, message.number)
        elif not self._answered(worker, message):
            if message.tag == FAILURE and message.number == self._group:
                self._on_refusal(worker, message.load(private=False))
            message.close()

    def _on_ready(self, worker: Worker, group: int) -> None:
        worker.ready = group
        if self.has_formed:
            self._false_starts = 0
            self.came_up.set()
            self._remove_rendezvous(keep=group)

    def _on_refusal(self, worker: Worker, report: Report) -> None:
        """A worker could not join: hopeless if it is the first time, else a matter of this one worker."""
        if not self.came_up.is_set():
            self._give_up(f"the workers could not form a group: {report.message}")
        self._lose_with_those_who_wait(worker)

    def _on_death(self, worker: Worker) -> None:
        self._selector.unregister(worker.process.sentinel)
        worker.process.join()
        if self._died(worker):
            return
        self._lose_with_those_who_wait(worker)
        self._false_starts += worker.ready != self._group
        if self._false_starts >= STARTS:
            where = "again and again while it started"
            self._give_up(str(errors.died(worker.rank, worker.process.exitcode, where, self._seats[0].ranks)))

    def _lose_with_those_who_wait(self, worker: Worker) -> None:
        """Replace it, and with it those that still wait for it in a group that will not come."""
        self.lost |= {other.rank for other in self.workers if other is worker or other.ready != self._group}

    # --- the end

    def close(self) -> None:
        """Kill them all, and leave nothing behind."""
        for worker in self.workers:
            worker.close()
        self._remove_rendezvous()

    def _remove_rendezvous(self, keep: int = 0) -> None:
        """Groups leave a file behind, also those that never came together; only the present one needs it."""
        for file in self._rendezvous.parent.glob(f"{self._rendezvous.name}-group-*"):
            if not file.name.endswith(f"-{keep}"):
                file.unlink(missing_ok=True)
