"""Layers that are gathered as one: which modules they are, and functions outside of a layer that need its weights.

Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
# of a parameter's attributes, those that need its shape or its numbers
_ATTRIBUTES = {getattr(torch.Tensor, name).__get__ for name in ("shape", "T", "mT", "H", "mH", "data")}
_HARMLESS = {"__get__", "__set__", "__delete__", "__hash__", "__repr__"}


def layers_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Return each module that has parameters of its own, with them.

    A module of PyTorch such as `nn.MultiheadAttention` comes with those of the modules inside it, since it reads them.
    """
    inside = set[nn.Module]()
    for module in model.modules():
        if module in inside:
            continue
        is_one = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
        if is_one:
            inside.update(module.modules())
        if own := list(module.parameters(recurse=is_one)):
            yield module, own


class StrayUses(TorchFunctionMode):
    """Calls `need(parameter)` before a function gets a parameter that is in `away`, as in `x @ self.embed.weight.T`."""

    def __init__(self, away: dict[int, int], need: Callable[[int], object]) -> None:
        super().__init__()
        self._away, self._need = away, need

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._away:
            for each in (*args, *kwargs.values()):
                if each.__class__ is nn.Parameter:
                    self._look(func, each)
                elif each.__class__ in (list, tuple):
                    for inner in each:
                        if inner.__class__ is nn.Parameter:
                            self._look(func, inner)
        return func(*args, **kwargs)

    def _look(self, func: Any, parameter: nn.Parameter) -> None:
        number = self._away.get(id(parameter))
        if number is not None and (func in _ATTRIBUTES or getattr(func, "__name__", "") not in _HARMLESS):
            self._need(number)
