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
    """Wraps the model in `DistributedDataParallel(model, **options)`; gradients are averaged inside `backward`.

    A network of which a batch may leave out a layer needs `DDP(find_unused_parameters=True)`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """DDP itself makes the models equal."""
        if not dist.is_initialized() or dist.get_world_size() != transport.size:
            raise RuntimeError("DDP needs a torch.distributed process group with all ranks: run it in a cluster")
        self.model, self.optimizer, self.transport = model, optimizer, transport
        self._wrapped = DistributedDataParallel(model, **self.options)
        return self._wrapped

    def accumulating(self) -> AbstractContextManager[Any]:
        """Gradients are added up on each rank, without a reduction."""
        return self._wrapped.no_sync()

    def step(self) -> Told:
        """The waiting was inside the backward pass, where it cannot be told apart."""
        try:
            self._wrapped._check_reducer_finalized()  # or else the next pass fails, and the last is silently wrong
        except RuntimeError as problem:
            raise RuntimeError(
                f"the batch of rank {self.transport.rank} has left out some parameters, so DDP still waits for their "
                "gradients: use every layer in every pass, or write dlab.DDP(find_unused_parameters=True)"
            ) from problem
        self.optimizer.step()
        return {"wait": 0.0}
