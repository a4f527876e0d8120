"""How an operator is cut: its dimensions get subscripts, as in einsum, and a strategy says which axes cut which one.

A matmul is `ij,jk->ik`. A subscript in the result is cut in the result as well; one that is summed away leaves a
partial sum. Everything else follows: which part of each input a rank needs, and what communication that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dlab.layout import Layout, Placed
from dlab.sharding.refinement import refine, within

UNCUT = "."  # the subscript of a dimension of length 1 that is repeated along another operand's, and never cut
Strategy = tuple[Any, ...]


@dataclass
class Operation:
    """One call of an operator: its tensors, the subscripts of their dimensions, and how to compute a part of it.

    `compute(parts, lengths)` gets each tensor's part, and the local length of each subscript. Those in `uncut` must not
    be cut. A `linear` operator may be applied to a partial sum, and gives one.
    """

    name: str
    tensors: list[Any]
    subscripts: list[str]
    result: str
    compute: Callable[[list[Any], dict[str, int]], Any]
    uncut: str = ""
    linear: bool = False
    partial: bool = True  # whether a subscript that is not in the result leaves a partial sum
    lengths: dict[str, int] = field(default_factory=dict)  # of subscripts that only the result has
    shape: tuple[int, ...] | None = None  # of the result, where its subscripts do not tell
    split: dict[str, int] = field(default_factory=dict)  # lengths in the result that are others there
    bias: Any = None  # added to the result when its sum is complete


@dataclass(frozen=True)
class Resolved:
    """What a strategy means for one call: where each tensor must be, and where the result is."""

    inputs: tuple[Placed, ...]
    varying: tuple[tuple[str, ...], ...]  # for each tensor, axes along which its copies are used for different parts
    result: Placed


def resolve(
    subscripts: Sequence[str],
    result: str,
    cuts: dict[str, tuple[str, ...]],
    layout: Layout,
    partial: bool,
    kept: tuple[str, ...] = (),
) -> Resolved:
    """Return where tensors and result are, if each subscript is cut along these axes; `kept` axes stay partial sums."""
    used = [axis for axes in cuts.values() for axis in axes if layout.lengths[axis] > 1]
    inputs = tuple(
        Placed(
            layout, tuple(cuts.get(subscript, ()) for subscript in word), tuple(kept) if len(subscripts) == 1 else ()
        )
        for word in subscripts
    )
    varying = tuple(tuple(axis for axis in layout.names if axis in used and axis not in each.used) for each in inputs)
    summed = [axis for subscript, axes in cuts.items() if subscript not in result for axis in axes]
    left = tuple(axis for axis in layout.names if axis in kept or (partial and axis in summed))
    return Resolved(inputs, varying, Placed(layout, tuple(cuts.get(subscript, ()) for subscript in result), left))


def _is_within(coarse: Layout, fine: Layout) -> bool:
    """Return whether each axis of a device matrix consists of axes of a finer one, whatever their names are."""
    common = refine(fine, coarse)
    return common is not None and common.device_matrix == refine(fine).device_matrix  # type: ignore[union-attr]


def lengths_of(operation: Operation, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the whole length of each subscript, which must be the same wherever it stands."""
    lengths = dict(operation.lengths)
    for word, shape in zip(operation.subscripts, shapes, strict=True):
        if len(word) != len(shape):
            raise ValueError(
                f"{operation.name} needs a tensor of {len(word)} dimensions, but one has the shape {shape}"
            )
        for subscript, length in zip(word, shape, strict=True):
            if subscript != UNCUT and lengths.setdefault(subscript, length) != length:
                raise ValueError(
                    f"{operation.name} cannot be computed for the shapes {' and '.join(map(str, shapes))}: dimension "
                    f"{_where(operation, subscript)} has length {lengths[subscript]} there and {length} elsewhere"
                )
            if subscript != UNCUT:
                lengths[subscript] = length
    return lengths


# strategies that are given


