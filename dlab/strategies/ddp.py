"""PyTorch's own DistributedDataParallel, unmodified: the yardstick."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlab.strategies.base import Strategy, Told
from dlab.transports import Transport


class DDP(Strategy):
    """Wraps the model in `DistributedDataParallel(model, **options)`; gradients are averaged inside `backward`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Transport) -> nn.Module:
        """DDP itself makes the models equal."""
        if not dist.is_initialized() or dist.get_world_size() != wire.size:
            raise RuntimeError("DDP needs a torch.distributed process group with all ranks: run it in a cluster")
        self.model, self.optimizer, self.wire = model, optimizer, wire
        self._wrapped = DistributedDataParallel(model, **self.options)
        return self._wrapped

    def accumulating(self) -> AbstractContextManager[Any]:
        """No reduction yet."""
        return self._wrapped.no_sync()

    def step(self) -> Told:
        """The waiting was inside the backward pass, where it cannot be told apart."""
        self.optimizer.step()
        return {"wait": 0.0}
