"""How to wait for shared memory to change: look a few times, then let others have the core, then sleep.

Who can be woken by a semaphore sleeps at once after looking.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from dlab.memory.fence import fence
from dlab.memory.semaphore import Semaphore
from dlab.memory.waits import Wait, name_ranks, tell

LOOKS, YIELDS = 100, 200  # turns of each, before sleeping; where ranks outnumber cores, looking keeps others from it
NAP, LONGEST_NAP = 20e-6, 1e-3
ASK = 0.05  # seconds between two questions whether the wait can still end well

Whom = Callable[[], tuple[Sequence[int], str]]  # whom a wait is for, and what: ([1], "to receive from {}")


class Peers:
    """Who the other ranks are, as far as a wait must know: the numbers of their processes.

    Each rank writes its own number when it is ready, all ranks read all; it is safe because a number is written in one
    piece, after a fence.
    """

    def __init__(self, numbers: memoryview, rank: int, names: Sequence[int] = ()) -> None:
        self._pids, self.rank = numbers, rank
        self._names = names or range(len(numbers))  # by which others know these ranks: a group has numbers of its own
        fence()
        self._pids[rank] = os.getpid()
        self.workers: int | None = None  # those after so many are servers; None: there are none
        self.looks = LOOKS if len(numbers) <= len(os.sched_getaffinity(0)) else 1
        self.closed = False
        self.together = False  # does the death of any rank end the wait for any other?
        self.others: Callable[[], str | None] = lambda: None  # why no wait has any use, for reasons of others

    def alive(self) -> list[int]:
        """The ranks whose processes live."""
        return [rank for rank in range(len(self._pids)) if not self._is_dead(rank)]

    def trouble(self, rank: int) -> str | None:
        """Why a rank will never answer; None if it still may."""
        if self.closed:
            return "when the group was closed"
        if self._is_dead(rank):
            return f"whose process {self._pids[rank]} has ended"
        if lost := self.others():
            return lost
        dead = [other for other in range(len(self._pids)) if self.together and self._is_dead(other)]
        return f"which has no use any more: the process of rank {self.names(dead)[0]} has ended" if dead else None

    def tell(self, since: float, ranks: Sequence[int], what: str) -> None:
        """Say what this rank waits for, to whoever looks after it."""
        tell(Wait(since, what, self.names(ranks), [self._pids[rank] for rank in ranks]))

    def names(self, ranks: Sequence[int]) -> list[int]:
        """Ranks as the world numbers them."""
        return [self._names[rank] for rank in ranks]

    def complaint(self, ranks: Sequence[int], what: str) -> str:
        """`rank 0 has waited to receive from rank 1`."""
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
        return bool(select.select([file], [], [], 0)[0])  # readable when it has ended, also before it is buried
    finally:
        os.close(file)


class Backoff:
    """Call it for each turn in vain. It raises when the wait has become hopeless, or longer than `timeout` seconds.

    `whom` gives the ranks that it waits for, and what for; one that lasts tells it now and then.
    """

    def __init__(self, peers: Peers, timeout: float, whom: Whom, semaphore: Semaphore | None = None) -> None:
        self._peers, self._timeout, self._whom, self._semaphore = peers, timeout, whom, semaphore
        self.reset()

    def reset(self) -> None:
        """Something has changed: begin again."""
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
        if what and now > self._since:  # not when it has just begun
            self._peers.tell(self._since, others, what)
        for other in others or [self._peers.rank]:
            if trouble := self._peers.trouble(other):
                raise ConnectionError(f"{self._peers.complaint([other], what)}, {trouble}")
        if now > self._since + self._timeout:
            raise TimeoutError(
                f"{self._peers.complaint(others, what)} for {self._timeout:g} s, then its timeout was over: "
                f"{'is that rank' if len(others) < 2 else 'are these ranks'} stuck, or slow?"
            )
