"""Save a sharded network by slice: each rank writes the parts that it is the first to hold, and none twice.

The folder says for every part which box of the whole it is, so that a network can be loaded into another layout, on
another number of ranks, and no rank ever holds a whole weight: see `loading.py`, and `folders.py` for the files.
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
from dlab.sharding.home import Home, cut_state
from dlab.sharding.initial import Postponed, part_of
from dlab.sharding.recipe import Box
from dlab.transports import Transport


@dataclass
class SavedTensor:
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
    transport, folder, homes = transport_of(world), Path(folder), list(homes)

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


def _entries(homes: Iterable[Home], optimizer: torch.optim.Optimizer | None) -> dict[str, SavedTensor]:
    """Return the tensors that are saved in parts, by name."""
    found = {}
    if optimizer is not None:
        cut_state(optimizer)
    for home in homes:
        home.adopt()
        found[home.name] = SavedTensor(home, home.parameter)
        kept = {} if optimizer is None else optimizer.state.get(home.parameter, {})
        for key, value in kept.items():
            if _is_cut_alike(value, home):
                found[state_name(home, key)] = SavedTensor(home, value)
            elif isinstance(value, torch.Tensor) and value.dim():
                raise ValueError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {home.name}, which is of "
                    f"{tuple(home.parameter.shape)} here: dlab can save what has the shape of the parameter, or is one "
                    "number"
                )
    return found


def state_name(home: Home, key: str) -> str:
    """Return the name in a checkpoint of what an optimizer keeps for a parameter."""
    return f"{key} of {home.name}"


def _is_cut_alike(value: Any, home: Home) -> bool:
    shape = home.shape if isinstance(value, Postponed) else tuple(home.parameter.shape)
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape


def _described(entries: Mapping[str, SavedTensor], ranks: int) -> dict[str, Any]:
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
            for group, names in zip(optimizer.param_groups, groups_of(homes, optimizer), strict=True)
        ]
        common["state"] = {
            home.name: {
                key: value for key, value in optimizer.state[home.parameter].items() if not _is_cut_alike(value, home)
            }
            for home in homes
            if home.parameter in optimizer.state
        }
    return common


def groups_of(homes: Iterable[Home], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    names = {id(home.parameter): home.name for home in homes}
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, is none of the "
                    "network's: give the optimizer of this network"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def transport_of(world: World) -> Transport:
    """Return the transport of the ranks; raise an error for a plan, which has none."""
    if world.transport is None:
        raise ValueError("a plan holds no parameters: make AutoParallel without ranks=, in the processes of a cluster")
    return world.transport
