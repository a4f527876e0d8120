"""A recorder: wraps any transport and tells of every message that this rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlab.transports.base import TensorAndRank, Transport

READ = 1 << 12  # numbers; of more, the smallest and the largest are not told: to look for them would take too long


class Recorder(Transport):
    """Emits an event of kind `message` per message sent: source, destination, bytes, start, end, phase, step
    and round, the number of the collective; and of what is in it, as far as that is known: how many numbers (`count`),
    which part of a longer tensor they are (from `begin` on, `of` so many), the smallest (`low`) and the largest
    (`high`).

    Each message is told once, by its sender. `emit(kind, data)` is where the events go.
    """

    def __init__(self, transport: Transport, emit: Callable[[str, dict[str, Any]], object]) -> None:
        self.rank, self.size, self.peers = transport.rank, transport.size, transport.peers
        self.processes = transport.processes
        self._transport, self._emit = transport, emit
        self._phase, self._step = "", 0
        self._round, self._labels = 0, set[tuple[str, int]]()

    @property
    def members(self) -> Sequence[int]:
        """Those of the transport that it records."""
        return self._transport.members

    def label(self, phase: str, step: int) -> None:
        """The next messages belong to this step of this phase; when a label comes again, a new round has begun.

        All ranks label all steps, also those in which they send nothing, so they agree on the number of the round.
        """
        self._phase, self._step = phase, step
        if (phase, step) in self._labels:
            self._round += 1
            self._labels.clear()
        self._labels.add((phase, step))

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Move both, and tell of what went out; of what came in its sender tells."""
        content = {} if outgoing is None else describe_content(outgoing[0])  # as it is sent; it may change afterwards
        start = time.time()
        self._transport.move(outgoing, incoming)
        if outgoing is not None:
            tensor, destination = outgoing
            self.note(self.rank, destination, tensor.numel() * tensor.element_size(), start, content)

    def barrier(self) -> None:
        """Not recorded: its messages carry nothing."""
        self._transport.barrier()

    def note(
        self, source: int, destination: int, nbytes: int, start: float, content: dict[str, Any] | None = None
    ) -> None:
        """Tell of a message that has just arrived; for those that go by other ways than this transport."""
        message = {
            "source": source,
            "destination": destination,
            "bytes": nbytes,
            "start": start,
            "end": time.time(),
            "phase": self._phase,
            "step": self._step,
            "round": self._round,
            **(content or {}),
        }
        self._emit("message", message)


def describe_content(tensor: torch.Tensor) -> dict[str, Any]:
    """Which part of its storage a tensor is, and the range of its numbers, unless it is long or on a GPU."""
    count, of = tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()
    content: dict[str, Any] = {"count": count}
    if count < of:
        content |= {"begin": tensor.storage_offset(), "of": of}
    if 0 < count <= READ and tensor.device.type == "cpu" and not tensor.is_complex() and tensor.dtype != torch.bool:
        low, high = tensor.detach().aminmax()
        content |= {"low": low.item(), "high": high.item()}
    return content
