"""Find whom a rank waits for in torch.distributed's `send` and `recv`: they wait in C++, so another thread looks."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

import torch.distributed as dist

from dlab.memory.waits import Wait, clear, tell

PERIOD = 0.2  # seconds
_POINT_TO_POINT = {"recv": ("src", "to receive from {}"), "send": ("dst", "to send to {}")}
_FILE = dist.distributed_c10d.__file__


def observe() -> None:
    """Watch the main thread of this process, five times a second; each look costs a few microseconds."""
    threading.Thread(target=_look, name="dlab-observer", daemon=True).start()


def _look() -> None:
    seen, since = None, 0.0
    while True:
        time.sleep(PERIOD)
        found = _find(sys._current_frames().get(threading.main_thread().ident or 0))
        if found != seen:
            seen, since = found, time.monotonic()
            clear()  # otherwise the next wait would inherit it
        if found is not None:
            tell(Wait(since, found[1], [found[2]], [0]))


def _find(frame: FrameType | None) -> tuple[int, str, int] | None:
    """Return which call it is, what it does, and with which rank. Frames are not kept, because they hold tensors."""
    while frame is not None and frame.f_code.co_filename == _FILE:
        name, what = _POINT_TO_POINT.get(frame.f_code.co_name, ("", ""))
        other = frame.f_locals.get(name) if name else None
        if isinstance(other, int):
            return id(frame), what, other
        frame = frame.f_back  # a `send` that is not connected yet waits in a function that it calls
    return None
