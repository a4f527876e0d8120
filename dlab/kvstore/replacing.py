"""When a server has died and another one takes its place: how all workers learn of it, and begin anew together.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from dlab.kvstore.serving import lines_of
from dlab.processes.inside import emit
from dlab.transports import Recorder, Transport
from dlab.transports.meeting import Venue, meet


def watch_servers(wire: Transport) -> None:
    """From now on the death of a server ends every wait for other workers and servers, so that all learn of it."""
    lines = lines_of(wire)
    for peers in (wire.peers, lines.peers):
        if peers is not None:
            peers.others = lambda: "which has no use any more: a server has died" if lines.broken else None


def reconnect(rank: int, workers: int) -> Transport:
    """After a server was lost: wait for a new one, with all workers; gives a wire between them, for a new store."""
    lines = lines_of(None)
    crew = lines.crew()

    def where() -> Venue | None:
        nonlocal crew
        crew = lines.crew()
        return None if crew is None else (f"with the servers {crew}", list(range(workers)))

    wire, _ = meet(where, rank)
    assert crew is not None
    lines.meet_servers(crew)
    return Recorder(wire, emit)
