"""Going on without a rank that died: the others find each other again, agree on the newest state, and deal anew."""

from __future__ import annotations

import io
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlab.collectives import all_gather, broadcast
from dlab.transports import StoreTransport, Transport, connect
from dlab.transports.patience import Peers

_NAP, _PATIENCE = 0.01, 20.0  # seconds


def stand_together(wire: Transport) -> Peers:
    """From now on the death of any rank ends every wait on this wire, so that all ranks learn of it."""
    if wire.peers is None:
        raise ValueError("elastic=True needs worker processes on one host: run it in a cluster, on the CPU")
    wire.peers.together = True
    return wire.peers


def meet_again(peers: Peers, rank: int) -> tuple[Transport, list[int]]:
    """A wire between those who live, and who they are. Each of them must call it.

    They meet at a place in the process group's store that is named after them; when one more dies meanwhile, the rest
    meet at another.
    """
    store = dist.distributed_c10d._get_default_store()
    while True:
        alive = peers.alive()
        place = f"without the dead: {alive}"
        store.set(f"{place} {rank}", "here")
        while not store.check([f"{place} {other}" for other in alive]):
            time.sleep(_NAP)
            if peers.alive() != alive:
                break
        else:
            here = dist.PrefixStore(place, store)
            here.set_timeout(timedelta(seconds=_PATIENCE))
            try:
                return connect(StoreTransport(here, alive.index(rank), len(alive))), alive
            except RuntimeError:
                if peers.alive() == alive:  # nobody has died: something else is wrong
                    raise


def newest(state: dict[str, Any], steps: int, wire: Transport) -> dict[str, Any]:
    """The state of the rank that has made most steps, for all. When a rank dies, some may have made one more."""
    made = [int(each) for each in all_gather(torch.tensor([steps]), wire)]
    leader = made.index(max(made))
    buffer = io.BytesIO()
    if wire.rank == leader:
        torch.save(state, buffer)
    size = torch.tensor([buffer.tell()])
    broadcast(size, wire, leader)
    content = torch.empty(int(size), dtype=torch.uint8)
    if wire.rank == leader:
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    broadcast(content, wire, leader)
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
