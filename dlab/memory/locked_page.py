"""What workers that update weights themselves, one at a time, keep beside the weights."""

from __future__ import annotations

from dlab.memory.counters import Counters
from dlab.memory.lock import Lock
from dlab.memory.mapping import LINE, pages


class LockedPage:
    """A lock, the numbers that it guards, a table of `Versions`, and a clock for each worker.

    Every worker writes and reads the numbers and the table; it is safe because it holds the lock, which is a fence,
    too. A clock is written by its own worker only, and needs no lock.
    """

    def __init__(self, memory: memoryview, workers: int) -> None:
        self.lock, memory = Lock(memory), memory[Lock.ROOM :]
        # updates, the optimizer's steps, the last clock at which all met, and who was there
        self._numbers, memory = memory[:LINE].cast("Q"), memory[LINE:]
        self.clocks, memory = Counters(memory, workers), memory[Counters.room(workers) :]
        self.table = memory[: 8 * (1 + workers)].cast("Q")

    @staticmethod
    def room(workers: int) -> int:
        """The bytes that it takes."""
        return pages(Lock.ROOM + LINE + Counters.room(workers) + 8 * (1 + workers))

    @property
    def version(self) -> int:
        """How many updates there were."""
        return self._numbers[0]

    @property
    def steps(self) -> int:
        """How many steps the optimizer remembers."""
        return self._numbers[1]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._numbers[1] = steps

    def count_update(self) -> None:
        """One more update, which is one more step."""
        self._numbers[0] += 1
        self._numbers[1] += 1

    def meet(self, clock: int, present: int) -> int:
        """Who was there at this clock, a bit for each: what the first has said who asks is what all get."""
        if self._numbers[2] != clock:
            self._numbers[2], self._numbers[3] = clock, present
        return self._numbers[3]
