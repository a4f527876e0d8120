"""Notice when a learner's code calls dlab's own solution of an exercise, which would be correct but teach nothing."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

_CHECKERS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DLAB = os.path.dirname(os.path.dirname(_CHECKERS)) + os.sep


@contextmanager
def noticing(*solutions: Callable[..., Any]) -> Iterator[list[str]]:
    """Collect the names of dlab's functions and methods that are called in this thread while the block runs.

    A call counts if it comes from the learner's code, or from a checker in `dlab/exercises` when the learner has handed
    in dlab's own function; calls from other parts of dlab do not count. Functions are recognised by their code,
    whatever name the learner uses. It works in the threads of a rehearsal and in worker processes, and also when the
    block fails.

    >>> with noticing(ring_allreduce) as called:
    ...     my_ring(tensor, transport)
    >>> called
    ['ring_allreduce']
    """
    called: list[str] = []
    with each_call(called.append, *solutions):
        yield called


@contextmanager
def each_call(
    report: Callable[[str], object], *functions: Callable[..., Any], builtins: Collection[str] = ()
) -> Iterator[None]:
    """Report each call at the moment it is made; `builtins` are the names of functions written in C."""
    names = {id(_code(each)): _function(each).__qualname__ for each in functions}  # copies of a code object are equal

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := names.get(id(frame.f_code))) and _is_outside(frame.f_back):
            report(name)
        elif event == "c_call" and argument.__name__ in builtins:
            report(argument.__name__)

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(before)


def explain_own(called: list[str], instead: str) -> str:
    """Return the sentence for it, without a full stop: what was called and what to write instead."""
    return f"this calls dlab's own {called[0]}, which is the answer: {instead}"


def is_inside_dlab(except_for: Callable[..., Any]) -> bool:
    """Return whether the asking checker was reached through a function of dlab that the learner's code called."""
    frame, exempt = inspect.currentframe(), _code(except_for)
    while frame is not None and _is_checker(frame):
        frame = frame.f_back
    while frame is not None and not _is_checker(frame):  # up to the checker that called the learner's code
        if not _is_outside(frame) and frame.f_code is not exempt:
            return True
        frame = frame.f_back
    return False


def _is_outside(caller: FrameType | None) -> bool:
    return caller is None or _is_checker(caller) or not caller.f_code.co_filename.startswith(_DLAB)


def _is_checker(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_CHECKERS)


def _function(solution: Callable[..., Any]) -> Any:
    """Remove the wrappers that decorators have added."""
    while isinstance(solution, partial):
        solution = solution.func
    return inspect.unwrap(getattr(solution, "__func__", solution))


def _code(solution: Callable[..., Any]) -> CodeType:
    return _function(solution).__code__
