"""Going on without a rank that died: the others find each other again, agree on the newest state, and deal anew."""

from __future__ import annotations

import io
from typing import Any

import torch

from dlab.collectives import all_gather, broadcast
from dlab.memory.backoff import Peers
from dlab.transports import Transport
from dlab.transports.rendezvous import Rendezvous, meet


def stand_together(transport: Transport) -> Peers:
    """From now on the death of any rank ends every wait on this transport, so that all ranks learn of it."""
    if transport.peers is None:
        raise ValueError("elastic=True needs worker processes on one host: run it in a cluster, on the CPU")
    transport.peers.together = True
    return transport.peers


def meet_again(peers: Peers, rank: int) -> tuple[Transport, list[int]]:
    """A transport between those who live, and who they are. Each of them must call it."""

    def where() -> Rendezvous:
        alive = peers.alive()
        return f"without the dead: {alive}", alive

    return meet(where, rank)


def newest(state: dict[str, Any], steps: int, transport: Transport) -> dict[str, Any]:
    """The state of the rank that has made most steps, for all. When a rank dies, some may have made one more."""
    made = [int(each) for each in all_gather(torch.tensor([steps]), transport)]
    leader = made.index(max(made))
    buffer = io.BytesIO()
    if transport.rank == leader:
        torch.save(state, buffer)
    size = torch.tensor([buffer.tell()])
    broadcast(size, transport, leader)
    content = torch.empty(int(size), dtype=torch.uint8)
    if transport.rank == leader:
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    broadcast(content, transport, leader)
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
