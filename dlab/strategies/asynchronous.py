"""Asynchronous SGD without a server: every rank applies its own gradient at once, and the others' as they arrive.

No rank waits for a gradient, so a straggler slows the others down only when they are `room` gradients ahead of it; but
a gradient may be applied to weights that were updated since it was computed. The number of those updates is its
staleness. Taught in `04_async_sgd.ipynb`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Any

import torch
from torch import nn

from dlab.models import flatten_gradients
from dlab.processes.worker.tracing import trace
from dlab.strategies.base import Stopwatch, Strategy, Told
from dlab.transports import Transport
from dlab.transports.broadcast_queue import BroadcastQueue, open_broadcast_queue
from dlab.transports.rendezvous import Survivors


class VirtualClock:
    """Decides from a seed when each rank finishes each step, so that every run has the same interleaving.

    A step of rank r takes `speeds[r]` (default 1) plus up to `jitter` of that, at random.
    """

    def __init__(self, seed: int = 0, speeds: Sequence[float] = (), jitter: float = 0.5) -> None:
        if any(speed <= 0 for speed in speeds) or jitter < 0:
            raise ValueError(f"speeds={speeds!r}, jitter={jitter!r}: give speeds above 0 and a jitter of 0 or more")
        self.seed, self.speeds, self.jitter = seed, tuple(speeds), jitter

    def ends(self, rank: int, turn: int = 0) -> Iterator[tuple[float, int]]:
        """Yield (time, rank) for the end of each step of a rank; each checkpoint starts a new turn of the clock."""
        speed = self.speeds[rank] if rank < len(self.speeds) else 1.0
        dice, now = random.Random(f"{self.seed} {rank} {turn}"), 0.0
        while True:
            now += speed * (1 + self.jitter * dice.random())
            yield now, rank

    def __repr__(self) -> str:
        return f"VirtualClock(seed={self.seed}, speeds={self.speeds}, jitter={self.jitter:g})"


GRADIENT, NO_MORE, MODEL = range(3)  # kinds of messages
_PHASES = ("gradient", "no more gradients", "model")  # their names in a recording


class AsyncSGD(Strategy):
    """Each rank writes its gradients to all others and never waits for them; at the end all average their models.

    The staleness of an update is the number of updates that this rank had made and the gradient's weights had not. A
    rank may be at most `room` gradients ahead of the slowest reader. `clock=None` is real time; a `VirtualClock`
    decides instead which gradients a step finds, so that every run gives the same result. If a rank dies, the others
    continue. With n ranks each weight is updated n times per step: use a smaller learning rate than for `SyncSGD`.
    """

    survives = True

    def __init__(self, clock: VirtualClock | None = None, room: int = 32) -> None:
        if clock is not None and not isinstance(clock, VirtualClock):
            raise TypeError(f"clock={clock!r}: give None for real time, or a VirtualClock(seed)")
        if not isinstance(room, int) or room < 1:
            raise ValueError(f"room={room!r}: give a whole number of gradients, 1 or more")
        self.clock, self.room = clock, room

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Open the queues. A message holds a gradient, the updates by each rank in its weights, and its kind."""
        super().begin(model, optimizer, transport)
        self._flat = flatten_gradients(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        room = len(self._flat) + sum(buffer.numel() for buffer in self._buffers)
        self._all, self._rank, self._size = (
            transport,
            transport.rank,
            transport.size,
        )  # `self.transport` connects the ranks that have settled
        self._survivors = Survivors(transport)
        self._message = torch.zeros(room + transport.size + 1, dtype=self._flat.dtype)
        self._queue: BroadcastQueue = open_broadcast_queue(
            transport, len(self._message), self._message.dtype, self.room
        )
        self._writing = set(self._queue.others)  # ranks that still send gradients
        self._settled = {transport.rank}  # ranks that have sent their last gradient
        self._updates = [0] * transport.size  # made here, by the rank of the gradient
        self._seen = list(self._updates)  # those in the weights of the current gradient
        self._told: list[int] = []
        self._start_clock(0)
        return model

    def _start_clock(self, turn: int) -> None:
        self._turn = turn
        if self.clock is not None:
            self._now, self._mine = 0.0, self.clock.ends(self._rank, turn)
            self._ends = merge(*(self.clock.ends(other, turn) for other in self._queue.others))
            self._next = next(self._ends, _NEVER)

    # one step

    def clear(self) -> None:
        """Apply the gradients that have arrived, then clear the buffer for this rank's own."""
        if self.clock is None:
            self._take_in()
        else:
            self._wait_for_due(self._now)
        self._flat.zero_()
        self._seen = list(self._updates)

    def step(self) -> Told:
        """Apply this rank's own gradient at once, then send it to the others."""
        self._message[: len(self._flat)].copy_(self._flat)
        trace("sent", *self._parameters)
        self._update(self._rank, self._seen)
        watch = Stopwatch()
        with watch:
            self._post(GRADIENT)
        if self.clock is not None:
            self._now, _ = next(self._mine)
        told, self._told = self._told, []
        return {"wait": watch.seconds, "staleness": told}

    def _post(self, kind: int) -> None:
        while behind := self._queue.behind():
            if self.clock is not None or not self._take_in():  # a rank that waits keeps on reading
                self._queue.pause(behind)
        self._message[-1 - self._size :] = torch.tensor([*self._seen, kind])
        start = time.time()
        self._queue.post(self._message)
        self._all.label(_PHASES[kind], 0)
        for other in self._queue.others:
            if other not in self._queue.gone:
                self._all.note(self._rank, other, self._message.nbytes, start)

    def _take_in(self) -> bool:
        """Apply all gradients that have arrived, and return whether there were any."""
        found = False
        for source in list(self._writing):
            while source in self._writing and (message := self._queue.next(source)) is not None:
                self._open(source, message)
                found = True
        return found

    def _open(self, source: int, message: torch.Tensor) -> None:
        *seen, kind = message[-1 - self._size :].long().tolist()
        if kind == NO_MORE:
            self._writing.remove(source)
            self._settled.add(source)
        else:
            self._flat.copy_(message[: len(self._flat)])
            self._update(source, seen)

    def _update(self, source: int, seen: Sequence[int]) -> None:
        self._told.append(sum(max(0, mine - theirs) for mine, theirs in zip(self._updates, seen, strict=True)))
        self.optimizer.step()
        self._updates[source] += 1

    def _wait_for_due(self, now: float) -> None:
        """Apply what the others have finished by now on the virtual clock, in the order in which they finished it."""
        while self._writing and self._next[0] <= now:
            source = self._next[1]
            self._next = next(self._ends)
            if source in self._writing:
                self._open_or_miss(source)

    def _open_or_miss(self, source: int) -> None:
        message = self._queue.wait(source)
        if message is None:
            self._writing.remove(source)
        else:
            self._open(source, message)

    # at the end and before a checkpoint

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a rank has died since the ranks last settled."""
        return self._survivors.has_lost_one

    def settle(self) -> None:
        """Apply all outstanding gradients; afterwards all ranks have made the same updates, each in its own order.

        A rank that died before it settled is left out of `transport`, where any later death raises ConnectionError.
        """
        self.transport = self._survivors.among(self._take_in_all())

    def _take_in_all(self) -> list[int]:
        """Apply all outstanding gradients; returns the ranks whose last one has arrived, the same list on all ranks."""
        self._post(NO_MORE)
        if self.clock is not None:
            self._wait_for_due(_NEVER[0])
        while self._writing:
            if not self._take_in():
                self._queue.pause(self._writing)
                if not self._take_in():  # messages of ranks that died are read first
                    self._writing -= self._queue.gone
        settled = sorted(self._settled)
        self._writing, self._settled = self._settled - {self._rank}, {self._rank}
        self._start_clock(self._turn + 1)
        return settled

    def state(self) -> dict[str, Any]:
        """Return this rank's own model and optimizer, for a checkpoint."""
        parameters = torch.cat([each.detach().view(-1).cpu() for each in self._parameters])
        optimizer = self.optimizer.state_dict()
        return {"parameters": parameters, "optimizer": optimizer, "updates": self._updates, "turn": self._turn}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore the model and optimizer; if there were m ranks before, rank r gets those of rank r modulo m."""
        state = states[self._rank % len(states)]
        sizes = [each.numel() for each in self._parameters]
        with torch.no_grad():
            for parameter, part in zip(self._parameters, state["parameters"].split(sizes), strict=True):
                parameter.copy_(part.view_as(parameter))
        self.optimizer.load_state_dict(state["optimizer"])
        if len(states) == len(state["updates"]) == self._size:
            self._updates = list(state["updates"])
        self._start_clock(state["turn"])

    def end(self) -> None:
        """Settle, then average the models of all ranks that are alive."""
        self._take_in_all()
        own = torch.cat([each.detach().view(-1).to("cpu", self._flat.dtype) for each in self._content()])
        self._message[: len(own)] = own
        self._post(MODEL)
        models = {self._rank: own}
        for source in self._queue.others:
            message = self._queue.wait(source)
            if message is not None:
                models[source] = message[: len(own)].clone()
        there = sorted(models)
        mean = torch.stack([models[rank] for rank in there]).mean(
            0
        )  # in the same order on all ranks, for the same bits
        with torch.no_grad():
            sizes = [each.numel() for each in self._content()]
            for each, part in zip(self._content(), mean.split(sizes), strict=True):
                each.copy_(part.view_as(each))
        self._queue.close()
        self.transport = self._survivors.among(there)
        for parameter in self._parameters:
            parameter.grad = None

    def _content(self) -> list[torch.Tensor]:
        return [*self._parameters, *self._buffers]


_NEVER = (float("inf"), -1)
