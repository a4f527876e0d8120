"""How a long gradient is averaged in pieces, depending on what joins the ranks: shared memory, a backend, any wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dlab.collectives import ring_allreduce
from dlab.collectives.buckets import Buckets
from dlab.collectives.fused import Fused
from dlab.collectives.ops import COMBINE
from dlab.collectives.ring import collect_chunks, pass_chunks
from dlab.transports import Transport

Pieces = Sequence[tuple[int, int]]  # begin and end, in the order in which the backward pass fills them in


class Reducer:
    """Over any wire: each piece goes round the ring when all are there.

    With `spread=False` a rank gets the mean of its own part of every piece only, updates that part of the weights, and
    `publish` brings the parts together.
    """

    def __init__(self, wire: Transport, device: torch.device) -> None:
        self.wire, self.device = wire, device

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """For the gradients; every rank must call it."""
        return torch.empty(count, dtype=dtype, device=self.device)

    common = empty  # for the weights

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """Once, by all ranks."""
        self.flat, self.weights, self.spread = flat, weights, spread
        self.pieces = [flat[begin:end] for begin, end in pieces]
        self.published = [weights[begin:end] for begin, end in pieces] if weights is not None else []

    def part(self, piece: int) -> torch.Tensor:
        """The part of a piece that this rank gets in any case."""
        return self.pieces[piece].tensor_split(self.wire.size)[self.wire.rank]

    def ready(self, piece: int) -> None:
        """The backward pass has filled it in. Never waits."""

    def finish(self) -> None:
        """The means are there."""
        for piece in self.pieces:
            if self.spread:
                ring_allreduce(piece, self.wire, op="mean")
            else:
                parts = piece.tensor_split(self.wire.size)
                collect_chunks(parts, self.wire, COMBINE["mean"])
                parts[self.wire.rank].div_(self.wire.size)

    def publish(self) -> None:
        """Every rank has updated its part of the weights: let all have all of them."""
        for piece in self.published:
            pass_chunks(piece.tensor_split(self.wire.size), self.wire)


class BackendReducer(Reducer):
    """By torch.distributed, NCCL or gloo, which reduces a piece in the background while the backward pass goes on."""

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """Also of the works that are under way."""
        super().cut(flat, weights, pieces, spread)
        self._works: list[dist.Work] = []

    def ready(self, piece: int) -> None:
        """Begun at once."""
        if self.spread:
            self._works.append(dist.all_reduce(self.pieces[piece], async_op=True))

    def finish(self) -> None:
        """Wait for all of them."""
        if not self.spread:
            super().finish()
            return
        for work in self._works:
            work.wait()
        self._works.clear()
        self.flat /= self.wire.size


class SharedReducer(Reducer):
    """Ranks on one host add up where the gradients lie; weights that all share need no publishing, only a barrier."""

    def __init__(self, wire: Transport, device: torch.device, fused: Fused) -> None:
        super().__init__(wire, device)
        self._fused = fused

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """In a slot of memory that all ranks see."""
        return self._fused.empty((count,), dtype)

    def common(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory for all."""
        return self._fused.common(count, dtype)

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """As buckets."""
        super().cut(flat, weights, pieces, spread)
        self._buckets = Buckets(self._fused, flat, pieces, "mean", spread)

    def ready(self, piece: int) -> None:
        """Adds up whatever is complete by now."""
        self._buckets.ready(piece)

    def finish(self) -> None:
        """And the rest."""
        self._buckets.finish()

    def publish(self) -> None:
        """Nobody reads weights, or fills in gradients, before all are through."""
        self._fused.table.meet()


def reducer_for(wire: Transport, device: torch.device) -> Reducer:
    """The fastest for where the ranks are. Every rank must call it."""
    if device.type == "cpu":
        fused = Fused.connect(wire)
        if fused is not None:
            return SharedReducer(wire, device, fused)
    if dist.is_initialized() and dist.get_world_size() == wire.size:
        return BackendReducer(wire, device)
    return Reducer(wire, device)
