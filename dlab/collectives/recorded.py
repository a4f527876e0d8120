"""Collectives through shared memory that are counted, although they send no messages that could be recorded."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dlab.collectives.shared import SharedCollectives
from dlab.transports import Transport

ALGORITHM = "shared memory"

Count = Callable[[int, float, float, float], None]  # gets the bytes, the start, the end and the seconds between


class RecordedCollectives(SharedCollectives):
    """Counts each collective when it is done, with the bytes of this rank's own tensor.

    Costs half a microsecond. A single rank counts nothing.
    """

    _count: dict[str, Count]

    @classmethod
    def connect_to(cls, transport: Transport, count: Callable[[str], Count]) -> RecordedCollectives | None:
        """Connect the ranks like `connect`; `count(name)` returns the function that counts collectives of this name."""
        recorded = cls.connect(transport)
        if recorded is not None:
            recorded._count = {
                name: count(name) for name in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
            }
        return recorded

    def allreduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        start = time.time()
        super().allreduce(tensor, op)
        self._tell("all-reduce", tensor, start)

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """Write this rank's part of the combination of all tensors into the output."""
        start = time.time()
        super().reduce_scatter(tensor, output, op)
        self._tell("reduce-scatter", tensor, start)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write the tensors of all ranks into the output, one after another."""
        start = time.time()
        super().all_gather(tensor, output)
        self._tell("all-gather", tensor, start)

    def all_to_all(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write rank r's part for this rank into part r of the output."""
        start = time.time()
        super().all_to_all(tensor, output)
        self._tell("all-to-all", tensor, start)

    def _tell(self, name: str, tensor: torch.Tensor, start: float) -> None:
        if self.size > 1:
            end = time.time()
            self._count[name](tensor.nbytes, start, end, end - start)
