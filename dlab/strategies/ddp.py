"""PyTorch's own DistributedDataParallel, unmodified, to compare the other strategies with."""

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

    If a batch may skip a layer of the network, use `DDP(find_unused_parameters=True)`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Wrap the model in DDP, which makes the models of all ranks equal."""
        if not dist.is_initialized() or dist.get_world_size() != transport.size:
            raise RuntimeError("DDP needs a torch.distributed process group with all ranks: run it in a cluster")
        self.model, self.optimizer, self.transport = model, optimizer, transport
        self._wrapped = DistributedDataParallel(model, **self.options)
        return self._wrapped

    def accumulating(self) -> AbstractContextManager[Any]:
        """Add up gradients on each rank without reducing them."""
        return self._wrapped.no_sync()

    def step(self) -> Told:
        """Update the weights; the wait is reported as 0, because inside the backward pass it cannot be measured."""
        try:
            self._wrapped._check_reducer_finalized()  # otherwise the next pass fails, and the last is silently wrong
        except RuntimeError as problem:
            raise RuntimeError(
                f"the batch of rank {self.transport.rank} has not used some parameters, so DDP still waits for their "
                "gradients: use every layer in every pass, or write dlab.DDP(find_unused_parameters=True)"
            ) from problem
        self.optimizer.step()
        return {"wait": 0.0}
