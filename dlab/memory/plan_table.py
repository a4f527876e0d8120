"""A barrier in shared memory at which ranks also check that they are about to do the same thing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from dlab.memory.backoff import YIELDS, Backoff, Peers
from dlab.memory.fence import WEAK, fence
from dlab.memory.mapping import LINE, pages

Plan = tuple[int, ...]  # what a rank is about to do, in at most seven numbers
_NUMBERS = LINE // 8  # in a cache line
_MASK = (1 << 32) - 1


class PlanTable:
    """A line of numbers per rank: how many barriers it has reached, and with which plan.

    Each rank writes its own line, all ranks read all lines; it is safe because a rank writes its count last, after a
    fence, and no rank writes a new plan before all have passed the barrier before.

    `name(plan)` describes a plan in words; `compare(mine, plan, theirs, other)` says how the plans of two ranks differ.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        members: Sequence[int],
        timeout: float,
        name: Callable[[Plan], str],
        compare: Callable[[int, Plan, int, Plan], str],
    ) -> None:
        size = len(members)
        self.rank, self.size, self.timeout, self._name, self._compare = rank, size, timeout, name, compare
        self._lines = memory[: LINE * size].cast("Q")
        self.peers = Peers(memory[LINE * size :][: 8 * size].cast("Q"), rank, members)
        self._mine, self._others = rank * _NUMBERS, [other * _NUMBERS for other in range(size) if other != rank]
        self._count = 0
        self._plan: Plan = ()
        self._digest = 0

    @staticmethod
    def room(size: int) -> int:
        """Return the bytes that it takes: a line and a process id for each rank."""
        return pages((LINE + 8) * size)

    def meet(self, plan: Plan = ()) -> None:
        """Wait for all ranks, which must have the same plan; raises ValueError naming a rank whose plan differs.

        One number holds the count in its upper half and a digest of the plan in its lower half, so one read gets both.
        """
        lines, mine = self._lines, self._mine
        if plan and plan is not self._plan:
            for place, number in enumerate(plan, mine + 1):
                lines[place] = number
            self._plan, self._digest = plan, hash(plan) & _MASK  # the hash of numbers is the same in every process
        self._count += 1 << 32
        token = self._count | self._digest if plan else self._count
        if WEAK:
            fence()
        lines[mine] = token
        for line in self._others:
            if lines[line] != token:
                self._wait_for(line, token)
        if WEAK:
            fence()

    def _wait_for(self, line: int, token: int) -> None:
        lines, count, looks, yields = self._lines, self._count, self.peers.looks, YIELDS
        while lines[line] < count:  # the first stages of Backoff, without its cost
            if looks:
                looks -= 1
            elif yields:
                yields -= 1
                os.sched_yield()
            else:
                self._sleep_until(line, count)
        theirs = lines[line]
        if theirs >> 32 == count >> 32 and theirs != token:  # otherwise it is further on, so it has agreed
            self._disagree(line)

    def _sleep_until(self, line: int, count: int) -> None:
        what = f"for {{}} in {self._name(self._plan)}" if self._plan else "for {} at a barrier"
        wait = Backoff(self.peers, self.timeout, lambda: (self._missing(count), what))
        while self._lines[line] < count:
            wait()

    def _missing(self, count: int) -> list[int]:
        return [line // _NUMBERS for line in self._others if self._lines[line] < count]

    def _disagree(self, line: int) -> None:
        fence()
        mine, theirs = self.peers.names([self.rank, line // _NUMBERS])
        other = tuple(self._lines[line + 1 : line + 1 + len(self._plan)])
        raise ValueError(self._compare(mine, self._plan, theirs, other))
