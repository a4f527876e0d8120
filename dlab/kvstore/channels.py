"""Channels between workers and servers on one host: a request queue for each pair, and tensors in shared memory.

A worker copies a gradient into its own area and posts a request; the server reads the gradient there, and replies with
the offset of the new weights. So a gradient is copied once and weights never; whoever waits sleeps on a semaphore.
Taught in `05_parameter_server.ipynb`.
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

Span = tuple[int, int]  # of memory: offset, and number of bytes
NOTHING: Span = (0, 0)


class Channels:
    """All channels of one worker, or of one server: `queues` by the number of the other side."""

    def __init__(self, memory: memoryview, rank: int, workers: int, servers: int) -> None:
        self.rank, self.workers, self.servers = rank, workers, servers
        self.memory, self._front = memory, Front(memory, workers + servers)
        self.semaphore = self._front.semaphores[rank]
        self.epoch = 0  # how often all workers have restarted with new servers
        self.stores, self.parts = count(), [0] * servers  # for a worker: numbers for stores; parts sent to each server
        replaces = bool(self._front.numbers[rank])
        self._areas = [Desk.size(process) for process in range(workers + servers + 1)]  # offsets of the areas
        self.semaphore.hang()
        self._free = self._areas[rank]
        if rank < workers:
            self.queues = [self._queue(rank, server) for server in range(servers)]
            self._free += pages(servers * RequestQueue.ROOM)
        else:
            self.queues = [self._queue(worker, rank - workers) for worker in range(workers)]
            for queue in self.queues if replaces else []:
                queue.renew()
        self.peers = Peers(self._front.numbers, rank)  # last: a worker that sees a new server may use it at once
        self.peers.workers = workers

    def _queue(self, worker: int, server: int) -> RequestQueue:
        start = self._areas[worker] + server * RequestQueue.ROOM
        return RequestQueue(self.memory[start : start + RequestQueue.ROOM])

    def generations(self) -> list[tuple[int, int]] | None:
        """For a worker: return each server's process id and how often it was replaced; None if one is dead."""
        ranks = range(self.workers, self.workers + self.servers)
        if set(ranks) - set(self.peers.alive()):
            return None
        numbers = [self._front.numbers[rank] for rank in ranks]
        return list(zip(numbers, (queue.generation for queue in self.queues), strict=True))

    @property
    def broken(self) -> bool:
        """For a worker: whether a server is dead or was replaced by one that it has not met yet."""
        return self.generations() is None or any(queue.known != queue.generation for queue in self.queues)

    def meet_servers(self, generations: list[tuple[int, int]]) -> None:
        """For a worker, together with all others: restart with these servers; old stores and requests are dropped."""
        self.epoch = sum(generation for _, generation in generations)
        self.stores = count(self.epoch << 20)
        for server, (queue, (_, generation)) in enumerate(zip(self.queues, generations, strict=True)):
            self.parts[server] *= queue.known == generation
            queue.begin_anew(generation, self.epoch)

    def say_how_it_ended(self, well: bool) -> None:
        """For a worker: tell all others whether it has finished with the servers, or has lost one before that."""
        self.queues[0].outcome = 2 * self.epoch + (1 if well else 2)
        for semaphore in self._front.semaphores[: self.workers]:
            semaphore.post()

    def silent(self) -> list[int]:
        """For a worker: return the workers that are alive and have not reported their outcome."""
        return [rank for rank in self.peers.alive() if rank < self.workers and self._outcome(rank) <= 2 * self.epoch]

    @property
    def somebody_failed(self) -> bool:
        """For a worker: whether any has reported a lost server; the same for all once no worker is silent."""
        return any(self._outcome(worker) == 2 * self.epoch + 2 for worker in range(self.workers))

    def _outcome(self, worker: int) -> int:
        return self._queue(worker, 0).outcome

    @property
    def over(self) -> bool:
        """Whether no worker is left to be served."""
        return self._front.over

    def end(self) -> None:
        """Let the servers return."""
        self._front.end()

    def ask(
        self, server: int, op: Op, part: int, *numbers: int, lays: Span = NOTHING, gets: Span = NOTHING, text: int = 0
    ) -> int:
        """For a worker: post a request, for which the queue must have room; returns the number to wait for.

        `lays` is the memory that the server reads, `gets` what it fills (or the size of what its reply locates), and
        `text` the length of the text. Only a relay between hosts uses them; on one host the memory is shared.
        """
        self.parts[server] += op == Op.INIT
        number = self.queues[server].post(op, part, *numbers)
        self.ring(server)
        return number

    def ring(self, other: int) -> None:
        """Wake the worker or the server with this number."""
        self._front.semaphores[other + self.workers * (self.rank < self.workers)].post()

    def place(self, count: int, dtype: torch.dtype, rows: int) -> tuple[GradientSlot, int]:
        """For a worker: allocate a gradient slot in its area; returns it and its offset, for the server."""
        offset = self._take(GradientSlot.room(count, dtype, rows))
        return GradientSlot(self.memory, offset, count, dtype, rows), offset

    def room(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """For a server: allocate weights in its area; returns the tensor and its offset."""
        offset = self._take(count * dtype.itemsize)
        return self.tensor(offset, count, dtype), offset

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the shared memory at this offset; nothing is copied."""
        return tensor_in(self.memory, dtype, count, offset)

    def _take(self, nbytes: int) -> int:
        """Allocate bytes in this process's area."""
        offset, self._free = self._free, self._free + pages(nbytes)
        if self._free > self._areas[self.rank + 1]:
            raise MemoryError(f"{nbytes} more bytes do not fit into this process's area of {Desk.AREA} bytes")
        return offset
