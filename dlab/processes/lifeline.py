"""Nothing outlives its parent: the kernel's signal on the parent's death, and a watchdog thread besides."""

from __future__ import annotations

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
