"""End workers when their parent dies, by a signal of the system and by a watchdog thread; and signal live workers.

A directory can be removed while processes that use it are still alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: int) -> None:
    """Ask the system to send this process a signal as soon as the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the thread that runs the function, if the process is still alive.

    A signal to the process may reach any of its threads, and does so just after a pause: then the function would not
    be interrupted.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc has it since 2.30
        libc.tgkill(pid, pid, number)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def state_of(pid: int) -> str:
    """Return the main thread's state as in /proc: R runs, S sleeps, D waits for a device, T is stopped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def wake(pid: int) -> bool:
    """Let a process that was stopped by a signal continue; False if it was not stopped."""
    stopped = state_of(pid) == "T"
    if stopped:
        signal_main_thread(pid, signal.SIGCONT)
    return stopped


def die_with_parent() -> None:
    """For a worker: end at once when the fork server or the notebook's kernel dies.

    The signal works even if the worker is stopped or stuck in C; the thread notices the kernel's death when the fork
    server between them does not.
    """
    server = os.getppid()
    signal_on_parent_death(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if server == 1 or parent is None:  # it died before the call
        os._exit(1)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="dlab-lifeline", daemon=True).start()


def remove_directory(path: Path) -> None:
    """Remove a directory in which processes that are still alive may create files.

    It is renamed first, so that they no longer find it: torch's store opens its file every few milliseconds while it
    waits, and creates it if it is gone, which would keep the directory from being removed.
    """
    with contextlib.suppress(OSError):  # another process is removing it
        shutil.rmtree(path.rename(path.with_name(f"{path.name}-removed")), ignore_errors=True)
