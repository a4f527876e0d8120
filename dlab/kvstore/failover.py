"""When a server has died and another one takes its place: how all workers learn of it, and begin anew together.

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
    """From now on the death of a server ends every wait for other workers and servers, so that all learn of it."""
    channels = channels_of(transport)
    for peers in (transport.peers, channels.peers):
        if peers is not None:
            peers.others = lambda: "which has no use any more: a server has died" if channels.broken else None


def has_lost_a_server() -> bool:
    """Has one died that this worker of a cluster has not yet replaced?"""
    return servers() is not None and channels_of(None).broken


def numbers_of(transport: Transport, device: torch.device) -> list[int]:
    """Which worker is at each end of a transport, as the servers count them: there may be fewer than at first."""
    return [int(each) for each in all_gather(torch.tensor([channels_of(transport).rank], device=device), transport)]


def reconnect() -> Transport:
    """After a server was lost, wait for a new one with all workers that live; gives a transport between these workers.

    They are numbered anew on it if one has died.
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

    So nobody goes back to a checkpoint while others have returned. Who has settled knows that all others that live are
    about to, and waits until they have said how it went; from then on servers may die.
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
        with suppress(ConnectionError):  # who has just died is not waited for
            wait()
    if channels.somebody_failed:
        raise ConnectionError("a server has died, as another rank has found")
