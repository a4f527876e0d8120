"""How the values of a tensor are made, written down, so that any part of it can be made alone, bit for bit.

The random numbers of the whole are drawn again, a block at a time, and all but those of the part are thrown away: that
costs the time of drawing the whole, and the memory of the part and a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

Box = tuple[slice, ...]
DRAWS = {"uniform_", "normal_"}
_BLOCK = 1 << 16  # elements; a multiple of 16, because torch draws normal numbers in groups of 16


class Recipe:
    """How a tensor's values are made: a function that gives all of them anew, then functions of single elements."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.first_dtype = dtype  # before the first step
        self.steps: list[tuple[Any, Any, Any]] = []  # functions of torch with their further arguments
        self.drawn: torch.Tensor | None = None  # the state of the generator before the first step, if that draws
        self.filled: list[tuple[Box, Any]] = []  # parts that are one number in the end
        self.stored: Callable[[Box], torch.Tensor] | None = None  # reads a part that a checkpoint holds
        self.made: torch.Tensor | None = None  # the whole, if something had to compute with it
        self.waits = False  # until a rank makes its part: a parameter, or a tensor that is cut as a parameter is

    def copy(self) -> Recipe:
        """Return a recipe of its own with the same steps."""
        other = Recipe(self.shape, self.dtype)
        other.__dict__.update(self.__dict__)
        other.steps, other.filled, other.waits = [*self.steps], [*self.filled], False
        other.made = None if self.made is None else self.made.clone()
        return other

    def __getstate__(self) -> dict[str, Any]:
        # torch's own functions cannot be pickled: their names can
        steps = [(each.overloadpacket.__name__, each._overloadname, *more) for each, *more in self.steps]
        return self.__dict__ | {"steps": steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        steps = [(getattr(getattr(torch.ops.aten, name), kind), *more) for name, kind, *more in state["steps"]]
        self.__dict__.update(state, steps=steps)

    def begin(self, function: Any, args: Any, generator: torch.Generator | None = None) -> None:
        """Record a function that sets all values; if it draws random numbers, the generator advances as usual."""
        self.steps, self.filled, self.drawn, self.stored = [(function, args, {})], [], None, None
        self.first_dtype = self.dtype
        if function.overloadpacket.__name__ in DRAWS:
            generator = generator or torch.default_generator
            self.drawn = generator.get_state()
            for _ in self._blocks(generator):
                pass

    def add(self, function: Any, args: Any, kwargs: Any) -> None:
        """Record a function that is applied to each element."""
        self.steps.append((function, args, kwargs))
        self.dtype = function(torch.ones(1, dtype=self.dtype), *args, **kwargs).dtype
        number = torch.zeros((), dtype=self.dtype)
        self.filled = [(box, function(number + value, *args, **kwargs).item()) for box, value in self.filled]

    def read(self, stored: Callable[[Box], torch.Tensor], dtype: torch.dtype) -> None:
        """Take the values from what a checkpoint holds, instead of those that were to be made."""
        self.steps, self.filled, self.drawn, self.made, self.stored = [], [], None, None, stored
        self.dtype = self.first_dtype = dtype

    def part(self, box: Box) -> torch.Tensor:
        """Make the values of a part; costs the time of drawing the whole, and the memory of the part and a block."""
        if self.made is not None:
            return self.made[box].clone(memory_format=torch.contiguous_format)
        if self.stored is not None:
            values = self._apply(self.stored(box), self.steps)
        elif self.drawn is None:
            made = torch.zeros([each.stop - each.start for each in box], dtype=self.first_dtype)
            values = self._apply(made, self.steps)
        else:
            values = self._drawn_part(box)
        for filled, number in self.filled:
            if (common := overlap(filled, box)) is not None:
                values[shifted(common, box)] = number
        return values

    def whole(self) -> torch.Tensor:
        """Make the values of the whole parameter, as one process with the same seed has them."""
        return self.part(tuple(slice(0, length) for length in self.shape))

    @staticmethod
    def _apply(values: torch.Tensor, steps: Sequence[tuple[Any, Any, Any]]) -> torch.Tensor:
        with torch.no_grad():
            for function, args, kwargs in steps:
                values = function(values, *args, **kwargs)
        return values

    def _blocks(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Draw the whole, a block at a time, with the same bits as one call for the whole.

        torch draws normal numbers in groups of 16. If 16 does not divide the size, it draws the last 16 again; below 16
        it uses another method. So every block but the last is a multiple of 16, and the last has at least 16.
        """
        (function, args, _), left = self.steps[0], math.prod(self.shape)
        scratch = torch.empty(min(left, _BLOCK + 15), dtype=self.first_dtype)
        while left:
            size = left if left < _BLOCK + 16 else _BLOCK
            left -= size
            yield function(scratch[:size], *args, generator=generator)

    def _drawn_part(self, box: Box) -> torch.Tensor:
        assert self.drawn is not None
        generator = torch.Generator()
        generator.set_state(self.drawn)
        made = torch.empty([each.stop - each.start for each in box], dtype=self.dtype)
        stretches = _Reader(self._apply(block, self.steps[1:]) for block in self._blocks(generator))
        for stretch in _stretches(self.shape):
            values = stretches.read(math.prod(each.stop - each.start for each in stretch))
            if (common := overlap(stretch, box)) is not None:
                values = values.view([each.stop - each.start for each in stretch])
                made[shifted(common, box)] = values[shifted(common, stretch)]
        return made


class _Reader:
    """Reads numbers that come in blocks, as many at a time as are wanted."""

    def __init__(self, blocks: Iterator[torch.Tensor]) -> None:
        self._blocks, self._rest = blocks, torch.empty(0)

    def read(self, count: int) -> torch.Tensor:
        """Return the next numbers; valid until the next call."""
        found, missing = [], count
        while missing:
            if not len(self._rest):
                self._rest = next(self._blocks)
            found.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(found[-1])
            if missing:
                found[-1] = found[-1].clone()  # the next block is drawn in the same memory
        return found[0] if len(found) == 1 else torch.cat(found)


def _stretches(shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut a tensor into boxes that are contiguous in memory and follow each other, each of about a block."""
    dim = next((dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= _BLOCK), len(shape))
    if dim == len(shape):
        yield ()
        return
    rows = max(1, _BLOCK // math.prod(shape[dim + 1 :]))
    rest = tuple(slice(0, length) for length in shape[dim + 1 :])
    for outer in product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            first = tuple(slice(index, index + 1) for index in outer)
            yield (*first, slice(row, min(row + rows, shape[dim])), *rest)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the part that two parts of a tensor have in common; None if they have none."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return common if all(each.start < each.stop for each in common) else None


def shifted(inner: Box, outer: Box) -> Box:
    """Return the position of a part relative to a larger part that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))
