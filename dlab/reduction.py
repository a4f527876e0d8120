"""The fastest all-reduce for where the ranks are, and memory in which it has nothing to copy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dlab import collectives
from dlab.collectives.fused import Fused
from dlab.collectives.ops import prepare
from dlab.processes.inside import transport
from dlab.transports import TorchTransport

ALGORITHMS = ("auto", "naive", "tree", "ring", "halving_doubling", "hierarchical")
_REDUCE_OPS = {"sum": "SUM", "mean": "SUM", "product": "PRODUCT", "max": "MAX", "min": "MIN"}
_state: tuple[object, Fused | None] = (None, None)  # of which process group, and its shared memory if it has any


def allreduce(tensor: torch.Tensor, algorithm: str = "auto", op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place; every rank must call it with the same size, type and op.

    `auto`: on one host through shared memory, without any copy if the tensor comes from `shared_empty`; between hosts
    and on GPUs the backend's own. The other algorithms are those of `dlab.collectives`, over `dlab.transport()`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}: use {', '.join(ALGORITHMS)}")
    row, _ = prepare(tensor, op)
    if algorithm != "auto":
        getattr(collectives, f"{algorithm}_allreduce")(row, transport(), op=op)
    elif (fused := _shared_memory()) is not None and row.device.type == "cpu":
        fused.allreduce(row, op)
    else:
        dist.all_reduce(row, op=getattr(dist.ReduceOp, _REDUCE_OPS[op]))
        if op == "mean":
            row /= dist.get_world_size()


def shared_empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that `allreduce` combines where it lies. Every rank must call it, with the same shape and type.

    Where ranks share no memory (between hosts, on GPUs) it is an ordinary tensor on the CPU.
    """
    fused = _shared_memory()
    return torch.empty(*shape, dtype=dtype) if fused is None else fused.empty(shape, dtype)


def _shared_memory() -> Fused | None:
    """Made once for a process group, by all its ranks together."""
    global _state
    if not dist.is_initialized():
        raise RuntimeError("there is no process group here: run this in a cluster, as in cluster.run(fn)")
    if _state[0] is not dist.group.WORLD:
        possible = dist.get_backend() != "nccl"
        _state = (dist.group.WORLD, Fused.connect(TorchTransport()) if possible else None)
    return _state[1]
