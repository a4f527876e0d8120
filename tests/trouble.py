"""What can happen to a worker, for tests to call in one."""

import ctypes
import os
import signal
import sys
import time


def fail() -> None:
    raise ValueError("trouble")


def leave() -> None:
    sys.exit(7)


def vanish() -> None:
    os._exit(7)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def hang_in_python() -> None:
    while True:
        time.sleep(0.01)


def hang_in_c() -> None:
    """Lock a lock twice, with the interpreter's own lock held: no Python code of this process runs any more."""
    lock = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def swallow_exceptions() -> None:
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue
