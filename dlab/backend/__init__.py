"""The collectives of this package as a torch.distributed backend named `dlab`, for tensors on the CPU.

`import dlab.backend` registers it. Then `dist.init_process_group("dlab", …)` makes a process group on which PyTorch's
own DDP, FSDP and DTensor run unmodified: over shared memory between processes of one host, over gloo's point-to-point
messages between hosts. `using(my_ring)` replaces all-reduce by a function of your own. Taught in `02_allreduce.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dlab.backend.group import DlabGroup
from dlab.transports import Emit

NAME = "dlab"
_chosen: tuple[Callable[..., Any] | None, Emit | None] = (None, None)


@dataclass(frozen=True)
class using:
    """The backend with your own all-reduce: `dlab.Cluster(4, backend=dlab.backend.using(my_ring))`.

    The function works in place: `my_ring(tensor, transport)`. If it also takes `op`, it gets every reduction; otherwise
    only sums and means, and the others stay the package's own. Each message that it sends is recorded as an event.
    """

    allreduce: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.allreduce is not None and not callable(self.allreduce):
            raise TypeError(f"using() takes a function fn(tensor, transport), not {self.allreduce!r}")

    def install(self, emit: Emit) -> None:
        """Let groups made in this worker from now on use the function, and record its messages."""
        global _chosen
        _chosen = (self.allreduce, emit)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DlabGroup:
    return DlabGroup(store, rank, size, timeout.total_seconds(), *_chosen)


if NAME not in dist.Backend.backend_list:  # the module may be loaded again
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
