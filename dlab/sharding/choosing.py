"""`parallel_mode="auto"`: strategies that dlab chooses for the operators of a network, as a table that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from dlab.data.table import Bars, Table
from dlab.layout import Layout, Placed, replicated
from dlab.sharding.candidates import LATENCY, Candidate, Traffic
from dlab.sharding.communication import World
from dlab.sharding.graph import Node, Tracer
from dlab.sharding.operation import Operation
from dlab.sharding.search import Search, parameter_memory
from dlab.sharding.state import state, working
from dlab.sharding.tensor import Home, ShardedTensor


@dataclass
class Choice:
    """The strategy of one operator, what it sends, and the best other strategy if all others stayed as they are."""

    operator: str
    chosen: Candidate
    sent: Traffic
    other: Candidate | None
    other_bytes: int  # that the operator and its neighbours would send then, less what the neighbours send now


class Choices(Table):
    """A row for each operator: the strategy that was chosen, its bytes per rank, the next best and its bytes.

    `exact` says whether every combination was tried, `memory` is the bytes per rank of the parameters' parts and of
    their gradients, `layouts` where each parameter is.
    """

    def __init__(self, search: Search, chosen: Sequence[Candidate], held: dict[str, Placed | None]) -> None:
        self.nodes, self.chosen, self.exact = search.nodes, list(chosen), search.exact
        self.ranks, self.bound = search.ranks, search.memory
        self.tried = sum(map(len, search.options))
        costs = search.traffic(chosen)
        self.memory = search.held + sum(memory for _, memory in costs)
        self.layouts = dict(held)
        for node, each in zip(self.nodes, chosen, strict=True):
            for operand, placed in zip(node.operands, each.found.inputs, strict=True):
                if operand.parameter is not None and self.layouts[operand.parameter.name] is None:
                    self.layouts[operand.parameter.name] = placed
        self.rows: list[Choice] = []
        for number, (each, (sent, _)) in enumerate(zip(chosen, costs, strict=True)):
            other = search.second(chosen, number)
            name = f"{number + 1} {self.nodes[number].operation.name}"
            more = (None, 0) if other is None else (other[0], sent.bytes + other[1])
            self.rows.append(Choice(name, each, sent, *more))

    def bytes_per_rank(self, direction: str | None = None) -> int:
        """Return the bytes that a rank sends, in one direction or both."""
        if direction is None:
            return sum(row.sent.bytes for row in self.rows)
        return sum(getattr(row.sent, direction) for row in self.rows)

    @property
    def strategies(self) -> list[tuple[Any, Any]]:
        """The `in_strategy` and `out_strategy` of each operator, as one would give them by hand."""
        return [(each.strategy, each.out_strategy) for each in self.chosen]

    def valid(self, homes: dict[int, Home]) -> bool:
        """Return whether all parameters that have a layout have the planned one."""
        return all(home.placed is None or home.placed == self.layouts[home.name] for home in homes.values())

    def heading(self) -> list[str]:
        return ["operator", "strategy", "forward", "backward", "next best", "bytes with it"]

    def cells(self, row: Choice) -> list[int | str | Bars]:
        other: list[int | str | Bars] = ["-", "-"] if row.other is None else [str(row.other), row.other_bytes]
        return [row.operator, str(row.chosen), row.sent.forward, row.sent.backward, *other]

    def between(self, hidden: Sequence[Choice]) -> str:
        return f"… {len(hidden)} operators"

    def __repr__(self) -> str:
        forward, backward = self.bytes_per_rank("forward"), self.bytes_per_rank("backward")
        bound = "" if self.bound is None else f" of {self.bound} allowed"
        searched = "all combinations" if self.exact else "the most promising combinations"
        return (
            f"{super().__repr__()}\nper rank: {forward} bytes sent forward and {backward} backward, the least of "
            f"{searched} of {self.tried} strategies; {self.memory} bytes{bound} for parameters and their gradients"
        )


class Follower:
    """Gives the operators of one run the strategies that were chosen for them, in the order of their calls."""

    def __init__(self, choices: Choices) -> None:
        self._calls = iter(zip(choices.nodes, choices.strategies, strict=True))

    def choose(self, operation: Operation, shapes: Any, strategy: Any, out: Any) -> tuple[Any, Any]:
        """Return the strategy of the next operator, which must be the one that was planned."""
        node, chosen = next(self._calls, (None, (None, None)))
        planned = None if node is None else (node.operation.name, node.shapes)
        if planned != (operation.name, shapes):
            expected = "no more operators" if planned is None else f"{planned[0]} of {_shown(planned[1])}"
            raise ValueError(
                f"the network calls {operation.name} of {_shown(shapes)} where {expected} had been planned: in mode "
                "'auto' it must call the same operators whenever its inputs have the same shapes; else use 'semi_auto'"
            )
        return chosen

    def made(self, tensor: ShardedTensor) -> None:
        """Ignore the result: the strategies have been chosen."""

    def whole(self, tensor: ShardedTensor) -> None:
        """Ignore that a tensor is made whole."""


def _shown(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(tuple(each)) for each in shapes)


def key_of(training: bool, args: Any, kwargs: Any) -> Any:
    """Return what decides a plan: the shapes and types of tensors, all other arguments, and the network's mode."""
    leaves, structure = tree_flatten((args, kwargs))
    kinds = [
        (tuple(each.shape), each.dtype, each.requires_grad) if isinstance(each, torch.Tensor) else repr(each)
        for each in leaves
    ]
    return tuple(kinds), str(structure), training


