"""One rank: its environment, its process, its output, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dlab.launching.keeper import LOOPBACK
from dlab.processes.between.lifeline import signal_on_parent_death
from dlab.processes.parent.output import LineReader


def rank_environment(rank: int, n: int, port: int) -> dict[str, str]:
    """Return a rank's environment: the launcher's own, and the variables that torch.distributed reads."""
    cores = len(os.sched_getaffinity(0))
    chosen = {"OMP_NUM_THREADS": str(max(1, cores // n)), "GLOO_SOCKET_IFNAME": "lo"}  # unless they are set
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": port}
    ours = {
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the keeper hosts the store instead of rank 0
        "PYTHONUNBUFFERED": "1",
    }
    return {**chosen, **os.environ, **{name: str(value) for name, value in numbers.items()}, **ours}


class RankProcess(LineReader):
    """One rank: a process that leads its own process group, and its output."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], log: Path | None) -> None:
        self.log, self._copy = log, log.open("ab", buffering=0) if log else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, so that lines keep their order
            bufsize=0,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid()),
        )
        assert self.process.stdout is not None
        super().__init__(number, self.process.stdout.fileno())

    def read(self) -> tuple[list[str], bool]:
        """Return the complete lines that have arrived, and whether more can follow. Every byte is logged at once."""
        try:
            data = os.read(self.file, 1 << 20)  # more than a pipe holds
        except BlockingIOError:
            return [], True
        if self._copy:
            self._copy.write(data)
        return (self._feed(self._decode(data)), True) if data else (self.flush(), False)

    def signal(self, number: int) -> None:
        """Signal the rank and all processes it has started. Not after its end: its number may have been reused."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        for file in (self.process.stdout, self._copy):
            if file:
                file.close()


def _die_with(launcher: int) -> None:
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before the request
        os._exit(1)


def describe_end(code: int) -> str:
    """Say how a process ended, from the return code of `Popen`."""
    if code >= 0:
        return f"with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"by signal {-code} ({names.get(-code, 'no name')})"
