"""All-reduce of one long tensor in pieces, each as soon as all ranks have filled it; no rank waits before the end.

So a gradient is reduced while the backward pass computes the next one: a rank announces that its piece is filled, and
reduces its own part of all pieces that are complete by then. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlab.collectives.ops import tools
from dlab.collectives.shared_allreduce import SharedAllReduce, blocks_of, reduce_blocks
from dlab.memory.backoff import Backoff
from dlab.memory.counters import Counters
from dlab.transports import share_memory


class Buckets:
    """Pieces (begin, end) of a tensor from `SharedAllReduce.empty`, in the order in which they are filled.

    With `spread=False` only the rank that computes a part of a piece keeps the result: a reduce-scatter, after which
    each rank holds its own part (`part(piece)`) of every piece.

    >>> buckets = Buckets(shared, flat, [(1000, 2000), (0, 1000)], op="mean")
    >>> buckets.ready(0)  # flat[1000:2000] is filled
    >>> buckets.ready(1)
    >>> buckets.finish()
    """

    def __init__(
        self,
        shared: SharedAllReduce,
        flat: torch.Tensor,
        pieces: Sequence[tuple[int, int]],
        op: str,
        spread: bool = True,
    ) -> None:
        self._table, self._op, self._spread, self._using = shared.table, op, spread, tools(flat.dtype, op)
        self._rank = shared.rank
        self._parts = [flat[begin:end].tensor_split(shared.size)[shared.rank] for begin, end in pieces]
        self._blocks = [blocks_of(self._slots(shared, part), self._using) if len(part) else [] for part in self._parts]
        memory = share_memory(shared.transport, Counters.room(shared.size, len(pieces)))
        assert memory is not None
        self._ready = Counters(memory, shared.size, len(pieces))  # the last round in which a piece was filled
        self._round, self._done = 1, 0

    def _slots(self, shared: SharedAllReduce, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the part in all slots, first in this rank's own, where it is combined."""
        rows = shared.rows(part)
        return [rows[self._rank], *rows[: self._rank], *rows[self._rank + 1 :]]

    def part(self, piece: int) -> torch.Tensor:
        """Return the part of a piece that this rank reduces, in its slot."""
        return self._parts[piece]

    def ready(self, piece: int) -> None:
        """Mark this rank's piece as filled, and reduce pieces that are complete on all ranks. Never waits."""
        self._ready.announce(self._rank, self._round, piece)
        while self._done < len(self._blocks) and not self._missing():
            self._reduce()

    def finish(self) -> None:
        """Reduce the remaining pieces as they are filled; if results are spread, wait until all ranks have them."""
        wait = Backoff(self._table.peers, self._table.timeout, self._whom)
        while self._done < len(self._blocks):
            while self._missing():
                wait()
            wait.reset()
            self._reduce()
        self._round, self._done = self._round + 1, 0
        if self._spread:
            self._table.meet()

    def _reduce(self) -> None:
        reduce_blocks(self._blocks[self._done], self._using, self._op, self._spread)
        self._done += 1

    def _missing(self) -> list[int]:
        """Return the ranks that have not filled the next piece."""
        return self._ready.behind(self._round, self._done)

    def _whom(self) -> tuple[list[int], str]:
        return self._missing(), f"for {{}} to fill in piece {self._done} of the gradient"
