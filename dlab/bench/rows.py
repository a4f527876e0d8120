"""A row: two things measured in the same unit, their ratio, and what the ratio ought to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

REGISTERED: dict[str, Measurement] = {}  # by name, in the order of the table


@dataclass(frozen=True)
class AtLeast:
    """The ratio says how many times faster we are, and should be this or more."""

    bound: float

    def met(self, ratio: float) -> bool:
        """Is the ratio as large as the target?"""
        return ratio >= self.bound

    def __str__(self) -> str:
        return f"at least {self.bound:g}x"


@dataclass(frozen=True)
class AtMost:
    """The ratio says which share of the other we take, and should be this or less."""

    bound: float

    def met(self, ratio: float) -> bool:
        """Is the ratio as small as the target?"""
        return ratio <= self.bound

    def __str__(self) -> str:
        return f"at most {100 * self.bound:g} %"


@dataclass(frozen=True)
class Row:
    """One line of the table; `ours` and `theirs` are in `unit`, `target` is None where there is nothing to reach."""

    name: str
    ours: float
    theirs: float
    ratio: float
    target: AtLeast | AtMost | None
    unit: str
    note: str = ""

    @property
    def verdict(self) -> str:
        """met, not met, or a dash where there is no target."""
        if self.target is None:
            return "-"
        return "met" if self.target.met(self.ratio) else "not met"


@dataclass(frozen=True)
class Grid:
    """Where contenders and cases are many: a line for each case, a column for each contender, and no verdict."""

    name: str
    headings: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str = ""


def faster(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None, unit: str, note: str = ""
) -> Row:
    """A row from the times of each round: by how much our median is below theirs, and how far the rounds lie apart.

    >>> faster("a sum", ours=[1, 2, 9], theirs=[8, 8, 8], target=3, unit="ms").ratio
    4.0
    """
    rounds = [slow / quick for quick, slow in zip(ours, theirs, strict=True)]
    spread = f"{len(rounds)} rounds, {number(min(rounds))}x to {number(max(rounds))}x"
    note = "; ".join(filter(None, [spread if len(rounds) > 1 else "one round", note]))
    goal = None if target is None else AtLeast(target)
    return Row(name, median(ours), median(theirs), median(theirs) / median(ours), goal, unit, note)


def number(value: float) -> str:
    """Three digits are all that a measurement deserves: `0.0123`, `4.56`, `3187`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Measurement(Protocol):
    """What makes a row, or a grid: takes its name and whether to be quick about it."""

    def __call__(self, name: str, quick: bool) -> Row | Grid: ...


def row(name: str) -> Callable[[Measurement], Measurement]:
    """Put a measurement on the list, under the name that the table and `-k` know it by.

    In a loop, for one row per size: `row(f"all-reduce, {size} B")(partial(all_reduce, size))`.
    """

    def register(measurement: Measurement) -> Measurement:
        REGISTERED[name] = measurement
        return measurement

    return register
