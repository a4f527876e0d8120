"""All-reduce of one long tensor in pieces, each as soon as all ranks have filled it in; nobody waits before the end.

So a gradient is reduced while the backward pass is still at work on the next: a rank says that its piece is there, and
adds up its own part of whatever pieces are complete by then. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlab.collectives.ops import tools
from dlab.collectives.shared_allreduce import SharedAllReduce, blocks_of, reduce_blocks
from dlab.memory.backoff import Backoff
from dlab.transports import share_memory

_LINE = 8  # numbers of 8 bytes in a cache line


class Buckets:
    """Pieces (begin, end) of a tensor from `SharedAllReduce.empty`, in the order in which they get ready.

    `spread=False` leaves the result of a piece with the rank that has made it: a reduce-scatter, after which each rank
    holds its own part (`part(piece)`) of every piece.

    >>> buckets = Buckets(shared, flat, [(1000, 2000), (0, 1000)], op="mean")
    >>> buckets.ready(0)  # flat[1000:2000] is filled in
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
        stride = -(-len(pieces) // _LINE) * _LINE
        memory = share_memory(shared.transport, 8 * stride * shared.size)
        assert memory is not None
        self._ready = memory.cast("Q")  # by rank and piece: the last round in which it was filled in
        self._lines = [rank * stride for rank in range(shared.size)]
        self._round, self._done = 1, 0

    def _slots(self, shared: SharedAllReduce, part: torch.Tensor) -> list[torch.Tensor]:
        """The part in all slots, mine first: there it is combined."""
        rows = shared.rows(part)
        return [rows[self._rank], *rows[: self._rank], *rows[self._rank + 1 :]]

    def part(self, piece: int) -> torch.Tensor:
        """What I add up of a piece, in my slot."""
        return self._parts[piece]

    def ready(self, piece: int) -> None:
        """Mine is filled in; adds up what is complete. Never waits."""
        self._ready[self._lines[self._rank] + piece] = self._round
        while self._done < len(self._blocks) and self._missing() is None:
            self._reduce()

    def finish(self) -> None:
        """Wait for the pieces that are still missing, and, if results are spread, until all ranks have theirs."""
        wait = Backoff(self._table.peers, self._table.timeout, self._whom)
        while self._done < len(self._blocks):
            while self._missing() is not None:
                wait()
            wait.reset()
            self._reduce()
        self._round, self._done = self._round + 1, 0
        if self._spread:
            self._table.meet()

    def _reduce(self) -> None:
        reduce_blocks(self._blocks[self._done], self._using, self._op, self._spread)
        self._done += 1

    def _missing(self) -> int | None:
        """A rank that has not filled in the next piece."""
        for rank, line in enumerate(self._lines):
            if self._ready[line + self._done] < self._round:
                return rank
        return None

    def _whom(self) -> tuple[list[int], str]:
        missing = [rank for rank, line in enumerate(self._lines) if self._ready[line + self._done] < self._round]
        return missing, f"for {{}} to fill in piece {self._done} of the gradient"
