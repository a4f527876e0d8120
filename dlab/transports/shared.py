"""Shared memory between processes of one host: a ring buffer for each pair of ranks and direction.

A large message passes through its ring in pieces while the other side takes them out, so no message is too large. A
rank that has to wait checks a few times, then yields the core to other ranks, then sleeps: ranks may outnumber cores.
What `isend` finds no room for is written whenever this rank next sends, receives or waits.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable
from zlib import crc32

import torch

from dlab.memory.backoff import Backoff, Peers
from dlab.memory.fence import has_fence
from dlab.memory.mapping import host, lines, map_file, new_file
from dlab.memory.ring import Ring
from dlab.memory.tensors import bytes_of
from dlab.memory.waits import name_ranks
from dlab.transports.base import SendRequest, TensorAndRank, Transport
from dlab.transports.checked import compare, header
from dlab.transports.distributed import TorchTransport

_HEADER = struct.Struct("<QQ")


class SharedSend(SendRequest):
    """A message of which some parts may not be in the ring yet."""

    def __init__(self, transport: SharedTransport, outgoing: TensorAndRank, parts: list[memoryview]) -> None:
        self._transport, self.outgoing, self.parts = transport, outgoing, parts

    @property
    def done(self) -> bool:
        """Whether all of it has been written to the ring."""
        return not self.parts

    def wait(self) -> None:
        """Write the rest, as the receiver makes room for it."""
        self._transport.write_all(self)


class SharedTransport(Transport):
    """One rank's rings to and from all others; a message costs two copies, and system calls only during a wait."""

    peers: Peers

    def __init__(self, memory: memoryview, rank: int, size: int, timeout: float = 600.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.peers = Peers(memory[: 8 * size].cast("Q"), rank)
        rings = memory[lines(8 * size) :]

        def ring(source: int, destination: int) -> Ring:
            start = (source * size + destination) * Ring.ROOM
            return Ring(rings[start : start + Ring.ROOM])

        others = [other for other in range(size) if other != rank]
        self.outgoing = {other: ring(rank, other) for other in others}
        self.incoming = {other: ring(other, rank) for other in others}
        self._unwritten: dict[int, deque[SharedSend]] = {}  # by destination, in order; only those that have some

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Write a piece of one message and read a piece of the other in turn, until both are complete."""
        to_send: list[memoryview] = []
        to_fill: list[memoryview] = []
        announced = bytearray(_HEADER.size)
        behind: SharedSend | None = None  # the outgoing message, if others to the same rank must be written before
        if outgoing is not None:
            if outgoing[1] in self._unwritten:
                behind = self._queue(outgoing)
            else:
                to_send = _parts_of(outgoing[0])
        if incoming is not None:
            to_fill = [memoryview(announced), bytes_of(incoming[0])]

        wait: Backoff | None = None
        while to_send or to_fill or (behind is not None and behind.parts):
            moved = self._write() if self._unwritten else 0
            if to_send and outgoing is not None:
                moved += _advance(to_send, self.outgoing[outgoing[1]].put)
            if to_fill and incoming is not None:
                tensor, source = incoming
                waiting_for_header = len(to_fill) == 2
                moved += _advance(to_fill, self.incoming[source].get)
                if waiting_for_header and len(to_fill) < 2:
                    compare(_HEADER.unpack(announced), tensor, source, self.rank)
            if moved:
                wait = None
            else:
                wait = wait or self._backoff(outgoing, incoming if to_fill else None)
                wait()

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Write as much as there is room for, also as it becomes free meanwhile; the rest follows later."""
        request = self._queue(outgoing)
        while self._unwritten and self._write():
            pass
        return request

    def write_all(self, request: SharedSend) -> None:
        """Write until a message is complete, and whatever else can be written."""
        wait: Backoff | None = None
        while request.parts:
            if self._write():
                wait = None
            else:
                wait = wait or self._backoff(request.outgoing, None)
                wait()

    def _queue(self, outgoing: TensorAndRank) -> SharedSend:
        request = SharedSend(self, outgoing, _parts_of(outgoing[0]))
        self._unwritten.setdefault(outgoing[1], deque()).append(request)
        return request

    def _write(self) -> int:
        """Write as much as there is room for of all messages that wait, and return the number of bytes."""
        moved = 0
        for destination, queue in list(self._unwritten.items()):
            while queue:
                moved += _advance(queue[0].parts, self.outgoing[destination].put)
                if queue[0].parts:
                    break
                queue.popleft()
            else:
                del self._unwritten[destination]
        return moved

    def _backoff(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> Backoff:
        """Make a backoff for the rank to receive from, or else for the rank to send to."""

        def whom() -> tuple[list[int], str]:
            if incoming is not None:
                return [incoming[1]], "to receive from {}"
            assert outgoing is not None
            return [outgoing[1]], "to send to {}"

        return Backoff(self.peers, self.timeout, whom)


def connect(transport: Transport | None = None, timeout: float = 600.0) -> Transport:
    """Return a shared-memory transport between the ranks of `transport`, or that itself if they are on several hosts.

    Every rank must call it; without a transport, it connects the default process group of torch.distributed.
    """
    transport = transport or TorchTransport()
    memory = share_memory(transport, lines(8 * transport.size) + transport.size**2 * Ring.ROOM)
    return transport if memory is None else SharedTransport(memory, transport.rank, transport.size, timeout)


def share_memory(transport: Transport, nbytes: int) -> memoryview | None:
    """Return memory, all zeros, that rank 0 allocates and all ranks map; None if one cannot, or the transport may not.

    Every rank must call it. The memory has no name on disk and is freed with the last process that holds it. A machine
    without a memory fence gets None, and prints so. No recorder sees the messages with which the ranks agree on it.
    """
    if not transport.shares_memory:
        return None
    transport, members = transport.unrecorded(), list(transport.members)
    group = f"{crc32(str(members).encode()):08x}"  # a rank may take others for its members: then nothing would fit
    message, yes = torch.zeros(128, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    file = -1
    if transport.rank == 0:
        file = new_file("dlab-shared", nbytes)
        address = f"{group} /proc/{os.getpid()}/fd/{file} {host() if has_fence() else ''}".encode()
        message[: len(address)] = torch.tensor(list(address), dtype=torch.uint8)
        others = range(1, transport.size)
        for other in others:
            transport.send(message, other)
        for other in others:  # all ranks do without the memory if one cannot open it
            answer = torch.empty_like(yes)
            transport.recv(answer, other)
            yes &= answer
        for other in others:
            transport.send(yes, other)
    else:
        transport.recv(message, 0)
        of, place, there = bytes(message.tolist()).rstrip(b"\0").decode().split(" ", 2)
        if of != group:
            raise ValueError(
                f"rank {members[transport.rank]} is in a group of {name_ranks(members)}, but rank {members[0]} has "
                "other members in its own: every rank must make the same mesh and use the same lines of it"
            )
        if there == host() and has_fence():
            try:
                file = os.open(place, os.O_RDWR)
            except OSError:  # a container may hide one process's files from another
                pass
        transport.send(torch.full_like(yes, file >= 0), 0)
        transport.recv(yes, 0)
    try:
        return map_file(file, nbytes) if yes else None
    finally:
        if file >= 0:
            os.close(file)


def _parts_of(tensor: torch.Tensor) -> list[memoryview]:
    return [memoryview(_HEADER.pack(*header(tensor))), bytes_of(tensor)]


def _advance(parts: list[memoryview], move: Callable[[memoryview], int]) -> int:
    """Move as much of the first part as possible, and drop parts that are complete."""
    moved = move(parts[0])
    parts[0] = parts[0][moved:]
    while parts and not len(parts[0]):
        parts.pop(0)
    return moved
