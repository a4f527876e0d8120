"""How a worker's failure is shown in the cell: the rank, and the worker's own traceback into the cell's code."""

from __future__ import annotations

import dis
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from dlab.memory.waits import name_ranks
from dlab.processes.parent.forkserver import SERVER_DIED

_PROCESSES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DLAB = os.path.dirname(_PROCESSES) + os.sep
LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_RAISE = dis.opmap["RAISE_VARARGS"]
_LATE = re.compile(r"timed out waiting|timeout waiting|wait timeout", re.IGNORECASE)  # the words of gloo and its stores
_OURS = _PROCESSES + os.sep


class Stopped(KeyboardInterrupt):
    """The run was stopped.

    It is raised in a worker's function, which may catch it to return its result so far, and by `run.wait()`.
    """


@dataclass
class Report:
    """A worker's description of the exception that ended its function, as plain data, so that it can always be sent."""

    time: float
    kind: str
    message: str
    chain: list[tuple[list[tuple[str, int, str]], str]] = field(default_factory=list)
    connection: bool = False
    late: bool = False  # whether it waited for another rank until a timeout

    @classmethod
    def of(cls, problem: BaseException) -> Report:
        """Describe an exception; frames are sent as file and line, since only the parent has the source of the cells.

        If there are frames of the user's own code, only these are sent: those of dlab and torch add nothing to the
        error.
        """
        moment = time.monotonic()
        chain: list[tuple[list[tuple[str, int, str]], str]] = []
        link: BaseException | None = problem
        while link is not None and len(chain) < 5:
            stack = [(at.filename, at.lineno or 0, at.name) for at in traceback.extract_tb(link.__traceback__)]
            readers = [frame for frame in stack if is_readers(frame[0])]
            if not readers and not is_refusal(link.__traceback__):
                readers = [frame for frame in stack if not frame[0].startswith(_OURS)]  # a bug in dlab: send everything
            chain.append((readers, _last_line(link)))
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        return cls(
            moment, type(problem).__name__, _last_line(problem), chain, _is_connection(problem), _is_late(problem)
        )

    def traceback(self) -> str:
        """Return the worker's traceback, with the lines of the cell's code."""
        texts = []
        for frames, last in reversed(self.chain):
            if frames:
                summary = [traceback.FrameSummary(*frame) for frame in frames]  # reads the line from the parent's cache
                texts.append("".join(["Traceback (most recent call last):\n", *traceback.format_list(summary), last]))
        return "\n\nthen, while that was handled:\n\n".join(texts)


def is_refusal(trace: TracebackType | None) -> bool:
    """Return whether an error comes from a `raise` in dlab, whose message explains it without dlab's own frames."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return code.co_filename.startswith(DLAB) and code.co_code[trace.tb_lasti] == _RAISE


def is_readers(file: str) -> bool:
    """Return whether a file or cell is the user's own code; code that `dataclass` generates is in `<string>`."""
    return not file.startswith((DLAB, *LIBRARIES, "<frozen", "<string>"))


def _last_line(problem: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(type(problem), problem)).strip()
    except Exception:  # an exception whose own __str__ fails must still be reported
        return type(problem).__name__


def _is_connection(problem: BaseException) -> bool:
    """Return whether this rank failed only because it lost the connection to another one."""
    if isinstance(problem, ConnectionError):  # raised by dlab's own transports
        return True
    text = _last_line(problem)
    return isinstance(problem, RuntimeError) and any(
        sign in text for sign in ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL")
    )


def _is_late(problem: BaseException) -> bool:
    """Return whether a wait of dlab's own, or of torch.distributed's, has timed out."""
    if isinstance(problem, TimeoutError):
        return is_refusal(problem.__traceback__)
    return isinstance(problem, RuntimeError | ConnectionError) and bool(_LATE.search(_last_line(problem)))


class WorkerError(RuntimeError):
    """A worker failed: `.rank` is its rank, `.traceback` its own traceback, `.ranks` all that failed the same way.

    If ranks failed because they waited too long for another, that one comes first.
    """

    def __init__(self, message: str, ranks: Sequence[int], traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{traceback}" if traceback else message)
        self.ranks, self.traceback = list(ranks), traceback

    @property
    def rank(self) -> int:
        """The rank that failed first, or that the others waited for."""
        return self.ranks[0]

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.ranks, self.traceback)

    def _render_traceback_(self) -> list[str]:
        """Show only the worker's side in IPython; dlab's own frames would not help the user."""
        return [f"{type(self).__name__}: {self}"]


class WorkerTimeout(WorkerError, TimeoutError):
    """Some ranks did not finish in time: `.ranks` names them, the likely culprit first."""


def _rebuild(kind: type[WorkerError], text: str, ranks: list[int], trace: str) -> WorkerError:
    error = kind("", ranks, trace)
    error.args = (text,)
    return error


def failed(ranks: Sequence[int], report: Report, workers: int, missing: Mapping[int, str] | None = None) -> WorkerError:
    """Make the error for a function that raised; `missing` says, by rank, where the ranks were that it waited for."""
    lines, missing = [f"{name_ranks(ranks, workers)} failed: {report.message}"], missing or {}
    lines += [f"{name_ranks([rank], workers)} did not arrive: {where}" for rank, where in missing.items()]
    return WorkerError("\n".join(lines), [*missing, *ranks], report.traceback())


def died(rank: int, exitcode: int | None, where: str, workers: int) -> WorkerError:
    """Make the error for a process that ended without a report."""
    return WorkerError(f"{name_ranks([rank], workers)} {end_of(exitcode)} {where}", [rank])


def lost_server(ranks: Sequence[int], name: str, workers: int) -> WorkerError:
    """Make the error for workers that died because the fork server did."""
    return WorkerError(
        f"the process that starts workers died, and {name_ranks(ranks, workers)} with it, while they ran {name}; "
        "new ones take their place",
        ranks,
    )


def end_of(exitcode: int | None) -> str:
    """Describe how a process ended: `was killed by signal 9 (SIGKILL)`, `exited with code 3`."""
    if exitcode == SERVER_DIED:
        return "died with the process that starts workers"
    if exitcode is None or exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    except ValueError:
        return f"was killed by signal {-exitcode}"
