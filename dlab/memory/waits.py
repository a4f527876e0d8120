"""Who waits for whom: a long wait is announced in shared memory, where the parent of the ranks can read it.

A wait is announced only after some hundredths of a second, so a short one costs nothing.
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

SLOTS = 4  # per process: one for its main thread, and some for its other threads
FRESH = 2.0  # seconds for which an announcement counts; it is repeated as long as the wait lasts


class Wait(NamedTuple):
    """What a thread waits for, and since when by `time.monotonic`, which all processes of a host share."""

    since: float
    what: str  # with {} instead of the names: "to receive from {}"
    ranks: list[int]  # in the numbering of its transport
    pids: list[int]  # their process ids; 0 if not known


class Slot:
    """The memory in which one thread announces what it waits for.

    That thread writes, the parent reads; it is safe because the time until which the wait counts is written last,
    after a fence, and the parent checks after reading that the wait is still the same.
    """

    ROOM = 512

    def __init__(self, memory: memoryview) -> None:
        self._times = memory[:16].cast("d")  # when the wait began, and until when it counts
        self._length = memory[16:24].cast("Q")
        self._text = memory[24 : self.ROOM]

    def write(self, wait: Wait, until: float) -> None:
        """Announce a wait; the time until which it counts is written last, so a reader of it sees the rest."""
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
        """Withdraw the announcement when the wait is over."""
        self._times[1] = 0.0

    def since(self, now: float) -> float:
        """Return when the current wait began; 0 if there is none. Costs two reads of memory."""
        goes_on = self._times[1] > now
        fence()
        return self._times[0] if goes_on else 0.0

    def read(self, now: float) -> Wait | None:
        """Return the current wait; None if there is none."""
        since = self.since(now)
        try:
            what, ranks, pids = json.loads(bytes(self._text[: self._length[0]])) if since else ("", [], [])
        except ValueError:  # it is being written
            return None
        fence()
        return Wait(since, what, ranks, pids) if since and self.since(now) == since else None


_slots: list[Slot] = []  # of this process; empty if it has no parent that reads them
_thread = threading.local()
_others = count()


def tell_in(slots: Sequence[Slot]) -> None:
    """Let this process announce its waits in these slots."""
    _slots[:] = slots


def tell(wait: Wait, seconds: float = FRESH) -> None:
    """Announce what this thread waits for; it counts for so many seconds, unless it is announced again."""
    if _slots:
        _mine().write(wait, time.monotonic() + seconds)


@contextmanager
def waiting(what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Announce a wait that cannot repeat its announcement, because it is in C. Costs some microseconds."""
    tell(Wait(time.monotonic(), what, list(ranks), [0] * len(ranks)), float("inf"))
    try:
        yield
    finally:
        clear()


def clear() -> None:
    """Withdraw this thread's announcement."""
    if _slots:
        _mine().clear()


def _mine() -> Slot:
    if not hasattr(_thread, "number"):
        is_main = threading.current_thread() is threading.main_thread()
        _thread.number = 0 if is_main else 1 + next(_others) % (SLOTS - 1)
    return _slots[_thread.number]


def name_ranks(ranks: Sequence[int], workers: int | None = None) -> str:
    """Name ranks as `rank 2` or `ranks 0, 1 and 3`; those after the last worker are servers: `rank 2 and server 0`."""
    servers = [rank - workers for rank in ranks if workers is not None and rank >= workers]
    ranks = ranks[: len(ranks) - len(servers)]
    names = [_name(role, numbers) for role, numbers in (("rank", ranks), ("server", servers)) if numbers]
    return " and ".join(names)


def _name(role: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{role} {numbers[0]}"
    return f"{role}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
