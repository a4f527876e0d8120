"""Semaphores in shared memory: a process with nothing to do sleeps until another wakes it, and frees its core."""

from __future__ import annotations

import ctypes
import time

_libc = ctypes.CDLL(None, use_errno=True)


class Moment(ctypes.Structure):
    """A point in time as C's `timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def after(cls, seconds: float) -> Moment:
        """Return the point in time so many seconds from now."""
        until = time.time() + seconds
        return cls(int(until), int(until % 1 * 1e9))


class Semaphore:
    """A POSIX semaphore on which one process, its owner, sleeps; a post before the owner sleeps is not lost.

    Its owner initialises it and waits, any process posts, all by the functions of libc, which writes and reads it; it
    is safe because these are, and they order what is written before a post as a fence does.
    """

    ROOM = 32  # bytes

    def __init__(self, memory: memoryview) -> None:
        self._memory = (ctypes.c_char * self.ROOM).from_buffer(memory)

    def hang(self) -> None:
        """For its owner: initialise it; the first sleep ends at once, in case another process has posted already."""
        _libc.sem_init(self._memory, 1, 1)

    def post(self) -> None:
        """Wake its owner. Costs about a microsecond, with a system call only if the owner sleeps."""
        _libc.sem_post(self._memory)

    def sleep(self, seconds: float) -> bool:
        """For its owner: sleep until a post, or not at all if there was one since; False after so many seconds."""
        if _libc.sem_timedwait(self._memory, ctypes.byref(Moment.after(seconds))):
            return False
        while not _libc.sem_trywait(self._memory):  # one wake-up is enough for all posts
            pass
        return True
