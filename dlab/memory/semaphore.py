"""Semaphores in shared memory: who has nothing to do sleeps until somebody rings, and leaves the cores to others."""

from __future__ import annotations

import ctypes
import time

_libc = ctypes.CDLL(None, use_errno=True)


class Moment(ctypes.Structure):
    """A time of the clock, as C has it."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def after(cls, seconds: float) -> Moment:
        """The moment that is so many seconds from now."""
        until = time.time() + seconds
        return cls(int(until), int(until % 1 * 1e9))


class Semaphore:
    """One process's. It is a semaphore of POSIX: a ring that comes before its owner sleeps is not lost.

    Its owner initialises it and waits, anybody posts, all by the functions of libc, which writes and reads it; it is
    safe because these are, and they order what is written before a post as a fence does.
    """

    ROOM = 32  # bytes

    def __init__(self, memory: memoryview) -> None:
        self._memory = (ctypes.c_char * self.ROOM).from_buffer(memory)

    def hang(self) -> None:
        """For its owner, before the first sleep, which ends at once: somebody may have rung already."""
        _libc.sem_init(self._memory, 1, 1)

    def post(self) -> None:
        """Wake its owner. Costs about a microsecond, and a system call only if it sleeps."""
        _libc.sem_post(self._memory)

    def sleep(self, seconds: float) -> bool:
        """For its owner: until somebody rings, or has rung since the last sleep; False if nobody does for so long."""
        if _libc.sem_timedwait(self._memory, ctypes.byref(Moment.after(seconds))):
            return False
        while not _libc.sem_trywait(self._memory):  # once is enough for all who have rung
            pass
        return True
