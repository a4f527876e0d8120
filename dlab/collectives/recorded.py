"""Collectives through shared memory that are counted, although they send no messages that could be recorded."""

from __future__ import annotations

from collections.abc import Callable
from time import time as now

import torch

from dlab.collectives.shared import SharedCollectives
from dlab.transports import Transport

ALGORITHM = "shared memory"

Count = Callable[[int, float, float, float], None]  # gets the bytes, the start, the end and the seconds between


class RecordedCollectives(SharedCollectives):
    """Counts each collective when it is done, with the bytes of this rank's own tensor.

    Costs a third of a microsecond. A single rank counts nothing.
    """

    _count_allreduce: Count
    _count_reduce_scatter: Count
    _count_all_gather: Count
    _count_all_to_all: Count

    @classmethod
    def connect_to(cls, transport: Transport, count: Callable[[str], Count]) -> RecordedCollectives | None:
        """Connect the ranks like `connect`; `count(name)` returns the function that counts collectives of this name."""
        recorded = cls.connect(transport)
        if recorded is not None:
            recorded._count_allreduce = count("all-reduce")
            recorded._count_reduce_scatter = count("reduce-scatter")
            recorded._count_all_gather = count("all-gather")
            recorded._count_all_to_all = count("all-to-all")
        return recorded

    # each calls its base class by name and counts without a helper, because either takes as long as adding up

    def allreduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        start = now()
        SharedCollectives.allreduce(self, tensor, op)
        if self.size > 1:
            end = now()
            self._count_allreduce(tensor.nbytes, start, end, end - start)

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """Write this rank's part of the combination of all tensors into the output."""
        start = now()
        SharedCollectives.reduce_scatter(self, tensor, output, op)
        if self.size > 1:
            end = now()
            self._count_reduce_scatter(tensor.nbytes, start, end, end - start)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write the tensors of all ranks into the output, one after another."""
        start = now()
        SharedCollectives.all_gather(self, tensor, output)
        if self.size > 1:
            end = now()
            self._count_all_gather(tensor.nbytes, start, end, end - start)

    def all_to_all(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Write rank r's part for this rank into part r of the output."""
        start = now()
        SharedCollectives.all_to_all(self, tensor, output)
        if self.size > 1:
            end = now()
            self._count_all_to_all(tensor.nbytes, start, end, end - start)
