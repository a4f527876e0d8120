"""Parts in memory that all ranks of a host share: a gather is one copy, and nobody waits for anybody to make it.

Gradients go through a buffer of each rank that the others read. It is used again and again: a bucket may be written to
its place as soon as all ranks have read what was there before. Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dlab.collectives.ops import Tools, tools
from dlab.collectives.shared_allreduce import BLOCK, SharedAllReduce
from dlab.memory.backoff import Backoff
from dlab.memory.counters import Counters
from dlab.strategies.reducers import SkippedRounds
from dlab.strategies.zero.buckets import Bucket
from dlab.strategies.zero.exchange import Exchange
from dlab.transports import Transport, share_memory

_FILLED, _READ = 0, 1  # counters of each rank: buckets that it has written to its buffer, and that it has added up


class SharedExchange(Exchange):
    """Exchanges parts in shared memory; a rank's gradients wait in a buffer of `room` numbers until all have read them.

    The weights of all ranks lie one after another. No rank changes its part while another may read it: it updates
    only after all have given their last bucket, at the end of their backward passes, and `publish` is a barrier.
    """

    def __init__(
        self,
        group: Transport,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        gradient: torch.dtype,
        parameters: int,
        room: int,
        shared: SharedAllReduce,
    ) -> None:
        super().__init__(group, buckets, gradient)
        self._shared, self._table = shared, shared.table
        lengths = [bucket.length for bucket in buckets]
        self.whole = list(shared.common(sum(lengths), dtype).split(lengths))
        self.weights = [whole[slice(*part)] for whole, part in zip(self.whole, self.parts, strict=True)]
        self._tools: Tools = tools(dtype, "sum")
        lengths = [buckets[number].length for number in self.trained]
        self._places, self._free_after = lay_out(lengths, room)
        ends_of = [place + length for place, length in zip(self._places, lengths, strict=True)]
        self._buffer = shared.empty((max(ends_of),), dtype)
        self._views = [
            buckets[number].views(self._buffer[place:end])
            for number, place, end in zip(self.trained, self._places, ends_of, strict=True)
        ]
        self._foreign = [
            (group.size - 1) * self.gradients[number].numel() * self._buffer.element_size() for number in self.trained
        ]
        self._blocks = [self._blocks_of(turn, number) for turn, number in enumerate(self.trained)]
        memory = share_memory(group, Counters.room(group.size, 2))
        assert memory is not None
        self._progress = Counters(memory, group.size, 2)
        self._before = self._since = 0  # buckets given before this pass, and before this step
        self._given = self._added = 0  # buckets of all passes that this rank has written, and has added up
        self._skips = SkippedRounds(group, parameters)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of this rank's buffer."""
        return self._buffer.nbytes

    def gather(self, number: int, after: int | None) -> torch.Tensor:
        """Copy a whole bucket of weights; there is no use in doing so before it is needed."""
        whole = self.whole[number].clone()
        self.moved["gather"] += whole.nbytes - self.weights[number].nbytes
        return whole

    def publish(self) -> None:
        """Wait until all ranks have updated their parts."""
        self._table.meet()

    # gradients

    def give(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Write gradients to the bucket's place once all ranks have read what was there; add up what all have given."""
        turn = self._given - self._before
        self._wait_until(_READ, self._before + self._free_after[turn])
        for view, gradient in zip(self._views[turn], gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self._given += 1
        self._progress.announce(self.group.rank, self._given, _FILLED)
        self._add_up()

    def end_pass(self) -> None:
        """Count the buckets of the pass; they are added up as the other ranks give theirs."""
        self._before = self._given

    def skip(self, skipped: Sequence[int]) -> None:
        """Announce which parameters this rank has not used."""
        self._skips.announce(skipped)

    def finish(self) -> list[int]:
        """Add up what is left, divide by the number of ranks, and return what all ranks have skipped."""
        self._wait_until(_FILLED, self._given)
        self._add_up()
        self._since = self._given
        if self.group.size > 1:
            self.summed /= self.group.size
        return self._skips.by_all()

    def _add_up(self) -> None:
        """Add this rank's part of all buckets that all ranks have written. Never waits."""
        before = self._added
        while self._added < self._given and not self._progress.behind(self._added + 1, _FILLED):
            in_step = self._added - self._since
            self._add(in_step % len(self.trained), is_first=in_step < len(self.trained))
            self._added += 1
        if self._added != before:
            self._progress.announce(self.group.rank, self._added, _READ)

    def _add(self, turn: int, is_first: bool) -> None:
        """Sum all ranks' gradients of this rank's part, in the order of the ranks, to the sum of the passes before."""
        _, combine, copy = self._tools
        for total, every in self._blocks[turn]:
            rest = every
            if is_first and len(every) > 1:
                combine(every[0], every[1], total)
                rest = every[2:]
            elif is_first:
                copy(total, every[0])
                rest = []
            for each in rest:
                combine(total, each, total)
        self.moved["reduce"] += self._foreign[turn]

    def _wait_until(self, what: int, number: int) -> None:
        """Wait until all ranks have written or read so many buckets, and add up what the others write meanwhile."""
        if not self._progress.behind(number, what):
            return
        words = "to give its gradients" if what == _FILLED else "to read the gradients before these"

        def whom() -> tuple[list[int], str]:
            return self._progress.behind(number, what), f"for {{}} {words}"

        wait = Backoff(self._table.peers, self._table.timeout, whom)
        while self._progress.behind(number, what):
            before = self._added
            self._add_up()
            if self._added == before:
                wait()
            else:
                wait.reset()

    # where things are

    def _blocks_of(self, turn: int, number: int) -> list[tuple[Any, list[Any]]]:
        """Cut this rank's part into blocks that fit into the cache: of its sum, and of all ranks' buffers."""
        begin, end = self.parts[number]
        if begin == end:
            return []
        place = self._places[turn]
        rows = self._shared.rows(self._buffer[place + begin : place + end])
        step = BLOCK // self._buffer.element_size()
        totals = [self._tools.view(each) for each in self.gradients[number].split(step)]
        cuts = zip(*([self._tools.view(each) for each in row.split(step)] for row in rows), strict=True)
        return [(total, list(cut)) for total, cut in zip(totals, cuts, strict=True)]


def lay_out(lengths: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """Place stretches of these lengths one after another in a buffer, from its beginning again where it is full.

    Returns where each begins, and how many stretches must have been read before it may be written.

    >>> lay_out([4, 4, 4], room=8)
    ([0, 4, 0], [0, 0, 1])
    """
    places, free_after, end = list[int](), list[int](), 0
    for length in lengths:
        begin = end if end + length <= room else 0
        end = begin + length
        before = enumerate(zip(places, lengths, strict=False), start=1)
        covered = [number for number, (place, long) in before if place < end and begin < place + long]
        places.append(begin)
        free_after.append(max(covered, default=0))
    return places, free_after
