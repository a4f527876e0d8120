"""Rehearse an algorithm in one process: each rank is a thread, and every message is recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dlab.events import Event
from dlab.transports.base import Transport
from dlab.transports.recorder import Recorder
from dlab.transports.threads import ThreadTransport, ThreadWorld


class Rehearsal(list[Any]):
    """The results by rank; `.messages` are the recorded events, in the order in which they ended."""

    def __init__(self, results: list[Any], messages: list[Event]) -> None:
        super().__init__(results)
        self.messages = messages


def rehearse(fn: Callable[[Transport], Any], ranks: int = 4) -> Rehearsal:
    """Run `fn(transport)` on `ranks` threads of this process.

    The threads share torch's random numbers: `torch.manual_seed` on one of them changes them for all. Make a network
    before, and copy it on each rank (`copy.deepcopy(net)`).

    A deadlock is noticed at once and raised with the chain of who waits for whom; if a rank fails, its exception is
    raised and the others are stopped.

    >>> rehearse(lambda transport: transport.rank**2, ranks=3)
    [0, 1, 4]
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"a rehearsal with {ranks!r} ranks is not possible: give a whole number, 1 or more")
    world, results, messages = ThreadWorld(ranks), [None] * ranks, list[Event]()

    def play(rank: int) -> None:
        def emit(kind: str, data: Mapping[str, Any]) -> None:
            messages.append(Event(time.time(), rank, kind, dict(data)))

        try:
            results[rank] = fn(Recorder(ThreadTransport(world, rank), emit))
            world.leave(rank)
        except BaseException as problem:
            if hasattr(problem, "add_note"):  # since Python 3.11
                problem.add_note(f"on rank {rank}")
            world.fail(rank, problem)

    threads = [threading.Thread(target=play, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.broken is not None:
        raise world.broken
    return Rehearsal(results, messages)
