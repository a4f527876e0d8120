"""Find out where a worker is: its Python stack, even when it is blocked in C, and a sentence that describes it."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from collections.abc import Mapping
from typing import NamedTuple

from dlab.processes.between import lifeline, roles
from dlab.processes.between.errors import name_ranks

ANSWER_SECONDS = 1.0  # a running process answers within milliseconds, unless the machine is very busy
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_HERE = os.path.dirname(os.path.dirname(__file__))
_WORKER = os.path.join(_HERE, "worker", "main.py")
_DLAB = os.path.join(os.path.dirname(_HERE), "")
_PATHS = (os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
_LIBRARIES = ("<frozen ", _DLAB, *_PATHS)
_COLLECTIVE = re.compile(r"torch[/\\]distributed[/\\]distributed_c10d\.py$")
# where C code waits for other ranks, or computes: the state of the thread tells which
_IN_TORCH = re.compile(r"torch[/\\](distributed[/\\].*|nn[/\\]parallel[/\\]distributed|autograd[/\\]graph|_ops)\.py$")
# dlab's own waits; each is a loop, so that the innermost frame may be any function that it calls
_OURS = re.compile(
    r"(memory[/\\](backoff|lock|plan_table|semaphore|waits)|transports[/\\]\w+)\.py:"
    r"|collectives[/\\]buckets\.py:finish$"
    r"|kvstore[/\\](distributed\.py:_wait_for|locked\.py:meet)$"
    r"|strategies[/\\]asynchronous\.py:(_post|settle)$"
)
_DELAY = (os.path.join(_HERE, "worker", "context.py"), "log")
_OF_OTHERS = re.compile(r"backend[/\\]works\.py$")  # waits for a thread that waits

Frame = tuple[str, int, str]  # file, line, name of the function


class Where(NamedTuple):
    """Where a rank is, in words. A line is always one of the user's own, never one of dlab or torch."""

    line: str  # "line 4 of train: dist.barrier()", or another description if there is none
    waits: bool = False  # for other ranks
    stopped: bool = False  # by SIGSTOP
    returned: bool = False  # its function has just ended
    function: str | None = None  # the function of dlab or torch.distributed in which it waits
    told: bool = False  # is it in one of dlab's own waits, which announce themselves if they last?
    what: str = "in a collective"  # how it waits if no function is known; {} stands for the names
    whom: str = ""  # the names of those it waits for, if known
    ranks: tuple[int, ...] = ()  # their ranks

    @property
    def wait(self) -> str:
        """How it waits: `in recv for rank 1`, `for ranks 1 and 2 in an all-reduce`."""
        if self.function is None:
            return self.what.replace("{}", self.whom)
        return f"in {self.function}" + (f" for {self.whom}" if self.whom else "")

    @property
    def sentence(self) -> str:
        """A sentence: `waiting in recv for rank 1, line 4 of train: transport.recv(x, 1)`."""
        return ", ".join(filter(None, [f"waiting {self.wait}", self.line])) if self.waits else self.line


