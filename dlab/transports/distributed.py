"""torch.distributed's point-to-point messages as a transport: gloo between hosts, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported while there is no process group: its functions would keep that one for ever

from dlab.memory.waits import waiting
from dlab.transports.base import SendRequest, TensorAndRank, Transport
from dlab.transports.checked import compare, header

Sending = tuple[torch.Tensor, dist.Work]  # a part of a message, kept alive until it is sent


class TorchTransport(Transport):
    """Sends messages with `dist.batch_isend_irecv` of a process group (default: all ranks).

    gloo ends the whole process when a message is larger than its receiver expects, and fills only part of the tensor
    when it is smaller. So a small header is sent before each message: twice the latency, almost the same bytes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._members = range(self.size) if group is None else dist.get_process_group_ranks(group)
        self._device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")

    @property
    def members(self) -> Sequence[int]:
        """The world's ranks of the process group."""
        return self._members

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        """Exchange the headers, compare them, and then exchange the tensors."""
        announcement = None if outgoing is None else (self._announcement(outgoing[0]), outgoing[1])
        announced = None if incoming is None else (self._announcement(incoming[0]), incoming[1])
        self._both(announcement, announced)
        if incoming is not None and announced is not None:
            tensor, source = incoming
            compare(tuple(announced[0].tolist()), tensor, source, self.rank)
        self._both(outgoing, incoming)

    def start(self, outgoing: TensorAndRank) -> SendRequest:
        """Start to send the header and the tensor; gloo's own threads send them."""
        tensor, destination = outgoing
        sending = list[Sending]()
        with self._naming(outgoing, None), self._waiting(outgoing, None):  # while two ranks connect for the first time
            for part in (self._announcement(tensor), tensor):
                if part.numel() and (work := dist.isend(part, group=self._group, group_dst=destination)):
                    sending.append((part, work))
        return TorchSend(self, outgoing, sending)

    def finish(self, outgoing: TensorAndRank, sending: list[Sending]) -> None:
        """Wait until a message is sent."""
        with self._naming(outgoing, None), self._waiting(outgoing, None):
            for _, work in sending:
                work.wait()

    def _announcement(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(header(tensor), dtype=torch.int64, device=self._device)

    def _both(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        if outgoing is not None and not outgoing[0].numel():
            outgoing = None
        if incoming is not None and not incoming[0].numel():
            incoming = None
        if outgoing is None and incoming is None:
            return
        with self._naming(outgoing, incoming), self._waiting(outgoing, incoming):  # also while two ranks connect
            for work in self._begin(outgoing, incoming):
                work.wait()

    @contextmanager
    def _naming(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> Iterator[None]:
        """Name the ranks in an error, because the backend names none, or only its address."""
        try:
            yield
        except RuntimeError as problem:
            doing = [f"send to rank {outgoing[1]}"] if outgoing else []
            doing += [f"receive from rank {incoming[1]}"] if incoming else []
            raise ConnectionError(f"rank {self.rank} could not {' and '.join(doing)}: {problem}") from None

    def _waiting(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> AbstractContextManager[None]:
        """Announce the wait to receive, if there is one, else the wait to send, in the world's ranks."""
        message, what = (incoming, "to receive from {}") if incoming else (outgoing, "to send to {}")
        assert message is not None
        return waiting(what, [self._members[message[1]]])

    def _begin(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> list[dist.Work]:
        """Start both at once, as NCCL requires."""
        operations = [
            dist.P2POp(operation, message[0], group=self._group, group_peer=message[1])
            for operation, message in ((dist.isend, outgoing), (dist.irecv, incoming))
            if message is not None
        ]
        return dist.batch_isend_irecv(operations)


class TorchSend(SendRequest):
    """A message on its way; gloo does not tell whether it is done."""

    def __init__(self, transport: TorchTransport, outgoing: TensorAndRank, sending: list[Sending]) -> None:
        self._transport, self._outgoing, self._sending = transport, outgoing, sending

    @property
    def done(self) -> bool:
        """Whether somebody has waited until it was sent."""
        return not self._sending

    def wait(self) -> None:
        """Wait until it is sent."""
        self._transport.finish(self._outgoing, self._sending)
        self._sending = []


def for_cpu(transport: Transport) -> Transport:
    """Return a transport between the same ranks for CPU tensors, which NCCL does not send; every rank must call it."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return TorchTransport(dist.new_group(backend="gloo"))
    return transport
