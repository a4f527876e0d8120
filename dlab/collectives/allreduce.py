"""All-reduce by other algorithms than the ring: every rank ends with the combination of all ranks' tensors.

Each works in place on a contiguous tensor of any size and for any number of ranks, and leaves the same bits on all
ranks, because every element is combined on one rank only, or on all ranks in the same order.
"""

from __future__ import annotations

from math import isqrt

import torch

from dlab.collectives.ops import Combine, finish, prepare
from dlab.collectives.ring import ring_allreduce
from dlab.collectives.rooted import broadcast, reduce
from dlab.transports.base import Group, Transport


def naive_allreduce(tensor: torch.Tensor, transport: Transport, op: str = "sum") -> None:
    """Every rank sends its whole tensor to every other: n-1 steps, n-1 times the tensor per rank."""
    row, combine = prepare(tensor, op)
    rank, size = transport.rank, transport.size
    rows = [torch.empty_like(row) for _ in range(size)]
    rows[rank].copy_(row)
    for step in range(1, size):
        transport.label("exchange", step - 1)
        to, source = (rank + step) % size, (rank - step) % size
        transport.exchange(rows[rank], to, rows[source], source)
    row.copy_(rows[0])
    for other in rows[1:]:  # in the order of ranks, so that all get the same bits
        combine(row, other)
    finish(row, op, size)


def tree_allreduce(tensor: torch.Tensor, transport: Transport, op: str = "sum") -> None:
    """Reduce up a tree to rank 0, then broadcast: 2 log2(n) steps, 2(n-1) messages, each of the whole tensor."""
    reduce(tensor, transport, root=0, op=op)
    broadcast(tensor, transport, root=0)


def halving_doubling_allreduce(tensor: torch.Tensor, transport: Transport, op: str = "sum") -> None:
    """Exchange halves with the far half of the ranks, then quarters with a nearer rank, and so on, and back.

    For a power of two: 2 log2(n) steps, 2(n-1)/n of the tensor per rank. For other n, with p the power of two below
    it, n-p ranks first send their tensor to a neighbour and get the result at the end: 2 steps more than p ranks take,
    and those neighbours send 2(p-1)/p + 1 of the tensor.
    """
    row, combine = prepare(tensor, op)
    rank, size = transport.rank, transport.size
    power = 1 << (size.bit_length() - 1)
    extra = size - power  # the odd ranks among the first 2 * extra do not take part
    members = [other for other in range(size) if other >= 2 * extra or other % 2 == 0]
    if rank not in members:
        transport.label("fold", 0)
        transport.send(row, rank - 1)
        transport.label("unfold", 0)
        transport.recv(row, rank - 1)
        return
    if rank < 2 * extra:
        transport.label("fold", 0)
        incoming = torch.empty_like(row)
        transport.recv(incoming, rank + 1)
        combine(row, incoming)
    _halve_and_double(row, Group(transport, members), combine)
    finish(row, op, size)
    if rank < 2 * extra:
        transport.label("unfold", 0)
        transport.send(row, rank + 1)


def _halve_and_double(row: torch.Tensor, transport: Transport, combine: Combine) -> None:
    """For 2**k ranks: each step halves the part that a rank combines, until it is 1/n; then the steps go backwards."""
    parts = row.tensor_split(transport.size)
    ends = [0, *torch.tensor([part.numel() for part in parts]).cumsum(0).tolist()]
    done: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    low, high = 0, transport.size
    while high - low > 1:
        middle = (low + high) // 2
        distance = middle - low
        upper = bool(transport.rank & distance)
        mine, theirs = ((middle, high), (low, middle)) if upper else ((low, middle), (middle, high))
        partner = transport.rank ^ distance
        keep, give = row[ends[mine[0]] : ends[mine[1]]], row[ends[theirs[0]] : ends[theirs[1]]]
        incoming = torch.empty_like(keep)
        transport.label("halve", len(done))
        transport.exchange(give, partner, incoming, partner)
        combine(keep, incoming)
        done.append((keep, give, partner))
        low, high = mine
    for step, (keep, give, partner) in enumerate(reversed(done)):
        transport.label("double", step)
        transport.exchange(keep, partner, give, partner)


def hierarchical_allreduce(
    tensor: torch.Tensor, transport: Transport, op: str = "sum", group_size: int | None = None
) -> None:
    """Reduce to the leader of each group, all-reduce on a ring of leaders, and broadcast within the groups.

    It suits machines with fast links inside. Groups are `group_size` neighbours, by default about the square root of n.
    """
    row, _ = prepare(tensor, op)
    rank, size = transport.rank, transport.size
    width = isqrt(size) if group_size is None else group_size
    if not 1 <= width <= size:
        raise ValueError(f"groups of {width} are not possible with {size} ranks: use 1 to {size}")
    first = rank - rank % width
    group = Group(transport, range(first, min(first + width, size)))
    plain = "sum" if op == "mean" else op
    reduce(row, group, root=0, op=plain)
    if rank == first:
        ring_allreduce(row, Group(transport, range(0, size, width)), plain)
        finish(row, op, size)
    broadcast(row, group, root=0)
