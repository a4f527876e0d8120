"""Weights without a server: they are in shared memory, and the workers update them themselves, one at a time.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from dlab.collectives.recorded import ALGORITHM
from dlab.kvstore.optimizers import Recipe, ServerOptimizer
from dlab.kvstore.placement import Interval, Key
from dlab.memory.backoff import Backoff, Peers
from dlab.memory.front import Front
from dlab.memory.locked_page import LockedPage
from dlab.memory.mapping import pages
from dlab.memory.tensors import tensor_in
from dlab.memory.versions import Versions
from dlab.transports import Transport, share_memory
from dlab.transports.distributed import for_cpu


class LockedStore:
    """An asynchronous store of one flat key, for workers on one host; every worker of the transport must make it.

    An update writes a new version beside the one that others still read, and only then makes it the newest: no worker
    ever sees half an update, and one that dies in the middle leaves the old version in use. The optimizer's state is
    updated in place.
    """

    def __init__(self, weights: torch.Tensor, recipe: Recipe, transport: Transport, timeout: float = 600.0) -> None:
        self._transport, self._timeout = transport, timeout
        self._updater = ServerOptimizer(recipe)
        room = pages(weights.nbytes)
        begin, tensors = Front.ROOM + LockedPage.room(transport.size), transport.size + 1 + self._updater.slots
        memory = share_memory(for_cpu(transport), begin + tensors * room)
        if memory is None:
            raise RuntimeError("workers without a server share memory, so they must be on one host: use servers=1")
        self._front = Front(memory, transport.size)
        self._page = LockedPage(memory[Front.ROOM : begin], transport.size)

        def tensor(number: int) -> torch.Tensor:
            return tensor_in(memory, weights.dtype, len(weights), begin + number * room)

        self._versions = Versions(transport.size, self._page.table, tensor)
        self._slots = [tensor(transport.size + 1 + number) for number in range(self._updater.slots)]
        self._stored, self._seen, self._staleness = tensor(0), 0, 0
        self._parts: dict[int, tuple[torch.Tensor, ...]] = {}  # of each version, cut like the gradients
        self._semaphore = self._front.semaphores[transport.rank]
        self._semaphore.hang()
        self._peers = Peers(self._front.numbers, transport.rank)
        if transport.rank == 0:
            self._page.lock.make()
            self._versions[0].copy_(weights)
        self.barrier()

    def barrier(self) -> None:
        """Wait for all workers."""
        self._transport.barrier()

    def turn(self, **numbers: float) -> None:
        """Change hyperparameters of the optimizer, for this worker's updates."""
        self._updater.turn(**numbers)

    def push_pieces(self, key: Key, pieces: list[torch.Tensor], bound: int, left_out: Sequence[Interval] = ()) -> None:
        """Update the weights with a gradient that is given in consecutive flat pieces.

        The intervals `left_out`, for which there is no gradient, stay as they are; Adam still counts the step.
        """
        start, rate = time.time(), self._updater.rate if pieces[0].is_cpu else None
        with self._page.lock:
            old, new = self._versions.newest, self._versions.next()
            if rate is not None:
                for before, piece, after in zip(self._cut(old, pieces), pieces, self._cut(new, pieces), strict=True):
                    torch.add(before, piece, alpha=-rate, out=after)
            else:
                if new != old:
                    self._versions[new].copy_(self._versions[old])
                self._stored.data = self._versions[new]
                kept = [[each[begin:end].clone() for each in (self._stored, *self._slots)] for begin, end in left_out]
                self._updater.remember(self._stored, self._slots, self._page.steps)
                self._updater(key, torch.cat(pieces).cpu(), self._stored)
                self._updater.write_down(self._stored, self._slots)
                for (begin, end), tensors in zip(left_out, kept, strict=True):
                    for each, old_values in zip((self._stored, *self._slots), tensors, strict=True):
                        each[begin:end] = old_values
            self._versions.turn_to(new)
            self._staleness = self._page.version - self._seen
            self._page.count_update()
        self._transport.note_collective("push", ALGORITHM, self._stored.nbytes, start)

    def _cut(self, number: int, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return a version cut into pieces of these sizes, which never change for a worker."""
        if number not in self._parts:
            self._parts[number] = self._versions[number].split([piece.numel() for piece in pieces])
        return self._parts[number]

    def borrow(self, key: Key, own: torch.Tensor) -> torch.Tensor:
        """Return the newest weights, read-only and valid until the next call; for a GPU, copy them to `own`."""
        start = time.time()
        with self._page.lock:
            found = self._versions[self._versions.lend(self._transport.rank)]
            self._seen = self._page.version
        self._transport.note_collective("pull", ALGORITHM, found.nbytes, start)
        return found if own.is_cpu else own.copy_(found)

    def staleness(self, key: Key) -> list[int]:
        """Return the number of updates between the last push and the weights that it was computed on."""
        return [self._staleness]

    def meet(self, clock: int) -> list[int]:
        """Wait for all live workers at this clock, which must grow; returns them, the same list on all workers."""
        self._page.clocks.announce(self._transport.rank, clock)
        for semaphore in self._front.semaphores:
            semaphore.post()

        def missing() -> list[int]:
            behind = self._page.clocks.behind(clock)
            return [rank for rank in self._peers.alive() if rank in behind] if behind else []

        wait = Backoff(self._peers, self._timeout, lambda: (missing(), "for {} to meet"), self._semaphore)
        while missing():
            with suppress(ConnectionError):  # a worker that has just died is not waited for
                wait()
        with self._page.lock:
            present = self._page.meet(clock, sum(1 << rank for rank in self._peers.alive()))
        return [rank for rank in range(self._transport.size) if present >> rank & 1]

    # checkpoints

    def slots(self, key: Key) -> list[tuple[torch.Tensor, int]]:
        """Return the optimizer's state tensors, each with the number of steps; for a checkpoint."""
        return [(slot.clone(), self._page.steps) for slot in self._slots if self._page.steps]

    def restore(self, key: Key, value: torch.Tensor, slots: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Load a value and the optimizer's state from a checkpoint; one worker calls it while the others wait."""
        with self._page.lock:
            number = self._versions.next()
            self._versions[number].copy_(value)
            self._versions.turn_to(number)
            self._page.steps = 0
            for slot, (content, steps) in zip(self._slots, slots, strict=False):  # there are none before the first step
                slot.copy_(content)
                self._page.steps = max(1, steps)
