"""Nothing outlives its parent: the kernel's signal on the parent's death, and a watchdog thread besides; nor does a
directory. And how to signal a worker while it lives."""

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
    """Ask the system to send us this signal as soon as the thread that started us is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the thread that runs the function, if the process is still there.

    One to the process may go to any of its threads, and does when it has just been woken from a pause: then the
    function would sleep on.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc has it since 2.30
        libc.tgkill(pid, pid, number)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def state_of(pid: int) -> str:
    """The state of its main thread, as the system calls it: R runs, S sleeps, D waits for a device, T is stopped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def wake(pid: int) -> bool:
    """Let a process that a signal has stopped go on; False if it was not stopped."""
    stopped = state_of(pid) == "T"
    if stopped:
        signal_main_thread(pid, signal.SIGCONT)
    return stopped


def die_with_parent() -> None:
    """For a worker: go at once when the fork server dies or when the notebook's kernel does.

    The signal works even if we are stopped or stuck in C; the thread notices the kernel's death when the fork
    server, which stands between, does not.
    """
    server = os.getppid()
    signal_on_parent_death(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if server == 1 or parent is None:  # it died before we asked
        os._exit(1)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="dlab-lifeline", daemon=True).start()


def remove_directory(path: Path) -> None:
    """Remove a directory in which processes that still live may create files.

    It is renamed first, so that they no longer find it: torch's store opens its file every few milliseconds while it
    waits, and creates it if it is gone, which would keep the directory from being removed.
    """
    with contextlib.suppress(OSError):  # somebody else removes it
        shutil.rmtree(path.rename(path.with_name(f"{path.name}-removed")), ignore_errors=True)
