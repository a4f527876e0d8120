"""Layouts from outside: an ordinary network is cut by the names of its parameters, and of modules for their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dlab.layout import Placed, check_placed
from dlab.sharding.communication import World
from dlab.sharding.home import Home
from dlab.sharding.networks import modules_in
from dlab.sharding.state import state
from dlab.sharding.tensor import ShardedTensor, _to


def place(net: Any, homes: Mapping[str, Home], layouts: Mapping[str, Placed], world: World) -> None:
    """Cut the parameters whose layouts are given, and let modules with a layout leave their results in it.

    Nothing is cut before all layouts are known to be right.
    """
    modules = {name: module for name, module in modules_in(net) if name in layouts and name not in homes}
    if unknown := [name for name in layouts if name not in homes and name not in modules]:
        raise ValueError(
            f"there is no parameter or module {', '.join(map(repr, unknown))}: the parameters are {', '.join(homes)}"
        )
    first: dict[int, str] = {}  # the name by which a layout is given to a parameter that has several
    for name, placed in layouts.items():
        check_placed(placed, f"the layout of {name}")
        placed.layout.check_ranks(world.size)
        if name in homes:
            other = first.setdefault(id(homes[name]), name)
            if layouts[other] != placed:
                raise ValueError(
                    f"{name} is another name of {other}, which has the layout {layouts[other]}, not {placed}: give one"
                )
            _check(name, homes[name], placed)
    for name, placed in layouts.items():
        if name in modules:
            modules[name].register_forward_pre_hook(_want(placed))
            modules[name].register_forward_hook(_leave(placed))
            continue
        home = homes[name]
        home.fixed = True
        if world.transport is None:
            home.placed = placed
        elif home.placed is None:
            home.settle(placed, world.rank)


def _check(name: str, home: Home, placed: Placed) -> None:
    if home.placed not in (None, placed):
        raise ValueError(
            f"{name} is cut already, {home.placed}, by another AutoParallel of the same network: use one layout for "
            "both"
        )
    try:
        placed.local_shape(home.shape)
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


def _want(placed: Placed) -> Any:
    def hook(module: nn.Module, _: Any) -> None:
        if state.world is not None and isinstance(module, nn.Linear):
            state.wanted = placed

    return hook


def _leave(placed: Placed) -> Any:
    def hook(module: nn.Module, _: Any, result: Any) -> Any:
        if isinstance(result, ShardedTensor) and state.world is not None and state.world.size > 1:
            return _to(result, placed, state.world.operator)
        return result

    return hook
