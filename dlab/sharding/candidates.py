"""The strategies that an operator could have, and what each communicates: the cost model of `parallel_mode="auto"`.

A candidate cuts an operator as its `shard(in_strategy, out_strategy)` would. Its cost is what `explain` tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

from dlab.layout import Layout, Placed, replicated
from dlab.sharding.communication import World, adds_up
from dlab.sharding.graph import Node
from dlab.sharding.operation import UNCUT, Operation, Resolved, Strategy, lengths_of
from dlab.sharding.redistribution import steps_between, volume
from dlab.sharding.tensor import _find, _out

MOST = 128  # candidates of one operator; of more, those that cut the fewest dimensions are tried

LATENCY = 8192  # bytes that a rank could send in the time that a collective takes to begin


class Traffic(NamedTuple):
    """Bytes that a rank sends forward and backward, and the number of collectives."""

    forward: int = 0
    backward: int = 0
    collectives: int = 0

    @property
    def bytes(self) -> int:
        """The bytes that a rank sends in both directions."""
        return self.forward + self.backward

    def cost(self, latency: int) -> int:
        """Return one number to compare: the bytes, and `latency` more for each collective."""
        return self.bytes + latency * self.collectives

    def plus(self, other: Traffic) -> Traffic:
        """Return the traffic of two operators together."""
        return Traffic(self[0] + other[0], self[1] + other[1], self[2] + other[2])


@dataclass(frozen=True)
class Candidate:
    """One strategy of an operator: the layouts of its inputs and its result, and the cost of adding up partial sums."""

    strategy: Strategy
    out_strategy: Any
    found: Resolved
    result: Placed
    own: Traffic
    work: int  # numbers that a rank's part of the operator goes through, which breaks ties

    def __str__(self) -> str:
        text = " ".join(_cuts(each) for each in self.strategy)
        return text if self.out_strategy is None else f"{text} → {_cuts(self.out_strategy)}"


def _cuts(entry: Any) -> str:
    return str(entry) if isinstance(entry, Placed) else f"({', '.join(map(str, entry))})"


def traffic(
    source: Placed,
    target: Placed,
    varying: tuple[str, ...],
    shape: tuple[int, ...],
    itemsize: int,
    gradient: bool,
    planner: str,
) -> Traffic:
    """Return what `redistribute` sends, without any tensor; what goes back is said by each class of `communication`."""
    steps = steps_between(source, target, shape, planner)
    forward = sum(step.numbers(shape) for step in steps)
    collectives = sum(step.collective != "slice" for step in steps)
    back: list[int] = []
    summed = bool(steps) and bool(varying) and adds_up(steps[-1], target, varying)
    for number, step in enumerate(steps):
        returns = {"slice": "all-gather", "reduce-scatter": "all-gather", "all-to-all": "all-to-all"}
        reverse = returns.get(step.collective)
        if number == len(steps) - 1 and summed:
            reverse = "reduce-scatter"
        if reverse is not None:
            back.append(volume(reverse, step.ranks, prod(step.after.local_shape(shape))))
    if varying and not summed:
        ranks = prod(target.layout.lengths[axis] for axis in varying)
        back.append(volume("all-reduce", ranks, prod(target.local_shape(shape))))
    if not gradient:
        back = []
    return Traffic(forward * itemsize, sum(back) * itemsize, collectives + len(back))


@cache
def canonical(placed: Placed, varying: tuple[str, ...] = ()) -> tuple[Placed, tuple[str, ...]]:
    """Return the same placement with numbered axes and without those of length 1: equal ones compare equal."""
    layout = placed.layout
    names = {name: str(number) for number, name in enumerate(each for each in layout.names if layout.lengths[each] > 1)}
    matrix = Layout(tuple(layout.lengths[name] for name in names) or (1,), tuple(names.values()) or ("0",))
    dims = tuple(tuple(names[name] for name in dim if name in names) for dim in placed.dims)
    partial = tuple(names[name] for name in placed.partial if name in names)
    return Placed(matrix, dims, partial), tuple(names[name] for name in varying)


# the candidates


def candidates(node: Node, ranks: int, planner: str) -> tuple[list[Candidate], bool]:
    """Return the strategies that an operator could have, and whether these are all.

    One that is given by hand is the only one. A product is divided among as many ranks as its dimensions allow;
    otherwise repeating all work on every rank, which sends nothing, would always win. Other operators may repeat it.
    """
    if node.strategy is not None:
        strategy = node.strategy[: len(node.operation.tensors)]
        return [_candidate(node, strategy, node.out_strategy, ranks, planner)], True
    cuts = sorted(_all_cuts(node, ranks), key=lambda parts: sum(cut > 1 for cut in parts.values()))
    if _is_product(node.operation, node.shapes):
        most = max(prod(parts.values()) for parts in cuts)
        cuts = [parts for parts in cuts if prod(parts.values()) == most]
    found: list[Candidate] = []
    for parts in cuts:
        strategy = tuple(tuple(parts.get(subscript, 1) for subscript in word) for word in node.operation.subscripts)
        plain = _candidate(node, strategy, node.out_strategy, ranks, planner)
        found.append(plain)
        if node.out_strategy is None:
            outs = _scattered(node, plain.found.result)
            found += [_candidate(node, strategy, out, ranks, planner) for out in outs]
    return found[:MOST], len(found) <= MOST


def _all_cuts(node: Node, ranks: int) -> Iterator[dict[str, int]]:
    """Yield how many parts each subscript can be cut into, so that all ranks share them equally."""
    operation, lengths = node.operation, lengths_of(node.operation, node.shapes)
    subscripts = list(dict.fromkeys("".join(operation.subscripts)))
    free = [each for each in subscripts if each != UNCUT and each not in operation.uncut]

    def cut(number: int, left: int) -> Iterator[dict[str, int]]:
        if number == len(free):
            yield {}
            return
        for parts in _divisors(left):
            if lengths[free[number]] % parts == 0 and operation.split.get(free[number], parts) % parts == 0:
                yield from ({free[number]: parts, **rest} for rest in cut(number + 1, left // parts))

    return cut(0, ranks)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_product(operation: Operation, shapes: Any) -> bool:
    """Return whether an operator multiplies and adds up, as a matmul does: its work is more than its largest tensor."""
    lengths, words = lengths_of(operation, shapes), [*operation.subscripts, operation.result]
    pairs = [each for each in "".join(operation.subscripts) if each not in operation.result]
    sizes = [prod(lengths.get(each, 1) for each in word) for word in words]
    work = prod(lengths.get(each, 1) for each in dict.fromkeys("".join(words)))
    return len(pairs) > len(set(pairs)) and work > max(sizes)


def _scattered(node: Node, result: Placed) -> Iterator[tuple[int, ...]]:
    """Yield the `out_strategy` for each dimension that a partial sum can be scattered over."""
    parts = prod(result.layout.lengths[axis] for axis in result.partial)
    for dim, length in enumerate(node.shape):
        if parts > 1 and length % (parts * result.cuts(dim)) == 0:
            yield tuple(result.cuts(each) * (parts if each == dim else 1) for each in range(len(node.shape)))


def _candidate(node: Node, strategy: Strategy, out: Any, ranks: int, planner: str) -> Candidate:
    found, local, _ = _find(node.operation, node.shapes, (), (), False, strategy, ranks)
    made = found.result
    result = Placed(made.layout, made.dims) if out is None else _out(node.operation, out, found, World(ranks))
    own = traffic(made, result, (), node.shape, node.itemsize, node.gradient, planner)
    if node.whole:
        nowhere = replicated(result.layout, len(result.dims))
        own = own.plus(traffic(result, nowhere, (), node.shape, node.itemsize, node.gradient, planner))
    subscripts = dict.fromkeys("".join(node.operation.subscripts))
    return Candidate(strategy, out, found, result, own, prod(local.get(each, 1) for each in subscripts))