def by_strategy(
    operation: Operation, shapes: Sequence[Sequence[int]], strategy: Strategy, ranks: int
) -> tuple[dict[str, tuple[str, ...]], Layout]:
    """Return the axes of each subscript, and the device matrix, for a strategy of cuts or of layouts."""
    name, wanted = operation.name, len(operation.tensors)
    if not isinstance(strategy, (tuple, list)):
        raise ValueError(f"{name}: a strategy is a tuple with an entry for each input, not {strategy!r}")
    if len(strategy) != wanted:
        entries = f"{len(strategy)} {'entry' if len(strategy) == 1 else 'entries'}"
        raise ValueError(f"{name}: the strategy {_show(strategy)} has {entries}, not {wanted}, one for each input")
    if all(isinstance(each, Placed) for each in strategy):
        cuts, layout = _by_layouts(operation, strategy, ranks)
    elif any(isinstance(each, Layout) for each in strategy):
        raise ValueError(
            f"{name}: call the layout with an entry for each dimension of an input, as in layout('tp', None)"
        )
    elif any(isinstance(each, Placed) for each in strategy):
        raise ValueError(f"{name}: the strategy {_show(strategy)} mixes cuts and layouts: give one kind for all inputs")
    else:
        cuts, layout = _by_cuts(operation, strategy, ranks)
    lengths = lengths_of(operation, shapes)
    for subscript, axes in cuts.items():
        parts = prod(layout.lengths[axis] for axis in axes)
        if parts > 1 and subscript in operation.uncut:
            raise ValueError(
                f"{name} cannot cut dimension {_where(operation, subscript)}: it needs the whole of it; give 1 there"
            )
        if subscript in operation.split and operation.split[subscript] % parts:
            raise ValueError(
                f"{name} cannot cut dimension {_where(operation, subscript)} into {parts}: it becomes a dimension of "
                f"length {operation.split[subscript]} in the result, which {parts} does not divide"
            )
        if lengths[subscript] % parts:
            below = lengths[subscript] // parts * parts
            near = f"{below} or {below + parts}" if below else str(parts)
            raise ValueError(
                f"{name}: dimension {_where(operation, subscript)} has length {lengths[subscript]} and cannot be cut "
                f"into {parts} equal parts: {near} would work"
            )
    return cuts, layout


