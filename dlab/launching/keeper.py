"""A small process beside the ranks that hosts the store for their rendezvous and outlives the launcher.

The store listens on a port that only this machine can reach; a store in rank 0 would listen on all interfaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from dlab.launching.logs import SchedulerLog

LOOPBACK = "127.0.0.1"


def start_keeper(listening: socket.socket, scheduler_log: SchedulerLog) -> subprocess.Popen[bytes]:
    """Start the keeper with the listening socket itself, so that no other process can take the port in between."""
    number, port = listening.fileno(), listening.getsockname()[1]
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(number), str(port), str(scheduler_log.path or "")],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=[number],
        cwd=Path(__file__).resolve().parents[2],  # Python looks for modules here first, not among the user's
        start_new_session=True,  # so that Ctrl-C reaches only the launcher
    )


def keep(listening: int, port: int, scheduler_log: SchedulerLog) -> None:
    """Host the store until the keeper is killed or the launcher is gone; the main function of the keeper."""
    threading.Thread(target=outlive, args=(scheduler_log,), daemon=True).start()  # before torch, whose import is slow

    from torch.distributed import TCPStore

    # The store serves as long as a reference to it exists.
    _store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    threading.Event().wait()


def outlive(scheduler_log: SchedulerLog) -> None:
    """Read from the launcher which processes start (+pid) and end (-pid); when the pipe closes, kill those left."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line))
        else:
            groups.discard(-int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the folder may be gone
        scheduler_log.write("the launcher was killed, and all ranks with it")
    os._exit(0)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), SchedulerLog(Path(sys.argv[3]).parent if sys.argv[3] else None))
