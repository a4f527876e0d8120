"""Shared memory between processes of one host: a ring of bytes for each pair of ranks and direction.

A large message flows through its ring in pieces while the other side takes them out, so nothing is ever too large.
Whoever has to wait looks a few times, then lets other ranks have the core, then sleeps: ranks may outnumber cores.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlab.transports.base import Parcel, Transport
from dlab.transports.checked import compare, header
from dlab.transports.patience import Patience

RING = 256 << 10  # bytes that fit into a ring; larger messages flow through
_LINE = 64  # head and tail on a cache line each
_RING_BYTES = 2 * _LINE + RING
_HEADER = struct.Struct("<QQ")


class _Ring:
    """Bytes on their way from one rank to another. `head` counts what was written, `tail` what was read, for ever."""

    def __init__(self, memory: memoryview) -> None:
        self._head = memory[:_LINE].cast("Q")
        self._tail = memory[_LINE : 2 * _LINE].cast("Q")
        self._bytes = memory[2 * _LINE :]

    def put(self, source: memoryview) -> int:
        """Write as much as there is room for; gives how much."""
        head = self._head[0]
        count = min(len(source), RING - (head - self._tail[0]))
        if count:
            start = head % RING
            first = min(count, RING - start)
            self._bytes[start : start + first] = source[:first]
            if first < count:
                self._bytes[: count - first] = source[first:count]
            self._head[0] = head + count  # last: the reader sees whole pieces (x86 keeps the order of stores)
        return count

    def get(self, target: memoryview) -> int:
        """Read as much as is there and fits; gives how much."""
        tail = self._tail[0]
        count = min(len(target), self._head[0] - tail)
        if count:
            start = tail % RING
            first = min(count, RING - start)
            target[:first] = self._bytes[start : start + first]
            if first < count:
                target[first:count] = self._bytes[: count - first]
            self._tail[0] = tail + count
        return count


class SharedTransport(Transport):
    """One rank's rings to and from all others. A message costs two copies and no system call, unless one must wait."""

    def __init__(self, memory: memoryview, rank: int, size: int, timeout: float = 600.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout

        def ring(source: int, destination: int) -> _Ring:
            start = (source * size + destination) * _RING_BYTES
            return _Ring(memory[start : start + _RING_BYTES])

        others = [other for other in range(size) if other != rank]
        self._to = {other: ring(rank, other) for other in others}
        self._from = {other: ring(other, rank) for other in others}

    def move(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """A piece out, a piece in, until both are through."""
        to_send: list[memoryview] = []
        to_fill: list[memoryview] = []
        announced = bytearray(_HEADER.size)
        if outgoing is not None:
            to_send = [memoryview(_HEADER.pack(*header(outgoing[0]))), _bytes_of(outgoing[0])]
        if incoming is not None:
            to_fill = [memoryview(announced), _bytes_of(incoming[0])]

        def complaint() -> str:
            if to_fill and incoming is not None:
                return f"rank {self.rank} has waited to receive from rank {incoming[1]}"
            return f"rank {self.rank} has waited to send to rank {outgoing[1] if outgoing else '?'}"

        wait = Patience(self.timeout, complaint)
        while to_send or to_fill:
            moved = 0
            if to_send and outgoing is not None:
                moved += _advance(to_send, self._to[outgoing[1]].put)
            if to_fill and incoming is not None:
                tensor, source = incoming
                waiting_for_header = len(to_fill) == 2
                moved += _advance(to_fill, self._from[source].get)
                if waiting_for_header and len(to_fill) < 2:
                    compare(_HEADER.unpack(announced), tensor, source, self.rank)
            if moved:
                wait.reset()
            else:
                wait()


def share_a_host() -> bool:
    """Do all ranks of the process group see the same processes? Then they can see the same memory, too."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        here = f"{file.read()} {os.readlink('/proc/self/ns/pid')}"
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, here)
    return len(set(places)) == 1


def connect(timeout: float = 600.0) -> SharedTransport:
    """The transport of this rank. Every rank must call it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return SharedTransport(map_together(size * size * _RING_BYTES), rank, size, timeout)


def map_together(size: int) -> memoryview:
    """Memory, all zeros, that rank 0 makes and all ranks of the process group map. Every rank must call it.

    It has no name on disk and goes with the last process that holds it.
    """
    file = -1
    place: list[str] = [""]
    if dist.get_rank() == 0:
        file = os.memfd_create("dlab-shared")
        os.truncate(file, size)
        place = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(place, src=0)
    if dist.get_rank() != 0:
        file = os.open(place[0], os.O_RDWR)
    memory = memoryview(mmap.mmap(file, size))
    dist.barrier()  # rank 0 must not close it before all have opened it
    os.close(file)
    return memory


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()
    return memoryview(array)


def _advance(parts: list[memoryview], move: Callable[[memoryview], int]) -> int:
    """Move as much of the first part as possible; drop parts that are through."""
    moved = move(parts[0])
    parts[0] = parts[0][moved:]
    while parts and not len(parts[0]):
        parts.pop(0)
    return moved
