"""The interface of a transport that collectives are written on: send, receive, both at once, and a barrier.

A collective is written once on this interface, and runs on threads, shared memory, gloo and NCCL. A pipeline also sends
without waiting (`isend`), so that it can compute meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dlab.memory.backoff import Peers
from dlab.memory.waits import name_ranks

TensorAndRank = tuple[torch.Tensor, int]  # a tensor, and the rank at the other end
T = TypeVar("T")


class SendRequest:
    """A message that was sent without waiting, as MPI calls it: its tensor must not change until it is `done`."""

    @property
    def done(self) -> bool:
        """Whether the tensor may change; False if that is not known without waiting."""
        return True

    def wait(self) -> None:
        """Return when the tensor may change; one that was sent at once has nothing to wait for."""


class Transport(ABC):
    """Messages between `size` ranks, seen from `rank`. A message is the content of a contiguous tensor.

    `send` may wait until the other side receives, so two ranks that both send first and receive afterwards may wait
    for ever. `exchange` sends and receives at the same time and avoids this deadlock.
    """

    rank: int
    size: int
    peers: Peers | None = None  # the processes at the other ends, where they are known
    processes: bool = True  # whether ranks are processes; threads share all their memory anyway
    shares_memory: bool = True  # if not, ranks of one host send each other everything, as ranks of several do

    @property
    def members(self) -> Sequence[int]:
        """The world's ranks that take part here: member r is rank r of this transport."""
        return range(self.size)

    def once(self, make: Callable[[Transport], T]) -> T:
        """Return the result of `make(transport)`, which is called only once for this transport."""
        kept: dict[Any, Any] = self.__dict__.setdefault("_kept", {})
        if make not in kept:
            kept[make] = make(self)
        return kept[make]

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send a tensor's content to a rank."""
        self.check(tensor, destination)
        self.move((tensor, destination), None)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with what a rank has sent; its size and type must be those of the tensor sent."""
        self.check(tensor, source)
        self.move(None, (tensor, source))

    def isend(self, tensor: torch.Tensor, destination: int) -> SendRequest:
        """Send a tensor's content without waiting for the other side; MPI and torch use the same name.

        Messages to one rank arrive in the order in which they were sent, by whichever of the methods. The tensor must
        not change until the request that is returned is done. Every request must be waited for in the end: until then
        a part of the message may still be here, since no thread sends it in the background.

        >>> request = transport.isend(activations, destination=1)
        >>> ...  # compute
        >>> request.wait()
        """
        self.check(tensor, destination)
        return self.start((tensor, destination))

    def exchange(self, outgoing: torch.Tensor, destination: int, incoming: torch.Tensor, source: int) -> None:
        """Send to one rank while receiving from another, or from the same one."""
        self.check(outgoing, destination)
        self.check(incoming, source)
        self.move((outgoing, destination), (incoming, source))

    @abstractmethod
    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Send and receive at the same time; the only method that a transport must implement."""

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Start to send; where nothing better is known, send at once, and wait as long as that takes."""
        self.move(outgoing, None)
        return SendRequest()

    def barrier(self) -> None:
        """Wait until every rank has called it: log2(size) rounds of empty messages, each twice as far away."""
        nothing, distance = torch.empty(0, dtype=torch.uint8), 1
        while distance < self.size:
            self.exchange(
                nothing, (self.rank + distance) % self.size, nothing.clone(), (self.rank - distance) % self.size
            )
            distance *= 2

    def label(self, phase: str, step: int) -> None:  # noqa: B027  (most transports have no use for it)
        """Say which part of an algorithm the next messages belong to; only a recorder uses it."""

    def note(self, source: int, destination: int, nbytes: int, start: float) -> None:  # noqa: B027  (the same)
        """Report a message that was sent by other means than this transport, since `start` of `time.time`."""

    def note_collective(self, name: str, algorithm: str, nbytes: int, start: float, **details: Any) -> None:  # noqa: B027
        """Report a collective in which this rank took part without messages, since `start` of `time.time`."""

    def within(self, members: Sequence[int], axis: str) -> Transport:
        """Return the transport for messages within a group; a recorder returns one that names the group."""
        return self

    def unrecorded(self) -> Transport:
        """Return a transport between the same ranks that records nothing, for messages that are not the user's."""
        return self

    def check(self, tensor: torch.Tensor, peer: int) -> None:
        """Raise an error for a tensor or a rank that cannot be used in a message."""
        if not isinstance(peer, int) or not 0 <= peer < self.size:
            raise IndexError(f"rank {self.rank} names rank {peer}, but the ranks are 0 to {self.size - 1}")
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} sends to itself: copy the tensor instead")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError("only dense, contiguous tensors can be sent: call .contiguous() (or .to_dense()) first")
        if tensor.is_conj() or tensor.is_neg():  # the numbers in memory differ from those that it shows
            raise ValueError("a conjugated view cannot be sent as it is: call .resolve_conj().resolve_neg() first")


class Group(Transport):
    """Some of the ranks, numbered from 0 in the order given: `Group(transport, [1, 3])` on ranks 1 and 3.

    A group within a group uses the transport beneath both. With `axis`, the name of a mesh's axis, recorded messages
    name their group; without, as inside an algorithm, they do not.
    """

    _members: list[int]
    _transport: Transport

    def __init__(self, transport: Transport, members: Sequence[int], axis: str = "") -> None:
        if transport.rank not in members:
            raise ValueError(f"rank {transport.rank} is not in the group {list(members)}: only members may take part")
        self.axis = axis
        self.shares_memory = self.shares_memory and transport.shares_memory
        if isinstance(transport, Group):
            members, transport = [transport._members[member] for member in members], transport._transport
        self._members = list(members)
        self._transport = transport.within([transport.members[each] for each in members], axis) if axis else transport
        self.rank, self.size = self._members.index(transport.rank), len(self._members)
        self.processes = transport.processes

    @property
    def members(self) -> Sequence[int]:
        """The world's ranks of the members, in the order of this group."""
        world = self._transport.members
        return [world[member] for member in self._members]

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Send and receive on the transport beneath, with the members' ranks there."""
        self._transport.move(self._address(outgoing), self._address(incoming))

    def _address(self, message: TensorAndRank | None) -> TensorAndRank | None:
        return None if message is None else (message[0], self._members[message[1]])

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Start to send on the transport beneath, with the member's rank there."""
        return self._transport.start((outgoing[0], self._members[outgoing[1]]))

    def label(self, phase: str, step: int) -> None:
        """Pass the phase of the next messages to the transport beneath."""
        self._transport.label(phase, step)

    def note(self, source: int, destination: int, nbytes: int, start: float) -> None:
        """Pass the report to the transport beneath, with the members' ranks there."""
        self._transport.note(self._members[source], self._members[destination], nbytes, start)

    def note_collective(self, name: str, algorithm: str, nbytes: int, start: float, **details: Any) -> None:
        """Pass the report to the transport beneath, which knows the group."""
        self._transport.note_collective(name, algorithm, nbytes, start, **details)

    def unrecorded(self) -> Transport:
        """Return the same group on a transport that records nothing."""
        return Group(self._transport.unrecorded(), self._members)

    def __repr__(self) -> str:
        axis = f" along {self.axis}" if self.axis else ""
        return f"<Group of {name_ranks(self.members)}{axis}>"


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor for an error message: `5 float32`."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def mismatch(source: int, sent: str, destination: int, expected: str) -> ValueError:
    """Return the error for a message whose receiver expected another size or type."""
    return ValueError(f"rank {source} sent {sent} to rank {destination}, which expected {expected}: they must agree")
