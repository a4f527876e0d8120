"""Failover: when a server has died and was replaced, all workers notice it and restart together.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from dlab.collectives import all_gather
from dlab.kvstore.joining import channels_of
from dlab.memory.backoff import Backoff
from dlab.processes.worker.context import emit, servers
from dlab.transports import Recorder, Transport
from dlab.transports.rendezvous import Rendezvous, meet


def watch_servers(transport: Transport) -> None:
    """Let the death of a server end every wait for other workers and servers, so that all workers notice it."""
    channels = channels_of(transport)
    for peers in (transport.peers, channels.peers):
        if peers is not None:
            peers.others = lambda: "which is now pointless: a server has died" if channels.broken else None


def has_lost_a_server() -> bool:
    """Return whether a server has died and this worker has not reconnected yet."""
    return servers() is not None and channels_of(None).broken


def numbers_of(transport: Transport, device: torch.device) -> list[int]:
    """Return, by rank of a transport, the numbers that servers give to workers; they differ after a worker has died."""
    return [int(each) for each in all_gather(torch.tensor([channels_of(transport).rank], device=device), transport)]


def reconnect() -> Transport:
    """Wait, with all live workers, until a lost server is replaced; returns a new transport between these workers.

    If a worker has died, the ranks of the others on this transport are new.
    """
    channels = channels_of(None)
    generations = channels.generations()

    def where() -> Rendezvous | None:
        nonlocal generations
        generations, alive = (
            channels.generations(),
            [rank for rank in channels.peers.alive() if rank < channels.workers],
        )
        return None if generations is None else (f"{alive} with the servers {generations}", alive)

    transport, _ = meet(where, channels.rank)
    assert generations is not None
    channels.meet_servers(generations)
    return Recorder(transport, emit)


def end_together(transport: Transport, settle: Callable[[], None]) -> None:
    """Settle for the last time. If a server dies meanwhile, either all workers have settled, or all raise.

    So no worker goes back to a checkpoint while others have returned. A worker that has settled knows that all other
    live workers are about to, and waits until they have reported the outcome; after that, servers may die.
    """
    channels = channels_of(transport)
    try:
        settle()
    except ConnectionError:
        channels.say_how_it_ended(False)
        raise
    for peers in (transport.peers, channels.peers):
        if peers is not None:
            peers.others = lambda: None
    channels.say_how_it_ended(True)
    wait = Backoff(channels.peers, 600.0, lambda: (channels.silent(), "for {} to end"), channels.semaphore)
    while channels.silent():
        with suppress(ConnectionError):  # a worker that has just died is not waited for
            wait()
    if channels.somebody_failed:
        raise ConnectionError("another rank reported that a server has died")
