"""Ring algorithms: reduce-scatter, all-gather, and all-reduce, which is one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlab.collectives.ops import Combine, finish, prepare
from dlab.transports.base import Transport


def ring_allreduce(tensor: torch.Tensor, transport: Transport, op: str = "sum") -> None:
    """Pass chunks round a ring: 2(n-1) steps, in which each rank sends 2(n-1)/n of the tensor.

    In the first round each chunk is combined with those of all ranks, in the second the finished chunks go round.
    """
    row, combine = prepare(tensor, op)
    chunks = row.tensor_split(transport.size)
    collect_chunks(chunks, transport, combine)
    finish(chunks[transport.rank], op, transport.size)
    pass_chunks(chunks, transport)


def collect_chunks(chunks: Sequence[torch.Tensor], transport: Transport, combine: Combine) -> None:
    """First round: combine the chunk from the left neighbour with this rank's own, and send it to the right next.

    After n-1 steps rank r holds the finished chunk r.
    """
    rank, size = transport.rank, transport.size
    buffer = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    for step in range(size - 1):
        transport.label("reduce-scatter", step)
        outgoing, mine = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
        incoming = buffer[: mine.numel()]
        transport.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
        combine(mine, incoming)


def pass_chunks(chunks: Sequence[torch.Tensor], transport: Transport) -> None:
    """Second round: rank r starts with chunk r, keeps every chunk from the left, and passes it on to the right."""
    rank, size = transport.rank, transport.size
    for step in range(size - 1):
        transport.label("all-gather", step)
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        transport.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)


def reduce_scatter(tensor: torch.Tensor, transport: Transport, op: str = "sum") -> torch.Tensor:
    """Give rank r part r of the combination of all tensors, as a new tensor; each rank sends (n-1)/n of the tensor."""
    row, combine = prepare(tensor, op)
    chunks = row.clone().tensor_split(transport.size)
    collect_chunks(chunks, transport, combine)
    mine = chunks[transport.rank].clone()
    finish(mine, op, transport.size)
    return mine


def all_gather(tensor: torch.Tensor, transport: Transport) -> list[torch.Tensor]:
    """Give every rank the tensors of all, by rank; each rank sends n-1 times the tensor."""
    prepare(tensor, "sum")
    tensors = [torch.empty_like(tensor) for _ in range(transport.size)]
    tensors[transport.rank].copy_(tensor)
    pass_chunks(tensors, transport)
    return tensors


def all_to_all(parts: Sequence[torch.Tensor], transport: Transport) -> list[torch.Tensor]:
    """Give rank s `parts[s]` of every rank, by rank; all parts have one size. n-1 steps, each with another partner."""
    received = [torch.empty_like(part) for part in parts]
    swap_parts(parts, received, transport)
    return received


def swap_parts(parts: Sequence[torch.Tensor], received: Sequence[torch.Tensor], transport: Transport) -> None:
    """Do an all-to-all into existing tensors, which may have different sizes."""
    rank, size = transport.rank, transport.size
    if len(parts) != size:
        raise ValueError(f"rank {rank} gave {len(parts)} parts for {size} ranks: give one for each rank")
    received[rank].copy_(parts[rank])
    for step in range(1, size):
        transport.label("all-to-all", step - 1)
        to, source = (rank + step) % size, (rank - step) % size
        transport.exchange(parts[to], to, received[source], source)
