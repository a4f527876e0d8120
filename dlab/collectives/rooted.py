"""Collectives with a root: from one rank to all, from all to one, along a binomial tree or directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlab.collectives.ops import check_root, finish, prepare
from dlab.transports.base import Transport


def broadcast(tensor: torch.Tensor, transport: Transport, root: int = 0) -> None:
    """Give every rank the root's tensor: log2(n) steps, each of which doubles the number of ranks that have it."""
    check_root(root, transport)
    row, _ = prepare(tensor, "sum")
    size = transport.size
    place = (transport.rank - root) % size  # the root is at place 0
    distances = [1 << step for step in reversed(range((size - 1).bit_length()))]
    for step, distance in enumerate(distances):
        transport.label("broadcast", step)
        if place % (2 * distance) == distance:
            transport.recv(row, (place - distance + root) % size)
        elif place % (2 * distance) == 0 and place + distance < size:
            transport.send(row, (place + distance + root) % size)


def reduce(tensor: torch.Tensor, transport: Transport, root: int = 0, op: str = "sum") -> None:
    """Give the root the combination of all; the others keep their own. log2(n) steps, n-1 messages of the tensor."""
    check_root(root, transport)
    row, combine = prepare(tensor, op)
    size = transport.size
    place = (transport.rank - root) % size
    total = row if place == 0 else row.clone()
    incoming = torch.empty_like(row)
    for step in range((size - 1).bit_length()):
        transport.label("reduce", step)
        distance = 1 << step
        if place % (2 * distance) == distance:
            transport.send(total, (place - distance + root) % size)
            return
        if place + distance < size:
            transport.recv(incoming, (place + distance + root) % size)
            combine(total, incoming)
    finish(total, op, size)


def gather(tensor: torch.Tensor, transport: Transport, root: int = 0) -> list[torch.Tensor] | None:
    """Return a list of all tensors, by rank, on the root, and None on the others. n-1 messages to the root."""
    check_root(root, transport)
    prepare(tensor, "sum")
    transport.label("gather", 0)
    if transport.rank != root:
        transport.send(tensor, root)
        return None
    tensors = [torch.empty_like(tensor) for _ in range(transport.size)]
    for rank in range(transport.size):
        if rank == root:
            tensors[rank].copy_(tensor)
        else:
            transport.recv(tensors[rank], rank)
    return tensors


def scatter(tensor: torch.Tensor, transport: Transport, parts: Sequence[torch.Tensor] | None, root: int = 0) -> None:
    """Copy `parts[r]` of the root into the tensor of rank r. n-1 messages from the root."""
    check_root(root, transport)
    prepare(tensor, "sum")
    transport.label("scatter", 0)
    if transport.rank != root:
        transport.recv(tensor, root)
        return
    if parts is None or len(parts) != transport.size:
        found = "None" if parts is None else len(parts)
        raise ValueError(f"the root must give a part for each of the {transport.size} ranks, but gave {found}")
    for rank, part in enumerate(parts):
        if rank == root:
            tensor.copy_(part)
        else:
            transport.send(part, rank)
