"""What code around a network asks of it, such as its mode and its state; one that is cut answers like a whole one.

Parameters are this rank's parts, for an optimizer; weights, gradients and states by name are whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dlab.layout import Placed, replicated
from dlab.sharding import loading, saving
from dlab.sharding.clipping import clip_gradients
from dlab.sharding.communication import World, redistribute
from dlab.sharding.home import CUT, Home
from dlab.sharding.initial import Postponed, put
from dlab.sharding.networks import buffers_in, loose_parameters_in, networks_in

Self = TypeVar("Self", bound="AsModule")


class AsModule:
    """The methods of `nn.Module` for parameters, gradients, mode and state, and checkpoints by slice."""

    net: Any
    world: World
    _homes: dict[int, Home]

    # mode

    @property
    def training(self) -> bool:
        """Whether all networks that it wraps are in training mode."""
        return all(module.training for module, _ in networks_in(self.net))

    def train(self: Self, mode: bool = True) -> Self:
        """Set the mode of the networks that it wraps."""
        for module, _ in networks_in(self.net):
            module.train(mode)
        return self

    def eval(self: Self) -> Self:
        """Set the networks that it wraps to evaluation: dropout drops nothing."""
        return self.train(False)

    # parameters and gradients

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parts of the parameters, for any optimizer of torch that updates each number by itself."""
        return (home.parameter for home in self._homes.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parts of the parameters with their names."""
        return ((home.name, home.parameter) for home in self._homes.values())

    @property
    def layouts(self) -> dict[str, Placed | None]:
        """The layout of each parameter by name; None before its first operator has run."""
        return {home.name: home.placed for home in self._homes.values()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or with `set_to_none=False` fill them with zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole ones is at most `max_norm`; return the norm that they had.

        `clip_grad_norm_` of torch would see the norm of this rank's parts. Every rank must call it.
        """
        self._check_ranks_are_there()
        return clip_gradients(self._homes.values(), self.world, max_norm)

    # the whole state

    def whole(self, grad: bool = False) -> dict[str, torch.Tensor | None]:
        """Return all parameters whole, or with `grad` their gradients, by name; every rank must call it."""
        self._check_ranks_are_there()
        found: dict[str, torch.Tensor | None] = {}
        with torch.no_grad():
            for home in self._homes.values():
                value = home.parameter.grad if grad else home.value()
                if value is not None and home.placed is not None and self.world.size > 1:
                    nowhere = replicated(home.placed.layout, len(home.shape))
                    value = redistribute(value, home.placed, nowhere, home.shape, self.world)
                found[home.name] = None if value is None else value.clone()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole network's state, by the names that it has in torch; every rank must call it."""
        whole = self.whole()
        names = {id(home.parameter): home.name for home in self._homes.values()}  # a tied weight has several
        return {
            name: whole[names[id(each)]] if id(each) in names else copy.deepcopy(each) for name, each in self._entries()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a whole network; each rank keeps its parts of it."""
        entries, own = dict(self._entries()), dict(state)
        if entries.keys() != state.keys():
            lacks = [f"it lacks {name}" for name in sorted(entries.keys() - state.keys())]
            has = [f"it has {name}, unlike the network here" for name in sorted(state.keys() - entries.keys())]
            raise RuntimeError(f"this is the state of another network: {'; '.join(lacks + has)}")
        for name, each in entries.items():
            if isinstance(each, nn.Parameter):
                _, shape, slices = CUT.get(each, (None, tuple(each.shape), ...))
                if tuple(state[name].shape) != shape:
                    raise RuntimeError(
                        f"size mismatch for {name}: {tuple(state[name].shape)} was saved, and the network here has "
                        f"{shape}"
                    )
                own[name] = state[name][slices]
                if isinstance(each, Postponed):
                    put(each, own[name].to(each.dtype, copy=True))
        with torch.no_grad():
            for name, parameter in loose_parameters_in(self.net):
                parameter.copy_(own.pop(name))
        for module, prefix in networks_in(self.net):
            start = f"{prefix}." if prefix else ""
            module.load_state_dict({n.removeprefix(start): each for n, each in own.items() if n.startswith(start)})

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Yield what belongs to the state, with the tensors that this rank has, by all of its names."""
        for module, prefix in networks_in(self.net):
            yield from module.state_dict(prefix=f"{prefix}." if prefix else "", keep_vars=True).items()
        yield from loose_parameters_in(self.net)

    # checkpoints by slice

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Save the parameters, and an optimizer, by slice: each rank writes what it is the first to hold.

        Every rank must call it, with a folder that all hosts share. What was saved there before stays, until all of
        the new files are complete.
        """
        saving.save(folder, self._homes.values(), self.world, dict(buffers_in(self.net)), optimizer)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what `save` has saved, in whatever layout and by however many ranks; every rank must call it.

        A rank reads its own parts only. A parameter of `no_init_parameters()` that has no layout yet is read when it
        is placed, and so is an optimizer's state for a parameter without a layout; their files stay open.
        """
        loading.load(folder, self._homes.values(), self.world, dict(buffers_in(self.net)), optimizer)

    def _check_ranks_are_there(self) -> None:
        if self.world.transport is None:
            raise RuntimeError(
                "this network is only planned, with ranks=: no rank is there to compute it; leave out ranks= where "
                "every rank calls it, or ask for explain()"
            )
