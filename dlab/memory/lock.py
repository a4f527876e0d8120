"""A lock in shared memory, which is released if the process that holds it dies."""

from __future__ import annotations

import ctypes
import errno
import time

from dlab.memory.semaphore import Moment
from dlab.memory.waits import Wait, tell

_libc = ctypes.CDLL(None)
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_LOOK = 0.05  # seconds between two checks whether this process was asked to end


class Lock:
    """A robust POSIX mutex.

    Every process writes and reads it, but only by the functions of libc; it is safe because these are, and they order
    what is written under the lock as a fence does.
    """

    ROOM = 64  # bytes

    def __init__(self, memory: memoryview) -> None:
        self._memory = (ctypes.c_char * self.ROOM).from_buffer(memory)

    def make(self) -> None:
        """Initialise the lock; one process does so before any other uses it."""
        attributes = ctypes.create_string_buffer(64)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(self._memory, attributes)

    def __enter__(self) -> None:
        since = 0.0
        while True:
            got = _libc.pthread_mutex_timedlock(self._memory, ctypes.byref(Moment.after(_LOOK)))
            if got == errno.EOWNERDEAD:
                _libc.pthread_mutex_consistent(self._memory)
            elif got == errno.ETIMEDOUT:
                since = since or time.monotonic()
                tell(Wait(since, "for a lock that another rank holds", [], []))
                continue
            elif got:
                raise OSError(got, "a lock in shared memory could not be acquired")
            return

    def __exit__(self, *_: object) -> None:
        _libc.pthread_mutex_unlock(self._memory)
