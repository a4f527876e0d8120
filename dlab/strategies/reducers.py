"""Average a flat gradient in pieces: in shared memory, with a torch.distributed backend, or over any transport."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dlab.collectives import ring_allreduce
from dlab.collectives.buckets import Buckets
from dlab.collectives.ops import COMBINE
from dlab.collectives.recorded import ALGORITHM
from dlab.collectives.ring import collect_chunks, pass_chunks
from dlab.collectives.shared_allreduce import SharedAllReduce
from dlab.memory.counters import Counters
from dlab.transports import Transport, share_memory

Pieces = Sequence[tuple[int, int]]  # begin and end, in the order in which the backward pass fills them
_LINE = 64  # bytes in a cache line


class Reducer:
    """Averages over any transport: each piece is reduced round the ring after the backward pass.

    With `spread=False` a rank gets only the mean of its own part of every piece (reduce-scatter), updates that part of
    the weights, and `publish` gathers the parts.

    In front of the gradients there is a flag for each parameter, 0 if this rank has skipped it. The flags are reduced
    with the last piece, which is the first in memory, without a message of their own; with `spread=False`, where a
    rank would get only some of them, they take an all-reduce of a few bytes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self._skipped: Sequence[int] = ()

    def empty(self, count: int, dtype: torch.dtype, parameters: int = 0) -> torch.Tensor:
        """Allocate the flat gradient of so many parameters; every rank must call it."""
        line = _LINE // dtype.itemsize
        front = -(-parameters // line) * line
        self._whole = torch.ones(front + count, dtype=dtype, device=self.device)
        self._flags = self._whole[:front]
        return self._whole[front:]

    def common(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate the flat weights; every rank must call it."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """Set the pieces in which the gradient is reduced; every rank must call it once, before the first step."""
        self.flat, self.weights, self.spread = flat, weights, spread
        self.pieces = [flat[begin:end] for begin, end in pieces]
        self.published = [weights[begin:end] for begin, end in pieces] if weights is not None else []
        if spread:
            front = len(self._whole) - len(flat)
            self.pieces[-1] = self._whole[: front + pieces[-1][1]]

    def part(self, piece: int) -> torch.Tensor:
        """Return the part of a piece whose mean this rank gets even with `spread=False`."""
        return self.pieces[piece].tensor_split(self.transport.size)[self.transport.rank]

    def skip(self, parameters: Sequence[int]) -> None:
        """Mark parameters that the batch has not used (their gradients are zeros), before the last piece is ready."""
        self._skipped = parameters
        self._flags[list(parameters)] = 0

    def ready(self, piece: int) -> None:
        """Mark a piece as filled by the backward pass, in the same order on all ranks. Never waits."""

    def finish(self) -> list[int]:
        """Complete all means, and return the parameters that all ranks have skipped."""
        for piece in self.pieces:
            if self.spread:
                ring_allreduce(piece, self.transport, op="mean")
            else:
                parts = piece.tensor_split(self.transport.size)
                collect_chunks(parts, self.transport, COMBINE["mean"])
                parts[self.transport.rank].div_(self.transport.size)
        return self._skipped_by_all()

    def _skipped_by_all(self) -> list[int]:
        """Return what all ranks have skipped; reads only this rank's own skips, to avoid waiting for a GPU."""
        if not self.spread:
            ring_allreduce(self._flags, self.transport)
        found = [parameter for parameter in self._skipped if not self._flags[parameter]]
        self._flags.fill_(1)
        self._skipped = ()
        return found

    def publish(self) -> None:
        """Give all ranks all weights, after each has updated its part; sends (n-1)/n of them per rank."""
        for piece in self.published:
            pass_chunks(piece.tensor_split(self.transport.size), self.transport)


class BackendReducer(Reducer):
    """Averages with torch.distributed (NCCL or gloo), which reduces pieces in the background of the backward pass."""

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """Set the pieces, and start with no all-reduce in progress."""
        super().cut(flat, weights, pieces, spread)
        self._works: list[dist.Work] = []

    def ready(self, piece: int) -> None:
        """Start the all-reduce of this piece in the background."""
        if self.spread:
            self._works.append(dist.all_reduce(self.pieces[piece], async_op=True))

    def finish(self) -> list[int]:
        """Wait for all pieces, and return the parameters that all ranks have skipped."""
        if not self.spread:
            return super().finish()
        for work in self._works:
            work.wait()
        self._works.clear()
        self.flat /= self.transport.size
        return self._skipped_by_all()


class SkippedRounds:
    """Which parameters a rank has not used in which round: it writes the number of the round where all can read it.

    Usually nothing is written. A reader can be at most one round behind, so even and odd rounds have separate places.
    """

    def __init__(self, transport: Transport, parameters: int) -> None:
        self._rank, self._parameters, self._round = transport.rank, max(1, parameters), 1
        memory = share_memory(transport, Counters.room(transport.size, 2 * self._parameters))
        assert memory is not None
        self._rounds = Counters(memory, transport.size, 2 * self._parameters)
        self._mine: Sequence[int] = ()

    def announce(self, parameters: Sequence[int]) -> None:
        """Mark parameters that this rank has not used in this round."""
        self._mine = parameters
        for parameter in parameters:
            self._rounds.announce(self._rank, self._round, self._place(parameter))

    def by_all(self) -> list[int]:
        """Return what all ranks have skipped, after each has announced its own, and begin the next round."""
        found = [each for each in self._mine if not self._rounds.behind(self._round, self._place(each))]
        self._round, self._mine = self._round + 1, ()
        return found

    def _place(self, parameter: int) -> int:
        return self._round % 2 * self._parameters + parameter


class SharedReducer(Reducer):
    """Averages in shared memory on one host, without copies; shared weights need only a barrier to be published."""

    def __init__(self, transport: Transport, device: torch.device, shared: SharedAllReduce) -> None:
        super().__init__(transport, device)
        self._shared = shared

    def empty(self, count: int, dtype: torch.dtype, parameters: int = 0) -> torch.Tensor:
        """Allocate the flat gradient in memory that all ranks can read."""
        self._skips = SkippedRounds(self.transport, parameters)
        self._whole = self._shared.empty((count,), dtype)
        return self._whole

    def common(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate the flat weights in one piece of memory that all ranks share."""
        return self._shared.common(count, dtype)

    def cut(self, flat: torch.Tensor, weights: torch.Tensor | None, pieces: Pieces, spread: bool) -> None:
        """Make a bucket of each piece, and share the counters that tell the other ranks that it is filled."""
        super().cut(flat, weights, pieces, spread)
        self._buckets = Buckets(self._shared, flat, pieces, "mean", spread)
        self._began, self._spent = 0.0, 0.0

    def skip(self, parameters: Sequence[int]) -> None:
        """Mark parameters that this rank has not used in this round."""
        self._skips.announce(parameters)

    def ready(self, piece: int) -> None:
        """Mark a piece as filled, and reduce this rank's part of all pieces that are complete on all ranks."""
        start = time.time()
        self._buckets.ready(piece)
        self._began, self._spent = self._began or start, self._spent + time.time() - start

    def finish(self) -> list[int]:
        """Reduce the remaining buckets, and return the parameters that no rank has used."""
        start = time.time()
        self._buckets.finish()
        self._tell(time.time() - start)
        return self._skips.by_all()

    def _tell(self, seconds: float) -> None:
        """Report all buckets of a step as one collective, with the seconds that this rank spent in it."""
        if self.transport.size > 1:
            told = {"seconds": self._spent + seconds, "buckets": len(self.pieces)}
            name, nbytes = "all-reduce" if self.spread else "reduce-scatter", self.flat.nbytes
            self.transport.note_collective(name, ALGORITHM, nbytes, self._began, **told)
        self._began = self._spent = 0.0

    def publish(self) -> None:
        """Wait until all ranks have updated their weights, before any reads them or writes gradients."""
        self._shared.table.meet()


def reducer_for(transport: Transport, device: torch.device) -> Reducer:
    """Return the fastest reducer for this transport and device; every rank must call it."""
    if device.type == "cpu":
        shared = SharedAllReduce.connect(transport)
        if shared is not None:
            return SharedReducer(transport, device, shared)
    if dist.is_initialized() and dist.get_world_size() == transport.size:
        return BackendReducer(transport, device)
    return Reducer(transport, device)
