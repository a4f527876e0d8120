"""Stop a function: raise an exception in it between two instructions, without leaving anything half done.

A half-imported module can be neither used nor imported again, so the exception waits until the import is complete. If
the import takes longer than the supervisor waits, the process is killed; the worker that replaces it starts without
that module. `with torch.no_grad()` may be interrupted just where it sets or restores its mode: after a stop, the modes
of torch are set back to those before the function.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch

from dlab.processes.between.errors import Stopped

IMPORTS = "<frozen importlib._bootstrap"  # the file names of Python's import machinery begin like this
DEVICES = ("cpu", "cuda")


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers is part of an import, also of one by C code, as in unpickling."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            return True
        frame = frame.f_back
    return False


class TorchModes(NamedTuple):
    """How torch computes in this thread: with gradients or without, and in which precision."""

    gradients: bool
    autocast: list[tuple[bool, torch.dtype]]  # by device
    depth: int  # of nested `with torch.autocast(…)`

    @classmethod
    def now(cls) -> TorchModes:
        """Return the current modes."""
        each = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
        return cls(torch.is_grad_enabled(), each, _depth())

    def restore(self) -> None:
        """Set the modes of torch back to these."""
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
    """A context in which a function can be stopped once; its cleanup is not interrupted again."""

    def __init__(self) -> None:
        self._open = self._cut = False

    def __enter__(self) -> None:
        self._modes, self._cut = TorchModes.now(), False
        self._open = True

    def __exit__(self, *_: Any) -> None:
        self._open = False
        if self._cut:
            self._modes.restore()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal that the supervisor repeats until the function has ended."""
        if self._open and not is_importing(frame):
            self._open, self._cut = False, True
            raise Stopped("the run was stopped")
