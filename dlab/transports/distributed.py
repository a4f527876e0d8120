"""torch.distributed's point to point as a transport: gloo between hosts, NCCL between GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dlab.transports.base import Transport
from dlab.transports.checked import compare, header


class TorchTransport(Transport):
    """Messages by `dist.send`, `dist.recv` and `dist.batch_isend_irecv` of a process group (default: all ranks).

    gloo ends the whole process when a message is larger than its receiver expects, and fills half the tensor when it
    is smaller. So a small message goes first that says what comes: twice the latency, the same bytes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send, with an announcement."""
        self.check(tensor, destination)
        for part in (self._announcement(tensor), tensor):
            if part.numel():
                dist.send(part, group=self._group, group_dst=destination)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive, if what comes fits."""
        self.check(tensor, source)
        announced = self._announcement(tensor)
        dist.recv(announced, group=self._group, group_src=source)
        compare(tuple(announced.tolist()), tensor, source, self.rank)
        if tensor.numel():
            dist.recv(tensor, group=self._group, group_src=source)

    def exchange(self, outgoing: torch.Tensor, destination: int, incoming: torch.Tensor, source: int) -> None:
        """Both at once: first the announcements, then the tensors."""
        self.check(outgoing, destination)
        self.check(incoming, source)
        announced = self._announcement(incoming)
        self._both(self._announcement(outgoing), destination, announced, source)
        compare(tuple(announced.tolist()), incoming, source, self.rank)
        self._both(outgoing, destination, incoming, source)

    def _announcement(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(header(tensor), dtype=torch.int64, device=self._device)

    def _both(self, outgoing: torch.Tensor, destination: int, incoming: torch.Tensor, source: int) -> None:
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=destination))
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, group=self._group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
