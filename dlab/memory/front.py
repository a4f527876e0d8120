"""What processes that share memory know of each other: process ids, semaphores, and whether the run is over."""

from __future__ import annotations

from dlab.memory.fence import fence
from dlab.memory.semaphore import Semaphore


class Front:
    """The first pages of memory that workers share with servers, or with each other.

    Each process writes its own id and initialises its own semaphore; any process reads the ids, posts to semaphores,
    and sets the flag that the run is over. It is safe because each number is written in one piece and never reset.
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
        """Whether no worker is left to be served."""
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
