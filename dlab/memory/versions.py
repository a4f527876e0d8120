"""Versions of weights, made only when needed, so that a reader can use the newest one in place, without a copy.

As long as a reader may still use a version, the next one is written elsewhere. Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Numbers(Protocol):
    """Numbers in a list, or in memory that several processes share."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...


class Versions:
    """At most one more version than there are readers; `make(number)` makes each of them once.

    The process that updates the weights writes a version and the table, readers read the version that they were lent;
    it is safe because a version that is lent is never written, and because the table belongs to one process, a server
    that replies by a `RequestQueue`, or is guarded by the lock of a `LockedPage`.

    The table holds the number of the newest version, then, for each reader, one more than the number of the version
    that it was lent, or 0.
    """

    def __init__(self, readers: int, table: Numbers, make: Callable[[int], torch.Tensor]) -> None:
        self._readers, self._table, self._make = readers, table, make
        self._made: dict[int, torch.Tensor] = {}

    def __getitem__(self, number: int) -> torch.Tensor:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    @property
    def newest(self) -> int:
        """The number of the newest version."""
        return self._table[0]

    def lend(self, reader: int) -> int:
        """Return the newest version, which does not change until this reader's next call."""
        self._table[1 + reader] = 1 + self.newest
        return self.newest

    def forget(self, reader: int) -> None:
        """Take back the version of a reader that has died."""
        self._table[1 + reader] = 0

    def next(self) -> int:
        """Return the version to write after an update: the newest itself, if no reader uses it."""
        taken = {self._table[1 + reader] - 1 for reader in range(self._readers)}
        if self.newest not in taken:
            return self.newest
        return next(number for number in range(self._readers + 1) if number not in taken)

    def turn_to(self, number: int) -> None:
        """Make a version that has been written the newest one."""
        self._table[0] = number
