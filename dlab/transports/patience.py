"""How to wait for shared memory to change: look a few times, then let others have the core, then sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LOOKS, YIELDS = 100, 200  # turns of each, before sleeping
NAP, LONGEST_NAP = 20e-6, 1e-3


class Patience:
    """Call it for each turn in vain; after `timeout` seconds it raises TimeoutError with the complaint."""

    def __init__(self, timeout: float, complaint: Callable[[], str]) -> None:
        self._timeout, self._complaint = timeout, complaint
        self.reset()

    def reset(self) -> None:
        """Something has changed: begin again."""
        self._turns, self._deadline = 0, 0.0

    def __call__(self) -> None:
        self._turns += 1
        if self._turns <= LOOKS:
            return
        if self._turns <= LOOKS + YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        if now > self._deadline:
            raise TimeoutError(f"{self._complaint()} for {self._timeout:g} s: is that rank stuck, or only slow?")
        time.sleep(min(NAP * (self._turns - LOOKS - YIELDS), LONGEST_NAP))
