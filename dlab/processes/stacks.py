"""Where a worker is right now: its Python stack, even when it is blocked in C, and one sentence about it."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from collections.abc import Mapping
from typing import NamedTuple

from dlab.processes import lifeline
from dlab.processes.errors import name_ranks

ANSWER_SECONDS = 0.3
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_WORKER = os.path.join(os.path.dirname(__file__), "worker.py")
_DLAB = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PATHS = (os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
_LIBRARIES = ("<frozen ", _DLAB, *_PATHS)
_COLLECTIVE = re.compile(r"torch[/\\]distributed[/\\]distributed_c10d\.py$")
# where C code waits for other ranks, or computes: the thread's state tells which
_IN_TORCH = re.compile(r"torch[/\\](distributed[/\\].*|nn[/\\]parallel[/\\]distributed|autograd[/\\]graph|_ops)\.py$")
_OURS = re.compile(r"transports[/\\](patience|bells|locks|meeting|distributed|store)\.py$")
_OF_OTHERS = re.compile(r"backend[/\\]works\.py$")  # waits for a thread that waits

Frame = tuple[str, int, str]  # file, line, name of the function


class Where(NamedTuple):
    """A rank's whereabouts, in words. A line is always one of the user's own, never one of dlab or of torch."""

    line: str  # "line 4 of train: dist.barrier()"; where there is none, what else there is to say
    waits: bool = False  # for other ranks
    function: str | None = None  # of dlab or of torch.distributed, in which it waits
    told: bool = False  # does it wait in one of dlab's own waits, which says so itself if it lasts?
    what: str = "in a collective"  # it waits, where no function has a name; with {} in the place of the names
    whom: str = ""  # the names of those it waits for, where that is known
    ranks: tuple[int, ...] = ()  # of these

    @property
    def wait(self) -> str:
        """`in recv for rank 1`, `for ranks 1 and 2 in an all-reduce`."""
        if self.function is None:
            return self.what.replace("{}", self.whom)
        return f"in {self.function}" + (f" for {self.whom}" if self.whom else "")

    @property
    def sentence(self) -> str:
        """`waiting in recv for rank 1, line 4 of train: transport.recv(x, 1)`."""
        return ", ".join(filter(None, [f"waiting {self.wait}", self.line])) if self.waits else self.line


def ask(files: dict[int, int], pids: dict[int, int], signal_number: int) -> dict[int, Where]:
    """Have each rank's signal handler write its stack into its file, and read them. Takes at most 0.3 s."""
    for rank, file in files.items():
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        lifeline.signal_main_thread(pids[rank], signal_number)
    answers: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(answers) < len(files) and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, file in files.items():
            text = os.pread(file, 1 << 16, 0).decode(errors="replace")
            if text.endswith(("in <module>\n", "...\n")):  # the outermost frame, or as far as it goes
                answers[rank] = text
    return {rank: describe(answers.get(rank), pids[rank]) for rank in files}


def describe(stack: str | None, pid: int) -> Where:
    """What a stack tells, innermost frame first, as faulthandler writes it."""
    if stack is None:
        return Where("stopped by a signal (SIGSTOP)" if _state(pid) in "Tt" else "not answering")
    frames = [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(stack)]
    depth = next((position for position, frame in enumerate(frames) if frame[0] == _WORKER), len(frames))
    frames = frames[:depth]  # what the worker's function does; below it is the worker itself
    own = next((position for position, frame in enumerate(frames) if not frame[0].startswith(_LIBRARIES)), None)
    called = frames[:own][::-1]  # by the user's line, outermost first
    line, code = _line(*frames[own]) if own is not None else ("", "")
    collectives = [name for file, _, name in called if _COLLECTIVE.search(file) and name != "wrapper"]
    for file, _, name in called:
        told = bool(_OURS.search(file))
        if file.startswith(_DLAB) and (told or (name == "wait" and _OF_OTHERS.search(file))):
            return Where(line, waits=True, function=_function(called, own is not None), told=told)
    if collectives and not collectives[0].startswith(("get_", "is_")):  # these wait for nobody
        return Where(line, waits=True, function=collectives[0])
    if called and _IN_TORCH.search(called[-1][0]) and _state(pid) == "S":
        what = "in its backward pass" if called[-1][2] == "_engine_run_backward" else "in a collective"
        return Where(line, waits=True, what=what)
    if own == 0 and ".wait(" in code and _state(pid) == "S":  # of a work handle, which is written in C++
        return Where(line, waits=True, function="wait")
    if own is None:
        return Where(f"in {frames[0][2]}" if frames else "between two functions")
    return Where(f"at {line}")


def knot(places: Mapping[int, Where], ended: Mapping[int, str], workers: int) -> str:
    """Why those who wait will wait for ever: for one that has ended, or in a circle; empty if they may not.

    `ended` says how others have ended; ranks after so many `workers` are servers.
    """
    missed, circle = {rank for where in places.values() for rank in where.ranks if rank in ended}, _circle(places)
    if missed or (not circle and any(where.waits and not where.ranks for where in places.values())):
        alike = {how: [rank for rank in sorted(ended) if ended[rank] == how] for how in ended.values()}
        return ", ".join(f"{name_ranks(r)} {'have' if len(r) > 1 else 'has'} {how}" for how, r in alike.items())
    names = [str(rank) if rank < workers else f"server {rank - workers}" for rank in circle]
    return f"each waits for the next: {' → '.join(names)}" if names else ""


def _circle(places: Mapping[int, Where]) -> list[int]:
    """Ranks of which each waits for the next, and the last is the first again; empty if there is no such circle."""
    for first in sorted(places):
        path = [first]
        while (after := min((rank for rank in places[path[-1]].ranks if rank in places), default=None)) is not None:
            path.append(after)
            if after in path[:-1]:
                return path[path.index(after) :]
    return []


def _function(called: list[Frame], by_user: bool) -> str | None:
    """What the user's line has called, if that is to be known by its name; else the collective of torch, if any."""
    known = [name for file, _, name in called if _COLLECTIVE.search(file) or (by_user and file.startswith(_DLAB))]
    name = next((name for name in known if name != "wrapper"), "_")
    return None if name.startswith(("_", "<")) else name


def _line(file: str, line: int, name: str) -> tuple[str, str]:
    code = linecache.getline(file, line).strip()
    return f"line {line} of {'the cell' if name == '<module>' else name}" + (f": {code}" if code else ""), code


def _state(pid: int) -> str:
    """Of its main thread, as the system calls it: R runs, S sleeps, T is stopped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "?"
