"""SGD with parameter servers: the weights live on servers, to which workers push gradients and from which they pull.

Servers wait for the gradients of all workers (sync), of none (async), or hold back a worker that is too far ahead (ssp,
stale synchronous parallel). Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dlab.kvstore.compression import parse_compression
from dlab.kvstore.distributed import DistStore
from dlab.kvstore.failover import end_together, has_lost_a_server, numbers_of, reconnect, watch_servers
from dlab.kvstore.locked import LockedStore
from dlab.kvstore.optimizers import recipe
from dlab.kvstore.protocol import AT_ONCE, ROUND
from dlab.models import FlatBuffer
from dlab.processes.worker.context import knob
from dlab.processes.worker.tracing import trace
from dlab.strategies.base import Stopwatch, Strategy, Told, broadcast_all
from dlab.transports import Transport
from dlab.transports.rendezvous import Survivors

MODES = ("sync", "async", "ssp")
_END = 1 << 40  # the clock of a worker at its n-th rendezvous with all others is n more


class ParameterServer(Strategy):
    """Servers keep the weights and run the optimizer; with n workers, each gradient is divided by n.

    `mode="sync"`: an update waits for the gradients of all workers. `"async"`: each gradient is applied as soon as it
    arrives. `"ssp"`: the same, but no worker begins a step more than `staleness` steps ahead of the slowest; 0 is sync,
    None is async; the knob `staleness` changes it during training. This bound counts steps of workers; the staleness
    that is reported with each step counts updates. In async and ssp mode the others continue without a worker that
    dies. A server that dies ends the run; if the run saves checkpoints, the server is replaced, and all continue from
    the last checkpoint.

    `compression` applies to what workers push, not to what they pull: "2bit", …, see `dlab.kvstore.TwoBit`.

    `servers=0` is for async on one host: the weights are in shared memory, and each worker updates them itself, one at
    a time, under a lock.

    The weights are one key, divided among all servers. A step costs a worker one copy of the gradient; with one server
    on the same host, the model reads the weights in the server's memory. For a worker that has not used a parameter its
    gradient counts as zeros; a parameter that no gradient of an update has used is not updated, as in DDP.
    """

    def __init__(
        self,
        mode: str = "sync",
        staleness: int | None = 4,
        servers: int = 1,
        compression: Mapping[str, Any] | str | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"there is no mode {mode!r}: use {', '.join(map(repr, MODES))}")
        if not isinstance(servers, int) or servers < 0:
            raise ValueError(f"servers={servers!r}: give a whole number, 0 or more")
        if not servers and mode != "async":
            raise ValueError(f"servers=0 only works with mode='async': use that, or at least one server for {mode!r}")
        if not servers and compression is not None:
            raise ValueError("servers=0 sends nothing that could be compressed: leave compression out, or use a server")
        parse_compression(compression)  # to report a mistake at once
        self.mode, self.staleness, self.servers, self.compression = mode, _steps(staleness), servers, compression
        self.survives = mode != "sync"  # only in sync mode would workers wait for one that has died

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """The check of the knob `staleness`, which can be changed during training."""
        return {"staleness": _steps}

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, transport: Transport) -> nn.Module:
        """Send rank 0's weights to the servers as one key, and the optimizer's name and hyperparameters."""
        self.model, self.optimizer, self.transport = model, optimizer, transport
        if self.servers:
            watch_servers(transport)
        self._survivors = Survivors(transport)
        broadcast_all(model.buffers(), transport)
        if len(optimizer.param_groups) > 1:
            raise ValueError("a parameter server treats all weights alike: use one parameter group")
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._own = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        self._numbers = numbers_of(transport, self._own.device) if self.servers else list(range(transport.size))
        self._buffer = FlatBuffer(self._parameters)
        self._kv = self._open_store(optimizer)
        self._pull()
        self._rate, self._clock, self._rendezvous_count = optimizer.param_groups[0]["lr"], 0, 0
        return model

    def _open_store(self, optimizer: torch.optim.Optimizer) -> DistStore | LockedStore:
        if not self.servers:
            return LockedStore(self._own.cpu(), recipe(optimizer, rescale=1 / self.transport.size), self.transport)
        kv = DistStore("dist_sync" if self.mode == "sync" else "dist_async", transport=self.transport)
        kv.big = 1  # divided among all servers, however small
        kv.init("weights", self._own)
        kv.set_optimizer(optimizer, rescale=1 / self.transport.size)
        if self.compression is not None:
            kv.set_gradient_compression(self.compression)
        return kv

    def _pull(self) -> None:
        """Make every parameter a view of the newest weights."""
        self._weights = self._kv.borrow("weights", self._own)
        self._buffer.view_in(self._weights)

    def clear(self) -> None:
        """Drop the gradients, so that new ones need not be added to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> Told:
        """Push the gradient, wait until this worker may continue, and pull the weights."""
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self._rate:
            self._rate = rate
            self._kv.turn(lr=rate)
        pieces = [
            parameter.grad.view(-1) if parameter.grad is not None else torch.zeros_like(parameter).view(-1)
            for parameter in self._parameters
        ]
        bound = self._bound()
        self._clock += 1
        watch = Stopwatch()
        with watch:
            self._kv.push_pieces("weights", pieces, ROUND if bound == 0 else AT_ONCE, self._left_out())
            trace("sent", *self._parameters)
            if self.mode == "ssp" and isinstance(self._kv, DistStore):
                self._kv.clock(self._clock, bound)
            self._pull()
        trace("reduced", *self._parameters)
        trace("applied", *self._parameters)
        staleness = {"staleness": self._kv.staleness("weights")} if self.mode != "sync" else {}
        return {"wait": watch.seconds, **staleness}

    def _left_out(self) -> list[tuple[int, int]]:
        """Return the intervals of the weights that this batch has not used, with adjacent ones merged."""
        found: list[tuple[int, int]] = []
        end = 0
        for parameter in self._parameters:
            begin, end = end, end + parameter.numel()
            if parameter.grad is None:
                if found and found[-1][1] == begin:
                    begin, _ = found.pop()
                found.append((begin, end))
        return found

    def _bound(self) -> int | None:
        """Return how many steps this worker may be ahead of the slowest; None if there is no bound."""
        if self.mode == "ssp":
            return _steps(knob("staleness", self.staleness))
        return 0 if self.mode == "sync" else None

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a rank has died since the ranks last settled, and the others continue without it."""
        return self.survives and self._survivors.has_lost_one

    @property
    def has_lost_a_server(self) -> bool:
        """Whether one of its servers has died, as seen on its channels."""
        return self.servers > 0 and has_lost_a_server()

    def reconnect(self) -> Transport:
        """Wait until all servers are running and all workers that are alive know it."""
        return reconnect()

    def settle(self) -> None:
        """Wait until all pushed gradients are in the weights of all workers that are alive.

        Afterwards, the death of a worker or a server raises ConnectionError on the transport.
        """
        self._rendezvous_count += 1
        alive = self._kv.meet(_END + self._rendezvous_count)
        self._pull()
        self.transport = self._survivors.among([self._numbers.index(number) for number in alive])
        self._slots = self._kv.slots("weights") if self.transport.rank == 0 else []

    def state(self) -> dict[str, Any]:
        """Return the servers' optimizer state (rank 0) and each rank's own residual of the compression."""
        residuals = []
        if self.compression is not None and isinstance(self._kv, DistStore):
            residuals = [self._kv.residual("weights", part) for part in range(self._kv.num_servers)]
        return {"slots": self._slots, "residuals": residuals}

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Send the restored weights to the servers; residuals are restored only if the number of ranks is the same."""
        if self.transport.rank == 0:
            self._kv.restore("weights", self._weights.clone(), states[0]["slots"])
        if len(states) == self.transport.size and isinstance(self._kv, DistStore):
            for part, residual in enumerate(states[self.transport.rank]["residuals"]):
                self._kv.set_residual("weights", residual, part)
        self._kv.barrier()
        self._pull()

    def end(self) -> None:
        """Settle, release the servers, and make the model an ordinary one again, with the same weights on all ranks."""
        if self.servers:
            end_together(self._survivors.first, self.settle)
        else:
            self.settle()
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None
        super().end()


def _steps(staleness: object) -> int | None:
    """Check a staleness bound, as given at the start or changed during training."""
    if staleness is not None and not str(staleness).isdecimal():
        raise ValueError(f"staleness={staleness!r}: give a whole number of steps, 0 or more, or None for any")
    return None if staleness is None else int(str(staleness))
