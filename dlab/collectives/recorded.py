"""Collectives through shared memory that somebody hears of, though they send nothing that could be recorded."""

from __future__ import annotations

import time

import torch

from dlab.collectives.shared import SharedCollectives
from dlab.transports import Transport

ALGORITHM = "shared memory"


class RecordedCollectives(SharedCollectives):
    """Tells a transport of each, by `note_collective`, when it is done: its name, the bytes of the tensor that this
    rank brought, and since when. Costs a microsecond; of one rank alone there is nothing to tell.
    """

    listener: Transport

    @classmethod
    def connect_to(cls, transport: Transport, listener: Transport) -> RecordedCollectives | None:
        """As `connect`, with somebody who listens; what ranks say to each other to connect is not told."""
        recorded = cls.connect(transport)
        if recorded is not None:
            recorded.listener = listener
        return recorded

    def allreduce(self, tensor: torch.Tensor, op: str) -> None:
        """In place, on a contiguous tensor."""
        start = time.time()
        super().allreduce(tensor, op)
        self._tell("all-reduce", tensor, start)

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """The output becomes this rank's part of the combination of all tensors."""
        start = time.time()
        super().reduce_scatter(tensor, output, op)
        self._tell("reduce-scatter", tensor, start)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """The output becomes the tensors of all ranks, one after another."""
        start = time.time()
        super().all_gather(tensor, output)
        self._tell("all-gather", tensor, start)

    def all_to_all(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Part r of the output becomes rank r's part for this rank."""
        start = time.time()
        super().all_to_all(tensor, output)
        self._tell("all-to-all", tensor, start)

    def _tell(self, name: str, tensor: torch.Tensor, start: float) -> None:
        if self.size > 1:
            self.listener.note_collective(name, ALGORITHM, tensor.numel() * tensor.element_size(), start)