def ask(files: dict[int, int], pids: dict[int, int], signal_number: int) -> dict[int, Where]:
    """Let each rank's signal handler write its stack into its file, and read the stacks. Takes at most a second.

    A stopped process cannot answer, and is not waited for.
    """
    for rank, file in files.items():
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        lifeline.signal_main_thread(pids[rank], signal_number)
    answers: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while (silent := [rank for rank in files if rank not in answers and not _is_stopped(pids[rank])]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
        for rank in silent:
            text = os.pread(files[rank], 1 << 16, 0).decode(errors="replace")
            if text.endswith(("in <module>\n", "...\n")):  # the outermost frame, or the limit of the handler
                answers[rank] = text
    return {rank: describe(answers.get(rank), pids[rank]) for rank in files}


def describe(stack: str | None, pid: int) -> Where:
    """Describe a stack, given as faulthandler writes it, innermost frame first."""
    if _is_stopped(pid):  # whatever it did before
        return Where("stopped by a signal (SIGSTOP)", stopped=True)
    if stack is None:
        return Where("not answering")
    frames = [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(stack)]
    returned = (_WORKER, "_perform") not in [frame[::2] for frame in frames]
    depth = next((position for position, frame in enumerate(frames) if frame[0] == _WORKER), len(frames))
    frames = frames[:depth]  # the frames of the worker's function; those below belong to the worker itself
    own = next((position for position, frame in enumerate(frames) if not frame[0].startswith(_LIBRARIES)), None)
    called = frames[:own][::-1]  # functions called by the user's line, outermost first
    line, code = _line(*frames[own]) if own is not None else ("", "")
    collectives = [name for file, _, name in called if _COLLECTIVE.search(file) and name != "wrapper"]
    inside = [(file, name) for file, _, name in called if file.startswith(_DLAB)]
    told = any(_OURS.search(f"{file}:{name}") for file, name in inside) or _serves_nobody(called)
    if told or any(name == "wait" and _OF_OTHERS.search(file) for file, name in inside):
        return Where(line, waits=True, function=_function(called, own is not None), told=told)
    if collectives and not collectives[0].startswith(("get_", "is_")):  # these do not wait
        return Where(line, waits=True, function=collectives[0])
    if called and _IN_TORCH.search(called[-1][0]) and lifeline.state_of(pid) == "S":
        what = "in its backward pass" if called[-1][2] == "_engine_run_backward" else "in a collective"
        return Where(line, waits=True, what=what)
    if own == 0 and ".wait(" in code and lifeline.state_of(pid) == "S":  # of a work handle, which is written in C++
        return Where(line, waits=True, function="wait")
    if called and called[-1][::2] == _DELAY:
        return Where(", ".join(filter(None, ["asleep for its delay (run.delay)", line])))
    if own is None:
        return Where(f"in {frames[0][2]}" if frames else "between two functions", returned=returned)
    return Where(f"at {line}")


def _serves_nobody(called: list[Frame]) -> bool:
    """Return whether this is a server that is waiting for the next request."""
    names = [name for file, _, name in called if file in roles.modules()]
    return "serve" in names and "_answer" not in names


def in_order(places: Mapping[int, Where]) -> list[int]:
    """Return the ranks, likely culprits first: stopped, then waited for but not waiting, then not waiting."""
    missed = culprits(places)
    return sorted(places, key=lambda rank: (not places[rank].stopped, rank not in missed, places[rank].waits, rank))


def culprits(places: Mapping[int, Where]) -> set[int]:
    """Return the ranks that do not wait and for which others wait, as far as that is known."""
    return {missed for rank in places if places[rank].waits for missed in _missed_by(rank, places)}


def _missed_by(rank: int, places: Mapping[int, Where]) -> set[int]:
    """Return the ranks at work for which a waiting rank waits, directly or through other waiting ranks."""
    met, ahead = {rank}, [rank]
    while ahead:
        where = places[ahead.pop()]
        # a rank that does not say for whom it waits may wait for any
        new = {other for other in where.ranks or places if other in places} - met if where.waits else set()
        met |= new
        ahead += new
    return {other for other in met if not places[other].waits}


def explain(places: Mapping[int, Where], ended: Mapping[int, str], workers: int) -> str:
    """Return `ranks 0 and 1 waited for rank 2`; for ranks that wait for none of these, why they will wait forever."""
    stuck = {rank: where for rank, where in places.items() if where.waits and not _missed_by(rank, places)}
    waiting = [rank for rank, where in sorted(places.items()) if where.waits and rank < workers and rank not in stuck]
    missed = f"{name_ranks(waiting)} waited for {name_ranks(sorted(culprits(places)), workers)}" if waiting else ""
    return "; ".join(filter(None, [missed, explain_deadlock(stuck, ended, workers) if stuck else ""]))


def explain_deadlock(places: Mapping[int, Where], ended: Mapping[int, str], workers: int) -> str:
    """Return why the waiting ranks will wait forever: for a rank that has ended, or in a circle; empty if they may not.

    `ended` says how other ranks have ended; ranks from `workers` on are servers.
    """
    missed, circle = {rank for where in places.values() for rank in where.ranks if rank in ended}, _circle(places)
    if missed or (not circle and any(where.waits and not where.ranks for where in places.values())):
        alike = {how: [rank for rank in sorted(ended) if ended[rank] == how] for how in ended.values()}
        return ", ".join(f"{name_ranks(r)} {'have' if len(r) > 1 else 'has'} {how}" for how, r in alike.items())
    names = [str(rank) if rank < workers else f"server {rank - workers}" for rank in circle]
    return f"each waits for the next: {' → '.join(names)}" if names else ""


def _circle(places: Mapping[int, Where]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first; empty if there is no such circle."""
    for first in sorted(places):
        path = [first]
        while (after := min((rank for rank in places[path[-1]].ranks if rank in places), default=None)) is not None:
            path.append(after)
            if after in path[:-1]:
                return path[path.index(after) :]
    return []


def _function(called: list[Frame], by_user: bool) -> str | None:
    """Return the function that the user's line called if its name is worth showing, else torch's collective, if any."""
    known = [name for file, _, name in called if _COLLECTIVE.search(file) or (by_user and file.startswith(_DLAB))]
    name = next((name for name in known if name != "wrapper"), "_")
    return None if name.startswith(("_", "<")) else name


def _line(file: str, line: int, name: str) -> tuple[str, str]:
    code = linecache.getline(file, line).strip()
    return f"line {line} of {'the cell' if name == '<module>' else name}" + (f": {code}" if code else ""), code


def _is_stopped(pid: int) -> bool:
    return lifeline.state_of(pid) in "Tt"