def trace(run: Callable[[Callable[[Any], Any]], Any], homes: dict[int, Home], ranks: int, cut: bool) -> list[Node]:
    """Return the operators that `run(shard)` calls; `cut` says that each rank brings its part of the inputs."""
    tracer, alone, layout = Tracer(), Layout((1,), ("dp",)), Layout((ranks,), ("dp",))
    stand_ins = {key: copy.copy(home) for key, home in homes.items()}
    for home in stand_ins.values():
        home.placed = None

    def shard(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return value
        shape, placed = tuple(value.shape), replicated(layout, value.dim())
        if cut and shape:
            shape, placed = (shape[0] * ranks, *shape[1:]), Placed(layout, (("dp",), *placed.dims[1:]))
        empty = torch.empty(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
        return tracer.begin(ShardedTensor.of(empty.view_as(empty), replicated(alone, len(shape)), shape), placed)

    before = state.chooser
    with working(World(1, told=[]), stand_ins, True, "rules"), torch.enable_grad():
        state.chooser = tracer
        try:
            run(shard)
        finally:
            state.chooser = before
    nodes = tracer.finish()
    for node in nodes:
        for operand in node.operands:
            if operand.parameter is not None:
                operand.parameter = homes[id(operand.parameter.parameter)]
    return nodes


def choose_strategies(
    nodes: list[Node],
    homes: dict[int, Home],
    ranks: int,
    memory: int | None = None,
    planner: str = "rules",
    latency: int = LATENCY,
) -> Choices:
    """Choose strategies that together send the fewest bytes per rank, forward and backward, within the memory.

    Each collective counts as `latency` bytes more, the time that it takes to begin; where that is equal, less work per
    rank decides. `memory` counts a rank's parts of all parameters, and the gradients of those parts; a parameter that
    no operator uses stays whole.
    """
    used = {id(each.parameter) for node in nodes for each in node.operands if each.parameter is not None}
    held = 0
    for home in homes.values():
        if home.placed is not None or id(home) not in used:
            held += parameter_memory(home, home.placed or replicated(Layout((ranks,), ("all",)), len(home.shape)))
    search = Search(nodes, ranks, memory, planner, latency, held)
    return Choices(search, search.run(), {home.name: home.placed for home in homes.values()})
