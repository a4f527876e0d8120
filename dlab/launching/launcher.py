"""One loop that waits for all events at once: the output of the ranks, their ends, and signals to the launcher."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from dlab.launching.keeper import LOOPBACK, start_keeper
from dlab.launching.logs import SchedulerLog, open_logs
from dlab.launching.rank import RankProcess, describe_end, rank_environment

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL


class Outcome(NamedTuple):
    """The end of a launch: the exit code for the shell, and a sentence with the reason if one is needed."""

    code: int
    sentence: str


def python_command(script: str | None, module: str | None, arguments: Sequence[str]) -> list[str]:
    """Return the command of every rank, as in `python_command("train.py", None, ["--lr", "0.1"])`."""
    if module is not None:
        package = module.split(".")[0]  # only the top level: looking inside the package would import it
        if not (importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
            raise ValueError(f"there is no module {module}")
        return [sys.executable, "-m", module, *arguments]
    if script is None or not Path(script).is_file():
        raise ValueError(f"there is no script {script}")
    return [sys.executable, script, *arguments]


def launch(command: Sequence[str], n: int, logs: Path | None = None) -> Outcome:
    """Run a command n times as the ranks of one group, until all have ended or one has failed.

    The environment of each rank has its number and the rendezvous address, as `init_process_group("gloo")` reads them.
    Its output appears line by line as `[rank] …`; with `logs` it is also written to `worker_<rank>.log`, and the course
    of events to `scheduler.log`. Processes that a rank has started end with it. Must be called in the main thread.
    """
    if n < 1:
        raise ValueError(f"{n} ranks cannot be started: it takes at least one")
    files = open_logs(logs, n) if logs else [None] * n
    with signals_as_bytes() as signals, contextlib.closing(Launcher(SchedulerLog(logs), signals)) as launcher:
        return launcher.run(command, files)


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Turn Ctrl-C, `kill` and a closed terminal into bytes on a socket, which wake the loop without interrupting it."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # ignored by nohup
    handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
    former = signal.set_wakeup_fd(writing.fileno())
    try:
        with reading, writing:
            yield reading
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Launcher:
    """Starts the ranks, shows their output, and makes sure that all end together."""

    def __init__(self, scheduler_log: SchedulerLog, signals: socket.socket) -> None:
        self._scheduler_log, self._signals = scheduler_log, signals
        self._keeper: subprocess.Popen[bytes] | None = None
        self._living: list[RankProcess] = []
        self._done: list[int] = []  # the ranks that ended with exit code 0
        self._outcome: Outcome | None = None  # set as soon as something is wrong
        self._deadline: float | None = None  # for ranks that were asked to end
        self._selector = selectors.EpollSelector()  # reports events in the order in which they happened
        self._watched: list[int] = []
        self._terminal, self._output_closed = sys.stdout.fileno(), False
        dull = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
        self._prefix = "[{0}] " if dull or not os.isatty(self._terminal) else "\x1b[3{1}m[{0}]\x1b[0m "

    def run(self, command: Sequence[str], logs: Sequence[Path | None]) -> Outcome:
        """Start one rank for each of the logs, and wait until all have ended."""
        start = time.monotonic()
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        with socket.create_server((LOOPBACK, 0), backlog=4096) as listening:
            port = listening.getsockname()[1]
            self._keeper = start_keeper(listening, self._scheduler_log)
        self._watch(self._keeper, self._on_keeper_end)
        store = f"the store on {LOOPBACK}:{port} has pid {self._keeper.pid}"
        self._scheduler_log.write(f"{len(logs)} ranks in {os.getcwd()}: the launcher has pid {os.getpid()}, {store}")
        for number, log in enumerate(logs):
            rank = RankProcess(number, command, rank_environment(number, len(logs), port), log)
            self._living.append(rank)
            self._notify_keeper(f"+{rank.process.pid}")
            self._watch(rank.process, partial(self._on_end, rank))
            self._selector.register(rank.file, selectors.EVENT_READ, partial(self._on_output, rank))
            self._scheduler_log.write(f"rank {number} started with pid {rank.process.pid}: {shlex.join(command)}")
        while self._living:
            self._wait()
        outcome = self._outcome or Outcome(0, "")
        self._scheduler_log.write(f"all ended after {time.monotonic() - start:.2f} s, exit code {outcome.code}")
        return outcome

    def close(self) -> None:
        """Kill all processes that are left."""
        for rank in self._living:
            rank.signal(signal.SIGKILL)
        for rank in self._living:
            rank.process.wait()
            rank.close()
        if self._keeper:
            self._keeper.kill()
            self._keeper.communicate()
        for file in self._watched:
            os.close(file)
        self._selector.close()

    def _watch(self, process: subprocess.Popen[bytes], react: Callable[[int], None]) -> None:
        file = os.pidfd_open(process.pid)
        self._watched.append(file)
        self._selector.register(file, selectors.EVENT_READ, partial(react, file))

    def _notify_keeper(self, text: str) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end will be reported
            self._keeper.stdin.write(f"{text}\n".encode())

    def _wait(self) -> None:
        backoff = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(backoff):
            key.data()
        if self._living and self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._scheduler_log.write(
                f"SIGKILL to {name_ranks([rank.rank for rank in self._living])}: still running after SIGTERM"
            )
            for rank in self._living:
                rank.signal(signal.SIGKILL)

    def _on_output(self, rank: RankProcess) -> None:
        if rank in self._living:  # its end may have been the previous event
            lines, goes_on = rank.read()
            self._show(rank, lines)
            if not goes_on:
                self._selector.unregister(rank.file)

    def _on_end(self, rank: RankProcess, file: int) -> None:
        self._selector.unregister(file)
        rank.signal(signal.SIGKILL)  # kills the processes that it has left behind
        self._notify_keeper(f"-{rank.process.pid}")
        how = describe_end(code := rank.process.wait())
        self._living.remove(rank)
        self._show(rank, rank.read()[0] + rank.flush())
        with contextlib.suppress(KeyError):  # it had closed its output already
            self._selector.unregister(rank.file)
        rank.close()
        self._scheduler_log.write(f"rank {rank.rank} ended {how}")
        if code == 0:
            self._done.append(rank.rank)
        elif self._outcome is None:
            before = f" ({name_ranks(self._done)} had ended before with exit code 0)" if self._done else ""
            where = f"its output is in {rank.log}" if rank.log else f"its output is above, behind [{rank.rank}]"
            reason = f"rank {rank.rank} ended {how}{before}"
            self._stop(Outcome(code if code > 0 else 128 - code, f"{reason}; {where}"), reason)

    def _on_keeper_end(self, file: int) -> None:
        self._selector.unregister(file)
        assert self._keeper is not None
        reason = f"the process that hosts the ranks' store ended {describe_end(self._keeper.wait())}"
        if self._outcome is None:
            self._stop(Outcome(1, reason), reason)

    def _on_signal(self) -> None:
        for number in self._signals.recv(64):
            if self._outcome is not None:
                self._deadline = time.monotonic()  # asked a second time: kill at once
            else:
                name = signal.Signals(number).name
                sentence = "" if number == signal.SIGINT else f"{name} ended all ranks"  # Ctrl-C needs no explanation
                self._stop(Outcome(128 + number, sentence), f"{name} came")

    def _stop(self, outcome: Outcome, reason: str) -> None:
        self._outcome, self._deadline = outcome, time.monotonic() + GRACE_SECONDS
        self._scheduler_log.write(f"SIGTERM to all: {reason}")
        for rank in self._living:
            rank.signal(signal.SIGTERM)

    def _show(self, rank: RankProcess, lines: list[str]) -> None:
        prefix = self._prefix.format(rank.rank, 1 + rank.rank % 6)
        data = "".join(f"{prefix}{line}\n" for line in lines).encode(errors="replace")
        while data and not self._output_closed:
            _, writable, _ = select.select([self._signals], [self._terminal], [], 1.0 if self._outcome else None)
            if not writable:
                self._output_closed = self._outcome is not None  # the ranks are ending, and nobody reads
                return
            try:
                data = data[os.write(self._terminal, data[: select.PIPE_BUF]) :]
            except BrokenPipeError:
                if self._outcome is None:
                    self._stop(Outcome(128 + signal.SIGPIPE, ""), "the output has no reader any more")
                return


def name_ranks(numbers: Sequence[int]) -> str:
    """Name ranks in words: rank 2, or ranks 0, 1 and 3."""
    *first, last = map(str, sorted(numbers))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
