"""All-reduce for those who only want it done: the fastest for where the ranks are, and gradients averaged with it.

Taught in `02_allreduce.ipynb`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlab import collectives
from dlab.backend.group import OPS, DlabGroup
from dlab.collectives.fused import Fused
from dlab.collectives.ops import finish, prepare
from dlab.processes.inside import device, transport, world_size
from dlab.processes.watching import tell
from dlab.transports import TorchTransport, Transport

ALGORITHMS = ("auto", "naive", "tree", "ring", "halving_doubling", "hierarchical")
_REDUCE_OPS = {name: op for op, name in OPS.items()} | {"mean": dist.ReduceOp.SUM}  # divided here: gloo has no mean
_memory: weakref.WeakKeyDictionary[dist.ProcessGroup, Fused | None] = weakref.WeakKeyDictionary()  # None: it has none


def average_gradients(
    model: torch.nn.Module, allreduce: Callable[..., Any] | None = None, wire: Transport | None = None
) -> None:
    """Replace each gradient by its mean over the ranks: a sum over all, divided by their number.

    Parameter by parameter, by `dist.all_reduce`, or by a collective of `dlab.collectives` or your own that works in
    place, `allreduce(tensor, transport)`: that one gets a copy, so that the gradient stays whole until all is there.
    Over `wire`, if given, else over `dlab.transport()`.

    >>> loss.backward()
    >>> average_gradients(model, allreduce=ring_allreduce)
    >>> optimizer.step()
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient: call loss.backward() first, and use every layer on every rank")
        tell("sent", parameter)
        if allreduce is None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        else:
            received = parameter.grad.clone(memory_format=torch.contiguous_format)
            allreduce(received, wire or transport())
            parameter.grad.copy_(received)
        parameter.grad /= wire.size if wire else world_size()
        tell("reduced", parameter)


def allreduce(tensor: torch.Tensor, algorithm: str = "auto", op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place; every rank must call it with the same size, type and op.

    `auto`: on one host through shared memory, without any copy if the tensor comes from `shared_empty`; between hosts
    and on GPUs the backend's own. The other algorithms are those of `dlab.collectives`, over `dlab.transport()`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}: use {', '.join(ALGORITHMS)}")
    if algorithm != "auto":
        getattr(collectives, f"{algorithm}_allreduce")(tensor, transport(), op=op)
    elif tensor.is_cpu and (fused := _shared_memory()) is not None:
        fused.allreduce(tensor, op)
    else:
        row, _ = prepare(tensor, op)
        dist.all_reduce(row, op=_REDUCE_OPS[op])
        finish(row, op, dist.get_world_size())


def shared_empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that `allreduce` combines where it lies. Every rank must call it, with the same shape and type.

    Where ranks share no memory (between hosts, on GPUs) it is an ordinary tensor, on the GPU if NCCL joins them.
    """
    fused = _shared_memory()
    if isinstance(dist.group.WORLD, DlabGroup):
        return dist.group.WORLD.shared_empty(shape, dtype)
    if fused is None:
        return torch.empty(*shape, dtype=dtype, device=device() if dist.get_backend() == "nccl" else None)
    return fused.empty(shape, dtype)


def _shared_memory() -> Fused | None:
    """Made once for a process group, by all its ranks together. The backend `dlab` has its own."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no process group here: run this in a cluster, as in cluster.run(fn)")
    if world not in _memory:
        _memory[world] = Fused.connect(TorchTransport()) if dist.get_backend() == "gloo" else None
    return _memory[world]
