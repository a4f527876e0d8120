"""The parts of a model that ranks hold, put together again: its whole state, and the state of an optimizer.

A checkpoint says of every part where it belongs: the parameter's name, the bounds of a slice, and, where an optimizer
is sharded, a span of that slice. So any mesh can resume what another has saved. Taught in `10_hybrid.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dlab.collectives import broadcast
from dlab.layout import replicated
from dlab.mesh import Mesh
from dlab.sharding.communication import World, redistribute
from dlab.strategies.hybrid.plan import HybridPlan, Slices


class OptimizedPart(NamedTuple):
    """What an optimizer updates as one tensor: a span of this rank's slice of a parameter, laid flat, or all of it."""

    name: str
    span: tuple[int, int]
    shape: tuple[int, ...]  # of the tensor


class ModelParts:
    """What this rank holds of a model: the parameters and buffers of its own stages, each cut along tp."""

    def __init__(self, plan: HybridPlan, mesh: Mesh, model: nn.Module) -> None:
        self.entries, self._mesh, self._model = plan.entries, mesh, model
        self._names = {id(each): name for name, each in model.named_parameters()}
        self._world = World(mesh["tp"].size, mesh["tp"].rank, mesh["tp"])

    def slices_of(self, name: str) -> Slices:
        """Return which slice this rank has of a tensor."""
        entry = self.entries[name]
        return entry.placed.slices_of(self._mesh["tp"].rank, entry.shape)

    # the whole model

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Give every rank the whole state: gathered along tp, then broadcast along pp; every rank must call it."""
        pipeline, here = self._mesh["pp"], self._model.state_dict(keep_vars=True)
        device = next(iter(here.values())).device
        whole: dict[str, torch.Tensor] = {}
        for name, entry in self.entries.items():
            if pipeline.rank == entry.holders[0]:
                everywhere = replicated(entry.placed.layout, len(entry.shape))
                part = here[name].detach()
                gathered = redistribute(part, entry.placed, everywhere, entry.shape, self._world)
                whole[name] = gathered.clone(memory_format=torch.contiguous_format)
            else:
                whole[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            broadcast(whole[name], pipeline, root=entry.holders[0])
        return whole

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's parts from the state of a whole model."""
        if missing := sorted(set(state) ^ set(self.entries)):
            raise RuntimeError(f"only one of the two models has {', '.join(missing[:3])}")
        for name, entry in self.entries.items():
            if tuple(state[name].shape) != entry.shape:
                there = tuple(state[name].shape)
                raise RuntimeError(f"size mismatch for {name}: {there} was saved, and the model here has {entry.shape}")
        with torch.no_grad():
            for name, each in self._model.state_dict(keep_vars=True).items():
                each.copy_(state[name][self.slices_of(name)])

    # the state of an optimizer

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the whole model."""
        return self._names[id(parameter)]

    def describe(self, parts: Iterable[OptimizedPart]) -> list[dict[str, Any]]:
        """Return where the parts that an optimizer updates belong, as a checkpoint says it."""
        return [
            {"name": name, "bounds": [[each.start, each.stop] for each in self.slices_of(name)], "span": list(span)}
            for name, span, _ in parts
        ]

    def restored(self, parts: Sequence[OptimizedPart], states: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the state of each of these parts, cut from those of all ranks, which may have held other parts.

        Holds the whole state of one parameter at a time.
        """
        saved: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for state in states:
            for number, where in enumerate(state["parts"]):
                entries = state["optimizer"]["state"].get(number, {})
                saved.setdefault(where["name"], []).append((where, entries))
        found: dict[int, dict[str, Any]] = {}
        last, whole = "", dict[str, Any]()
        for number, (name, (begin, end), shape) in enumerate(parts):
            if name != last:
                last, whole = name, self._put_together(name, saved.get(name, []))
            for key, value in whole.items():
                if _is_cut(value, self.entries[name].shape):
                    value = value[self.slices_of(name)].reshape(-1)[begin:end].view(shape).clone()
                found.setdefault(number, {})[key] = value
        return found

    def _put_together(self, name: str, saved: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
        """Return the whole values that an optimizer has saved for a parameter in parts."""
        shape = self.entries[name].shape
        whole: dict[str, Any] = {}
        for where, entries in saved:
            begin, end = where["span"]
            for key, value in entries.items():
                if not _is_cut(value, (end - begin,)):
                    whole[key] = value  # such as the number of steps, the same for all
                    continue
                target = whole.setdefault(key, value.new_zeros(shape))[tuple(slice(*each) for each in where["bounds"])]
                flat = target.reshape(-1)
                flat[begin:end] = value.reshape(-1)
                target.copy_(flat.view(target.shape))
        return whole


def _is_cut(value: Any, shape: Sequence[int]) -> bool:
    """Return whether an optimizer keeps a value for each number of a part of this shape."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == torch.Size(shape).numel()
