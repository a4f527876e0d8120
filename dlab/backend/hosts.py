"""Messages between hosts, which share no memory, are carried by gloo's sends and receives."""

from __future__ import annotations

from typing import Any

import torch

from dlab.backend.point_to_point import ANY_SOURCE
from dlab.transports import TorchTransport
from dlab.transports.base import TensorAndRank


class GlooTransport(TorchTransport):
    """A transport on a ProcessGroupGloo that is not registered with torch.distributed."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.rank, self.size = gloo.rank(), gloo.size()
        self._members = range(self.size)
        self._device = torch.device("cpu")

    def _begin(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> list[Any]:
        works = [] if outgoing is None else [self._gloo.send([outgoing[0]], outgoing[1], _COLLECTIVE)]
        return works if incoming is None else [*works, self._gloo.recv([incoming[0]], incoming[1], _COLLECTIVE)]


_COLLECTIVE = 1 << 30  # a tag that no user chooses


class GlooPointToPoint:
    """Point-to-point messages between hosts; `PointToPoint` does the same on one host."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Any:
        """Send with gloo; the work ends when the tensor may be changed."""
        return self._gloo.send([tensor], destination, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Receive with gloo, from one rank or from any."""
        if source == ANY_SOURCE:
            return self._gloo.recv_anysource([tensor], tag)
        return self._gloo.recv([tensor], source, tag)

    def close(self) -> None:
        """Do nothing, since gloo closes its connections itself."""
