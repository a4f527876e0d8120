"""Channels between workers and servers of one host: a queue of requests for each pair, and tensors where both see them.

A worker lays a gradient down in its own area and asks; the server reads it there, and tells where it has the new
weights: one copy there and none back, and a semaphore for who sleeps meanwhile. Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

import json
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

import torch

from dlab.memory.backoff import Peers
from dlab.processes.between.control import Desk, Front

DEPTH = 256  # requests in a queue
TEXT = 1 << 16  # bytes for what is not a number
_WORDS = 8  # in a request
_LINE = 64
_QUEUE = 2 * _LINE + 8 * _WORDS * DEPTH + TEXT
_PAGE = 4096

Span = tuple[int, int]  # of memory: where it begins, and how many bytes it has
NOTHING: Span = (0, 0)


class Op(IntEnum):
    """What a worker may ask for."""

    INIT = 1  # keep this key (in the text) and show me where to lay what
    PUSH = 2
    PULL = 3
    SET = 4  # an optimizer, a compression, a learning rate (in the text)
    CLOCK = 5  # I begin step n: let me wait until nobody is too far behind


class Request(NamedTuple):
    """One of them, with its numbers."""

    op: Op
    part: int  # as this worker counts them, in the order of its INITs
    numbers: tuple[int, ...]


class Queue:
    """Requests of one worker to one server, answered in order. One side posts, the other serves."""

    def __init__(self, memory: memoryview) -> None:
        self._posted, self._served = memory[:_LINE].cast("Q"), memory[_LINE : 2 * _LINE].cast("Q")
        self._words = memory[2 * _LINE : _QUEUE - TEXT].cast("q")
        self._text = memory[_QUEUE - TEXT : _QUEUE]
        self.known = self.generation  # of the server that the worker means

    @property
    def posted(self) -> int:
        """How many there ever were."""
        return self._posted[0]

    @property
    def served(self) -> int:
        """How many of them are answered."""
        return self._served[0]

    @property
    def generation(self) -> int:
        """How often the server was replaced."""
        return self._served[1]

    def renew(self) -> None:
        """For a server in the place of one that has died: it knows nothing of what was asked."""
        self._served[1] += 1
        self._served[0] = self._posted[0]

    def begin_anew(self, generation: int, epoch: int) -> None:
        """For the worker: from now on it means this server, and nothing that it has asked before."""
        self.known, self._posted[1] = generation, epoch

    @property
    def outcome(self) -> int:
        """How the worker's training has ended: twice its epoch, and 1 if it was well or 2 if it was not; at first 0."""
        return self._posted[2]

    @outcome.setter
    def outcome(self, outcome: int) -> None:
        self._posted[2] = outcome

    def _tag(self, generation: int) -> int:
        return generation | self._posted[1] << 32

    def post(self, op: Op, part: int, *numbers: int) -> int:
        """For the worker: ask, and get the number that `served` will reach. There must be room."""
        number = self._posted[0]
        start = number % DEPTH * _WORDS
        for place, word in enumerate((op, part, self._tag(self.known), len(numbers), *numbers), start):
            self._words[place] = word
        self._posted[0] = number + 1  # last: who sees it sees the request (x86 keeps the order of stores)
        return number + 1

    def head(self) -> Request | None:
        """For the server: the oldest that is not answered; those that are not meant for it any more never are."""
        while (number := self._served[0]) < self._posted[0]:
            start = number % DEPTH * _WORDS
            op, part, tag, count, *numbers = self._words[start : start + _WORDS].tolist()
            if tag == self._tag(self.generation):
                return Request(Op(op), part, tuple(numbers[:count]))
            self._served[0] = number + 1
        return None

    def serve(self, reply: int = 0) -> None:
        """For the server: it is answered, perhaps with a number."""
        self._words[(self._served[0] % DEPTH + 1) * _WORDS - 1] = reply
        self._served[0] += 1

    def reply(self, number: int) -> int:
        """For the worker: what the server has answered to a request that is served, soon after it was."""
        return self._words[((number - 1) % DEPTH + 1) * _WORDS - 1]

    def write(self, content: Any) -> int:
        """Text, for a request that has some. Only one such may be under way. Gives its length."""
        text = json.dumps(content).encode()
        if len(text) > TEXT - 8:
            raise ValueError(f"{len(text)} bytes of text are too many for a server: there is room for {TEXT - 8}")
        self._text[:8] = len(text).to_bytes(8, "little")
        self._text[8 : 8 + len(text)] = text
        return len(text)

    def text(self, length: int) -> torch.Tensor | None:
        """Where a text of this length is, or will be, with its length in front; None if there is none."""
        return torch.frombuffer(self._text, dtype=torch.uint8, count=8 + length) if length else None

    def read(self) -> Any:
        """The other end of `write`."""
        return json.loads(bytes(self._text[8 : 8 + int.from_bytes(self._text[:8], "little")]))


class GradientSlot:
    """Where a worker lays down what belongs to one part of a key, for the server that keeps it.

    `applied` counts the pushes that are in the weights: only then may the worker lay down the next gradient.
    """

    def __init__(self, memory: memoryview, offset: int, count: int, dtype: torch.dtype, rows: int) -> None:
        self._numbers = memory[offset : offset + _LINE].cast("Q")
        nbytes = room_for_gradient(count, dtype, rows)
        self.begin = offset + _PAGE
        self.raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=self.begin)
        self.gradient = self.raw[: count * dtype.itemsize].view(dtype)

    @property
    def applied(self) -> int:
        """Pushes that the server is through with."""
        return self._numbers[0]

    @property
    def staleness(self) -> int:
        """Of the last of them: updates by others between the pull that it was computed on and itself."""
        return self._numbers[1]

    def spans_after(self, nbytes: int, count: int) -> torch.Tensor:
        """Room behind a gradient of so many bytes for `count` spans of weights that it leaves out: begin and end."""
        start = -(-nbytes // 8) * 8
        return self.raw[start : start + 16 * count].view(torch.int64).view(count, 2)

    def apply(self, staleness: int) -> None:
        """For the server: one more."""
        self._numbers[1] = staleness
        self._numbers[0] += 1


def room_for_gradient(count: int, dtype: torch.dtype, rows: int) -> int:
    """Bytes: as it is, with spans that it leaves out, at most every second weight; or as rows with their numbers."""
    return count * dtype.itemsize + 8 * rows + 16


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
            self._free += _pages(servers * _QUEUE)
        else:
            self.queues = [self._queue(worker, rank - workers) for worker in range(workers)]
            for queue in self.queues if replaces else []:
                queue.renew()
        self.peers = Peers(self._front.numbers, rank)  # last: who sees the new server may ask it
        self.peers.workers = workers

    def _queue(self, worker: int, server: int) -> Queue:
        start = self._areas[worker] + server * _QUEUE
        return Queue(self.memory[start : start + _QUEUE])

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
        offset = self._take(_PAGE + room_for_gradient(count, dtype, rows))
        return GradientSlot(self.memory, offset, count, dtype, rows), offset

    def room(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """For a server: the same, for weights."""
        offset = self._take(max(1, count * dtype.itemsize))
        return self.tensor(offset, count, dtype), offset

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the shared memory at this offset; nothing is copied."""
        return torch.frombuffer(self.memory, dtype=dtype, count=max(1, count), offset=offset)[:count]

    def _take(self, nbytes: int) -> int:
        """Of my area."""
        offset, self._free = self._free, self._free + _pages(nbytes)
        if self._free > self._areas[self.rank + 1]:
            raise MemoryError(f"{nbytes} bytes do not fit on the desk any more: it has room for {Desk.AREA}")
        return offset


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
