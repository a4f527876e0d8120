"""What a function can ask and tell while it runs in a worker: who am I, what is the learning rate now, here is my loss.

All of it also works outside a worker (rank 0 of 1, knobs at their defaults, `log` prints), so that a function can be
tried in one process before it is given to four.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from dlab.kinds import COLLECTIVE, KNOB, LOG, KnobData
from dlab.memory.waits import tell_in
from dlab.processes.between.control import ControlBlock, Desk
from dlab.processes.worker.tally import CollectiveCounter, Tally
from dlab.transports import Recorder, TorchTransport, connect

T = TypeVar("T")


class Servers(NamedTuple):
    """What joins the workers and the servers of a cluster, as one of them sees it; servers count on after workers."""

    desk: Desk
    rank: int
    workers: int
    servers: int


_control: ControlBlock | None = None
_servers: Servers | None = None
_ring_rank = 0
_device: torch.device | None = None
_transport: Recorder | None = None
_tally: Tally | None = None
_declared: set[str] = set()
_slept = 0.0  # seconds of delay since the last `log`
_kept: dict[Callable[[], Any], Any] = {}
_NAP = 0.05  # a delay that is shortened while we sleep takes effect this soon


def enter(control: ControlBlock, rank: int, device: torch.device, servers: Servers) -> None:
    """Called once by the worker."""
    global _control, _ring_rank, _device, _servers, _tally
    _control, _ring_rank, _device, _servers = control, rank, device, servers
    _tally = Tally(control.rings[rank].push)
    tell_in(control.waits[rank])


def begin() -> None:
    """Called by the worker before each run: knobs are declared and transports laid anew."""
    global _transport, _slept
    _declared.clear()
    _kept.clear()
    _transport, _slept = None, 0.0


def end() -> None:
    """Called by the worker after each run: tell what has been kept back."""
    if _tally is not None:
        _tally.flush()


def once(make: Callable[[], T]) -> T:
    """What a function makes, made once in each run."""
    if make not in _kept:
        _kept[make] = make()
    return _kept[make]


def is_worker() -> bool:
    """Are we inside a worker of a cluster?"""
    return _control is not None


def servers() -> Servers | None:
    """The way to the servers of this cluster; None outside a worker, or if there are none."""
    return _servers if _servers is not None and _servers.servers else None


def rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Where this rank's tensors belong: its GPU if it has one, else the CPU."""
    if _device is not None:
        return _device
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def transport() -> Recorder:
    """This rank's transport to all others, for the collectives of `dlab.collectives`. Every rank must call it.

    Shared memory if all ranks are on one host and on the CPU, else torch.distributed's own point to point. Each
    message is recorded as an event of kind `message`.
    """
    global _transport
    if not dist.is_initialized():
        raise RuntimeError("there is no process group here: run this in a cluster, or try it with dlab.rehearse(fn)")
    if _transport is None:
        direct = TorchTransport()
        _transport = Recorder(direct if dist.get_backend() == "nccl" else connect(direct), emit)
    return _transport


def log(**data: Any) -> None:
    """Tell the notebook something: `dlab.log(step=3, loss=0.7)`. Never waits; costs 10 to 50 us.

    Numbers, strings and small tensors; reading a GPU tensor's value waits for the GPU, as `.item()` does.
    A delay set by `run.delay(rank, seconds)` is slept here, so a step is as slow as the learner has asked for. The next
    event says how long that was, as `delay`.
    """
    global _slept
    emit(LOG, data | {"delay": _slept} if _slept else data)
    _slept = 0.0
    if _control is not None and _control.delays[_ring_rank] > 0.0:
        start = time.monotonic()
        while (left := start + _control.delays[_ring_rank] - time.monotonic()) > 0:
            time.sleep(min(left, _NAP))
        _slept = time.monotonic() - start


def emit(kind: str, data: Mapping[str, Any]) -> None:
    """Write an event of any kind; collectives are added up first."""
    if _control is None or _tally is None:
        if kind == LOG:
            print("  ".join(f"{key}={value}" for key, value in data.items()))
    elif kind == COLLECTIVE:
        _tally.add(data)
    else:
        _control.rings[_ring_rank].push(kind, cast("dict[str, Any]", data))


def counter(sort: Mapping[str, Any]) -> CollectiveCounter:
    """Counts collectives of a sort, for whoever does so many of them that an event for each would slow them down."""
    assert _tally is not None, "only a worker has somebody to tell"
    return CollectiveCounter(_tally, sort)


def knob(name: str, default: Any = None) -> Any:
    """A value that can be turned while the run goes on: `lr = dlab.knob("lr", 0.01)`, then `run.set("lr", 0.05)`.

    Costs one read of shared memory. The first call of a run tells the notebook that this knob exists.
    """
    if _control is None:
        return default
    if name not in _declared:
        _declared.add(name)
        told: KnobData = {"name": name, "default": default}
        emit(KNOB, told)
    return _control.read().get(name, default)
