"""Connect this process with the servers: through its cluster's memory, or a transport whose last ranks are servers."""

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
    """Open the channels of a worker to the servers of its cluster, or of a server to its workers."""
    if not has_fence():
        raise RuntimeError(
            "the servers of a cluster share memory with its workers, which this machine does not allow: install "
            "libatomic1, or start the ranks with torchrun and call dlab.kvstore.run(function, servers=1)"
        )
    return Channels(here.desk.map(), here.rank, here.workers, here.servers)


class Workers(Group):
    """The ranks of a transport without the last ones, which are servers for the others, as under torchrun."""

    def __init__(self, transport: Transport, channels: Channels) -> None:
        super().__init__(transport, range(channels.workers))
        self.channels = channels


_workers: Workers | None = None  # those of this process, inside `using`


@contextmanager
def using(workers: Workers) -> Iterator[None]:
    """Let stores that are created inside use these workers and their servers."""
    global _workers
    _workers = workers
    try:
        yield
    finally:
        _workers = None


def workers() -> Workers | None:
    """Return the workers' transport with its channels inside `dlab.kvstore.run`, and None elsewhere."""
    return _workers


def channels_of(transport: Transport | None) -> Channels:
    """Return the channels to the servers of this transport's workers, or those of a worker of a cluster."""
    return transport.channels if isinstance(transport, Workers) else once(_way_to_servers)


def _way_to_servers() -> Channels:
    here = servers()
    if here is None:
        raise RuntimeError(
            "there are no servers here: make the cluster with some, dlab.Cluster(4, servers=1), and create the store "
            "in a function that its workers run; under torchrun, call dlab.kvstore.run(function, servers=1)"
        )
    return channels(here)


def open_channels(transport: Transport, workers: int, servers: int) -> Channels:
    """Open channels between the last ranks of a transport, the servers, and the others; every rank must call it."""
    memory = share_memory(for_cpu(transport), Desk.size(transport.size))  # servers work on the CPU
    if memory is None:
        return RelayedChannels(transport.rank, workers, servers)
    return Channels(memory, transport.rank, workers, servers)
