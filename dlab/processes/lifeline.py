"""Nothing outlives its parent: the kernel's signal on the parent's death, and a watchdog thread besides. And how to
signal a worker while it lives."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

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
