"""Run servers: in the server processes of a cluster, or, where there are none, on the last ranks of a transport.

A server has been sent the same function as the workers, and runs only code that this function contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dlab.kvstore import server as server_module
from dlab.kvstore.desk import Desk
from dlab.kvstore.functions import find_function
from dlab.kvstore.joining import Workers, channels, open_channels, using
from dlab.kvstore.server import Server
from dlab.processes.between import roles
from dlab.processes.between.errors import Stopped
from dlab.processes.worker import context
from dlab.processes.worker.context import servers
from dlab.transports import Transport

T = TypeVar("T")


def serve(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Serve in a server process of a cluster until all workers have returned; returns the number of updates."""
    here = servers()
    assert here is not None

    def find(name: str, digest: str) -> Callable[..., object]:
        return find_function(name, digest, [function, *args, *kwargs.values()])

    server = Server(channels(here), find)
    with suppress(Stopped):
        server.serve()
    return server.updates


roles.register("server", roles.Role(Desk, serve, server_module.__file__))


def run(function: Callable[..., T], *args: Any, servers: int = 1, **kwargs: Any) -> T | None:
    """Run `function(*args)` on all ranks, started by torchrun or the like, but the last ones, which are servers.

    Every rank must call it. Stores that the function creates use these servers. A server returns None when all workers
    have returned. They use shared memory, or, if they are on several hosts, messages of torch.distributed.

    >>> dist.init_process_group("gloo")
    >>> dlab.kvstore.run(train, servers=1)  # torchrun --nproc-per-node 4: three workers
    """

    def work(workers: Workers) -> T:
        with using(workers):
            return function(*args, **kwargs)

    return share_out(context.transport(), servers, work, [function, *args, *kwargs.values()])


def share_out(transport: Transport, servers: int, work: Callable[[Workers], T], given: Sequence[Any] = ()) -> T | None:
    """Run `work` on all ranks but the last `servers`, which serve the others and return None.

    `given` are values whose functions the servers may run. Every rank must call it.
    """
    workers = transport.size - servers
    if servers < 1 or workers < 1:
        raise ValueError(f"{transport.size} ranks cannot be {servers} servers and a worker or more: start more ranks")
    joined = open_channels(transport, workers, servers)
    try:
        if transport.rank < workers:
            result = work(here := Workers(transport, joined))
            here.barrier()
            return result
        Server(joined, lambda name, digest: find_function(name, digest, list(given))).serve()
        return None
    finally:
        joined.end()
