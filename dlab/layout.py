"""Layouts: which rank holds which part of a tensor, written with the names of a device matrix's axes.

`Layout((2, 2, 2), ("dp", "sp", "mp"))` puts 8 ranks on a grid, the first axis slowest. Calling it with one entry for
each dimension of a tensor says which axes cut that dimension. Nothing here communicates, or needs ranks that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from math import isqrt, prod
from operator import index
from typing import Any

Entry = str | tuple[str, ...] | None
ORDERS = ("first", "last")


@dataclass(frozen=True, eq=False)
class Layout:
    """A device matrix with named axes: rank = ((dp * 2) + sp) * 2 + mp for shape (2, 2, 2) and names (dp, sp, mp).

    `layout("mp", ("sp", "dp"))` cuts a matrix: its rows along mp, its columns along sp and dp. The first name of a
    tuple is the major one: the columns are cut by sp, and each piece by dp. With `major="last"` it is the other way.

    >>> x = Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))
    >>> x.slices((32, 784))[1]
    (slice(16, 32, None), slice(0, 196, None))
    """

    device_matrix: tuple[int, ...]
    names: tuple[str, ...]
    major: str = "first"

    def __post_init__(self) -> None:
        given: Any = self.device_matrix, self.names
        if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in given):
            raise ValueError(
                f"Layout({given[0]!r}, {given[1]!r}): give a tuple of lengths and a tuple of names, one per axis"
            )
        shape, names = whole_numbers(given[0]), tuple(given[1])
        if not shape or min(shape) < 1:
            raise ValueError(f"a device matrix of {tuple(given[0])} is not possible: give whole numbers, 1 or more")
        object.__setattr__(self, "device_matrix", shape)
        object.__setattr__(self, "names", names)
        if len(shape) != len(names):
            raise ValueError(
                f"a device matrix of {shape} has {len(shape)} axes but {len(names)} names, {names}: give "
                "one name for each axis"
            )
        for name in names:
            if not isinstance(name, str) or name in ("", "None"):
                raise ValueError(f"an axis cannot be called {name!r}: give a word, such as 'dp'")
            if names.count(name) > 1:
                raise ValueError(f"two axes are called {name!r}: give each axis its own name")
        if self.major not in ORDERS:
            raise ValueError(f"major={self.major!r}: the major name of a tuple is its 'first' or its 'last'")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.device_matrix)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of each axis, by name."""
        return dict(zip(self.names, self.device_matrix, strict=True))

    @cached_property
    def strides(self) -> dict[str, int]:
        """How many ranks lie between neighbours along each axis, by name."""
        strides, stride = {}, 1
        for name, length in zip(reversed(self.names), reversed(self.device_matrix), strict=True):
            strides[name] = stride
            stride *= length
        return strides

    def coordinate(self, rank: int, name: str) -> int:
        """Return the coordinate of a rank along an axis."""
        return rank // self.strides[name] % self.lengths[name]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank, in the order of the axes."""
        self._check_rank(rank)
        return tuple(self.coordinate(rank, name) for name in self.names)

    def block(self, rank: int, names: Sequence[str]) -> int:
        """Return the number of a rank's block of a dimension that is cut along these axes, the first one major."""
        number = 0
        for name in names:
            number = number * self.lengths[name] + self.coordinate(rank, name)
        return number

    def group(self, rank: int, names: Sequence[str]) -> list[int]:
        """Return the ranks that differ from this one along these axes only, in the order of their blocks."""
        self._check_rank(rank)
        names = (names,) if isinstance(names, str) else tuple(names)
        self._check_names(names)
        if len(set(names)) < len(names):
            raise ValueError(f"a group along {', '.join(names)} names an axis twice: give each axis once")
        members = [rank - sum(self.coordinate(rank, name) * self.strides[name] for name in names)]
        for name in names:
            members = [first + step * self.strides[name] for first in members for step in range(self.lengths[name])]
        return members

    def check_ranks(self, ranks: int) -> None:
        """Raise an error if the device matrix is not for this number of ranks."""
        if self.size != ranks:
            product = f"{' × '.join(map(str, self.device_matrix))} = " if len(self.device_matrix) > 1 else ""
            fitting = " or ".join(map(str, _fitting(self.device_matrix, ranks)))
            raise ValueError(
                f"{self} has {product}{_count(self.size, 'place')}, but there {'is' if ranks == 1 else 'are'} "
                f"{_count(ranks, 'rank')}: the product must be the number of ranks, and the nearest device matrix that "
                f"fits is {fitting}"
            )

    def __call__(self, *entries: Entry) -> Placed:
        """Place a tensor: an entry for each of its dimensions, a name, a tuple of names, or None."""
        dims: list[tuple[str, ...]] = []
        for number, entry in enumerate(entries):
            if entry is None or isinstance(entry, str):
                entry = () if entry in (None, "None") else (str(entry),)
            elif not isinstance(entry, (tuple, list)):
                raise ValueError(
                    f"entry {number} of a layout is {entry!r}: give the name of an axis, a tuple of names, or None"
                )
            self._check_names(entry)
            dims.append(tuple(entry) if self.major == "first" else tuple(reversed(entry)))
        used = [name for dim in dims for name in dim]
        for name in used:
            if used.count(name) > 1:
                raise ValueError(
                    f"{name!r} cuts the same tensor twice in {_written(entries)}: each axis can cut only one dimension"
                )
        return Placed(self, tuple(dims))

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self.size):
            raise IndexError(f"there is no rank {rank!r} in {self}: its ranks are 0 to {self.size - 1}")

    def _check_names(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.names:
                raise ValueError(f"{self} has no axis {name!r}: its axes are {', '.join(map(repr, self.names))}")

    def __reduce__(self) -> tuple[object, ...]:
        # without the stored hash: another process hashes the same words to other numbers
        return Layout, (self.device_matrix, self.names, self.major)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.device_matrix, self.names, self.major

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return "Layout(" + ", ".join(f"{name} {length}" for name, length in self.lengths.items()) + ")"

    def __repr__(self) -> str:
        order = "" if self.major == "first" else f", major={self.major!r}"
        return f"Layout({self.device_matrix!r}, {self.names!r}{order})"


@dataclass(frozen=True, eq=False)
class Placed:
    """A layout for one tensor: the axes that cut each dimension, the major one first.

    Along an axis that cuts no dimension, ranks hold copies (the tensor is replicated), unless the axis is in `partial`:
    then the tensor is the sum of what they hold.
    """

    layout: Layout
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = field(default=())

    def cuts(self, dim: int) -> int:
        """Return into how many blocks a dimension is cut."""
        return self._cuts[dim]

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one rank's part of a tensor of this shape."""
        shape = check_shape(shape)
        if len(shape) != len(self.dims):
            raise ValueError(
                f"{self} is for a tensor with {_count(len(self.dims), 'dimension')}, but the shape {shape} has "
                f"{len(shape)}: give one entry for each dimension"
            )
        for dim, length in enumerate(shape):
            if length % self.cuts(dim):
                raise ValueError(
                    f"dimension {dim} of the shape {shape} cannot be cut into {self.cuts(dim)} equal parts "
                    f"along {' and '.join(self.dims[dim])}: {_nearest(length, self.cuts(dim))} would work"
                )
        return tuple(length // self.cuts(dim) for dim, length in enumerate(shape))

    def slices_of(self, rank: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return which part of a tensor of this shape a rank holds, as a slice for each dimension."""
        self.layout._check_rank(rank)
        starts = [self.layout.block(rank, names) for names in self.dims]
        parts = self.local_shape(shape)
        return tuple(slice(start * part, (start + 1) * part) for start, part in zip(starts, parts, strict=True))

    def slices(self, shape: Sequence[int]) -> list[tuple[slice, ...]]:
        """Return which part of a tensor of this shape each rank holds, by rank."""
        return [self.slices_of(rank, shape) for rank in range(self.layout.size)]

    def with_partial(self, *names: str) -> Placed:
        """Return the same layout for a tensor that is a sum over the ranks along these axes."""
        for name in names:
            if name not in self.layout.names or any(name in dim for dim in self.dims):
                raise ValueError(f"{self} cannot be a partial sum over {name!r}: name an axis that cuts no dimension")
        return Placed(self.layout, self.dims, tuple(name for name in self.layout.names if name in names))

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        return tuple(prod(self.layout.lengths[name] for name in names) for names in self.dims)

    @cached_property
    def used(self) -> frozenset[str]:
        """The axes that cut a dimension."""
        return frozenset(name for dim in self.dims for name in dim)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries with which `layout(*entries)` makes this, in the layout's own order of tuples."""
        written = self.dims if self.layout.major == "first" else tuple(tuple(reversed(dim)) for dim in self.dims)
        return tuple(dim if len(dim) > 1 else dim[0] if dim else "None" for dim in written)

    def __reduce__(self) -> tuple[object, ...]:
        return Placed, (self.layout, self.dims, self.partial)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Placed) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.layout, self.dims, self.partial

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        text = _written(self.entries)
        return text + (f" partial over {', '.join(self.partial)}" if self.partial else "")

    def __repr__(self) -> str:
        text = f"{self.layout!r}({', '.join(map(repr, self.entries))})"
        return text + (f".with_partial({', '.join(map(repr, self.partial))})" if self.partial else "")


def whole_numbers(given: Sequence[Any]) -> tuple[int, ...] | None:
    """Return whole numbers of any kind, such as NumPy's, as those of Python; None if one is something else."""
    try:
        return None if any(isinstance(number, bool) for number in given) else tuple(map(index, given))
    except TypeError:
        return None


def check_shape(given: Any) -> tuple[int, ...]:
    """Return the shape of a tensor as a tuple of whole numbers, or raise an error."""
    shape = whole_numbers(given) if isinstance(given, Sequence) else None
    if shape is None or min(shape, default=0) < 0:
        shown = f"a {type(given).__name__}" if hasattr(given, "shape") else repr(given)
        raise ValueError(f"a shape is a tuple of whole numbers, such as (32, 784), not {shown}")
    return shape


def check_placed(given: Any, what: str) -> None:
    """Raise an error if something is not the layout of a tensor."""
    if isinstance(given, Layout):
        raise ValueError(f"{what} is {given}, which places no tensor yet: call it with an entry for each dimension")
    if not isinstance(given, Placed):
        raise ValueError(
            f"{what} is {given!r}: give a layout with an entry for each dimension, as in layout('tp', None)"
        )


def replicated(layout: Layout, dims: int) -> Placed:
    """Return the layout of a tensor that every rank holds whole."""
    return Placed(layout, ((),) * dims)


def _fitting(device_matrix: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """Return up to two device matrices for this number of ranks: those that change the fewest axes, by the least."""
    Found = list[tuple[int, Fraction, tuple[int, ...]]]  # axes that change, by which factor in all, and the matrix
    small = [number for number in range(1, isqrt(ranks) + 1) if ranks % number == 0]
    divisors = sorted({*small, *(ranks // number for number in small)})

    @cache
    def best(number: int, axis: int) -> Found:
        """The best two ways to put this number of ranks on the axes from this one on."""
        if axis == len(device_matrix):
            return [(0, Fraction(1), ())] if number == 1 else []
        old, found = device_matrix[axis], []
        for new in (each for each in divisors if number % each == 0):
            factor = Fraction(max(old, new), min(old, new))
            for changed, by, others in best(number // new, axis + 1):
                found.append((changed + (new != old), factor * by, (new, *others)))
        return sorted(found)[:2]

    found = best(ranks, 0)
    return [matrix for changed, by, matrix in found if (changed, by) == found[0][:2]]


def _nearest(length: int, cuts: int) -> str:
    below = length // cuts * cuts
    return f"{below} or {below + cuts}" if below else f"{cuts}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _written(entries: Sequence[Entry]) -> str:
    """Return entries as people write them on a whiteboard: (mp, (sp, dp))."""
    words = [f"({', '.join(entry)})" if isinstance(entry, (tuple, list)) else str(entry) for entry in entries]
    return f"({', '.join(words)})"
