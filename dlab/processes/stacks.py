"""Where a worker is right now: its Python stack, even when it is blocked in C, and one sentence about it."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from typing import NamedTuple

from dlab.processes import lifeline

ANSWER_SECONDS = 0.3
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_LIBRARIES = tuple({"<frozen ", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(__file__)})
_WORKER = os.path.join(os.path.dirname(__file__), "worker.py")
_COLLECTIVE = re.compile(r"torch[/\\]distributed[/\\]distributed_c10d\.py$")


class Where(NamedTuple):
    """A rank's whereabouts: the collective it waits in, if any, and a sentence."""

    collective: str | None
    sentence: str


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
    """One sentence about a stack, innermost frame first, as faulthandler writes it."""
    if stack is None:
        return Where(None, "stopped by a signal (SIGSTOP)" if _is_stopped(pid) else "not answering")
    frames = [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(stack)]
    depth = next((position for position, frame in enumerate(frames) if frame[0] == _WORKER), len(frames))
    frames = frames[:depth]  # what the worker's function does; below it is the worker itself
    own = next((position for position, frame in enumerate(frames) if not frame[0].startswith(_LIBRARIES)), None)
    if own is None:
        return Where(None, f"in {frames[0][2]}" if frames else "between two functions")
    inner = [name for file, _, name in reversed(frames[:own]) if _COLLECTIVE.search(file) and name != "wrapper"]
    file, line, name = frames[own]
    code = linecache.getline(file, line).strip()
    place = f"line {line} of {name}" + (f": {code}" if code else "")
    if inner and not inner[0].startswith(("get_", "is_")):  # these wait for nobody
        return Where(inner[0], f"waiting in {inner[0]}, {place}")
    return Where(None, f"at {place}")


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
