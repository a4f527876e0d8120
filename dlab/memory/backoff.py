"""Wait for shared memory to change: check a few times, then yield the core to others, then sleep.

A process that can be woken by a semaphore sleeps right after the first checks.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from dlab.memory.fence import fence
from dlab.memory.semaphore import Semaphore
from dlab.memory.waits import Wait, name_ranks, tell

LOOKS, YIELDS = 100, 200  # turns of each before sleeping; if ranks outnumber cores, checking would only delay others
NAP, LONGEST_NAP = 20e-6, 1e-3
ASK = 0.05  # seconds between two checks whether the wait can still succeed

Whom = Callable[[], tuple[Sequence[int], str]]  # the ranks waited for, and why: ([1], "to receive from {}")


class Peers:
    """The process ids of all ranks, by which a wait finds out whether a rank is still alive.

    Each rank writes its own id when it is ready, and all ranks read all; it is safe because an id is written in one
    piece, after a fence.
    """

    def __init__(self, numbers: memoryview, rank: int, names: Sequence[int] = ()) -> None:
        self._pids, self.rank = numbers, rank
        self._names = names or range(len(numbers))  # their ranks in the world; a group has its own numbering
        fence()
        self._pids[rank] = os.getpid()
        self.workers: int | None = None  # ranks from this number on are servers; None if there are none
        self.looks = LOOKS if len(numbers) <= len(os.sched_getaffinity(0)) else 1
        self.closed = False
        self.together = False  # whether the death of any rank ends the wait for any other
        self.others: Callable[[], str | None] = lambda: None  # another reason that makes every wait pointless

    def alive(self) -> list[int]:
        """Return the ranks whose processes are alive."""
        return [rank for rank in range(len(self._pids)) if not self._is_dead(rank)]

    def trouble(self, rank: int) -> str | None:
        """Return why a rank will never answer; None if it still may."""
        if self.closed:
            return "when the group was closed"
        if self._is_dead(rank):
            return f"whose process {self._pids[rank]} has ended"
        if lost := self.others():
            return lost
        dead = [other for other in range(len(self._pids)) if self.together and self._is_dead(other)]
        return f"which is now pointless: the process of rank {self.names(dead)[0]} has ended" if dead else None

    def tell(self, since: float, ranks: Sequence[int], what: str) -> None:
        """Announce what this rank waits for, so that the parent can report it."""
        tell(Wait(since, what, self.names(ranks), [self._pids[rank] for rank in ranks]))

    def names(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers of these ranks in the world."""
        return [self._names[rank] for rank in ranks]

    def complaint(self, ranks: Sequence[int], what: str) -> str:
        """Describe a wait for an error message: `rank 0 has waited to receive from rank 1`."""
        names = name_ranks(self.names(ranks), self.workers)
        return f"{name_ranks(self.names([self.rank]), self.workers)} has waited {what.replace('{}', names)}"

    def _is_dead(self, rank: int) -> bool:
        pid = self._pids[rank]
        fence()
        return bool(pid) and _has_ended(pid)


def _has_ended(pid: int) -> bool:
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()  # select.select() takes only the first 1,024 files of a process
        ended.register(file, select.POLLIN)
        return bool(ended.poll(0))  # readable once it has ended, even as a zombie
    finally:
        os.close(file)


class Backoff:
    """Call it after each unsuccessful check; it waits longer each time.

    It raises ConnectionError when the wait can no longer succeed, and TimeoutError after `timeout` seconds. `whom`
    returns the ranks that it waits for, and why; a long wait announces this from time to time.
    """

    def __init__(self, peers: Peers, timeout: float, whom: Whom, semaphore: Semaphore | None = None) -> None:
        self._peers, self._timeout, self._whom, self._semaphore = peers, timeout, whom, semaphore
        self.reset()

    def reset(self) -> None:
        """Start again with short waits, after something has changed."""
        self._turns, self._since, self._ask = 0, 0.0, 0.0

    def __call__(self) -> None:
        self._turns += 1
        if self._turns <= self._peers.looks:
            return
        if self._semaphore is not None:
            self._since = self._since or time.monotonic()
            if not self._semaphore.sleep(ASK):
                self._complain(time.monotonic())
            return
        if self._turns <= self._peers.looks + YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        self._since = self._since or now
        if now > self._ask:
            self._ask = now + ASK
            self._complain(now)
        time.sleep(min(NAP * (self._turns - self._peers.looks - YIELDS), LONGEST_NAP))

    def _complain(self, now: float) -> None:
        others, what = self._whom()
        if what and now > self._since:  # not if it has only just begun
            self._peers.tell(self._since, others, what)
        for other in others or [self._peers.rank]:
            if trouble := self._peers.trouble(other):
                raise ConnectionError(f"{self._peers.complaint([other], what)}, {trouble}")
        if now > self._since + self._timeout:
            raise TimeoutError(
                f"{self._peers.complaint(others, what)} for {self._timeout:g} s, until its timeout expired: "
                f"{'is that rank' if len(others) < 2 else 'are these ranks'} stuck, or slow?"
            )
