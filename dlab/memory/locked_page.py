"""The bookkeeping of workers that update shared weights themselves, one at a time."""

from __future__ import annotations

from dlab.memory.counters import Counters
from dlab.memory.lock import Lock
from dlab.memory.mapping import LINE, pages


class LockedPage:
    """A lock, the numbers that it guards, a table of `Versions`, and a clock for each worker.

    Every worker writes and reads the numbers and the table; it is safe because it holds the lock, which is also a
    fence. A clock is written only by its own worker, and needs no lock.
    """

    def __init__(self, memory: memoryview, workers: int) -> None:
        self.lock, memory = Lock(memory), memory[Lock.ROOM :]
        # updates, the optimizer's steps, the clock of the last rendezvous, and who was present
        self._numbers, memory = memory[:LINE].cast("Q"), memory[LINE:]
        self.clocks, memory = Counters(memory, workers), memory[Counters.room(workers) :]
        self.table = memory[: 8 * (1 + workers)].cast("Q")

    @staticmethod
    def room(workers: int) -> int:
        """Return the bytes that it takes for so many workers."""
        return pages(Lock.ROOM + LINE + Counters.room(workers) + 8 * (1 + workers))

    @property
    def version(self) -> int:
        """The number of updates so far."""
        return self._numbers[0]

    @property
    def steps(self) -> int:
        """The number of steps in the optimizer's state."""
        return self._numbers[1]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._numbers[1] = steps

    def count_update(self) -> None:
        """Count one more update, which is also one more step."""
        self._numbers[0] += 1
        self._numbers[1] += 1

    def meet(self, clock: int, present: int) -> int:
        """Return who was present at this clock, a bit for each worker; all get the answer of the first caller."""
        if self._numbers[2] != clock:
            self._numbers[2], self._numbers[3] = clock, present
        return self._numbers[3]
