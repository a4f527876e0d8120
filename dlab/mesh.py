"""Meshes: ranks on a grid with named axes, so that each line of them can communicate as a group.

A mesh of shape (2, 4) with the names ("dp", "tp") has 2 rows of 4 ranks: a rank shards its layers with the 3 others in
its row, `mesh["tp"]`, and averages gradients with the other one in its column, `mesh["dp"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NoReturn

from dlab.data.table import Bars, Table
from dlab.processes.worker.context import transport as transport_of_this_worker
from dlab.transports import Group, Transport


class RankGrid:
    """The numbers of ranks on a grid with named axes, the first axis slowest; it needs no ranks that run."""

    def __init__(self, shape: Sequence[int], names: Sequence[str]) -> None:
        if not isinstance(shape, Sequence):
            raise ValueError(f"a mesh of shape {shape!r} is not possible: give a length for each axis, as in (2, 4)")
        self.shape, self.names = tuple(shape), (names,) if isinstance(names, str) else tuple(names)
        self._check()

    def _check(self) -> None:
        if not self.shape or not all(isinstance(length, int) and length > 0 for length in self.shape):
            raise ValueError(f"a mesh of shape {self.shape} is not possible: give a whole number, 1 or more, per axis")
        if len(self.names) != len(self.shape):
            axes, names = _count(len(self.shape), "axis", "axes"), _count(len(self.names), "name", "names")
            raise ValueError(
                f"a mesh of shape {self.shape} has {axes} but got {names}, {self.names}: give one name for each axis"
            )
        for name in self.names:
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of an axis must be a word, such as 'dp', not {name!r}")
            if self.names.count(name) > 1:
                raise ValueError(f"two axes of the mesh are called {name!r}: give each its own name")

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis."""
        if rank not in range(prod(self.shape)):
            raise IndexError(f"there is no rank {rank!r} in this mesh: its ranks are 0 to {prod(self.shape) - 1}")
        found = {}
        for name, length in zip(reversed(self.names), reversed(self.shape), strict=True):
            rank, found[name] = divmod(rank, length)
        return {name: found[name] for name in self.names}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """Return the rank at these coordinates, one for each axis."""
        if set(coordinates) != set(self.names):
            raise KeyError(f"{coordinates} names no rank: give one coordinate for each of the axes {self._axes()}")
        rank = 0
        for name, length in zip(self.names, self.shape, strict=True):
            if coordinates[name] not in range(length):
                raise IndexError(
                    f"there is no {name} {coordinates[name]!r} in this mesh: it goes from 0 to {length - 1}"
                )
            rank = rank * length + coordinates[name]
        return rank

    def line(self, rank: int, *names: str) -> list[int]:
        """Return the ranks that differ from this one only in these coordinates, itself included; first name slowest."""
        at = self.coordinates_of(rank)
        unknown = [name for name in names if name not in self.names]
        if unknown or not names:
            asked = ", ".join(map(repr, unknown)) or "without a name"
            raise KeyError(f"this mesh has no axis {asked}: its axes are {self._axes()}")
        if len(set(names)) < len(names):
            raise KeyError(f"{names} names an axis twice: give each axis once")
        lengths = [range(self.shape[self.names.index(name)]) for name in names]
        return [self.rank_at({**at, **dict(zip(names, place, strict=True))}) for place in product(*lengths)]

    def _axes(self) -> str:
        return ", ".join(map(repr, self.names))


class Mesh(RankGrid):
    """Ranks on a grid with named axes, the first axis slowest: ranks that differ in the last one are neighbours.

    Every rank makes the same mesh. `mesh["dp"]` is this rank's line along an axis, a transport among the ranks that
    differ from it only in that coordinate; `mesh["dp", "tp"]` is the plane of two axes, whose ranks are numbered with
    the first name slowest. A mesh on a `transport` sends nothing when it is made; without one, it uses
    `dlab.transport()`, whose first use in a run connects the ranks, so every rank must make the mesh.

    >>> mesh = dlab.Mesh((2, 2, 2), ("pp", "dp", "tp"))  # on rank 5 of 8
    >>> mesh.coordinates
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> list(mesh["dp"].members)
    [5, 7]
    >>> dlab.rehearse(lambda transport: dlab.Mesh((2, 2), ("dp", "tp"), transport).coordinates["tp"], ranks=4)
    [0, 1, 0, 1]
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str], transport: Transport | None = None) -> None:
        super().__init__(shape, names)
        self.transport = transport_of_this_worker() if transport is None else transport
        if prod(self.shape) != self.transport.size:
            raise ValueError(
                f"a mesh of {' × '.join(map(str, self.shape))} needs {prod(self.shape)} ranks, but there are "
                f"{self.transport.size}: the product of the shape must be their number"
            )
        self._groups: dict[tuple[str, ...], Transport] = {}

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of this rank, by axis."""
        return self.coordinates_of(self.transport.rank)

    def __getitem__(self, names: str | tuple[str, ...]) -> Transport:
        """Return this rank's line along one axis, or the plane of several, as a transport."""
        names = tuple(names) if isinstance(names, (tuple, list)) else (names,)
        if names not in self._groups:
            self._groups[names] = Group(self.transport, self.line(self.transport.rank, *names), ", ".join(names))
        return self._groups[names]

    def table(self) -> MeshTable:
        """Return a table with a row for each rank: its coordinates and its groups."""
        return MeshTable(RankGrid(self.shape, self.names))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a mesh cannot be sent to another process, since it holds this one's transports: return mesh.table() or "
            "mesh.coordinates, and make the mesh in the function that each rank runs"
        )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {length}" for name, length in zip(self.names, self.shape, strict=True))
        return f"<Mesh of {_count(prod(self.shape), 'rank', 'ranks')}: {axes}>"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


class MeshTable(Table):
    """A table with a row per rank: its coordinates, and the ranks of its line along each axis.

    >>> dlab.Mesh((2, 2), ("dp", "tp")).table()
    rank  dp  tp  dp group  tp group
       0   0   0  0, 2      0, 1
       1   0   1  1, 3      0, 1
       2   1   0  0, 2      2, 3
       3   1   1  1, 3      2, 3
    """

    def __init__(self, grid: RankGrid) -> None:
        self._grid = grid
        self.rows: list[int] = list(range(prod(grid.shape)))

    def heading(self) -> list[str]:
        return ["rank", *self._grid.names, *(f"{name} group" for name in self._grid.names)]

    def cells(self, row: int) -> list[int | str | Bars]:
        groups = [", ".join(map(str, self._grid.line(row, name))) for name in self._grid.names]
        return [row, *self._grid.coordinates_of(row).values(), *groups]

    def between(self, hidden: Sequence[int]) -> str:
        return f"… ranks {hidden[0]} to {hidden[-1]}"
