"""A recorder: wraps any transport and tells of every message that this rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dlab.transports.base import Parcel, Transport


class Recorder(Transport):
    """Emits an event of kind `message` per message sent: source, destination, bytes, start, end, phase, step
    and round, the number of the collective.

    Each message is told once, by its sender. `emit(kind, data)` is where the events go.
    """

    def __init__(self, transport: Transport, emit: Callable[[str, dict[str, Any]], object]) -> None:
        self.rank, self.size, self.peers = transport.rank, transport.size, transport.peers
        self._transport, self._emit = transport, emit
        self._phase, self._step = "", 0
        self._round, self._labels = 0, set[tuple[str, int]]()

    def label(self, phase: str, step: int) -> None:
        """The next messages belong to this step of this phase; when a label comes again, a new round has begun.

        All ranks label all steps, also those in which they send nothing, so they agree on the number of the round.
        """
        self._phase, self._step = phase, step
        if (phase, step) in self._labels:
            self._round += 1
            self._labels.clear()
        self._labels.add((phase, step))

    def move(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Move both, and tell of what went out; of what came in its sender tells."""
        start = time.time()
        self._transport.move(outgoing, incoming)
        if outgoing is not None:
            tensor, destination = outgoing
            self.note(self.rank, destination, tensor.numel() * tensor.element_size(), start)

    def barrier(self) -> None:
        """Not recorded: its messages carry nothing."""
        self._transport.barrier()

    def note(self, source: int, destination: int, nbytes: int, start: float) -> None:
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
        }
        self._emit("message", message)
