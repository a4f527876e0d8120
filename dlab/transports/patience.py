"""How to wait for shared memory to change: look a few times, then let others have the core, then sleep.

Who can be woken by a bell sleeps at once after looking.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from dlab.transports.bells import Bell

LOOKS, YIELDS = 100, 200  # turns of each, before sleeping; where ranks outnumber cores, looking keeps others from it
NAP, LONGEST_NAP = 20e-6, 1e-3
ASK = 0.05  # seconds between two questions whether the wait can still end well


class Peers:
    """Who the other ranks are, as far as a wait must know: their processes, in memory that all ranks see."""

    def __init__(self, numbers: memoryview, rank: int) -> None:
        self._pids = numbers
        self._pids[rank] = os.getpid()
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
        return f"which has no use any more: the process of rank {dead[0]} has ended" if dead else None

    def _is_dead(self, rank: int) -> bool:
        pid = self._pids[rank]
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


class Patience:
    """Call it for each turn in vain. It raises when the wait has become hopeless, or longer than `timeout` seconds.

    `whom` gives the other rank, and the complaint to begin the error with.
    """

    def __init__(
        self, peers: Peers, timeout: float, whom: Callable[[], tuple[int, str]], bell: Bell | None = None
    ) -> None:
        self._peers, self._timeout, self._whom, self._bell = peers, timeout, whom, bell
        self.reset()

    def reset(self) -> None:
        """Something has changed: begin again."""
        self._turns, self._deadline, self._ask = 0, 0.0, 0.0

    def __call__(self) -> None:
        self._turns += 1
        if self._turns <= self._peers.looks:
            return
        if self._bell is not None:
            self._deadline = self._deadline or time.monotonic() + self._timeout
            if not self._bell.sleep(ASK):
                self._complain(time.monotonic() > self._deadline)
            return
        if self._turns <= self._peers.looks + YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        if now > self._ask:
            self._ask = now + ASK
            self._complain(now > self._deadline)
        time.sleep(min(NAP * (self._turns - self._peers.looks - YIELDS), LONGEST_NAP))

    def _complain(self, too_long: bool) -> None:
        other, complaint = self._whom()
        if trouble := self._peers.trouble(other):
            raise ConnectionError(f"{complaint}, {trouble}")
        if too_long:
            raise TimeoutError(
                f"{complaint} for {self._timeout:g} s, then its timeout was over: is that rank stuck, or slow?"
            )
