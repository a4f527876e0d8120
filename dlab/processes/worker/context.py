"""The functions that user code calls in a worker: its rank, its device, the current value of a knob, and logging.

All of them also work outside a worker (rank 0 of 1, knobs at their defaults, `log` prints), so that a function can be
tried in one process before it runs in four.
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
from dlab.processes.between.control import ControlBlock
from dlab.processes.between.roles import SharedFile
from dlab.processes.worker.tally import CollectiveCounter, Tally
from dlab.transports import Recorder, TorchTransport, connect

T = TypeVar("T")


class Servers(NamedTuple):
    """The connection between workers and servers of a cluster, as one of them sees it; servers follow the workers."""

    desk: SharedFile
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
_NAP = 0.05  # a delay that is shortened during the sleep takes effect within this time


def enter(control: ControlBlock, rank: int, device: torch.device, servers: Servers | None) -> None:
    """Set up the context of this process; the worker calls it once."""
    global _control, _ring_rank, _device, _servers, _tally
    _control, _ring_rank, _device, _servers = control, rank, device, servers
    _tally = Tally(control.rings[rank].push)
    tell_in(control.waits[rank])


def begin() -> None:
    """Prepare for a run: forget declared knobs and make new transports."""
    global _transport, _slept
    _declared.clear()
    _kept.clear()
    _transport, _slept = None, 0.0


def end() -> None:
    """Emit what was counted but not yet emitted; the worker calls it after each run."""
    if _tally is not None:
        _tally.flush()


def once(make: Callable[[], T]) -> T:
    """Return what `make()` returns, calling it only once in each run."""
    if make not in _kept:
        _kept[make] = make()
    return _kept[make]


def is_worker() -> bool:
    """Return whether this process is a worker of a cluster."""
    return _control is not None


def servers() -> Servers | None:
    """Return the connection to the servers of this cluster; None outside a worker, or if there are none."""
    return _servers


def rank() -> int:
    """Return this process's rank; 0 if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 if there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Return the device for this rank's tensors: its GPU if it has one, else the CPU."""
    if _device is not None:
        return _device
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def transport() -> Recorder:
    """Return this rank's transport to all others, for the collectives of `dlab.collectives`. Every rank must call it.

    It uses shared memory if all ranks are on one host and on the CPU, and otherwise torch.distributed's point-to-point
    messages. Each message is recorded as an event of kind `message`.
    """
    global _transport
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # a rank of `dlab run` or torchrun
            raise RuntimeError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has no process group yet: call "
                'torch.distributed.init_process_group("gloo") first, on every rank'
            )
        raise RuntimeError(
            "there is no process group here: run this in a cluster, or use the transport that dlab.rehearse(fn) gives "
            "to fn, as in dlab.Mesh(shape, names, transport) or dlab.AutoParallel(net, transport=transport)"
        )
    if _transport is None:
        direct = TorchTransport()
        _transport = Recorder(direct if dist.get_backend() == "nccl" else connect(direct), emit)
    return _transport


def log(**data: Any) -> None:
    """Send values to the notebook: `dlab.log(step=3, loss=0.7)`. Never waits; costs 10 to 50 us.

    Values are numbers, strings and small tensors; reading a GPU tensor waits for the GPU, as `.item()` does. A delay
    set by `run.delay(rank, seconds)` is slept here, which makes each step slower. The next event has the time slept as
    `delay`.
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
    """Return a value that can be changed during the run: `lr = dlab.knob("lr", 0.01)`, then `run.set("lr", 0.05)`.

    Costs one read of shared memory. The first call in a run tells the notebook that this knob exists.
    """
    if _control is None:
        return default
    if name not in _declared:
        _declared.add(name)
        told: KnobData = {"name": name, "default": default}
        emit(KNOB, told)
    return _control.read().get(name, default)
