"""Checkpoints by slice: each rank saves the parts that it is the first to hold, and loads the parts that it needs.

The folder says for every part which box of the whole it is, so that a network can be loaded into another layout, on
another number of ranks, and no rank ever holds a whole weight. A save is complete when its manifest takes the place of
the one before, in one atomic step. Taught in `07_operator_parallel.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlab.sharding import folders
from dlab.sharding.communication import World
from dlab.sharding.folders import together
from dlab.sharding.initial import Postponed, part_of
from dlab.sharding.recipe import Box, Recipe, overlap, shifted
from dlab.sharding.tensor import Home, cut_state
from dlab.transports import Transport


@dataclass
class Entry:
    """A tensor of a checkpoint: a parameter, or what an optimizer keeps for each of its elements."""

    home: Home
    tensor: torch.Tensor

    def boxes(self, ranks: int) -> dict[int, Box]:
        """Return which part of the tensor each rank saves; no element is saved twice.

        A part of which several ranks hold copies is saved by the first of them. What has not been cut yet is saved by
        all ranks in equal shares.
        """
        shape, placed = self.home.shape, self.home.placed
        if placed is None:
            return {rank: box for rank in range(ranks) if (box := _share(shape, rank, ranks)) is not None}
        first: dict[tuple[tuple[int, int], ...], tuple[int, Box]] = {}
        for rank, box in enumerate(placed.slices(shape)):
            first.setdefault(tuple((each.start, each.stop) for each in box), (rank, box))
        return dict(first.values())

    def part(self, box: Box) -> torch.Tensor:
        """Return the values of a part that this rank saves."""
        if self.home.placed is None or isinstance(self.tensor, Postponed):
            return part_of(self.tensor, box)
        mine = self.tensor.detach()
        shared = mine.untyped_storage().nbytes() != mine.nbytes or not mine.is_contiguous()
        return part_of(mine) if shared else mine  # torch saves all of the memory that a view belongs to


def _share(shape: tuple[int, ...], rank: int, ranks: int) -> Box | None:
    if not shape:
        return () if rank == 0 else None
    first, last = rank * shape[0] // ranks, (rank + 1) * shape[0] // ranks
    return (slice(first, last), *(slice(0, length) for length in shape[1:])) if first < last else None


# saving


def save(
    folder: str | Path,
    homes: Iterable[Home],
    world: World,
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Save a sharded network, and an optimizer; every rank must call it, with a folder that all hosts share.

    Costs each rank the time to write and read again what it holds, and a few small all-gathers.
    """
    transport, folder, homes = _transport(world), Path(folder), list(homes)

    def prepare() -> str:
        entries = _entries(homes, optimizer)
        if transport.rank == 0:
            return f"{folders.begin(folder)} {folders.digest(_described(entries, transport.size))}"
        return f"0 {folders.digest(_described(entries, transport.size))}"

    answers = [each.split() for each in together(transport, prepare)]
    number, entries = int(answers[0][0]), _entries(homes, optimizer)
    described = _described(entries, transport.size)

    def write() -> str:
        if len({digest for _, digest in answers}) > 1:
            raise ValueError("ranks hold their parameters in different layouts: run the same network on all of them")
        mine = {}
        for name, entry in entries.items():
            if (box := entry.boxes(transport.size).get(transport.rank)) is not None:
                mine[name] = entry.part(box)
        return folders.write(folder / folders.own_file(number, transport.rank), mine)

    files = {folders.own_file(number, rank): each for rank, each in enumerate(together(transport, write))}

    def commit() -> str:
        if transport.rank == 0:
            common = folder / folders.common_file(number)
            files[common.name] = folders.write(common, _common(homes, buffers, optimizer))
            body = {"number": number, "ranks": transport.size, "files": files, "tensors": described}
            folders.commit(folder, body | {"optimizer": optimizer is not None})
        return ""

    together(transport, commit)


