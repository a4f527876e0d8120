"""Where a parameter lives: each rank keeps its part in the same `nn.Parameter`, so that optimizers still know it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dlab.kinds import SLICE, SliceData
from dlab.layout import Placed
from dlab.processes.worker.context import emit
from dlab.sharding.initial import Postponed, part_of, put

CUT = WeakIdKeyDictionary()  # the layout, whole shape and slices of parameters of which this process holds a part
_times_cut: list[None] = []  # its length grows with each


def cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut the state that an optimizer has had since before its parameters were cut, such as momentum."""
    if vars(optimizer).get("times_cut") == len(_times_cut):
        return
    for parameter, entries in optimizer.state.items():
        if (known := CUT.get(parameter)) is not None:
            _, shape, slices = known
            for value in entries.values():
                whole = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
                if whole and (isinstance(value, Postponed) or tuple(parameter.shape) != shape):
                    put(value, part_of(value, slices))
    vars(optimizer)["times_cut"] = len(_times_cut)


class Home:
    """Where a parameter lives: its layout, its whole shape, and a stand-in without values while only a plan is made."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self.parameter, self.name, self.shape = parameter, name, tuple(parameter.shape)
        self.placed: Placed | None = None
        self.fixed = False
        self.adopt()

    def adopt(self) -> None:
        """Learn how another `AutoParallel` of this process has cut the parameter, if one has."""
        if self.placed is None and (known := CUT.get(self.parameter)) is not None:
            self.placed, self.shape, _ = known

    def settle(self, placed: Placed, rank: int) -> None:
        """Keep only this rank's part, and tell which; the parameter stays the same object, for optimizers."""
        if (known := CUT.get(self.parameter)) is not None and known[0].used:
            raise ValueError(
                f"{self.name} is cut already, {known[0]}, by another AutoParallel of the same network: make it "
                "anew, or use one AutoParallel for both"
            )
        self.placed = placed
        slices = placed.slices_of(rank, self.shape)
        with torch.no_grad():
            gradient, self.parameter.grad = self.parameter.grad, None
            if placed.used or isinstance(self.parameter, Postponed):
                put(self.parameter, part_of(self.parameter, slices))
            self.parameter.grad = None if gradient is None else part_of(gradient, slices)
        CUT[self.parameter] = placed, self.shape, slices  # only now: what has a weak reference cannot be made in place
        _times_cut.append(None)
        if placed.layout.size > 1:
            spans = [(each.start, each.stop) for each in slices]
            told: SliceData = {"tensor": self.name, "shape": list(self.shape), "slice": spans}
            emit(SLICE, told)

    def value(self) -> torch.Tensor:
        """Return what this rank holds of the parameter; one that has not been made or placed is made whole for it."""
        return part_of(self.parameter) if isinstance(self.parameter, Postponed) else self.parameter.detach()
