"""Whom a rank waits for in torch.distributed's own `send` and `recv`: they wait in C++, so another thread looks."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

import torch.distributed as dist

from dlab.transports.waiting import Wait, tell

PERIOD = 0.2  # seconds
_POINT_TO_POINT = {"recv": ("src", "to receive from {}"), "send": ("dst", "to send to {}")}
_FILE = dist.distributed_c10d.__file__


def observe() -> None:
    """Look at the main thread of this process from now on, five times a second. A look costs some microseconds."""
    threading.Thread(target=_look, name="dlab-observer", daemon=True).start()


def _look() -> None:
    main, seen, since = threading.main_thread().ident, None, 0.0
    while True:
        time.sleep(PERIOD)
        frame = sys._current_frames().get(main or 0)
        if frame is None or frame.f_code.co_filename != _FILE:
            seen = None
            continue
        if frame is not seen:  # held, so that no other frame can be taken for it
            seen, since = frame, time.monotonic()
        _tell(frame, since)


def _tell(frame: FrameType | None, since: float) -> None:
    """What the outermost says that was called: inside, a `send` may still be connecting itself."""
    while frame is not None and frame.f_code.co_filename == _FILE:
        name, what = _POINT_TO_POINT.get(frame.f_code.co_name, ("", ""))
        other = frame.f_locals.get(name) if name else None
        if isinstance(other, int):
            tell(Wait(since, what, [other], [0]))
        frame = frame.f_back