def _entries(homes: Iterable[Home], optimizer: torch.optim.Optimizer | None) -> dict[str, Entry]:
    """Return the tensors that are saved in parts, by name."""
    found = {}
    if optimizer is not None:
        cut_state(optimizer)
    for home in homes:
        home.adopt()
        found[home.name] = Entry(home, home.parameter)
        kept = {} if optimizer is None else optimizer.state.get(home.parameter, {})
        for key, value in kept.items():
            if _is_cut_alike(value, home):
                found[_name(home, key)] = Entry(home, value)
            elif isinstance(value, torch.Tensor) and value.dim():
                raise ValueError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {home.name}, which is of "
                    f"{tuple(home.parameter.shape)} here: dlab can save what has the shape of the parameter, or is one "
                    "number"
                )
    return found


def _name(home: Home, key: str) -> str:
    return f"{key} of {home.name}"


def _is_cut_alike(value: Any, home: Home) -> bool:
    shape = home.shape if isinstance(value, Postponed) else tuple(home.parameter.shape)
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape


def _described(entries: Mapping[str, Entry], ranks: int) -> dict[str, Any]:
    return {
        name: {
            "shape": entry.home.shape,
            "dtype": str(entry.tensor.dtype),
            "layout": None if entry.home.placed is None else repr(entry.home.placed),
            "boxes": {rank: [(each.start, each.stop) for each in box] for rank, box in entry.boxes(ranks).items()},
        }
        for name, entry in entries.items()
    }


def _common(homes: Iterable[Home], buffers: Mapping[str, torch.Tensor], optimizer: Any) -> dict[str, Any]:
    """Return what is the same on all ranks: buffers, and the numbers of the optimizer."""
    common: dict[str, Any] = {"buffers": dict(buffers)}
    if optimizer is not None:
        common["groups"] = [
            {**group, "params": names}
            for group, names in zip(optimizer.param_groups, _groups(homes, optimizer), strict=True)
        ]
        common["state"] = {
            home.name: {
                key: value for key, value in optimizer.state[home.parameter].items() if not _is_cut_alike(value, home)
            }
            for home in homes
            if home.parameter in optimizer.state
        }
    return common


def _groups(homes: Iterable[Home], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(home.parameter): home.name for home in homes}
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, is none of the "
                    "network's: give the optimizer of this network"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


# loading


class Stored:
    """A tensor of a checkpoint, in files that are mapped, not read: a part of it costs the memory of that part."""

    def __init__(self, about: Mapping[str, Any], pieces: list[tuple[Box, torch.Tensor]]) -> None:
        self.shape, self.dtype = tuple(about["shape"]), getattr(torch, about["dtype"].removeprefix("torch."))
        self._pieces = pieces

    def __call__(self, box: Box) -> torch.Tensor:
        made = torch.empty([each.stop - each.start for each in box], dtype=self.dtype)
        for held, values in self._pieces:
            if (common := overlap(held, box)) is not None:
                made[shifted(common, box)] = values[shifted(common, held)]
        return made

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
    transport, folder, homes = _transport(world), Path(folder), list(homes)
    bodies: list[dict[str, Any]] = []

    def check() -> str:
        bodies.append(folders.read_manifest(folder))
        for name in sorted(bodies[0]["files"])[transport.rank :: transport.size]:
            folders.check(folder / name, bodies[0]["files"][name])
        return ""

    def match() -> str:
        _match(bodies[0], folder, homes, buffers, optimizer)
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
        home.parameter.copy_(stored(_held(home, rank)))


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
            if name.endswith(suffix := _name(home, "")) and name != home.name:
                settled = home.placed is not None and not isinstance(home.parameter, Postponed)
                value = each(_held(home, rank)).to(home.parameter.device) if settled else each.postponed()
                state[name.removesuffix(suffix)] = value
        optimizer.state[home.parameter] = state


def _match(body: Any, folder: Path, homes: list[Home], buffers: Any, optimizer: Any) -> None:
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
        if saved != (mine := _groups(homes, optimizer)):
            raise ValueError(
                f"the optimizer in {folder} is for the parameters {saved}, this one for {mine}: give one with the same "
                "groups"
            )


def _transport(world: World) -> Transport:
    if world.transport is None:
        raise ValueError("a plan holds no parameters: make AutoParallel without ranks=, in the processes of a cluster")
    return world.transport
