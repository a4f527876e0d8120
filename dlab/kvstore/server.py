"""A parameter server: it keeps weights, applies gradients to them one at a time, and gives them to workers.

One thread serves one request after another, so updates never interfere. A request that cannot be answered yet stays at
the head of its worker's queue: in a round, the pull of a worker waits until the gradients of all have arrived. Taught
in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch

from dlab.kvstore.channels import Channels
from dlab.kvstore.compression import Compression, parse_compression
from dlab.kvstore.optimizers import ServerOptimizer, Updater
from dlab.kvstore.placement import Interval, Key, overlap
from dlab.kvstore.protocol import CODED, DENSE, ROUND, ROWS, SLOT, VALUE, Op, rows_in
from dlab.memory.backoff import ASK, Backoff
from dlab.memory.gradient_slot import GradientSlot
from dlab.memory.request_queue import Request, RequestQueue
from dlab.memory.versions import Versions


@dataclass
class Store:
    """The settings for all keys of one KVStore."""

    updater: Updater | None = None  # without one, the sum of a round replaces the value
    compression: Compression | None = None


@dataclass
class Held:
    """A part of a key: its weights, and the slot of each worker's gradient."""

    key: Key
    store: Store
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    value: torch.Tensor | None = None  # None until rank 0 has given it; a view of the newest version
    versions: Versions | None = None
    offsets: list[int] = field(default_factory=list)  # of the versions
    places: dict[int, GradientSlot] = field(default_factory=dict)
    # gradients of this round, by worker: the kind, and the number of rows, or of spans that are left out
    laid: dict[int, tuple[int, int]] = field(default_factory=dict)
    version: int = 0  # updates so far
    seen: dict[int, int] = field(default_factory=dict)  # by worker: the version that it pulled last

    @property
    def stored(self) -> torch.Tensor:
        """The current weights, which rank 0 must have given."""
        assert self.value is not None
        return self.value

    def move_on(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the current weights and the memory for the next ones, which may be the same."""
        assert self.versions is not None
        old, new = self.versions.newest, self.versions.next()
        self.versions.turn_to(new)
        before, self.stored.data = self.versions[old].view(self.shape), self.versions[new].view(self.shape)
        return before, self.stored.detach()


class Server:
    """Serves the workers at the other ends of these channels until it is stopped.

    `find(name, digest)` returns the function with this name and digest that the parent has sent.
    """

    def __init__(self, channels: Channels, find: Callable[[str, str], Updater]) -> None:
        self._channels, self._find = channels, find
        self._stores: dict[int, Store] = {}
        self._parts: list[list[Held]] = [[] for _ in range(channels.workers)]  # in each worker's own numbering
        self._held: dict[tuple[int, Key, int], Held] = {}  # by store, key, and first element
        self._clocks = [0] * channels.workers
        self._rendezvous = (-1, 0)  # the last clock that a worker could begin, and who was alive then
        self._alive = set(range(channels.workers))
        self._scratch: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._looked, self._idle = time.monotonic(), 0.0  # last check; idle since
        self.updates = 0
        self._reply = 0  # to the current request
        self._news: set[int] = set()  # workers to wake, because something has changed for them

    def serve(self) -> None:
        """Serve requests until no worker is left."""
        idle = Backoff(self._channels.peers, float("inf"), lambda: ([], ""), self._channels.semaphore)
        while not self._channels.over:
            served = [self._serve_some(worker, queue) for worker, queue in enumerate(self._channels.queues)]
            if any(served):
                idle.reset()
                self._idle = 0.0
            else:
                idle()
                self._look_around()

    def _serve_some(self, worker: int, queue: RequestQueue) -> bool:
        """Serve this worker's requests as far as they can be answered, and return whether there were any."""
        while (request := queue.head()) is not None and self._answer(worker, queue, request):
            queue.serve(self._reply)
            self._news.add(worker)
        found = bool(self._news)
        while self._news:
            self._channels.ring(self._news.pop())
        return found

    def _look_around(self) -> None:
        """Check now and then for workers that have died, and stop waiting for them."""
        now = time.monotonic()
        if now < self._looked + ASK:
            return
        self._looked = now
        self._idle = self._idle or now
        self._channels.peers.tell(self._idle, *self._missed())
        alive = set(self._channels.peers.alive())
        if self._alive - alive:
            self._alive &= alive
            for held in self._held.values():
                self._close_round(held)
                for worker in range(self._channels.workers):
                    if worker not in alive and held.versions is not None:
                        held.versions.forget(worker)

    def _missed(self) -> tuple[list[int], str]:
        """Return which workers the unanswered requests wait for, and for what."""
        for worker, queue in enumerate(self._channels.queues):
            request = queue.head()
            if request is None or request.op in (Op.INIT, Op.SET):  # it has only just arrived
                continue
            if request.op == Op.CLOCK:
                behind = [other for other in self._alive if self._clocks[other] < self._clocks[worker]]
                return sorted(behind), "for {} to catch up"
            held = self._parts[worker][request.part]
            if held.value is None:
                return sorted(self._alive)[:1], f"for {{}} to initialise key {held.key!r}"
            return sorted(self._alive - held.laid.keys()), f"for {{}} to push key {held.key!r}"
        return [], "for requests"

    def _answer(self, worker: int, queue: RequestQueue, request: Request) -> bool:
        """Answer a request; returns False if it cannot be answered yet."""
        self._reply = 0
        if request.op == Op.INIT:
            self._init(worker, queue.read())
        elif request.op == Op.SET:
            self._set(queue.read())
        elif request.op == Op.CLOCK:
            return self._may_begin(worker, *request.numbers)
        else:
            held = self._parts[worker][request.part]
            answer = self._push if request.op == Op.PUSH else self._pull
            return answer(worker, held, *request.numbers)
        return True

    # keys

    def _init(self, worker: int, what: dict[str, Any]) -> None:
        """Add a key, whose value comes from the worker with `gives` (rank 0); the others only describe their slots."""
        name = (what["store"], what["key"], what["begin"])
        if name not in self._held:
            store = self._stores.setdefault(what["store"], Store())
            self._held[name] = Held(what["key"], store, tuple(what["shape"]))
        held = self._held[name]
        dtype: torch.dtype = getattr(torch, what["dtype"])
        held.dtype = held.dtype or dtype
        if (held.shape, held.dtype) != (tuple(what["shape"]), dtype):
            raise ValueError(
                f"rank {worker} gives key {held.key!r} the shape {tuple(what['shape'])} of {dtype}, others gave it "
                f"{held.shape} of {held.dtype}: call kv.init with the same shape and dtype on all ranks"
            )
        count, rows = torch.Size(held.shape).numel(), held.shape[0] if held.shape else 0
        place = held.places[worker] = GradientSlot(self._channels.memory, what["place"], count, dtype, rows)
        if what["gives"]:
            held.versions = Versions(
                self._channels.workers, [0] * (1 + self._channels.workers), partial(self._make, held, count)
            )
            held.value = held.versions[0].copy_(place.gradient).view(held.shape)
        self._parts[worker].append(held)

    def _make(self, held: Held, count: int, number: int) -> torch.Tensor:
        """Allocate one more version; they are made in the order of their numbers."""
        assert held.dtype is not None and number == len(held.offsets)
        copy, offset = self._channels.room(count, held.dtype)
        held.offsets.append(offset)
        return copy

    def _set(self, what: dict[str, Any]) -> None:
        store = self._stores.setdefault(what["store"], Store())
        if "optimizer" in what:
            store.updater = ServerOptimizer(what["optimizer"])
        if "updater" in what:
            store.updater = self._find(*what["updater"])
        if "compression" in what:
            store.compression = parse_compression(what["compression"])
        if "turn" in what and isinstance(store.updater, ServerOptimizer):
            store.updater.turn(**what["turn"])

    # pushing and pulling

    def _push(self, worker: int, held: Held, kind: int, rows: int, bound: int) -> bool:
        if worker in held.laid or held.value is None:
            return False  # its gradient of the last round is not applied yet
        if kind in (VALUE, SLOT):
            self._restore(held, held.places[worker], kind, rows, bound)
            return True
        held.laid[worker] = (kind, rows)
        if bound == ROUND:
            self._close_round(held)
        else:
            for other in sorted(held.laid):
                self._apply(held, [other])
        return True

    def _close_round(self, held: Held) -> None:
        if held.laid and self._alive <= held.laid.keys():
            self._apply(held, sorted(held.laid))  # in the order of ranks, for the same bits every time

    def _apply(self, held: Held, workers: list[int]) -> None:
        """Make one update with the sum of these workers' gradients."""
        self._update(held, self._total(held, workers), self._left_out_by_all(held, workers))
        for worker in workers:
            del held.laid[worker]
            held.places[worker].apply(held.version - held.seen.get(worker, 0))
            self._news.add(worker)
        held.version += 1
        self.updates += 1

    def _left_out_by_all(self, held: Held, workers: list[int]) -> list[Interval]:
        if not all(held.laid[worker][1] for worker in workers):  # the usual case: some worker has used everything
            return []
        first, *others = (self._left_out(held, worker) for worker in workers)
        return reduce(overlap, others, first)

    def _left_out(self, held: Held, worker: int) -> list[Interval]:
        """Return the intervals of this part for which a worker had no gradient."""
        (kind, count), place = held.laid[worker], held.places[worker]
        if kind == ROWS or not count:
            return []
        nbytes = place.gradient.nbytes
        if kind == CODED and held.store.compression is not None:
            nbytes = held.store.compression.nbytes(place.gradient.numel())
        return [(begin, end) for begin, end in place.spans_after(nbytes, count).tolist()]

    def _update(self, held: Held, total: torch.Tensor, left_out: list[Interval]) -> None:
        updater, (before, after) = held.store.updater, held.move_on()
        if updater is None:
            after.copy_(_dense(total))
        elif isinstance(updater, ServerOptimizer) and updater.rate is not None and not total.is_sparse:
            torch.add(before, total, alpha=-updater.rate, out=after)
        else:
            if after.data_ptr() != before.data_ptr():
                after.copy_(before)
            if not isinstance(updater, ServerOptimizer):
                updater(held.key, _dense(total), held.stored)
            else:
                updater(held.key, total if updater.takes_rows else _dense(total), held.stored, left_out)

    def _total(self, held: Held, workers: list[int]) -> torch.Tensor:
        first, *others = workers
        total = self._gradient(held, first)
        if not others:
            return total
        if all(held.laid[worker][0] == ROWS for worker in workers):
            return sum((self._gradient(held, other) for other in others), total).coalesce()
        room = self._room(held.stored, 0)
        room.copy_(_dense(total))
        for other in others:
            room += _dense(self._gradient(held, other))
        return room

    def _gradient(self, held: Held, worker: int) -> torch.Tensor:
        """Return a worker's gradient in the shape of the weights; a decoded one is valid until the next call."""
        (kind, rows), place = held.laid[worker], held.places[worker]
        if kind == DENSE:
            return place.gradient.view(held.shape)
        if kind == ROWS:
            return read_rows(place, rows, held.shape)
        assert held.store.compression is not None
        out = self._room(held.stored, 1)
        held.store.compression.decode(place.raw[: held.store.compression.nbytes(out.numel())], out.view(-1))
        for begin, end in self._left_out(held, worker):
            out.view(-1)[begin:end] = 0
        return out

    def _room(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Return scratch memory for sums, which is reused."""
        rooms = self._scratch.setdefault((like.numel(), like.dtype), [])
        while len(rooms) <= number:
            rooms.append(torch.empty(like.numel(), dtype=like.dtype))
        return rooms[number].view(like.shape)

    def _restore(self, held: Held, place: GradientSlot, kind: int, number: int, steps: int) -> None:
        """Load weights or an optimizer's state tensor from a checkpoint."""
        content = place.gradient.view(held.shape)
        if kind == VALUE:
            _, after = held.move_on()
            after.copy_(content)
        else:
            assert isinstance(held.store.updater, ServerOptimizer)
            held.store.updater.set_slot(held.stored, number, content, steps)
        place.apply(staleness=0)

    def _pull(self, worker: int, held: Held, kind: int, rows: int) -> bool:
        """Reply with the offset of the weights, or copy some rows, once this worker's own pushes are applied."""
        if held.value is None or worker in held.laid:
            return False
        place = held.places[worker]
        if kind == SLOT:
            assert isinstance(held.store.updater, ServerOptimizer)
            slot = held.store.updater.slot(held.value, rows)
            place.gradient.copy_(slot[0].view(-1)) if slot else place.gradient.zero_()
            self._reply = 1 + slot[1] if slot else 0
            return True
        if kind == DENSE:
            assert held.versions is not None
            self._reply = held.offsets[held.versions.lend(worker)]
        else:
            numbers, found = rows_in(place, rows, held.shape, held.value.dtype)
            torch.index_select(held.value.view(-1, found.shape[1]), 0, numbers, out=found)
        held.seen[worker] = held.version
        return True

    # bounded staleness

    def _may_begin(self, worker: int, clock: int, bound: int) -> bool:
        """Return whether a worker may begin step `clock`: only if no live worker is more than `bound` steps behind.

        The reply says which workers are alive, a bit for each: all that wait for the same clock get the same reply.
        """
        self._clocks[worker] = clock
        if 0 <= bound < clock - min(self._clocks[other] for other in self._alive | {worker}):
            return False
        self._reply = self._present(clock)
        return True

    def _present(self, clock: int) -> int:
        if self._rendezvous[0] != clock:
            self._rendezvous = (clock, sum(1 << worker for worker in self._alive))
        return self._rendezvous[1]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def read_rows(place: GradientSlot, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Copy the rows in a worker's slot into a new sparse tensor."""
    numbers, values = (each.clone() for each in rows_in(place, rows, shape, place.gradient.dtype))
    return torch.sparse_coo_tensor(
        numbers[None], values.view(rows, *shape[1:]), shape, check_invariants=False
    ).coalesce()
