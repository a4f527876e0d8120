"""Redistribution: the collectives that bring a tensor from one layout into another, planned before anything is sent.

A plan is a list of steps, each along one axis of the device matrix: slice, all-gather, all-to-all, reduce-scatter or
all-reduce. Two planners make it: rules that one can follow by hand, and a search for the path with the fewest bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod

from dlab.layout import Layout, Placed, replicated
from dlab.sharding.refinement import refine, within

_MOST_AXES = 4  # with more axes than this, the search tries only moves towards the target


@dataclass(frozen=True)
class Transition:
    """One collective of a plan, or a slice, which sends nothing: from one placement to the next, along some axes.

    `source` is the dimension that loses a cut and `target` the one that gets it, where there is one.
    """

    collective: str
    axes: tuple[str, ...]
    source: int | None
    target: int | None
    before: Placed
    after: Placed

    @property
    def ranks(self) -> int:
        """The number of ranks that take part together."""
        return prod(self.before.layout.lengths[axis] for axis in self.axes)

    def group(self, rank: int) -> list[int]:
        """Return the ranks with which a rank communicates, itself included."""
        return self.before.layout.group(rank, self.axes)

    def numbers(self, shape: Sequence[int]) -> int:
        """Return how many numbers each rank sends, for a tensor of this whole shape."""
        return volume(self.collective, self.ranks, prod(self.before.local_shape(shape)))


def volume(collective: str, ranks: int, local: int) -> int:
    """Return how many numbers a rank sends in a collective, if it enters it with `local` of them.

    >>> volume("all-reduce", ranks=4, local=1000), volume("all-gather", ranks=4, local=1000)
    (1500, 3000)
    """
    each = (ranks - 1) * local
    return {"slice": 0, "all-gather": each, "all-reduce": 2 * each // ranks}.get(collective, each // ranks)


@lru_cache(maxsize=4096)
def steps_between(
    source: Placed, target: Placed, shape: tuple[int, ...], planner: str = "rules"
) -> tuple[Transition, ...]:
    """Return the steps of a plan; found once for each pair of placements and shape."""
    if source == target:
        return ()
    fine = refine(source.layout, target.layout)
    if fine is None:  # such as (2, 3) and (3, 2): every rank gets the whole tensor, and keeps its new part
        nowhere = replicated(source.layout, len(shape))
        joined = steps_between(source, nowhere, shape, planner)
        return (*joined, *steps_between(replicated(target.layout, len(shape)), target, shape, planner))
    begin, end = within(source, fine), within(target, fine)
    layouts = source.layout, target.layout
    found = _join(_by_rules(begin, end, shape), layouts)
    if planner == "bytes":
        searched = _join(_by_search(begin, end, shape), layouts)
        found = min(found, searched, key=lambda steps: (_sent(steps, shape), len(steps)))
    return tuple(found)


def _sent(steps: Sequence[Transition], shape: tuple[int, ...]) -> int:
    return sum(step.numbers(shape) for step in steps)


# the moves: what can be done with one axis


def _change(placed: Placed, axes: Sequence[str], collective: str, source: int | None, target: int | None) -> Transition:
    dims, partial = list(placed.dims), placed.partial
    if source is not None:
        dims[source] = dims[source][: -len(axes)]
    if target is not None:
        dims[target] = (*dims[target], *axes)
    if collective in ("all-reduce", "reduce-scatter"):
        partial = tuple(name for name in partial if name not in axes)
    return Transition(collective, tuple(axes), source, target, placed, Placed(placed.layout, tuple(dims), partial))


def _fits(placed: Placed, dim: int, axes: Sequence[str], shape: tuple[int, ...]) -> bool:
    return shape[dim] % (placed.cuts(dim) * prod(placed.layout.lengths[axis] for axis in axes)) == 0


def _moves(placed: Placed, end: Placed, shape: tuple[int, ...]) -> Iterator[Transition]:
    """Yield every step that is possible; only the last, innermost axes of a dimension can be joined or moved.

    Axes that move together keep their order; moved one by one, (x, y) would become (y, x).
    """
    towards = len(placed.layout.names) > _MOST_AXES

    def places(axes: Sequence[str], without: int | None = None) -> list[int]:
        dims = [dim for dim in range(len(shape)) if dim != without and _fits(placed, dim, axes, shape)]
        return [dim for dim in dims if axes[-1] in end.dims[dim]] if towards else dims

    for axis in placed.layout.names:
        if placed.layout.lengths[axis] == 1 or axis in end.partial:
            continue
        if axis in placed.partial:
            yield _change(placed, [axis], "all-reduce", None, None)
            yield from (_change(placed, [axis], "reduce-scatter", None, dim) for dim in places([axis]))
        elif axis not in placed.used:
            yield from (_change(placed, [axis], "slice", None, dim) for dim in places([axis]))
    for dim, names in enumerate(placed.dims):
        if names:
            yield _change(placed, names[-1:], "all-gather", dim, None)
        for first in range(len(names)):
            yield from (_change(placed, names[first:], "all-to-all", dim, to) for to in places(names[first:], dim))


def _by_search(begin: Placed, end: Placed, shape: tuple[int, ...]) -> list[Transition]:
    """Return the path with the fewest bytes, and among those the one with the fewest steps (Dijkstra's search)."""
    order = count()  # decides ties, since placements cannot be compared
    queue: list[tuple[int, int, int, Placed, list[Transition]]] = [(0, 0, next(order), begin, [])]
    done: set[Placed] = set()
    while queue:
        sent, steps, _, placed, path = heapq.heappop(queue)
        if placed == end:
            return path
        if placed in done:
            continue
        done.add(placed)
        for step in _moves(placed, end, shape):
            if step.after not in done:
                more = sent + step.numbers(shape)
                heapq.heappush(queue, (more, steps + 1, next(order), step.after, [*path, step]))
    return _by_rules(begin, end, shape)


def _by_rules(begin: Placed, end: Placed, shape: tuple[int, ...]) -> list[Transition]:
    """Cut every dimension whose next axis is free, move a cut from another dimension, join what the target does not
    use; if none of these is possible, join the first dimension that is cut in another way than the target."""
    steps: list[Transition] = []
    while (placed := steps[-1].after if steps else begin) != end:
        step = next(_rules(placed, end), None)
        if step is None:
            raise ValueError(
                f"{begin} cannot become {end}: a partial sum must be over the same axes in both, or in none"
            )
        steps.append(step)
    return steps


def _rules(placed: Placed, end: Placed) -> Iterator[Transition]:
    wanted = [  # the next axis that each dimension lacks, if what it has is right
        (dim, goal[len(has)])
        for dim, (has, goal) in enumerate(zip(placed.dims, end.dims, strict=True))
        if len(goal) > len(has) and goal[: len(has)] == has
    ]
    for dim, axis in wanted:
        if axis in placed.partial:
            yield _change(placed, [axis], "reduce-scatter", None, dim)
        elif axis not in placed.used:
            yield _change(placed, [axis], "slice", None, dim)
    for axis in placed.partial:
        if axis not in end.partial and axis not in end.used:
            yield _change(placed, [axis], "all-reduce", None, None)
    for dim, axis in wanted:
        for other, has in enumerate(placed.dims):
            if has and has[-1] == axis:
                yield _change(placed, [axis], "all-to-all", other, dim)
    for dim, has in enumerate(placed.dims):
        if has and has[-1] not in end.used:
            yield _change(placed, has[-1:], "all-gather", dim, None)
    for dim, has in enumerate(placed.dims):
        if has and end.dims[dim][: len(has)] != has:
            yield _change(placed, has[-1:], "all-gather", dim, None)


def _join(steps: Sequence[Transition], layouts: tuple[Layout, Layout]) -> list[Transition]:
    """Make one step of several of the same kind that go along parts of one axis of either layout."""
    joined: list[Transition] = []
    for step in steps:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.collective, last.source, last.target) == (step.collective, step.source, step.target)
            and step.collective != "all-to-all"
            and (step.collective == "all-reduce" or _one_axis((*last.axes, *step.axes), step.before.layout, layouts))
        ):
            # of joined cuts the innermost goes first, so that the major axis stands first in the group
            axes = (*step.axes, *last.axes) if step.collective == "all-gather" else (*last.axes, *step.axes)
            joined[-1] = Transition(step.collective, axes, last.source, last.target, last.before, step.after)
        else:
            joined.append(step)
    return joined


def _one_axis(names: Sequence[str], fine: Layout, layouts: tuple[Layout, Layout]) -> bool:
    """Return whether some axis of either layout consists of at least these parts."""
    for layout in layouts:
        for name, stride in layout.strides.items():
            high = stride * layout.lengths[name]
            if all(stride <= fine.strides[part] < high for part in names):
                return True
    return False
