"""A row: two things measured in the same unit, their ratio, and a target for the ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

REGISTERED: dict[str, Measurement] = {}  # by name, in the order of the table


@dataclass(frozen=True)
class AtLeast:
    """A target for a speed-up: the ratio should be this or more."""

    bound: float

    def met(self, ratio: float) -> bool:
        """Return whether the ratio is as large as the target."""
        return ratio >= self.bound

    def __str__(self) -> str:
        return f"at least {self.bound:g}x"


@dataclass(frozen=True)
class AtMost:
    """A target for a share: the ratio should be this or less."""

    bound: float

    def met(self, ratio: float) -> bool:
        """Return whether the ratio is as small as the target."""
        return ratio <= self.bound

    def __str__(self) -> str:
        return f"at most {100 * self.bound:g} %"


@dataclass(frozen=True)
class Row:
    """One line of the table; `ours` and `theirs` are in `unit`, `target` is None where there is none."""

    name: str
    ours: float
    theirs: float
    ratio: float
    target: AtLeast | AtMost | None
    unit: str
    note: str = ""

    @property
    def verdict(self) -> str:
        """Say `met` or `not met`, or a dash where there is no target."""
        if self.target is None:
            return "-"
        return "met" if self.target.met(self.ratio) else "not met"


@dataclass(frozen=True)
class Grid:
    """A table of its own, with a line per case and a column per contender, and without targets."""

    name: str
    headings: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str = ""


def faster(
    name: str, ours: Sequence[float], theirs: Sequence[float], target: float | None, unit: str, note: str = ""
) -> Row:
    """Make a row from the times of each round: the ratio of the medians, and the spread of the rounds.

    >>> faster("a sum", ours=[1, 2, 9], theirs=[8, 8, 8], target=3, unit="ms").ratio
    4.0
    """
    rounds = [slow / quick for quick, slow in zip(ours, theirs, strict=True)]
    spread = f"{len(rounds)} rounds, {number(min(rounds))}x to {number(max(rounds))}x"
    note = "; ".join(filter(None, [spread if len(rounds) > 1 else "one round", note]))
    goal = None if target is None else AtLeast(target)
    return Row(name, median(ours), median(theirs), median(theirs) / median(ours), goal, unit, note)


def number(value: float) -> str:
    """Write three significant digits, as precise as a measurement is: `0.0123`, `4.56`, `3187`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Measurement(Protocol):
    """A function that measures a row or a grid; it takes its name and whether to be quick."""

    def __call__(self, name: str, quick: bool) -> Row | Grid: ...


def row(name: str) -> Callable[[Measurement], Measurement]:
    """Register a measurement under its name, which the table shows and `-k` searches.

    In a loop, for one row per size: `row(f"all-reduce, {size} B")(partial(all_reduce, size))`.
    """

    def register(measurement: Measurement) -> Measurement:
        REGISTERED[name] = measurement
        return measurement

    return register
