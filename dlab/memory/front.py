"""What processes that share memory know of each other: their numbers, their semaphores, and whether all is over."""

from __future__ import annotations

from dlab.memory.fence import fence
from dlab.memory.semaphore import Semaphore


class Front:
    """The first pages of memory that workers share with servers, or with each other.

    Each process writes its own number and initialises its own semaphore; anybody reads numbers, posts to semaphores,
    and writes that all is over, once. It is safe because each number is written in one piece, and never taken back.
    """

    ROOM = 1 << 16
    _SEMAPHORES = 1 << 14  # where they begin

    def __init__(self, memory: memoryview, processes: int) -> None:
        self.numbers = memory[: 8 * processes].cast("Q")
        begins = range(self._SEMAPHORES, self._SEMAPHORES + processes * Semaphore.ROOM, Semaphore.ROOM)
        self.semaphores = [Semaphore(memory[begin : begin + Semaphore.ROOM]) for begin in begins]
        self._over = memory[self.ROOM - 8 : self.ROOM].cast("Q")

    @property
    def over(self) -> bool:
        """Is no worker left to be served?"""
        over = bool(self._over[0])
        fence()
        return over

    def end(self) -> None:
        """Let the servers return."""
        if not self.over:
            fence()
            self._over[0] = 1
            for semaphore in self.semaphores:
                semaphore.post()
