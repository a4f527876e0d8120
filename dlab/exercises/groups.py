"""torch.distributed on the threads of a rehearsal, so that `dist.all_reduce` works there as in a worker process.

A process has one default process group. Inside `process_groups`, each thread of a rehearsal has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from dlab.backend.group import DlabGroup
from dlab.backend.works import Pending
from dlab.processes.worker import context
from dlab.transports import Transport
from dlab.transports.base import TensorAndRank

_here = threading.local()  # .group and .transport of the rank that runs in this thread


@contextmanager
def process_groups() -> Iterator[Callable[[Transport], None]]:
    """Yield `join(transport)`, which makes the calling thread a rank for torch.distributed and for dlab.

    In that thread `dist.all_reduce`, `dlab.world_size()` and the like then refer to the ranks of the rehearsal.
    """

    def join(transport: Transport) -> None:
        _here.transport, _here.group = transport, _ThreadGroup(transport)

    world, old = c10d._world, context._transport
    c10d._world, context._transport = _ThreadLocalWorld(world), _ThreadTransportProxy()  # type: ignore[assignment]
    try:
        yield join
    finally:
        c10d._world, context._transport = world, old


class _ThreadGroup(DlabGroup):
    """The collectives of the backend `dlab`, over the transport of a rehearsal and in the calling thread."""

    def __init__(self, transport: Transport) -> None:
        dist.ProcessGroup.__init__(self, transport.rank, transport.size)  # type: ignore[call-arg]
        self._name = self._description = ""
        self._bare = self._transport = transport
        self._shared = self._plugged = None

    def _do(self, task: Callable[[], object], value: Any, opts: Any) -> Pending:
        with torch.no_grad():
            task()
        done = Pending(value)
        done.finish()
        return done

    def send(self, *_: Any) -> Any:
        """Refuse: over a rehearsal's transport `isend` would block, which a real one does not."""
        raise RuntimeError("this check has no point-to-point calls of torch.distributed: use transport.exchange")

    recv = recv_anysource = send  # type: ignore[assignment]


class _ThreadLocalWorld(c10d._World):
    """Gives each thread that has joined its own default process group; other threads see the usual one."""

    def __init__(self, before: c10d._World) -> None:
        super().__init__()
        self._before = before

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        """The process group of the rank that runs in this thread."""
        return getattr(_here, "group", self._before.default_pg)

    @default_pg.setter
    def default_pg(self, group: dist.ProcessGroup | None) -> None:
        self._before.default_pg = group

    @property
    def pg_map(self) -> Any:
        """The group's backend, which `dist.get_backend` looks up here."""
        mine = getattr(_here, "group", None)
        return self._before.pg_map if mine is None else self._before.pg_map | {mine: ("dlab", None)}


class _ThreadTransportProxy(Transport):
    """The result of `dlab.transport()`: it passes every call on to the transport of the rank in this thread."""

    rank = property(lambda self: _here.transport.rank)
    size = property(lambda self: _here.transport.size)

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Send and receive over the transport of the rank that runs in this thread."""
        _here.transport.move(outgoing, incoming)

    def label(self, phase: str, step: int) -> None:
        """Name the phase of the next messages on the transport of the rank that runs in this thread."""
        _here.transport.label(phase, step)
