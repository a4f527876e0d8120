"""What a rank is doing while a sharded network runs: its ranks, its parameters, and what has been moved already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dlab.layout import Placed
from dlab.sharding.communication import World
from dlab.sharding.home import Home
from dlab.sharding.operation import Operation, Resolved

if TYPE_CHECKING:
    from dlab.sharding.tensor import ShardedTensor


class Chooser(Protocol):
    """Gives operators their strategies, and is notified of their results."""

    def choose(self, operation: Operation, shapes: Any, strategy: Any, out: Any) -> tuple[Any, Any]:
        """Return `in_strategy` and `out_strategy` for an operator that was given these by hand, or None."""

    def made(self, tensor: ShardedTensor) -> None:
        """Note the result of the operator for which `choose` was called last."""

    def whole(self, tensor: ShardedTensor) -> None:
        """Note that a tensor is made whole."""


class State(threading.local):
    """What a rank's own thread is doing; ranks of a rehearsal are threads of one process."""

    world: World | None = None
    aside = False  # an optimizer works on this rank's own parts
    homes: dict[int, Home]
    moved: dict[Any, Any]
    found: Resolved | None = None  # what is known of the call that is computed now
    wanted: Placed | None = None  # where the layer that runs now must leave its result
    free = True  # whether an operator on whole inputs may choose to be data parallel
    planner = "rules"
    chooser: Chooser | None = None  # who chooses the strategies, in mode `auto`
    mode = "semi_auto"


state = State()


@contextmanager
def working(world: World, homes: dict[int, Home], free: bool, planner: str, mode: str = "semi_auto") -> Iterator[None]:
    """Let this thread's operators be cut over a world's ranks."""
    before = state.world, getattr(state, "homes", {}), getattr(state, "moved", {}), state.free, state.planner
    state.world, state.homes, state.moved, state.free, state.planner = world, homes, {}, free, planner
    state.mode = mode
    try:
        yield
    finally:
        state.world, state.homes, state.moved, state.free, state.planner = before
        state.wanted, state.mode = None, "semi_auto"
