"""The state of a run in progress: who has returned what, when to interrupt the others, and who caused a failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlab.processes.between import errors, messages
from dlab.processes.between.errors import Report
from dlab.processes.parent.forkserver import SERVER_DIED
from dlab.processes.parent.run import Run
from dlab.processes.worker.main import FAILURE, LEFT, STOP

GRACE = 0.5  # seconds in which a stopped function may return before its process is killed
AGAIN = 0.02  # seconds until the stop signal is repeated: the function may not have begun, or must finish an import
TOGETHER = 0.05  # seconds in which other ranks may fail in the same way before they are interrupted
REVIVALS = 5  # servers replaced in one run; more would not help
CAUSE_DELAY = 0.2  # seconds to wait for the real cause when a rank reports only that another one is gone


@dataclass
class RunState:
    """The run in progress, as seen by the supervisor."""

    run: Run
    again: Callable[[], messages.Message]  # makes the message that starts the run
    revived: int = 0  # number of replaced servers
    returned: dict[int, Any] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    deaths: dict[int, tuple[float, int | None]] = field(default_factory=dict)  # by rank: when, and the exit code
    ended: set[int] = field(default_factory=set)
    missing: dict[int, str] = field(default_factory=dict)  # ranks for which others waited in vain, and where they were
    scattered: bool = False  # has a rank left the process group?
    stop_at: float | None = None  # when to interrupt the other ranks
    tell_at: float = 0.0  # when to repeat the interrupt
    kill_at: float | None = None  # when to kill those that did not react

    def answered(self, rank: int, tag: int, value: Any) -> None:
        """Record a rank's result or error. After a failure the rank still has to leave the group, and reports that."""
        self.scattered |= tag in (FAILURE, LEFT)
        if isinstance(value, Report):
            self.reports[rank] = value
            interrupted = self.stop_at is not None and time.monotonic() >= self.stop_at
            if interrupted or value.connection:  # it did nothing wrong
                self.run._note([rank], "stopped")
            else:
                self.run._note([rank], "failed", value.message)
        elif rank not in self.reports:
            self.returned[rank] = value
            self.run._note([rank], "returned")
        if tag != FAILURE:
            self.ended.add(rank)

    def may_revive(self, rank: int) -> bool:
        """Return whether this is a server whose workers can continue with a new one."""
        return rank >= self.run.ranks and self.run.revives and self.stop_at is None and self.revived < REVIVALS

    def died(self, rank: int, exitcode: int | None) -> None:
        """Record that a rank's process has died."""
        self.ended.add(rank)
        if rank not in self.returned and rank not in self.reports:
            self.deaths[rank] = (time.monotonic(), exitcode)
            if self._by_us(*self.deaths[rank]):  # it did not react when it was stopped
                self.run._note([rank], "stopped")
            else:
                self.run._note([rank], "dead", errors.end_of(exitcode))

    @property
    def late(self) -> set[int]:
        """The ranks that failed because they waited too long for another rank."""
        return {rank for rank, report in self.reports.items() if report.late}

    @property
    def over(self) -> bool:
        """Whether every rank and every server has returned or died."""
        return len(self.ended) == self.run.ranks + self.run.servers

    @property
    def alone(self) -> bool:
        """Whether the servers have no worker left."""
        return self.ended.issuperset(range(self.run.ranks))

    def is_about_to_end(self, now: float) -> bool:
        """Return whether the busy ranks are about to be interrupted for the first time."""
        self._decide(now)
        return self.kill_at is None and self.stop_at is not None and now >= self.stop_at

    def signals(self, now: float) -> list[int]:
        """Return the signals for the busy ranks: none, an interrupt, or, after a grace period, SIGKILL."""
        self._decide(now)
        if self.stop_at is None or now < self.stop_at:
            return []
        self.kill_at = self.kill_at or now + GRACE
        if now >= self.kill_at:
            return [signal.SIGKILL]
        if now < self.tell_at:
            return []
        self.tell_at = now + AGAIN
        return [STOP, signal.SIGCONT]  # in case it was paused

    def _decide(self, now: float) -> None:
        """Set the time at which the busy ranks are interrupted, if something has made that necessary."""
        if self.stop_at is None and self.alone:
            self.stop_at = now + GRACE  # for those that have not noticed
        if self.stop_at is None and (self.reports or self._losses()):
            only_secondhand = not self.deaths and all(report.connection for report in self.reports.values())
            self.stop_at = now + (CAUSE_DELAY if only_secondhand else TOGETHER)
        if self.stop_at is not None and any(code != SERVER_DIED for _, code in self._losses().values()):
            self.stop_at = min(self.stop_at, now)

    def _losses(self) -> dict[int, tuple[float, int | None]]:
        """Return the deaths that the run cannot survive: those of servers, and of workers unless it survives them."""
        return {rank: how for rank, how in self.deaths.items() if rank >= self.run.ranks or not self.run.survives}

    def next_deadline(self) -> float | None:
        """Return the time at which `signals` may change."""
        return self.stop_at if self.kill_at is None else min(self.tell_at, self.kill_at)

    def results(self) -> list[Any]:
        """Return the results by rank; None for those that did not return."""
        return [self.returned.get(rank) for rank in range(self.run.ranks)]

    def verdict(self) -> errors.WorkerError | None:
        """Return the error of the rank at fault; interrupted ranks and lost connections are only consequences."""
        deaths = {rank: death for rank, death in self.deaths.items() if not self._by_us(*death)}
        if any(rank in self.returned for rank in range(self.run.ranks)):  # the remaining ranks continued without them
            deaths = {rank: death for rank, death in deaths.items() if rank in self._losses()}
        real = {rank: report for rank, report in self.reports.items() if report.kind != "Stopped"}
        direct = {rank: report for rank, report in real.items() if not report.connection}
        if direct and (not deaths or min(r.time for r in direct.values()) < min(when for when, _ in deaths.values())):
            real = direct
        elif deaths:
            rank, (_, code) = min(deaths.items(), key=lambda item: item[1][0])
            if code == SERVER_DIED:
                lost = sorted(rank for rank, (_, code) in deaths.items() if code == SERVER_DIED)
                return errors.lost_server(lost, self.run.name, self.run.ranks)
            role = "worker" if rank < self.run.ranks else "server"
            where = f"while it ran {self.run.name}; a new {role} takes its place"
            return errors.died(rank, code, where, self.run.ranks)
        if not real:
            return None
        first = min(real.values(), key=lambda report: report.time)
        ranks = sorted(rank for rank, report in real.items() if report.message == first.message)
        self.run._note([rank for rank in ranks if self.reports[rank].connection], "failed", first.message)
        missing = {rank: where for rank, where in self.missing.items() if first.late and rank not in real}
        return errors.failed(ranks, first, self.run.ranks, missing)

    def _by_us(self, when: float, exitcode: int | None) -> bool:
        return self.kill_at is not None and when >= self.kill_at and exitcode == -signal.SIGKILL
