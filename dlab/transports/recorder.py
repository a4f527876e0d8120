"""A recorder: wraps any transport and emits an event for every message that this rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlab.kinds import COLLECTIVE, MESSAGE, CollectiveData, MessageData, MessageDetails, Within
from dlab.transports.base import SendRequest, TensorAndRank, Transport

READ = 1 << 12  # numbers in a message up to which the smallest and the largest are found, which takes long for more

Emit = Callable[[str, Mapping[str, Any]], object]


class Labels:
    """The part of a collective that the next messages belong to."""

    def __init__(self) -> None:
        self.phase, self.step, self.round = "", 0, 0
        self._seen = set[tuple[str, int]]()  # in this round

    def put(self, phase: str, step: int) -> None:
        """Begin a step; a label that repeats begins a new round."""
        self.phase, self.step = phase, step
        if (phase, step) in self._seen:
            self.round += 1
            self._seen.clear()
        self._seen.add((phase, step))


class Recorder(Transport):
    """Emits an event of kind `message` per message sent, with the fields that `dlab.kinds.MessageData` describes.

    Each message is recorded once, by its sender. `emit(kind, data)` gets the events. Messages within groups of the same
    transport name their group (`within`); all groups share one count of rounds.
    """

    def __init__(
        self, transport: Transport, emit: Emit, group: Within | None = None, labels: Labels | None = None
    ) -> None:
        self.rank, self.size, self.peers = transport.rank, transport.size, transport.peers
        self.processes, self.shares_memory = transport.processes, transport.shares_memory
        self._transport, self._emit = transport, emit
        self._group: Within = group or {}
        self._labels = labels or Labels()

    @property
    def members(self) -> Sequence[int]:
        """The members of the transport that it records."""
        return self._transport.members

    def within(self, members: Sequence[int], axis: str) -> Recorder:
        """Return a recorder for a group of these ranks, whose messages name the group."""
        return Recorder(self._transport, self._emit, {"group": list(members), "axis": axis}, self._labels)

    def unrecorded(self) -> Transport:
        """Return the transport beneath, whose messages are not recorded."""
        return self._transport.unrecorded()

    def label(self, phase: str, step: int) -> None:
        """Label the next messages with this step of this phase; a label that repeats begins a new round.

        All ranks label all steps, even those in which they send nothing, so they agree on the number of the round.
        """
        self._labels.put(phase, step)

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Send and receive, and record the outgoing message; the incoming one is recorded by its sender."""
        content = None if outgoing is None else describe_content(outgoing[0])  # as it is sent; it may change afterwards
        start = time.time()
        self._transport.move(outgoing, incoming)
        if outgoing is not None:
            tensor, destination = outgoing
            self.note(self.rank, destination, tensor.numel() * tensor.element_size(), start, content)

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Start to send, and record the message now: only its receiver knows when it arrives."""
        tensor, destination = outgoing
        content, start = describe_content(tensor), time.time()
        request = self._transport.start(outgoing)
        self.note(self.rank, destination, tensor.numel() * tensor.element_size(), start, content)
        return request

    def barrier(self) -> None:
        """Wait for all ranks; the messages of a barrier are empty and are not recorded."""
        self._transport.barrier()

    def note(
        self, source: int, destination: int, nbytes: int, start: float, content: MessageDetails | None = None
    ) -> None:
        """Record a message that has just been sent, on this transport or by other means."""
        message: MessageData = {
            "source": source,
            "destination": destination,
            "bytes": nbytes,
            "start": start,
            "end": time.time(),
            "phase": self._labels.phase,
            "step": self._labels.step,
            "round": self._labels.round,
            **self._group,
            **(content or {}),
        }
        self._emit(MESSAGE, message)

    def note_collective(self, name: str, algorithm: str, nbytes: int, start: float, **details: Any) -> None:
        """Record a collective that has just ended and sent no messages, for instance through shared memory."""
        end = time.time()
        told: CollectiveData = {
            "name": name,
            "algorithm": algorithm,
            "count": 1,
            "bytes": nbytes,
            "seconds": end - start,
            "start": start,
            "end": end,
            **self._group,
            **details,  # type: ignore[typeddict-item]
        }
        self._emit(COLLECTIVE, told)


def describe_content(tensor: torch.Tensor) -> MessageDetails:
    """Describe which part of its storage a tensor is, and the range of its numbers, unless it is long or on a GPU."""
    count, of = tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()
    content: MessageDetails = {"count": count}
    if count < of:
        content |= {"begin": int(tensor.storage_offset()), "of": of}
    if 0 < count <= READ and tensor.device.type == "cpu" and not tensor.is_complex() and tensor.dtype != torch.bool:
        low, high = tensor.detach().aminmax()
        content |= {"low": low.item(), "high": high.item()}
    return content
