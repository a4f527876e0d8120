"""Going on without a rank that died: the others find each other again, agree on the newest state, and deal anew."""

from __future__ import annotations

import io
from typing import Any

import torch

from dlab.collectives import all_gather, broadcast
from dlab.transports import Transport
from dlab.transports.meeting import Venue, meet
from dlab.transports.patience import Peers


def stand_together(wire: Transport) -> Peers:
    """From now on the death of any rank ends every wait on this wire, so that all ranks learn of it."""
    if wire.peers is None:
        raise ValueError("elastic=True needs worker processes on one host: run it in a cluster, on the CPU")
    wire.peers.together = True
    return wire.peers


def meet_again(peers: Peers, rank: int) -> tuple[Transport, list[int]]:
    """A wire between those who live, and who they are. Each of them must call it."""

    def where() -> Venue:
        alive = peers.alive()
        return f"without the dead: {alive}", alive

    return meet(where, rank)


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
