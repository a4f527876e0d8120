"""Who serves: the server processes of a cluster, or, where nobody has started any, the last ranks of a transport.

A server has been sent the same function as the workers, and runs nothing else than what is in it.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dlab.kvstore.channels import Channels
from dlab.kvstore.relay import RelayedChannels
from dlab.kvstore.server import Server
from dlab.processes.between.control import Desk
from dlab.processes.between.errors import Stopped
from dlab.processes.worker import context
from dlab.processes.worker.context import Servers, once, servers
from dlab.transports import Group, Transport, share_memory
from dlab.transports.distributed import for_cpu

T = TypeVar("T")


def serve(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Until all workers have returned; gives the number of updates."""
    here = servers()
    assert here is not None

    def find(name: str, digest: str) -> Callable[..., object]:
        return find_function(name, digest, [function, *args, *kwargs.values()])

    server = Server(channels(here), find)
    with suppress(Stopped):
        server.serve()
    return server.updates


def channels(here: Servers) -> Channels:
    """The channels of this process to the servers of its cluster, or of a server to its workers."""
    return Channels(here.desk.map(), here.rank, here.workers, here.servers)


class Workers(Group):
    """The ranks of a transport without the last ones, which serve the others, as under torchrun."""

    def __init__(self, transport: Transport, channels: Channels) -> None:
        super().__init__(transport, range(channels.workers))
        self.channels = channels


_workers: Workers | None = None  # of the process, while `run` runs


def run(function: Callable[..., T], *args: Any, servers: int = 1, **kwargs: Any) -> T | None:
    """Where ranks were started by others, as by torchrun: `function(*args)` on all but the last ones, which serve them.

    Every rank must call it. Stores that the function makes have these servers. A server gets None, when all workers
    have returned. They meet in shared memory, or, if they are on several hosts, by messages of torch.distributed.

    >>> dist.init_process_group("gloo")
    >>> dlab.kvstore.run(train, servers=1)  # torchrun --nproc-per-node 4: three workers
    """

    def work(workers: Workers) -> T:
        global _workers
        _workers = workers
        try:
            return function(*args, **kwargs)
        finally:
            _workers = None

    return share_out(context.transport(), servers, work, [function, *args, *kwargs.values()])


def workers() -> Workers | None:
    """The transport to the workers and their channels, inside `run`."""
    return _workers


def channels_of(transport: Transport | None) -> Channels:
    """The way to the servers, of workers with this transport, or of a worker of a cluster."""
    return transport.channels if isinstance(transport, Workers) else once(_way_to_servers)


def _way_to_servers() -> Channels:
    here = servers()
    if here is None:
        raise RuntimeError(
            "there are no servers here: make the cluster with some, dlab.Cluster(4, servers=1), and create the store "
            "in a function that its workers run; under torchrun, call that by dlab.kvstore.run(function, servers=1)"
        )
    return channels(here)


def share_out(transport: Transport, servers: int, work: Callable[[Workers], T], given: Sequence[Any] = ()) -> T | None:
    """The last `servers` ranks of a transport serve the others and return None. `given` is what they may run.

    Every rank must call it.
    """
    workers = transport.size - servers
    if servers < 1 or workers < 1:
        raise ValueError(f"{transport.size} ranks cannot be {servers} servers and their workers: start more")
    channels = _open_channels(transport, workers, servers)
    try:
        if transport.rank < workers:
            result = work(here := Workers(transport, channels))
            here.barrier()
            return result
        Server(channels, lambda name, digest: find_function(name, digest, list(given))).serve()
        return None
    finally:
        channels.end()


def _open_channels(transport: Transport, workers: int, servers: int) -> Channels:
    memory = share_memory(for_cpu(transport), Desk.size(transport.size))  # servers are on the CPU
    if memory is None:
        return RelayedChannels(transport.rank, workers, servers)
    return Channels(memory, transport.rank, workers, servers)


def digest_of(function: Callable[..., Any]) -> str:
    """Of what a function does: the same for copies of it, wherever they were sent."""
    return _digest(function.__code__)


def _digest(code: types.CodeType) -> str:
    constants = [_digest(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    content = repr((code.co_code, constants, code.co_names, code.co_varnames))
    return hashlib.sha256(content.encode()).hexdigest()


def find_function(name: str, digest: str, given: list[Any]) -> Callable[..., object]:
    """The function that is meant, among those that the parent has sent: arguments, or what its function refers to."""
    for function in _reachable(given):
        if function.__name__ == name and digest_of(function) == digest:
            return function
    raise LookupError(
        f"the server knows no function {name!r}: it runs only what the notebook has sent. Define {name!r} where the "
        "workers' function can name it, without variables of that function, or give it as an argument of cluster.run"
    )


def _reachable(given: list[Any]) -> Iterator[types.FunctionType]:
    """Functions among these values, and those that they refer to by name, by closure, or have inside."""
    seen: set[int] = set()
    waiting = list(given)
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        names = {name for code in _codes(value.__code__) for name in code.co_names}
        waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        for code in _codes(value.__code__):
            if code is not value.__code__ and not code.co_freevars:
                waiting.append(types.FunctionType(code, value.__globals__, code.co_name))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
