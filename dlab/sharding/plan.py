"""A redistribution as data: a plan that can be printed, compared with another one, and run on real ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlab.data.table import Bars, Table
from dlab.layout import Placed, check_placed
from dlab.processes.worker.context import transport as transport_of_this_worker
from dlab.sharding.communication import World, take
from dlab.sharding.redistribution import Transition, steps_between
from dlab.transports import Transport

PLANNERS = ("rules", "bytes")


class RedistributionPlan(Table):
    """The steps from one placement to another; a list in `steps`, a table when it is shown.

    `plan.run(local, transport)` executes it on real ranks: every rank gives its part and gets its new one.
    """

    def __init__(
        self, source: Placed, target: Placed, shape: Sequence[int], steps: Sequence[Transition], itemsize: int
    ) -> None:
        self.source, self.target, self.shape, self.itemsize = source, target, tuple(shape), itemsize
        self.steps = self.rows = list(steps)

    @property
    def collectives(self) -> list[str]:
        """The names of the steps that communicate, in order."""
        return [step.collective for step in self.steps if step.collective != "slice"]

    @property
    def bytes_per_rank(self) -> int:
        """The bytes that each rank sends."""
        return self.itemsize * sum(step.numbers(self.shape) for step in self.steps)

    def run(self, local: torch.Tensor, transport: Transport | None = None) -> torch.Tensor:
        """Execute the plan: every rank gives its part in the old layout and gets its part in the new one."""
        transport = transport_of_this_worker() if transport is None else transport
        self.source.layout.check_ranks(transport.size)
        if tuple(local.shape) != self.source.local_shape(self.shape):
            raise ValueError(
                f"rank {transport.rank} gives a part of shape {tuple(local.shape)}, but in {self.source} each rank "
                f"holds {self.source.local_shape(self.shape)} of {self.shape}: give the part of this rank"
            )
        world = World(transport.size, transport.rank, transport)
        for step in self.steps:
            local = take(step, local, world)
        return local

    def heading(self) -> list[str]:
        return ["step", "collective", "axis", "group of rank 0", "bytes per rank", "layout after it"]

    def cells(self, row: Transition) -> list[int | str | Bars]:
        members = row.group(0)
        group = ", ".join(map(str, members if len(members) < 9 else [*members[:4], "…", members[-1]]))
        axes, sent = ", ".join(row.axes), self.itemsize * row.numbers(self.shape)
        return [self.steps.index(row) + 1, row.collective, axes, group, sent, str(row.after)]

    def between(self, hidden: Sequence[Transition]) -> str:
        return f"… {len(hidden)} steps"

    def __repr__(self) -> str:
        if not self.steps:
            return f"nothing to do: {self.source} is {self.target}"
        return super().__repr__()


def redistribution(
    source: Placed, target: Placed, shape: Sequence[int], planner: str = "rules", itemsize: int = 4
) -> RedistributionPlan:
    """Plan how a tensor of this shape gets from one layout to another. Nothing is sent.

    `planner="rules"` cuts where an axis is free, moves a cut that sits on another dimension, joins what the target does
    not cut; `"bytes"` searches for the steps that send the fewest bytes, never more than the rules.

    >>> layout = dlab.Layout((2, 2), ("dp", "tp"))
    >>> dlab.redistribution(layout("dp", "tp"), layout("dp", "None"), shape=(32, 784)).collectives
    ['all-gather']
    """
    if planner not in PLANNERS:
        raise ValueError(f"there is no planner {planner!r}: use {' or '.join(map(repr, PLANNERS))}")
    check_placed(source, "the first layout")
    check_placed(target, "the second layout")
    if source.layout.size != target.layout.size:
        raise ValueError(
            f"{source.layout} is for {source.layout.size} ranks and {target.layout} for {target.layout.size}: a "
            "redistribution keeps the number of ranks"
        )
    for placed in (source, target):
        placed.local_shape(shape)
    return RedistributionPlan(source, target, shape, steps_between(source, target, tuple(shape), planner), itemsize)
