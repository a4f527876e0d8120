"""Who is to hold what: the stages of a model along pp, and the slices of their weights along tp.

Every rank makes the same plan, and a table shows it where no rank is. Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from dlab.layout import Layout, Placed, replicated
from dlab.mesh import RankGrid
from dlab.pipeline.runner import find_schedule
from dlab.pipeline.schedules import Schedule
from dlab.pipeline.splitting import split as split_by_parameters
from dlab.sharding.megatron import megatron_layouts
from dlab.sharding.parallel import AutoParallel

MakeLayouts = Callable[[nn.Module, Layout], dict[str, Placed]]
Split = Callable[[nn.Module, int], list[nn.Module]]
Slices = tuple[slice, ...]


class StateEntry(NamedTuple):
    """A tensor of the whole model's state: its whole form, its layout along tp, and who holds it along pp."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: Placed
    holders: tuple[int, ...]  # coordinates along pp; a tied weight may have several


class PlannedLayer(NamedTuple):
    """A module with parameters of its own, in the order in which stages list them."""

    name: str
    kind: str
    stage: int
    parameters: tuple[str, ...]  # by their names in the whole model


class HybridPlan:
    """What each rank of a grid is to hold of a model; nothing is cut yet, and no rank need be there."""

    def __init__(
        self,
        model: nn.Module,
        grid: RankGrid,
        schedule: Schedule,
        layouts: MakeLayouts | None = None,
        split: Split | None = None,
    ) -> None:
        self.grid, self.schedule = grid, schedule
        self.lengths = dict(zip(grid.names, grid.shape, strict=True))
        self.stages = _stages_of(model, schedule, split)
        self.names = {id(each): name for name, each in model.named_parameters()}  # the first of a tied one
        self.layouts = self._find_layouts(model, layouts)
        self.entries = self._find_entries(model)
        self.layers = list(self._find_layers(model))

    def _find_layouts(self, model: nn.Module, make: MakeLayouts | None) -> dict[str, Placed]:
        """Return the layouts of parameters, and of modules for their results, by name; refuse what cannot be cut."""
        ranks = self.lengths["tp"]
        layout = Layout((ranks,), ("tp",))
        given = (make or megatron_layouts)(model, layout) if ranks > 1 else {}
        if not given and ranks > 1:
            raise ValueError(
                f"nothing in {type(model).__name__} can be cut over {ranks} ranks: use a number that divides the "
                "outputs of its linear layers (or its heads), or say with layouts= what to cut"
            )
        if ranks > 1:
            AutoParallel(model, layouts=given, ranks=ranks)  # checks them, and lets modules leave results in them
        whole = {name: replicated(layout, each.dim()) for name, each in model.named_parameters()}
        return whole | given

    def _find_entries(self, model: nn.Module) -> dict[str, StateEntry]:
        holders: dict[int, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for each in stage.state_dict(keep_vars=True).values():
                ranks = holders.setdefault(id(each), [])
                ranks += {self.schedule.rank_of(number)}.difference(ranks)
        whole = Layout((self.lengths["tp"],), ("tp",))
        found = {}
        for name, each in model.state_dict(keep_vars=True).items():
            placed = self.layouts[self.names[id(each)]] if id(each) in self.names else replicated(whole, each.dim())
            found[name] = StateEntry(tuple(each.shape), each.dtype, placed, tuple(holders[id(each)]))
        return found

    def _find_layers(self, model: nn.Module) -> Iterator[PlannedLayer]:
        modules = {id(each): name for name, each in model.named_modules()}
        for number, stage in enumerate(self.stages):
            for each in stage.modules():
                own = tuple(self.names[id(parameter)] for parameter in each.parameters(recurse=False))
                if own:
                    name = modules.get(id(each)) or own[0].rpartition(".")[0] or own[0]
                    yield PlannedLayer(name, type(each).__name__, number, own)

    def is_cut(self, stage: nn.Module) -> bool:
        """Return whether a stage has a parameter of which a rank holds a slice."""
        return self.lengths["tp"] > 1 and any(self.layouts[self.names[id(each)]].used for each in stage.parameters())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a rank holds."""
        return self.schedule.stages_of(self.grid.coordinates_of(rank)["pp"])

    def slices_of(self, rank: int) -> dict[str, Slices]:
        """Return the slice that a rank holds of each parameter of its stages, by the parameter's name."""
        at, names = self.grid.coordinates_of(rank), set(self.names.values())
        mine = {name: each for name, each in self.entries.items() if name in names and at["pp"] in each.holders}
        return {name: each.placed.slices_of(at["tp"], each.shape) for name, each in mine.items()}


def block_of(name: str) -> str:
    """Return the block of the network that a layer belongs to: of a numbered one its name up to the number.

    >>> block_of("blocks.0.attention.query"), block_of("head")
    ('blocks.0', 'head')
    """
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else name


def plan_schedule(
    schedule: str | Schedule | Sequence[Sequence[str]], ranks: int, microbatches: int, virtual: int
) -> Schedule:
    """Make the schedule for this many ranks; one that is given as a table says itself how many stages it has."""
    if isinstance(schedule, str):
        return find_schedule(schedule, (2 if schedule == "zbv" else virtual) * ranks, ranks, microbatches)
    planned = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    return find_schedule(planned, planned.stages, ranks, microbatches)


def _stages_of(model: nn.Module, schedule: Schedule, split: Split | None) -> list[nn.Module]:
    """Split a model into the stages of a schedule; refuse stages that do not make it up, or a rank without weights."""
    kind = type(model).__name__
    if split is None and schedule.stages == 1:
        return [model]  # any model is one stage
    stages = list((split or split_by_parameters)(model, schedule.stages))
    if len(stages) != schedule.stages:
        raise ValueError(f"split() made {len(stages)} stages of {kind}, but the schedule has {schedule.stages}")
    whole = {id(each): name for name, each in model.state_dict(keep_vars=True).items()}
    held = {id(each): name for stage in stages for name, each in stage.state_dict(keep_vars=True).items()}
    if lost := [name for key, name in whole.items() if key not in held]:
        raise ValueError(f"no stage of {kind} holds {', '.join(lost[:3])}: each of its blocks must be in a stage")
    if new := [name for key, name in held.items() if key not in whole]:
        raise ValueError(f"a stage has {', '.join(new[:3])}, which {kind} has not: split() must not copy its blocks")
    for rank in range(schedule.ranks):
        own = [each for number in schedule.stages_of(rank) for each in stages[number].parameters()]
        if not any(each.requires_grad for each in own):
            raise ValueError(
                f"rank {rank} of a pipeline would hold no parameters of {kind}, which is too small for "
                f"{schedule.stages} stages: use fewer, or say with split= where to cut"
            )
    return stages
