"""Versions of weights, made only when they are needed: who pulls is told where the weights are, and reads them there.

As long as somebody may still read a version, the next one is written elsewhere. Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Numbers(Protocol):
    """Numbers: a list, or memory that several processes see."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...


class Versions:
    """There are never more than readers, and one. `make(number)` makes one, once.

    Who updates the weights writes a version and the table, readers read the version that they were lent; it is safe
    because nobody writes into a version that is lent, and because the table belongs to one process, a server, which
    answers by a `RequestQueue`, or is guarded by the lock of a `LockedPage`.

    The table has one place more than there are readers: which copy is the newest; then, for each reader, one more than
    the number of the copy that it was lent, or 0.
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
        """The newest, which stays as it is until this reader comes again."""
        self._table[1 + reader] = 1 + self.newest
        return self.newest

    def forget(self, reader: int) -> None:
        """It has died, and reads no more."""
        self._table[1 + reader] = 0

    def next(self) -> int:
        """Where to write the weights after an update: in place, if nobody reads them."""
        taken = {self._table[1 + reader] - 1 for reader in range(self._readers)}
        if self.newest not in taken:
            return self.newest
        return next(number for number in range(self._readers + 1) if number not in taken)

    def turn_to(self, number: int) -> None:
        """It is written, and the newest from now on."""
        self._table[0] = number
