"""How a function is stopped: an exception is raised in it between two instructions, and must leave nothing half done.

A module that is half imported cannot be used, nor can it be imported again: the exception waits until the import is
over. An import that takes longer than the supervisor waits ends with its process; the worker that replaces it starts
without that module. `with torch.no_grad()` may be cut off just where it sets its mode or sets it back: after a stop,
the modes of torch are again what they were before the function.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch

from dlab.processes.between.errors import Stopped

IMPORTS = "<frozen importlib._bootstrap"  # the files of Python's import machinery begin so
DEVICES = ("cpu", "cuda")


def is_importing(frame: FrameType | None) -> bool:
    """Is a frame, or one of its callers, part of an import? C code, such as unpickling, imports by the same frames."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            return True
        frame = frame.f_back
    return False


class Modes(NamedTuple):
    """How torch computes in this thread: with gradients or without, and in which precision."""

    gradients: bool
    autocast: list[tuple[bool, torch.dtype]]  # by device
    depth: int  # of `with torch.autocast(…)` in one another

    @classmethod
    def now(cls) -> Modes:
        """The modes as they are now."""
        each = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
        return cls(torch.is_grad_enabled(), each, _depth())

    def restore(self) -> None:
        """Set the modes to what they were."""
        torch.set_grad_enabled(self.gradients)
        for kind, (enabled, dtype) in zip(DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while _depth() > self.depth:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Stoppable:
    """`with` it, a function can be stopped, once: what it does on its way out is not cut off again."""

    def __init__(self) -> None:
        self._open = self._cut = False

    def __enter__(self) -> None:
        self._modes, self._cut = Modes.now(), False
        self._open = True

    def __exit__(self, *_: Any) -> None:
        self._open = False
        if self._cut:
            self._modes.restore()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal that the supervisor sends again and again until the function has ended."""
        if self._open and not is_importing(frame):
            self._open, self._cut = False, True
            raise Stopped("the run was stopped")
