"""Channels between workers and servers of one host: a queue of requests for each pair, and tensors where both see them.

A worker lays a gradient down in its own area and asks; the server reads it there, and tells where it has the new
weights: one copy there and none back, and a semaphore for who sleeps meanwhile. Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from itertools import count

import torch

from dlab.kvstore.desk import Desk
from dlab.kvstore.protocol import Op
from dlab.memory.backoff import Peers
from dlab.memory.front import Front
from dlab.memory.gradient_slot import GradientSlot
from dlab.memory.mapping import pages
from dlab.memory.request_queue import RequestQueue
from dlab.memory.tensors import tensor_in

Span = tuple[int, int]  # of memory: where it begins, and how many bytes it has
NOTHING: Span = (0, 0)


class Channels:
    """All channels of one worker, or of one server: `queues` by the number of the other side."""

    def __init__(self, memory: memoryview, rank: int, workers: int, servers: int) -> None:
        self.rank, self.workers, self.servers = rank, workers, servers
        self.memory, self._front = memory, Front(memory, workers + servers)
        self.semaphore = self._front.semaphores[rank]
        self.epoch = 0  # how often all have begun anew
        self.stores, self.parts = count(), [0] * servers  # of a worker: numbers for stores; parts told to each server
        replaces = bool(self._front.numbers[rank])
        self._areas = [Desk.size(process) for process in range(workers + servers + 1)]  # where they begin
        self.semaphore.hang()
        self._free = self._areas[rank]
        if rank < workers:
            self.queues = [self._queue(rank, server) for server in range(servers)]
            self._free += pages(servers * RequestQueue.ROOM)
        else:
            self.queues = [self._queue(worker, rank - workers) for worker in range(workers)]
            for queue in self.queues if replaces else []:
                queue.renew()
        self.peers = Peers(self._front.numbers, rank)  # last: who sees the new server may ask it
        self.peers.workers = workers

    def _queue(self, worker: int, server: int) -> RequestQueue:
        start = self._areas[worker] + server * RequestQueue.ROOM
        return RequestQueue(self.memory[start : start + RequestQueue.ROOM])

    def generations(self) -> list[tuple[int, int]] | None:
        """For a worker: the process of each server, and how often it was replaced; None if one is dead."""
        ranks = range(self.workers, self.workers + self.servers)
        if set(ranks) - set(self.peers.alive()):
            return None
        numbers = [self._front.numbers[rank] for rank in ranks]
        return list(zip(numbers, (queue.generation for queue in self.queues), strict=True))

    @property
    def broken(self) -> bool:
        """For a worker: is a server dead, or not the one that it knows?"""
        return self.generations() is None or any(queue.known != queue.generation for queue in self.queues)

    def meet_servers(self, generations: list[tuple[int, int]]) -> None:
        """For a worker, with all others: begin anew with these. Old stores, requests and clocks count no more."""
        self.epoch = sum(generation for _, generation in generations)
        self.stores = count(self.epoch << 20)
        for server, (queue, (_, generation)) in enumerate(zip(self.queues, generations, strict=True)):
            self.parts[server] *= queue.known == generation
            queue.begin_anew(generation, self.epoch)

    def say_how_it_ended(self, well: bool) -> None:
        """For a worker: say to all others whether it needs the servers no more, or has lost one before."""
        self.queues[0].outcome = 2 * self.epoch + (1 if well else 2)
        for semaphore in self._front.semaphores[: self.workers]:
            semaphore.post()

    def silent(self) -> list[int]:
        """For a worker: which of those that live have not said it."""
        return [rank for rank in self.peers.alive() if rank < self.workers and self._outcome(rank) <= 2 * self.epoch]

    @property
    def somebody_failed(self) -> bool:
        """For a worker: has one said that it has lost a server? All get the same answer when nobody is silent."""
        return any(self._outcome(worker) == 2 * self.epoch + 2 for worker in range(self.workers))

    def _outcome(self, worker: int) -> int:
        return self._queue(worker, 0).outcome

    @property
    def over(self) -> bool:
        """Is no worker left to be served?"""
        return self._front.over

    def end(self) -> None:
        """Let the servers return."""
        self._front.end()

    def ask(
        self, server: int, op: Op, part: int, *numbers: int, lays: Span = NOTHING, gets: Span = NOTHING, text: int = 0
    ) -> int:
        """For a worker, if there is room in the queue; gives the number to wait for.

        `lays` and `gets`: what the server reads and what it fills, or how much of what it tells the place of; `text`
        is the length of what was written. On one host nobody needs to know: it is there already.
        """
        self.parts[server] += op == Op.INIT
        number = self.queues[server].post(op, part, *numbers)
        self.ring(server)
        return number

    def ring(self, other: int) -> None:
        """There is something new for the worker, or for the server, of this number."""
        self._front.semaphores[other + self.workers * (self.rank < self.workers)].post()

    def place(self, count: int, dtype: torch.dtype, rows: int) -> tuple[GradientSlot, int]:
        """For a worker: room in its area; and where it is, for the server."""
        offset = self._take(GradientSlot.room(count, dtype, rows))
        return GradientSlot(self.memory, offset, count, dtype, rows), offset

    def room(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """For a server: the same, for weights."""
        offset = self._take(count * dtype.itemsize)
        return self.tensor(offset, count, dtype), offset

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the shared memory at this offset; nothing is copied."""
        return tensor_in(self.memory, dtype, count, offset)

    def _take(self, nbytes: int) -> int:
        """Of my area."""
        offset, self._free = self._free, self._free + pages(nbytes)
        if self._free > self._areas[self.rank + 1]:
            raise MemoryError(f"{nbytes} bytes do not fit on the desk any more: it has room for {Desk.AREA}")
        return offset
