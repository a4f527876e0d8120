"""A key-value store on servers: a worker pushes to and pulls from the servers that keep the keys.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from dlab.kvstore.channels import NOTHING, Span
from dlab.kvstore.functions import digest_of
from dlab.kvstore.joining import channels_of, workers
from dlab.kvstore.optimizers import ServerOptimizer, Updater
from dlab.kvstore.placement import BIG, Interval, Key, Part, overlap, place
from dlab.kvstore.protocol import AT_ONCE, CODED, DENSE, ROUND, ROWS, SLOT, VALUE, Op, rows_in
from dlab.kvstore.store import KVStore, add_up
from dlab.memory.backoff import Backoff
from dlab.memory.gradient_slot import GradientSlot
from dlab.processes.worker import context
from dlab.transports import Recorder, Transport


class Shelf:
    """A part of a key as a worker sees it, with the slot through which it passes gradients to the server."""

    def __init__(self, part: Part, number: int, place: GradientSlot) -> None:
        self.part, self.number, self.place = part, number, place
        self.pushes = 0
        self.copies: dict[int, torch.Tensor] = {}  # the server's versions, by offset


class DistStore(KVStore):
    """The types `dist_sync` and `dist_async`, whose keys are kept by servers."""

    def __init__(self, type: str, timeout: float = 600.0, transport: Transport | None = None) -> None:
        super().__init__(type)
        transport = transport or workers()
        self._channels = channels_of(transport)
        self.rank, self.num_workers, self.num_servers = (
            self._channels.rank,
            self._channels.workers,
            self._channels.servers,
        )
        self._timeout, self._number = timeout, next(self._channels.stores)
        self._transport = transport or context.transport()
        self._bound = AT_ONCE if type.endswith("_async") else ROUND
        self._shelves: dict[Key, list[Shelf]] = {}
        self._rows: dict[Key, int] = {}  # elements per row, for keys that are not cut within rows
        self._updates = False  # whether there is an updater
        self.big = BIG  # elements from which a key is divided among all servers

    def barrier(self) -> None:
        """Wait for all workers, and until the servers have taken all their requests."""
        for server, queue in enumerate(self._channels.queues):
            self._wait(server, queue.posted, "take its requests")
        self._transport.barrier()

    @property
    def parts(self) -> list[Part]:
        """Which server keeps which elements of which key."""
        return [shelf.part for shelves in self._shelves.values() for shelf in shelves]

    # keys

    def _init(self, key: Key, value: torch.Tensor, rows: bool) -> None:
        flat, row, shelves = value.reshape(-1), value[0].numel() if rows else 1, []
        for part in place(key, value.numel(), self.num_servers, self.big, row):
            count = part.end - part.begin
            shape = (count // row, *value.shape[1:]) if rows else value.shape if count == value.numel() else (count,)
            found, offset = self._channels.place(count, value.dtype, shape[0] if shape else 0)
            gives = self._transport.rank == 0
            if gives:
                found.gradient.copy_(flat[part.begin : part.end])
            told = {"store": self._number, "key": key, "begin": part.begin, "shape": tuple(shape), "place": offset}
            told |= {"dtype": str(value.dtype).removeprefix("torch."), "gives": gives}
            shelves.append(Shelf(part, self._channels.parts[part.server], found))
            self._tell(part.server, Op.INIT, told, (found.begin, found.gradient.nbytes) if gives else NOTHING)
        self._shelves[key] = shelves
        if rows or len(shelves) == 1:
            self._rows[key] = value[0].numel() if value.ndim else 1

    def _use(self, updater: Updater, told: dict[str, Any]) -> None:
        if not isinstance(updater, ServerOptimizer):
            told = {"updater": (updater.__name__, digest_of(updater))}
        self._tell_all(told)
        self._updates = True

    def _compress(self, params: Mapping[str, Any] | str) -> None:
        self._tell_all({"compression": params})

    def turn(self, **numbers: float) -> None:
        """Change hyperparameters of the optimizer, such as the learning rate; one worker's call is enough."""
        for server in range(self.num_servers):
            self._tell(server, Op.SET, {"store": self._number, "turn": numbers})

    def _tell_all(self, what: dict[str, Any]) -> None:
        """Send settings to all servers (rank 0 only), and wait with all workers until the servers have them."""
        if self._transport.rank == 0:
            for server in range(self.num_servers):
                self._tell(server, Op.SET, {"store": self._number, **what})
        self.barrier()

    # pushing and pulling

    def _push(self, key: Key, gradients: list[torch.Tensor]) -> None:
        if self._bound != ROUND and not self._updates:
            raise RuntimeError(
                "an asynchronous store needs to know what to do with a gradient: "
                "call kv.set_optimizer('sgd', lr=0.1) or kv.set_updater(function) first"
            )
        total = add_up(gradients)
        for shelf, numbers, part in self._cut(key, total):
            start = time.time()
            self._wait_until_applied(shelf)
            self._hand_in(key, shelf, self._bound, start, *self._lay(key, shelf, part, numbers))

    def _hand_in(self, key: Key, shelf: Shelf, bound: int, start: float, kind: int, rows: int, nbytes: int) -> None:
        self._ask(shelf.part.server, Op.PUSH, shelf.number, kind, rows, bound, lays=(shelf.place.begin, nbytes))
        shelf.pushes += 1
        self._record("push", key, shelf, nbytes, start, to_server=True)

    def _cut(self, key: Key, total: torch.Tensor) -> Iterator[tuple[Shelf, torch.Tensor | None, torch.Tensor]]:
        """Yield the piece of a gradient for each part of the key; for a sparse one, rows and their numbers there."""
        if not total.is_sparse:
            flat = total.reshape(-1)
            for shelf in self._shelves[key]:
                yield shelf, None, flat[shelf.part.begin : shelf.part.end]
            return
        self._row(key)
        total = total.coalesce()
        numbers, values = total.indices()[0], total.values()
        for shelf, here, inside in self._by_rows(key, numbers):
            yield shelf, inside, values[here]

    def _by_rows(self, key: Key, numbers: torch.Tensor) -> Iterator[tuple[Shelf, torch.Tensor, torch.Tensor]]:
        """Yield for each part which of these rows are in it, and their numbers there."""
        row = self._row(key)
        for shelf in self._shelves[key]:
            first, last = shelf.part.begin // row, shelf.part.end // row
            here = (numbers >= first) & (numbers < last)
            yield shelf, here, numbers[here] - first

    def _row(self, key: Key) -> int:
        if key not in self._rows:
            raise ValueError(
                f"key {key!r} is divided among {self.num_servers} servers within its rows: "
                f"call kv.init({key!r}, value, rows=True) to divide it between rows"
            )
        return self._rows[key]

    def _lay(self, key: Key, shelf: Shelf, part: torch.Tensor, numbers: torch.Tensor | None) -> tuple[int, int, int]:
        """Write a gradient where the server will read it; returns its kind, its number of rows, and its bytes."""
        if numbers is not None:
            there, values = rows_in(shelf.place, len(numbers), part.shape, part.dtype)
            there.copy_(numbers)
            values.copy_(part.view_as(values))
            return ROWS, len(numbers), there.nbytes + values.nbytes
        if self._compression is not None:
            nbytes = self._compression.nbytes(len(part))
            self._code(key, self._shelves[key].index(shelf), part, shelf.place.raw[:nbytes])
            return CODED, 0, nbytes
        if part.data_ptr() != shelf.place.gradient.data_ptr():
            shelf.place.gradient.copy_(part)
        return DENSE, 0, part.numel() * part.element_size()

    def _pull(self, key: Key, targets: list[torch.Tensor]) -> None:
        start = time.time()
        asked = [(shelf, self._ask_for(shelf)) for shelf in self._shelves[key]]
        for shelf, number in asked:
            self._wait(shelf.part.server, number, f"answer its pull of key {key!r}")
            found, part = self._found(shelf, number), slice(shelf.part.begin, shelf.part.end)
            for target in targets:
                _flat(target)[part].copy_(found)
            self._record("pull", key, shelf, found.nbytes, start, to_server=False)

    def _pull_rows(self, key: Key, rows: torch.Tensor, out: torch.Tensor) -> None:
        distinct, where = rows.unique(return_inverse=True)
        found = out.new_empty(len(distinct), *out.shape[1:])
        for shelf, here, numbers in self._by_rows(key, distinct):
            if not len(numbers):
                continue
            start = time.time()
            self._wait_until_applied(shelf)  # the row numbers overwrite the slot of the gradient
            there, got = rows_in(shelf.place, len(numbers), out.shape, out.dtype)
            there.copy_(numbers)
            lays = (shelf.place.begin, there.nbytes)
            gets = (shelf.place.begin + there.nbytes, got.nbytes)
            asked = self._ask(shelf.part.server, Op.PULL, shelf.number, ROWS, len(numbers), lays=lays, gets=gets)
            self._wait(shelf.part.server, asked, f"answer its pull of key {key!r}")
            found[here] = got.view(len(numbers), *out.shape[1:])
            self._record("pull", key, shelf, there.nbytes + got.nbytes, start, to_server=False)
        out.copy_(found[where])

    # for strategies: without checks

    def borrow(self, key: Key, own: torch.Tensor) -> torch.Tensor:
        """Return the newest value, flat and read-only, valid until the next pull.

        With one server it is the server's own memory; with several, or for a GPU, it is pulled into `own`.
        """
        (shelf, *others) = self._shelves[key]
        if others or not own.is_cpu:
            self._pull(key, [own])
            return own
        start, number = time.time(), self._ask_for(shelf)
        self._wait(shelf.part.server, number, f"answer its pull of key {key!r}")
        found = self._found(shelf, number)
        self._record("pull", key, shelf, found.nbytes, start, to_server=False)
        return found

    def push_pieces(self, key: Key, pieces: list[torch.Tensor], bound: int, left_out: Sequence[Interval] = ()) -> None:
        """Push a gradient that is given in consecutive flat pieces; each is copied once.

        `left_out` are the intervals of the whole for which there is no gradient: the optimizer does not touch what all
        workers have left out, and what only some have left out counts as zeros.
        """
        counts = [piece.numel() for piece in pieces]
        ends = list(accumulate(counts))
        for shelf in self._shelves[key]:
            start = time.time()
            self._wait_until_applied(shelf)
            begin, end = shelf.part.begin, shelf.part.end
            some = (
                pieces
                if end - begin == ends[-1]
                else [
                    piece[max(0, begin - last + count) : count - max(0, last - end)]
                    for piece, count, last in zip(pieces, counts, ends, strict=True)
                    if last > begin and last - count < end
                ]
            )
            if self._compression is None and some[0].is_cpu:
                torch.cat(some, out=shelf.place.gradient)
                laid = DENSE, 0, shelf.place.gradient.nbytes
            else:
                with self._keeping_residual(key, shelf, left_out):
                    laid = self._lay(key, shelf, torch.cat(some), None)
            if left_out:
                laid = self._lay_left_out(shelf, left_out, *laid)
            self._hand_in(key, shelf, bound, start, *laid)

    def _lay_left_out(
        self, shelf: Shelf, left_out: Sequence[Interval], kind: int, _: int, nbytes: int
    ) -> tuple[int, int, int]:
        """Write the intervals that are left out of this part behind the gradient."""
        first, last = shelf.part.begin, shelf.part.end
        here = [(begin - first, end - first) for begin, end in overlap(left_out, [(first, last)])]
        spans = shelf.place.spans_after(nbytes, len(here))
        if here:
            spans.copy_(torch.tensor(here))
        return kind, len(here), -(-nbytes // 8) * 8 + spans.nbytes

    @contextmanager
    def _keeping_residual(self, key: Key, shelf: Shelf, left_out: Sequence[Interval]) -> Iterator[None]:
        """Keep the residual of what is left out, since none of it is sent."""
        residual = self._residuals.get((key, self._shelves[key].index(shelf))) if left_out else None
        before = None if residual is None else residual.clone()
        yield
        if residual is not None and before is not None:
            first, last = shelf.part.begin, shelf.part.end
            for begin, end in overlap(left_out, [(first, last)]):
                residual[begin - first : end - first] = before[begin - first : end - first]

    def slots(self, key: Key) -> list[tuple[torch.Tensor, int]]:
        """Return the optimizer's state tensors of a key, flat, each with its number of steps; for a checkpoint."""
        found: list[tuple[torch.Tensor, int]] = []
        while True:
            pieces, reply = [], 0  # the largest reply counts: a part that was never updated replies 0
            for shelf in self._shelves[key]:
                self._wait_until_applied(shelf)
                gets = (shelf.place.begin, shelf.place.gradient.nbytes)
                asked = self._ask(shelf.part.server, Op.PULL, shelf.number, SLOT, len(found), gets=gets)
                self._wait(shelf.part.server, asked, f"answer its pull of key {key!r}")
                reply = max(reply, self._channels.queues[shelf.part.server].reply(asked))
                pieces.append(shelf.place.gradient.clone())
            if not reply:
                uniform = not found or bool((found[-1][0] == found[-1][0][0]).all())
                return found[:-1] if uniform else found  # the last one counts the updates of each weight
            found.append((torch.cat(pieces), reply - 1))

    def restore(self, key: Key, value: torch.Tensor, slots: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Load a value and the optimizer's state from a checkpoint; one worker calls it while the others wait."""
        for kind, number, (content, steps) in [(VALUE, 0, (value, 0)), *((SLOT, *each) for each in enumerate(slots))]:
            for shelf in self._shelves[key]:
                self._wait_until_applied(shelf)
                shelf.place.gradient.copy_(content.reshape(-1)[shelf.part.begin : shelf.part.end])
                lays = (shelf.place.begin, shelf.place.gradient.nbytes)
                self._ask(shelf.part.server, Op.PUSH, shelf.number, kind, number, steps, lays=lays)
                shelf.pushes += 1
                self._wait_until_applied(shelf)

    def staleness(self, key: Key) -> list[int]:
        """Return, for each part, the number of updates between the last push and the pull that it was computed on."""
        return [shelf.place.staleness for shelf in self._shelves[key]]

    def clock(self, clock: int, bound: int | None) -> int:
        """Begin step `clock` as soon as no live worker is more than `bound` steps behind (None: no bound)."""
        number = self._ask(0, Op.CLOCK, 0, clock + (self._channels.epoch << 42), -1 if bound is None else bound)
        self._wait(0, number, f"let it begin step {clock}")
        return self._channels.queues[0].reply(number)

    def meet(self, clock: int) -> list[int]:
        """Wait for all live workers, and until all their pushes are applied; returns these workers."""
        for shelves in self._shelves.values():
            for shelf in shelves:
                self._wait_until_applied(shelf)
        alive = self.clock(clock, 0)
        return [worker for worker in range(self.num_workers) if alive >> worker & 1]

    # asking and waiting

    def _ask(self, server: int, op: Op, part: int, *numbers: int, lays: Span = NOTHING, gets: Span = NOTHING) -> int:
        """Post a request as soon as the queue has room; returns the number to wait for."""
        queue = self._channels.queues[server]
        if queue.posted - queue.served >= queue.DEPTH:
            self._wait(server, queue.posted - queue.DEPTH + 1, "take its requests")
        return self._channels.ask(server, op, part, *numbers, lays=lays, gets=gets)

    def _ask_for(self, shelf: Shelf) -> int:
        """Ask for the weights; the server's reply is their offset."""
        gets = (0, shelf.place.gradient.nbytes)
        return self._ask(shelf.part.server, Op.PULL, shelf.number, DENSE, 0, gets=gets)

    def _found(self, shelf: Shelf, number: int) -> torch.Tensor:
        """Return the weights at the offset that the server has replied."""
        offset = self._channels.queues[shelf.part.server].reply(number)
        if offset not in shelf.copies:
            shelf.copies[offset] = self._channels.tensor(
                offset, shelf.place.gradient.numel(), shelf.place.gradient.dtype
            )
        return shelf.copies[offset]

    def _tell(self, server: int, op: Op, what: dict[str, Any], lays: Span = NOTHING) -> None:
        queue = self._channels.queues[server]
        self._wait(server, queue.posted, "take its requests")  # the queue holds one text at a time
        number = self._channels.ask(server, op, 0, lays=lays, text=queue.write(what))
        subject = f"key {what['key']!r}" if op == Op.INIT else "an optimizer, a compression or a learning rate"
        self._wait(server, number, f"take in {subject}")

    def _wait(self, server: int, number: int, what: str) -> None:
        queue = self._channels.queues[server]
        if queue.served < number:
            self._wait_for(server, what, lambda: queue.served >= number)
        if queue.generation != queue.known:
            raise ConnectionError(f"server {server} has died and was replaced")

    def _wait_until_applied(self, shelf: Shelf) -> None:
        if shelf.place.applied < shelf.pushes:
            what = f"apply its last push to key {shelf.part.key!r}"
            self._wait_for(shelf.part.server, what, lambda: shelf.place.applied >= shelf.pushes)

    def _wait_for(self, server: int, what: str, done: Callable[[], bool]) -> None:
        peers, whom = self._channels.peers, ([self.num_workers + server], f"for {{}} to {what}")
        wait = Backoff(peers, self._timeout, lambda: whom, self._channels.semaphore)
        while not done():
            try:
                wait()
            except ConnectionError:
                if not done():  # it may have answered before it died
                    raise
            if self._channels.over and not done():
                raise ConnectionError(f"{peers.complaint(*whom)}, which has ended")

    def _record(self, phase: str, key: Key, shelf: Shelf, nbytes: int, start: float, to_server: bool) -> None:
        """Record a message between this worker and the server."""
        if isinstance(self._transport, Recorder):
            ends = (self.rank, self.num_workers + shelf.part.server)
            self._transport.label(f"{phase} {key}", self._shelves[key].index(shelf))
            self._transport.note(*(ends if to_server else ends[::-1]), nbytes, start)


def _flat(target: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor, detached so that it can be written."""
    target = target.detach()
    if not target.is_contiguous():
        raise ValueError("a value can only be pulled into a contiguous tensor: call .contiguous() first")
    return target.view(-1)
