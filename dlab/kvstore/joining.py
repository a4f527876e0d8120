"""What joins this process with the servers: the memory of its cluster, or a transport whose last ranks serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dlab.kvstore.channels import Channels
from dlab.kvstore.desk import Desk
from dlab.kvstore.relay import RelayedChannels
from dlab.memory.fence import has_fence
from dlab.processes.worker.context import Servers, once, servers
from dlab.transports import Group, Transport, share_memory
from dlab.transports.distributed import for_cpu


def channels(here: Servers) -> Channels:
    """The channels of this process to the servers of its cluster, or of a server to its workers."""
    if not has_fence():
        raise RuntimeError(
            "the servers of a cluster share memory with its workers, which this machine does not allow: install "
            "libatomic1, or start the ranks with torchrun and call dlab.kvstore.run(function, servers=1)"
        )
    return Channels(here.desk.map(), here.rank, here.workers, here.servers)


class Workers(Group):
    """The ranks of a transport without the last ones, which serve the others, as under torchrun."""

    def __init__(self, transport: Transport, channels: Channels) -> None:
        super().__init__(transport, range(channels.workers))
        self.channels = channels


_workers: Workers | None = None  # of the process, inside `using`


@contextmanager
def using(workers: Workers) -> Iterator[None]:
    """Stores that are made inside have these workers, and their servers."""
    global _workers
    _workers = workers
    try:
        yield
    finally:
        _workers = None


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


def open_channels(transport: Transport, workers: int, servers: int) -> Channels:
    """Between the last ranks of a transport, which serve, and the others. Every rank must call it."""
    memory = share_memory(for_cpu(transport), Desk.size(transport.size))  # servers are on the CPU
    if memory is None:
        return RelayedChannels(transport.rank, workers, servers)
    return Channels(memory, transport.rank, workers, servers)
