"""Mixed precision: parameters of 16 bits, with which a model computes, and float32 masters, which are updated.

A learning rate times a gradient is often too small to change a number of 8 significant bits; added to a float32 master
it is not lost. Parameters and gradients take 2 bytes each, the master 4, and only a rank's shard of it is held. Taught
in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


class Casting:
    """Casts a model's trained parameters and inputs to `dtype`, and its outputs back; with None it does nothing.

    Buffers and frozen parameters keep their type, as a loss does, which is computed from the float outputs.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._hooks: list[RemovableHandle] = []
        if dtype is None:
            return
        kinds = {each.dtype for each in model.parameters() if each.requires_grad}
        if kinds != {torch.float32}:
            found = ", ".join(sorted(str(kind) for kind in kinds))
            raise ValueError(f"parameters={dtype} is for a float32 model, but this one has {found}: make it float32")
        self._hooks = [
            model.register_forward_pre_hook(self._narrow, with_kwargs=True),
            model.register_forward_hook(lambda _, __, outputs: tree_map(self._widened, outputs)),
        ]

    def _narrow(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(self._narrowed, args), tree_map(self._narrowed, kwargs)

    def _narrowed(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def _widened(self, value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == self.dtype else value

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as the model stores them."""
        return values if self.dtype is None else values.to(self.dtype)

    def master(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 copy of a rank's piece that its optimizer updates; None if the model has it already."""
        return None if self.dtype is None else values.detach().float().clone()

    def end(self) -> None:
        """Remove the hooks that cast the inputs and outputs of the model."""
        for hook in self._hooks:
            hook.remove()
