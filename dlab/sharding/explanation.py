"""What a sharded network will communicate, as a table, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from dlab.data.table import Bars, Table
from dlab.layout import Placed
from dlab.sharding.communication import Call, Transfer, World


class Explanation(Table):
    """A row for each operator: where its inputs and its result are, what it communicates, and the bytes per rank.

    `rows` are the calls and `messages` the collectives, with operator, direction, group and bytes that a rank sends.
    """

    def __init__(self, world: World, parameters: dict[str, tuple[Placed | None, tuple[int, ...], Any]]) -> None:
        self.rows: list[Call] = world.calls
        self.messages: list[Transfer] = world.told or []
        self.layouts = {name: placed for name, (placed, _, _) in parameters.items()}
        self.parameter_bytes = sum(
            prod(placed.local_shape(shape) if placed else shape) * value.element_size()
            for placed, shape, value in parameters.values()
        )

    def bytes_per_rank(self, direction: str | None = None) -> int:
        """Return the bytes that a rank sends, in one direction or both."""
        return sum(each.bytes for each in self.messages if direction in (None, each.direction))

    def collectives(self, direction: str | None = None) -> list[str]:
        """Return the names of the collectives in order, in one direction or both."""
        return [each.collective for each in self.messages if direction in (None, each.direction)]

    def heading(self) -> list[str]:
        return ["operator", "inputs", "result", "forward", "bytes", "backward", "bytes back", "memory"]

    def cells(self, row: Call) -> list[int | str | Bars]:
        shown: list[int | str | Bars] = [row.operator, " ".join(map(str, row.inputs)), str(row.result)]
        for direction in ("forward", "backward"):
            found = [each for each in self.messages if each.operator == row.operator and each.direction == direction]
            shown += [", ".join(f"{each.collective} {_group(each.group)}" for each in found) or "-"]
            shown += [sum(each.bytes for each in found)]
        return [*shown, row.memory]

    def between(self, hidden: Sequence[Call]) -> str:
        return f"… {len(hidden)} operators"

    def __repr__(self) -> str:
        forward, backward = self.bytes_per_rank("forward"), self.bytes_per_rank("backward")
        joined = sum(each.bytes for each in self.messages if each.operator == "the result")
        return (
            f"{super().__repr__()}\nper rank: {forward} bytes sent forward, {backward} backward, of these {joined} to "
            f"make the result whole; {self.parameter_bytes} bytes of parameters"
        )


def _group(members: tuple[int, ...]) -> str:
    if len(members) > 4:
        return f"{{{members[0]}, {members[1]}, …, {members[-1]}}}"
    return "{" + ", ".join(map(str, members)) + "}"
