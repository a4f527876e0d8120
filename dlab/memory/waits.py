"""Who waits for whom: a wait that lasts says so in shared memory, where whoever looks after the ranks can read it.

A wait says nothing before it has lasted for some hundredths of a second, so what need not wait pays nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from dlab.memory.fence import fence

SLOTS = 4  # of a process: one for its main thread, and some for threads that wait for it
FRESH = 2.0  # seconds for which a word counts that is said again and again as long as the wait lasts


class Wait(NamedTuple):
    """What a thread waits for, and since when, by `time.monotonic`, which all processes of a host share."""

    since: float
    what: str  # with {} in the place of the names: "to receive from {}"
    ranks: list[int]  # as its transport numbers them
    pids: list[int]  # their processes; 0 for one that is not known


class Slot:
    """Where one thread says what it waits for.

    That thread writes, the parent reads; it is safe because the end of the wait is written last, after a fence, and
    who has read a wait looks whether it is still the same.
    """

    ROOM = 512

    def __init__(self, memory: memoryview) -> None:
        self._times = memory[:16].cast("d")  # since, and until when it counts
        self._length = memory[16:24].cast("Q")
        self._text = memory[24 : self.ROOM]

    def write(self, wait: Wait, until: float) -> None:
        """The end last: who sees it sees the rest."""
        text = json.dumps(wait[1:]).encode()
        if len(text) > len(self._text):
            text = json.dumps([wait.what[:40], [], []]).encode()
        self._times[1] = 0.0
        fence()
        self._text[: len(text)] = text
        self._length[0] = len(text)
        self._times[0] = wait.since
        fence()
        self._times[1] = until

    def clear(self) -> None:
        """Say that the wait is over."""
        self._times[1] = 0.0

    def since(self, now: float) -> float:
        """When the wait began that is going on; 0 if there is none. Costs two reads of memory."""
        goes_on = self._times[1] > now
        fence()
        return self._times[0] if goes_on else 0.0

    def read(self, now: float) -> Wait | None:
        """The wait that is going on."""
        since = self.since(now)
        try:
            what, ranks, pids = json.loads(bytes(self._text[: self._length[0]])) if since else ("", [], [])
        except ValueError:  # it is just being written
            return None
        fence()
        return Wait(since, what, ranks, pids) if since and self.since(now) == since else None


_slots: list[Slot] = []  # this process's; none where nobody looks
_thread = threading.local()
_others = count()


def tell_in(slots: Sequence[Slot]) -> None:
    """From now on this process says in these slots what it waits for."""
    _slots[:] = slots


def tell(wait: Wait, seconds: float = FRESH) -> None:
    """Say what this thread waits for; counts for so long, unless it is said again."""
    if _slots:
        _mine().write(wait, time.monotonic() + seconds)


@contextmanager
def waiting(what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Around a wait that can say nothing while it lasts, because it is in C. Costs some microseconds."""
    tell(Wait(time.monotonic(), what, list(ranks), [0] * len(ranks)), float("inf"))
    try:
        yield
    finally:
        clear()


def clear() -> None:
    """This thread waits no more."""
    if _slots:
        _mine().clear()


def _mine() -> Slot:
    if not hasattr(_thread, "number"):
        is_main = threading.current_thread() is threading.main_thread()
        _thread.number = 0 if is_main else 1 + next(_others) % (SLOTS - 1)
    return _slots[_thread.number]


def name_ranks(ranks: Sequence[int], workers: int | None = None) -> str:
    """`rank 2`, `ranks 0, 1 and 3`; those after the last of so many workers are servers: `rank 2 and server 0`."""
    servers = [rank - workers for rank in ranks if workers is not None and rank >= workers]
    ranks = ranks[: len(ranks) - len(servers)]
    names = [_name(role, numbers) for role, numbers in (("rank", ranks), ("server", servers)) if numbers]
    return " and ".join(names)


def _name(role: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{role} {numbers[0]}"
    return f"{role}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
