"""Counters that only grow, by which ranks tell each other how far they have got."""

from __future__ import annotations

from dlab.memory.fence import fence
from dlab.memory.mapping import lines


class Counters:
    """`each` counters for each rank.

    Each rank writes its own, all ranks read all; it is safe because a counter is written in one piece, after a fence
    that follows the data that it announces.
    """

    def __init__(self, memory: memoryview, ranks: int, each: int = 1) -> None:
        self._numbers = memory[: self.room(ranks, each)].cast("Q")
        self._begins = range(0, len(self._numbers), lines(8 * each) // 8)

    @staticmethod
    def room(ranks: int, each: int = 1) -> int:
        """Return the bytes that they take; each rank's counters have their own cache lines."""
        return ranks * lines(8 * each)

    def announce(self, rank: int, number: int, place: int = 0) -> None:
        """For this rank: announce that its work up to this number can be read."""
        fence()
        self._numbers[self._begins[rank] + place] = number

    def behind(self, number: int, place: int = 0) -> list[int]:
        """Return the ranks that have not announced this number yet; what the others have announced can be read."""
        numbers = self._numbers
        ranks = [rank for rank, begin in enumerate(self._begins) if numbers[begin + place] < number]
        fence()
        return ranks
