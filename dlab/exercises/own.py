"""Notice that a learner's code calls dlab's own solution of an exercise: it would be right, and nothing be learned."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

_CHECKERS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DLAB = os.path.dirname(os.path.dirname(_CHECKERS)) + os.sep


@contextmanager
def noticing(*solutions: Callable[..., Any]) -> Iterator[list[str]]:
    """The names of those of dlab's functions and methods that are called in this thread while the block runs.

    A call counts if it comes from the learner's code or, where the learner has handed in dlab's own, from a checker in
    `dlab/exercises`; not if another part of dlab makes it. By whatever name the learner knows it: what is looked at is
    the code that runs. It works in a thread of a rehearsal and in a worker process alike, and when the block fails.

    >>> with noticing(ring_allreduce) as called:
    ...     my_ring(tensor, transport)
    >>> called
    ['ring_allreduce']
    """
    names = {_code(solution): _function(solution).__qualname__ for solution in solutions}
    called: list[str] = []

    def notice(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := names.get(frame.f_code)) and _is_outside(frame.f_back):
            called.append(name)

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield called
    finally:
        sys.setprofile(before)


def tell_own(called: list[str], instead: str) -> str:
    """The sentence for it, without its full stop: what was called, and what to write instead."""
    return f"this calls dlab's own {called[0]}, which is the answer: {instead}"


def _is_outside(caller: FrameType | None) -> bool:
    file = caller.f_code.co_filename if caller else ""
    return not file.startswith(_DLAB) or file.startswith(_CHECKERS)


def _function(solution: Callable[..., Any]) -> Any:
    """Without what decorators have put around it."""
    while isinstance(solution, partial):
        solution = solution.func
    return inspect.unwrap(getattr(solution, "__func__", solution))


def _code(solution: Callable[..., Any]) -> CodeType:
    return _function(solution).__code__
