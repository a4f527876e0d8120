"""A run under way: who has come back and with what, when to interrupt the others, and who was to blame."""

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
AGAIN = 0.02  # seconds until it is told again to stop: it may not have begun, or be in an import, which it must finish
TOGETHER = 0.05  # seconds in which other ranks may fail in the same way before they are interrupted
REVIVALS = 5  # servers in one run: more would not help
GOSSIP = 0.2  # seconds to wait for the real culprit when a rank reports only that another one is gone


@dataclass
class RunState:
    """The run in progress, as the supervisor sees it."""

    run: Run
    again: Callable[[], messages.Message]  # makes the message with which the run began
    revived: int = 0  # servers
    returned: dict[int, Any] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    deaths: dict[int, tuple[float, int | None]] = field(default_factory=dict)  # by rank: when, and the exit code
    ended: set[int] = field(default_factory=set)
    missing: dict[int, str] = field(default_factory=dict)  # who others waited for in vain, and where they were
    scattered: bool = False  # has a rank left the process group?
    stop_at: float | None = None  # when to interrupt the rest
    tell_at: float = 0.0  # when to tell them again
    kill_at: float | None = None  # when to kill who did not react

    def answered(self, rank: int, tag: int, value: Any) -> None:
        """A rank has returned or reported an error. After a failure it still has to leave the group, and says so."""
        self.scattered |= tag in (FAILURE, LEFT)
        if isinstance(value, Report):
            self.reports[rank] = value
            interrupted = self.stop_at is not None and time.monotonic() >= self.stop_at
            if interrupted or value.connection:  # it has done nothing wrong
                self.run._note([rank], "stopped")
            else:
                self.run._note([rank], "failed", value.message)
        elif rank not in self.reports:
            self.returned[rank] = value
            self.run._note([rank], "returned")
        if tag != FAILURE:
            self.ended.add(rank)

    def may_revive(self, rank: int) -> bool:
        """Is this a server whose workers can go on with a new one?"""
        return rank >= self.run.ranks and self.run.revives and self.stop_at is None and self.revived < REVIVALS

    def died(self, rank: int, exitcode: int | None) -> None:
        """A rank's process is gone."""
        self.ended.add(rank)
        if rank not in self.returned and rank not in self.reports:
            self.deaths[rank] = (time.monotonic(), exitcode)
            if self._by_us(*self.deaths[rank]):  # it did not react when it was stopped
                self.run._note([rank], "stopped")
            else:
                self.run._note([rank], "dead", errors.end_of(exitcode))

    @property
    def late(self) -> set[int]:
        """Those that failed because they waited too long for another rank."""
        return {rank for rank, report in self.reports.items() if report.late}

    @property
    def over(self) -> bool:
        """Has every rank, and every server, come back or died?"""
        return len(self.ended) == self.run.ranks + self.run.servers

    @property
    def alone(self) -> bool:
        """Is no worker left for the servers?"""
        return self.ended.issuperset(range(self.run.ranks))

    def is_about_to_end(self, now: float) -> bool:
        """Will those who are still busy be interrupted now, for the first time?"""
        self._decide(now)
        return self.kill_at is None and self.stop_at is not None and now >= self.stop_at

    def signals(self, now: float) -> list[int]:
        """What to send to those who are still busy: nothing, an interruption, or, after a grace period, the end."""
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
        """When those who are still busy are to be interrupted, if anything has happened that makes it necessary."""
        if self.stop_at is None and self.alone:
            self.stop_at = now + GRACE  # those that have not noticed
        if self.stop_at is None and (self.reports or self._losses()):
            only_gossip = not self.deaths and all(report.connection for report in self.reports.values())
            self.stop_at = now + (GOSSIP if only_gossip else TOGETHER)
        if self.stop_at is not None and any(code != SERVER_DIED for _, code in self._losses().values()):
            self.stop_at = min(self.stop_at, now)

    def _losses(self) -> dict[int, tuple[float, int | None]]:
        """Those of the deaths that the run cannot do without: servers, and workers unless it survives that."""
        return {rank: how for rank, how in self.deaths.items() if rank >= self.run.ranks or not self.run.survives}

    def next_deadline(self) -> float | None:
        """When `signals` may have something new to say."""
        return self.stop_at if self.kill_at is None else min(self.tell_at, self.kill_at)

    def results(self) -> list[Any]:
        """By rank; None for who did not return."""
        return [self.returned.get(rank) for rank in range(self.run.ranks)]

    def verdict(self) -> errors.WorkerError | None:
        """Who was it? Not those who were interrupted, nor, if anyone else did, those who lost a connection."""
        deaths = {rank: death for rank, death in self.deaths.items() if not self._by_us(*death)}
        if any(rank in self.returned for rank in range(self.run.ranks)):  # those who are left went on without them
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
