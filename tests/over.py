"""One test, every transport: a function on threads of this process, or in the workers of a cluster; for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import dlab
from dlab.processes.worker.context import emit
from dlab.rehearsal import Rehearsal
from dlab.transports import SharedTransport, TorchTransport, connect
from dlab.transports.base import Transport
from dlab.transports.recorder import Recorder

Work = Callable[[Transport, torch.Tensor], Any]


class Over:
    """Calls `work(transport, mine)` on as many ranks as there are inputs, over one kind of transport.

    Gives what a rehearsal gives: the results by rank, on the CPU, and the `messages`. `numbers` tells with how many
    ranks a test should try.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.numbers = {"threads": range(1, 10), "nccl": range(1, torch.cuda.device_count() + 1)}.get(kind, range(1, 5))
        self._clusters: dict[int, dlab.Cluster] = {}  # by their number of workers

    def __call__(self, work: Work, inputs: Sequence[torch.Tensor]) -> Rehearsal:
        if self.kind == "threads":
            return dlab.rehearse(lambda transport: work(transport, inputs[transport.rank].clone()), ranks=len(inputs))
        if self.kind == "nccl" and len(inputs) > len(self.numbers):
            import pytest  # not in a worker

            pytest.skip(f"needs {len(inputs)} CUDA devices")
        if len(inputs) not in self._clusters:
            backend = "nccl" if self.kind == "nccl" else "gloo"
            self._clusters[len(inputs)] = dlab.Cluster(len(inputs), backend=backend)
        run = self._clusters[len(inputs)].start(in_a_worker, self.kind, work, inputs)
        return Rehearsal(run.wait(60), [event for event in run.events if event.kind == "message"])

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.close()


def in_a_worker(kind: str, work: Work, inputs: Sequence[torch.Tensor]) -> Any:
    transport = connect() if kind == "shared memory" else TorchTransport()
    assert isinstance(transport, SharedTransport) == (kind == "shared memory")
    with torch.device(dlab.device()):  # of whatever it makes
        return on_the_cpu(work(Recorder(transport, emit), inputs[transport.rank].to(dlab.device(), copy=True)))


def on_the_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return type(value)(map(on_the_cpu, value)) if isinstance(value, (list, tuple)) else value
