"""Show a mistake in a cell as the cell's own line and one sentence, without the frames of dlab in between.

This applies to errors that dlab raises on purpose, failures of the reader's own function, and interrupts. An error that
Python or torch raises inside dlab is a bug of dlab and keeps every frame. `%tb` and `%debug` always have all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from dlab.processes.between.errors import DLAB, is_readers, is_refusal


def shorten_tracebacks(shell: Any) -> None:
    """Let the shell of a notebook shorten the tracebacks of its cells."""
    shell.showtraceback = _shortened(shell.showtraceback)


def _shortened(show: Callable[..., None]) -> Callable[..., None]:
    @wraps(show)
    def showtraceback(exc_tuple: Any = None, *args: Any, running_compiled_code: bool = False, **kwargs: Any) -> None:
        kind, problem, trace = exc_tuple or sys.exc_info()
        short = readers_part(problem, trace) if running_compiled_code else None  # otherwise %tb asks
        shown = exc_tuple if short is None else (kind, problem, short)
        show(shown, *args, running_compiled_code=running_compiled_code, **kwargs)
        if short is not None:
            sys.last_traceback = trace

    return showtraceback


def readers_part(problem: BaseException | None, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without dlab's frames and their callees; None if it is to be shown unchanged."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [number for number, frame in enumerate(frames) if _file(frame).startswith(DLAB)]
    if not ours or not (
        isinstance(problem, KeyboardInterrupt) or is_readers(_file(frames[-1])) or is_refusal(frames[-1])
    ):
        return None
    kept = [frame for number, frame in enumerate(frames) if number < ours[0] or is_readers(_file(frame))]
    short = None
    for frame in reversed(kept):
        short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return short


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
