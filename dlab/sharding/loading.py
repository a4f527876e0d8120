"""Load a network that was saved by slice into any layout, on any number of ranks: a rank reads its own parts only.

What a rank needs lies in the files of several others. They are mapped into memory, and only what overlaps its own parts
is read. A parameter without a layout is read when it gets one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dlab.sharding import folders
from dlab.sharding.communication import World
from dlab.sharding.folders import together
from dlab.sharding.home import Home
from dlab.sharding.initial import Postponed
from dlab.sharding.recipe import Box, Recipe, overlap, shifted
from dlab.sharding.saving import groups_of, state_name, transport_of


class Stored:
    """A tensor of a checkpoint, in files that are mapped, not read: a part of it costs the memory of that part."""

    def __init__(self, about: Mapping[str, Any], pieces: list[tuple[Box, torch.Tensor]]) -> None:
        self.shape, self.dtype = tuple(about["shape"]), getattr(torch, about["dtype"].removeprefix("torch."))
        self._pieces, self._mapped = pieces, True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": False}  # a copy of it has its values in ordinary memory

    def __call__(self, box: Box) -> torch.Tensor:
        made = torch.empty([each.stop - each.start for each in box], dtype=self.dtype)
        self.read(box, made)
        return made

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Read a part of the tensor into one of the part's shape."""
        for held, values in self._pieces:
            if (common := overlap(held, box)) is not None:
                copy = folders.copy_mapped if self._mapped else folders.copy_plain
                copy(values, shifted(common, held), target[shifted(common, box)])

    def postponed(self) -> Postponed:
        """Return a tensor that is read when its part is known."""
        recipe = Recipe(self.shape, self.dtype)
        recipe.read(self, self.dtype)
        recipe.waits = True
        return Postponed.of(recipe)


def load(
    folder: str | Path,
    homes: Iterable[Home],
    world: World,
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Load what `save` has saved, into any layout, on any number of ranks; every rank must call it.

    Each file is checked by one of the ranks. A rank reads only what overlaps the parts that it holds. A parameter that
    waits to be placed is read when it is, from files that stay open.
    """
    transport, folder, homes = transport_of(world), Path(folder), list(homes)
    bodies: list[dict[str, Any]] = []

    def check() -> str:
        for home in homes:
            home.adopt()
        bodies.append(folders.read_manifest(folder))
        for name in sorted(bodies[0]["files"])[transport.rank :: transport.size]:
            folders.check(folder / name, bodies[0]["files"][name])
        return ""

    def match() -> str:
        _match(bodies[0], folder, homes, optimizer)
        return ""

    def read() -> str:
        stored = _open_files(folder, bodies[0])
        common = folders.read(folder / folders.common_file(bodies[0]["number"]))
        _match_common(common, folder, homes, buffers, optimizer)
        with torch.no_grad():
            for home in homes:
                _load_parameter(home, stored[home.name], transport.rank)
            for name, buffer in buffers.items():
                buffer.copy_(common["buffers"][name])
            if optimizer is not None:
                _load_state(optimizer, homes, stored, common, transport.rank)
        return ""

    for work in (check, match, read):
        together(transport, work)


def _open_files(folder: Path, body: Mapping[str, Any]) -> dict[str, Stored]:
    files = [folders.read(folder / folders.own_file(body["number"], rank)) for rank in range(body["ranks"])]
    stored = {}
    for name, about in body["tensors"].items():
        boxes = {int(rank): tuple(slice(*each) for each in box) for rank, box in about["boxes"].items()}
        stored[name] = Stored(about, [(box, files[rank][name]) for rank, box in boxes.items()])
    return stored


def _load_parameter(home: Home, stored: Stored, rank: int) -> None:
    if isinstance(home.parameter, Postponed):
        home.parameter.recipe.read(stored, stored.dtype)
    else:
        stored.read(_held(home, rank), home.parameter)


def _held(home: Home, rank: int) -> Box:
    if home.placed is None:
        return tuple(slice(0, length) for length in home.shape)
    return home.placed.slices_of(rank, home.shape)


def _load_state(optimizer: Any, homes: list[Home], stored: Mapping[str, Stored], common: Any, rank: int) -> None:
    for group, saved in zip(optimizer.param_groups, common["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for home in homes:
        if home.name not in common["state"]:
            optimizer.state.pop(home.parameter, None)
            continue
        kept = common["state"][home.name]
        state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
        for name, each in stored.items():
            if name.endswith(suffix := state_name(home, "")) and name != home.name:
                settled = home.placed is not None and not isinstance(home.parameter, Postponed)
                value = each(_held(home, rank)).to(home.parameter.device) if settled else each.postponed()
                state[name.removesuffix(suffix)] = value
        optimizer.state[home.parameter] = state


def _match(body: Any, folder: Path, homes: list[Home], optimizer: Any) -> None:
    """Raise an error if a checkpoint is not one of this network."""
    saved = {name: each for name, each in body["tensors"].items() if " of " not in name}
    mine = {home.name for home in homes}
    if saved.keys() != mine:
        only = [
            f"{', '.join(sorted(names))} only in {where}"
            for names, where in ((saved.keys() - mine, "the checkpoint"), (mine - saved.keys(), "the network"))
            if names
        ]
        raise ValueError(
            f"the checkpoint in {folder} is of another network, with {' and '.join(only)}: load it into one with the "
            "same parameters"
        )
    for home in homes:
        about, dtype = saved[home.name], str(home.parameter.dtype)
        if tuple(about["shape"]) != home.shape or about["dtype"] != dtype:
            raise ValueError(
                f"{home.name} is {tuple(about['shape'])} of {about['dtype']} in the checkpoint in {folder}, but "
                f"{home.shape} of {dtype} in the network: load it into a network of the same shapes and types"
            )
    if optimizer is not None and not body["optimizer"]:
        raise ValueError(f"the checkpoint in {folder} holds no optimizer: save it with par.save(folder, optimizer)")


def _match_common(common: Any, folder: Path, homes: list[Home], buffers: Any, optimizer: Any) -> None:
    if {name: tuple(each.shape) for name, each in common["buffers"].items()} != {
        name: tuple(each.shape) for name, each in buffers.items()
    }:
        raise ValueError(
            f"the checkpoint in {folder} has the buffers {', '.join(common['buffers']) or 'none'}, the network "
            f"{', '.join(buffers) or 'none'}, or of other shapes: load it into a network with the same ones"
        )
    if optimizer is not None:
        saved = [group["params"] for group in common["groups"]]
        if saved != (mine := groups_of(homes, optimizer)):
            raise ValueError(
                f"the optimizer in {folder} is for the parameters {saved}, this one for {mine}: give one with the same "
                "groups"
            )