def _by_cuts(operation: Operation, strategy: Strategy, ranks: int) -> tuple[dict[str, tuple[str, ...]], Layout]:
    """The device matrix has an axis for each subscript, in the order in which they appear; the copies are the last."""
    parts: dict[str, int] = {}
    for number, (word, cuts) in enumerate(zip(operation.subscripts, strategy, strict=True)):
        if (
            not isinstance(cuts, (tuple, list))
            or len(cuts) != len(word)
            or not all(type(cut) is int and cut > 0 for cut in cuts)
        ):
            raise ValueError(
                f"{operation.name}: input {number} has {len(word)} dimensions, but the strategy cuts it by "
                f"{_show(cuts)}: give a whole number, 1 or more, for each dimension"
            )
        for dim, (subscript, cut) in enumerate(zip(word, cuts, strict=True)):
            if subscript == UNCUT and cut > 1:
                raise ValueError(f"{operation.name}: dimension {dim} of input {number} has length 1 and cannot be cut")
            if subscript != UNCUT and parts.setdefault(subscript, cut) != cut:
                raise ValueError(
                    f"{operation.name}: dimension {dim} of input {number} is cut into {cut}, but dimension "
                    f"{_where(operation, subscript)}, which it is multiplied with or added to, into {parts[subscript]}"
                    ": the two must agree"
                )
    product = prod(parts.values())
    if ranks % product:
        raise ValueError(
            f"{operation.name}: the strategy {_show(strategy)} makes {product} parts, which {ranks} ranks cannot share "
            f"equally: use a number of parts that divides {ranks}"
        )
    names = [*parts, "copies"]
    shape = [*parts.values(), ranks // product]
    layout = Layout(tuple(shape), tuple(names))
    return {subscript: (subscript,) if cut > 1 else () for subscript, cut in parts.items()}, layout


def _by_layouts(operation: Operation, strategy: Strategy, ranks: int) -> tuple[dict[str, tuple[str, ...]], Layout]:
    layout = strategy[0].layout
    cuts: dict[str, tuple[str, ...]] = {}
    for number, (word, placed) in enumerate(zip(operation.subscripts, strategy, strict=True)):
        placed.layout.check_ranks(ranks)
        if (placed.layout.device_matrix, placed.layout.names) != (layout.device_matrix, layout.names):
            raise ValueError(
                f"{operation.name}: its inputs have different layouts, {layout} and {placed.layout}: use one for all"
            )
        if len(placed.dims) != len(word):
            raise ValueError(
                f"{operation.name}: input {number} has {len(word)} dimensions, but its layout {placed} has "
                f"{len(placed.dims)} entries: give one for each dimension"
            )
        for dim, (subscript, axes) in enumerate(zip(word, placed.dims, strict=True)):
            if subscript == UNCUT and axes:
                raise ValueError(f"{operation.name}: dimension {dim} of input {number} has length 1 and cannot be cut")
            if subscript != UNCUT and cuts.setdefault(subscript, axes) != axes:
                raise ValueError(
                    f"{operation.name}: dimension {dim} of input {number} is cut along {_axes(axes)}, but dimension "
                    f"{_where(operation, subscript)}, which it is multiplied with or added to, along "
                    f"{_axes(cuts[subscript])}: the two must agree"
                )
    owner: dict[str, str] = {}
    for subscript, axes in cuts.items():
        for axis in axes:
            if owner.setdefault(axis, subscript) != subscript:
                raise ValueError(
                    f"{operation.name}: {axis!r} cuts dimension {_where(operation, owner[axis])} and dimension "
                    f"{_where(operation, subscript)}, so that no rank would have all pairs: gather one of them first"
                )
    return cuts, layout


def _axes(axes: tuple[str, ...]) -> str:
    return " and ".join(axes) or "no axis"


def _where(operation: Operation, subscript: str) -> str:
    for number, word in enumerate(operation.subscripts):
        if subscript in word:
            return f"{word.index(subscript)} of input {number}"
    return f"{operation.result.index(subscript)} of the result"


def _show(strategy: Any) -> str:
    if isinstance(strategy, (tuple, list)):
        return f"({', '.join(map(_show, strategy))}{',' if len(strategy) == 1 else ''})"
    return str(strategy)


# operators without a strategy


def by_following(
    operation: Operation,
    shapes: Sequence[Sequence[int]],
    placed: Sequence[Placed | None],
    fixed: Sequence[bool],
    ranks: int,
) -> tuple[dict[str, tuple[str, ...]], Layout]:
    """Cut each subscript as the inputs are cut; weights whose layout is `fixed` come first, the others in their order.

    An axis cuts one subscript only: an input that is cut along it elsewhere is gathered. `None` is a weight that has no
    layout yet.
    """
    known = [each for each in placed if each is not None]
    known.sort(key=lambda each: not each.used)  # axes get the names of layouts that cut something
    layout = refine(*(each.layout for each in known)) if known else Layout((ranks,), ("dp",))
    if layout is None:  # no common device matrix: the first input decides, the others are gathered
        layout = known[0].layout
    lengths = lengths_of(operation, shapes)
    cuts: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    summed = {subscript for word in operation.subscripts for subscript in word if subscript not in operation.result}
    for first in (True, False):
        for word, each, is_fixed in zip(operation.subscripts, placed, fixed, strict=True):
            if each is None or is_fixed != first or not _is_within(each.layout, layout):
                continue
            for subscript, axes in zip(word, within(each, layout).dims, strict=True):
                free = tuple(axis for axis in axes if axis not in used)
                parts = prod(layout.lengths[axis] for axis in free)
                if subscript == UNCUT or subscript in operation.uncut or free != axes:
                    continue
                if lengths[subscript] % parts or operation.split.get(subscript, 0) % parts:
                    continue
                if subscript not in cuts and (free or (first and subscript in summed and len(word) > 1)):
                    cuts[subscript] = free
                    used |= set(free)
    return cuts, layout
