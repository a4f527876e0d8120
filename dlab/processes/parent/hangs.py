"""Report a hang: when no rank has made progress for five seconds, say who waits for whom, and at which line.

A rank waits if it is in one of dlab's own waits, which announce themselves in shared memory, or if its stack is in one
of torch.distributed's. As long as a rank computes, sleeps or is paused, the others wait for good reason, and nothing
is reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from dlab.events import Event
from dlab.kinds import HANG, LOG, HangData, RankWaits
from dlab.memory.waits import Wait
from dlab.processes.between.control import ControlBlock
from dlab.processes.between.errors import name_ranks
from dlab.processes.parent import stacks
from dlab.processes.parent.handle import WorkerHandle
from dlab.processes.parent.run_state import RunState
from dlab.processes.parent.stacks import Where, explain_deadlock
from dlab.processes.worker.main import WHERE

SECONDS = 5.0  # without progress, before it is called a hang
_FIRST = 0.6  # share of these seconds before the stacks are read for the first time
_IDLE = 0.1  # share of a core: a rank that uses more is not blocked in C, even if it seems so
_TICKS = os.sysconf("SC_CLK_TCK")


class HangDetector:
    """Checks one run repeatedly; reports a hang, updates the report, and withdraws it."""

    def __init__(self, state: RunState, control: ControlBlock, workers: Sequence[WorkerHandle]) -> None:
        self._state, self._run, self._control, self._workers = state, state.run, control, workers
        self._progress: Any = None  # changes when any rank makes progress
        self._told = ""
        self._reset(time.monotonic())

    def _reset(self, now: float) -> None:
        self._since, self._next = now, now + _FIRST * SECONDS
        self._places: dict[int, Where] | None = None
        self._used: dict[int, float] = {}
        self._looked = now
        if self._told:
            self._withdraw()

    def where(self) -> dict[int, Where]:
        """Return where each rank that has not returned is, and each server that is not idle. Takes at most a second."""
        busy = self._busy()
        files, pids = {worker.rank: worker.stack for worker in busy}, {worker.rank: worker.pid for worker in busy}
        places = {rank: self._add_whom(rank, where) for rank, where in stacks.ask(files, pids, WHERE).items()}
        workers = {rank: where for rank, where in places.items() if rank < self._run.ranks}
        asked = {server for where in workers.values() for server in where.ranks}
        return workers and {
            rank: where
            for rank, where in places.items()
            if rank in workers or rank in asked or where.ranks or not where.waits
        }

    def missing(self, late: Collection[int]) -> dict[int, Where]:
        """Return the ranks for which these ranks waited until their time was up; empty if no rank is still at work."""
        others = {rank: where for rank, where in self.where().items() if rank not in late and not where.returned}
        waited = {rank: self._add_whom(rank, Where("", waits=True, told=True)) for rank in late}
        named = stacks.culprits({**others, **waited})
        return {rank: others[rank] for rank in stacks.in_order(others) if rank in named}

    def look(self) -> None:
        """Check for a hang; cheap enough to be called often: stacks are read only after seconds without progress."""
        now = time.monotonic()
        if self._state.stop_at is not None:
            return
        sinces = [slot.since(now) for slots in self._control.waits for slot in slots]
        progress = (len(self._run._history), len(self._state.ended), self._state.revived, sinces)
        if self._run.paused or progress != self._progress:
            self._progress = progress
            self._reset(now)
        elif now >= self._next:
            self._look_closely(now)

    def _look_closely(self, now: float) -> None:
        before, self._places = self._places, self.where()
        used, self._used = self._used, {worker.rank: _seconds_of(worker.pid) for worker in self._busy()}
        limit, self._looked = _IDLE * (now - self._looked), now
        blocked = self._places and all(
            where.waits and (self._waits_itself(rank) or not where.told) for rank, where in self._places.items()
        )
        idle = all(self._waits_itself(worker.rank) for worker in self._busy() if worker.rank >= self._run.ranks)
        if before is not None:  # the same stacks twice, and no work of other threads in between
            for rank, where in self._places.items():
                same = where == before.get(rank) and self._used[rank] - used.get(rank, 0.0) < limit
                blocked = blocked and (same or self._waits_itself(rank))
        if not (blocked and idle):
            self._reset(now)
        elif before is None:
            self._next = self._since + SECONDS
        else:
            self._next = now + SECONDS
            self._report(now - self._since)

    def _busy(self) -> list[WorkerHandle]:
        return [worker for worker in self._workers if worker.busy and worker.process.exitcode is None]

    def _waits_itself(self, rank: int) -> bool:
        """Return whether the rank's main thread has announced a wait."""
        return bool(self._control.waits[rank][0].since(time.monotonic()))

    # --- whom they wait for

    def _add_whom(self, rank: int, where: Where) -> Where:
        """Add whom a rank waits for, as its main thread or, in a collective, another of its threads announces."""
        now = time.monotonic()
        mine, *others = (slot.read(now) for slot in self._control.waits[rank])
        wait = (mine if where.told else None) or min(filter(None, others), default=None)
        if wait is None or not where.waits:
            return where
        return where._replace(
            what=wait.what,
            whom=self._name(self._ranks_of(wait)),
            ranks=self._ranks_of(wait),
            line=self._line(rank, where),
        )

    def _line(self, rank: int, where: Where) -> str:
        """Return the user's line, or the step if a function of dlab's own runs."""
        if where.line:
            return where.line
        records, _ = self._run._history.since(0)
        for record in reversed([record for record in records if record.rank == rank]):
            for (_, _, kind), data in reversed(record.read().items()):
                if kind == LOG and "step" in data:
                    return f"after step {data['step']}"
        return ""

    def _ranks_of(self, wait: Wait) -> tuple[int, ...]:
        """Return the ranks in the numbering of the cluster; a subgroup has its own numbers."""
        known = {worker.pid: worker.rank for worker in self._workers}
        return tuple(sorted(known.get(pid, rank) for rank, pid in zip(wait.ranks, wait.pids, strict=True)))

    def _name(self, ranks: Sequence[int]) -> str:
        return name_ranks(ranks, self._run.ranks)

    # --- telling

    def _report(self, seconds: float) -> None:
        places = self._places or {}
        alike: dict[str, list[int]] = {}
        for rank, where in places.items():
            alike.setdefault(where.sentence.removeprefix("waiting "), []).append(rank)
        waits = [f"{self._name(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {how}" for how, ranks in alike.items()]
        why = explain_deadlock(places, self._run._ends(places), self._run.ranks)
        told = "\n".join([*waits, why] if why else waits)
        if told != self._told:
            ranks: list[RankWaits] = [{"rank": rank, "words": where.sentence} for rank, where in sorted(places.items())]
            self._note(why or "all wait for each other", ranks, seconds)
        text = f"no rank has made progress for {seconds:.0f} s:\n{told}\n"
        self._run.cell.rewrite(text + "The run goes on: an interrupt or run.stop() ends it", changed=told != self._told)
        self._told, self._seconds = told, seconds

    def _withdraw(self) -> None:
        self._run.cell.rewrite(
            f"the run went on after {self._seconds:.0f} s without progress:\n{self._told}", changed=True
        )
        self._note("", [], self._seconds)
        self._told = ""

    def end(self) -> None:
        """Put the report into the past tense, since the run is over."""
        if self._told and (self._run._stopped or self._run._error is not None):
            text = f"no rank had made progress for {self._seconds:.0f} s:\n{self._told}"
            self._run.cell.rewrite(text, changed=False)
        elif self._told:
            self._withdraw()

    def _note(self, why: str, ranks: list[RankWaits], seconds: float) -> None:
        told: HangData = {"why": why, "ranks": ranks, "seconds": seconds}
        self._run.states.append(Event(time.time(), ranks[0]["rank"] if ranks else 0, HANG, dict(told)))


def _seconds_of(pid: int) -> float:
    """Return the seconds that all threads of a process have computed so far."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
