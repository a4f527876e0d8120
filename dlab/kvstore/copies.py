"""Copies of weights, made only when they are needed: who pulls is told where the weights are, and reads them there.

As long as somebody may still read a version, the next one is written elsewhere. Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Room = Callable[[], tuple[torch.Tensor, int]]  # a tensor in memory that workers see, and where it is


class Copies:
    """Of one part of a key. There are never more than workers that have pulled it, and one."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._made = [room()]
        self._current = 0
        self._read: dict[int, int] = {}  # by worker: the copy that it was lent last

    @property
    def current(self) -> torch.Tensor:
        """The newest weights."""
        return self._made[self._current][0]

    def lend(self, worker: int) -> int:
        """Where the newest weights are. They stay as they are until this worker pulls again."""
        self._read[worker] = self._current
        return self._made[self._current][1]

    def forget(self, worker: int) -> None:
        """It has died, and reads no more."""
        self._read.pop(worker, None)

    def next(self) -> torch.Tensor:
        """Where to write the weights after an update: here, if nobody reads them; it is the current one from now."""
        taken = set(self._read.values())
        if self._current in taken:
            taken.add(self._current)
            self._current = next((number for number in range(len(self._made)) if number not in taken), len(self._made))
            if self._current == len(self._made):
                self._made.append(self._room())
        return self.current
