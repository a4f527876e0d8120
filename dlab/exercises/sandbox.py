"""Run a learner's code on the threads of a rehearsal, where it may fail, deadlock or loop, and report what happened."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlab.rehearsal import Rehearsal, rehearse
from dlab.transports import Deadlock, Transport


@dataclass
class Attempt:
    """The outcome: a rehearsal, or the ranks that failed, waited for each other or had not returned in time."""

    rehearsal: Rehearsal | None = None
    failed: dict[int, Exception] = field(default_factory=dict)  # by rank
    deadlock: str = ""  # the chain of ranks that wait for each other
    stuck: list[int] = field(default_factory=list)

    def describe_failure(self, name: str) -> str:
        """Say which ranks failed and how, with the line of the learner's function in which it happened."""
        error = self.failed[min(self.failed)]
        where = describe_line(traceback.extract_tb(error.__traceback__), name)
        return f"{name_ranks(sorted(self.failed))} ended in {type(error).__name__}: {error}{where}"


def describe_line(frames: list[traceback.FrameSummary], name: str) -> str:
    """Return `, in the line `x = 1 / 0``: the last line of the named function, or "" if its source is not available."""
    frames = [frame for frame in frames if frame.name == name]
    lines = [frame.line for frame in frames if frame.filename == frames[0].filename]  # torch has names like ours
    return f", in the line `{lines[-1]}`" if lines and lines[-1] else ""


def attempt(work: Callable[[Transport], Any], ranks: int, limit: float) -> Attempt:
    """Run `work(transport)` on each rank, in threads that are given up after `limit` seconds."""
    made, threads = Attempt(), dict[int, int]()  # threads of the ranks that are running
    left = set(range(ranks))  # ranks that have not returned
    over = threading.Event()

    def play_rank(transport: Transport) -> Any:
        threads[transport.rank] = threading.get_ident()
        try:
            if over.is_set():  # a busy loop may delay the start of another rank's thread until the time is up
                raise SystemExit
            return work(transport)
        except Deadlock:
            raise
        except Exception as error:
            made.failed[transport.rank] = error
            raise
        finally:
            del threads[transport.rank]
            left.discard(transport.rank)

    def play() -> None:
        try:
            made.rehearsal = rehearse(play_rank, ranks)
        except Deadlock as error:
            made.deadlock = str(error)
        except BaseException:
            pass  # reported in `failed`, or ended by `_interrupt`

    player = threading.Thread(target=play, daemon=True)
    player.start()
    player.join(limit)
    if player.is_alive():
        over.set()
        made.stuck = sorted(left)
        _interrupt(list(threads.values()))
    return made


def _interrupt(threads: list[int]) -> None:
    """Ask the threads that still run to end; a thread outside Python code (a long sleep) ends when it returns to it."""
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def name_ranks(ranks: list[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {join([str(rank) for rank in ranks])}"


def join(words: list[str]) -> str:
    """Join words as in `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
