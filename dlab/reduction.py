"""Collectives that choose the fastest way for this transport and tensor, and the averaging of gradients.

Each works over all ranks, or over a group of them, such as a line of a mesh. Taught in `02_allreduce.ipynb`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlab import collectives
from dlab.backend.group import OPS, DlabGroup
from dlab.collectives.ops import finish, prepare
from dlab.collectives.recorded import ALGORITHM, RecordedCollectives
from dlab.collectives.ring import collect_chunks, pass_chunks, swap_parts
from dlab.collectives.shared import SharedCollectives
from dlab.processes.worker import context
from dlab.processes.worker.context import device, world_size
from dlab.processes.worker.tracing import trace
from dlab.transports import Group, TorchTransport, Transport

ALGORITHMS = ("auto", "naive", "tree", "ring", "halving_doubling", "hierarchical")
_REDUCE_OPS = {name: op for op, name in OPS.items()} | {"mean": dist.ReduceOp.SUM}  # divided here: gloo has no mean
_memory: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedCollectives | None] = (
    weakref.WeakKeyDictionary()
)  # None if its ranks share no memory


def average_gradients(
    model: torch.nn.Module, allreduce: Callable[..., Any] | None = None, transport: Transport | None = None
) -> None:
    """Replace each gradient by its mean over the ranks: the sum over all, divided by their number.

    Costs one all-reduce per parameter: `dist.all_reduce`, or `allreduce(tensor, transport)`, a collective of
    `dlab.collectives` or your own that works in place. That one gets a copy, so that the gradient is only changed when
    the result is complete. It works over `transport`, by default `dlab.transport()`.

    >>> loss.backward()
    >>> average_gradients(model, allreduce=ring_allreduce)
    >>> optimizer.step()
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient: call loss.backward() first, and use every layer on every rank")
        trace("sent", parameter)
        if allreduce is None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        else:
            received = parameter.grad.clone(memory_format=torch.contiguous_format)
            allreduce(received, transport or context.transport())
            parameter.grad.copy_(received)
        parameter.grad /= transport.size if transport else world_size()
        trace("reduced", parameter)


def allreduce(tensor: torch.Tensor, algorithm: str = "auto", op: str = "sum", group: Transport | None = None) -> None:
    """Combine a tensor over all ranks, in place; every rank must call it with the same size, type and op.

    `auto` uses shared memory on one host, without any copy if the tensor comes from `shared_empty`, and the backend's
    own all-reduce between hosts and on GPUs. The other algorithms are those of `dlab.collectives`, over
    `dlab.transport()`. With `group`, such as `mesh["tp"]`, only its ranks take part, each of which must call it.
    """
    if algorithm != "auto":
        if algorithm not in ALGORITHMS:
            raise ValueError(f"there is no algorithm {algorithm!r}: use {', '.join(ALGORITHMS)}")
        if group is not None and not isinstance(group, Transport):
            raise _no_group(group)
        getattr(collectives, f"{algorithm}_allreduce")(tensor, group or context.transport(), op=op)
    elif tensor.is_cpu and (shared := _shared_memory(group)) is not None:
        shared.allreduce(tensor, op)
    elif _has_backend(group):
        row, _ = prepare(tensor, op)
        dist.all_reduce(row, op=_REDUCE_OPS[op], group=_process_group(group))
        finish(row, op, _place(group, None)[1])
    else:
        collectives.ring_allreduce(tensor, group or context.transport(), op)


def reduce_scatter(
    tensor: torch.Tensor, op: str = "sum", group: Transport | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return part r of the combination of all tensors on rank r, as a flat tensor, or in `out` of the same size.

    Parts are those of `tensor.view(-1).tensor_split(ranks)`. It is half of an all-reduce: each rank gets (n-1)/n of a
    tensor from the others. It chooses the algorithm like `allreduce` does.
    """
    shared = _shared_memory(group) if tensor.is_cpu else None
    rank, size = _place(group, shared)
    length, longer = divmod(tensor.numel(), size)
    length += rank < longer
    out = tensor.new_empty(length) if out is None else _check_room(out, length, tensor)
    if shared is not None and size > 1:
        shared.reduce_scatter(tensor, out, op)
        return out
    row, combine = prepare(tensor, op)
    if size == 1:
        out.copy_(row.view_as(out))
    elif _has_backend(group) and not longer:
        dist.reduce_scatter_single(out.view(-1), row, op=_REDUCE_OPS[op], group=_process_group(group))
        finish(out, op, size)
    else:
        chunks = row.clone().tensor_split(size)
        collect_chunks(chunks, group or context.transport(), combine)
        finish(chunks[rank], op, size)
        out.copy_(chunks[rank].view_as(out))
    return out


def all_gather(tensor: torch.Tensor, group: Transport | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensors of all ranks: `result[r]` is rank r's; or write them one after another into `out`.

    Each rank gets n-1 tensors from the others. It chooses the algorithm like `allreduce` does.
    """
    shared = _shared_memory(group) if tensor.is_cpu else None
    rank, size = _place(group, shared)
    if out is None:
        out = tensor.new_empty(size, *tensor.shape)
    else:
        out = _check_room(out, size * tensor.numel(), tensor)
    if shared is not None and size > 1:
        shared.all_gather(tensor, out)
        return out
    row, _ = prepare(tensor, "sum")
    if size == 1:
        out.copy_(tensor.view_as(out))
    elif _has_backend(group):
        dist.all_gather_single(out.view(-1), row, group=_process_group(group))
    else:
        rows = list(out.view(size, -1))
        rows[rank].copy_(row)
        pass_chunks(rows, group or context.transport())
    return out


def all_to_all(tensor: torch.Tensor, group: Transport | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor whose row r is row s of rank r's tensor, on rank s; the first dimension is the number of ranks.

    Each rank gets (n-1)/n of a tensor from the others. It chooses the algorithm like `allreduce` does.
    """
    shared = _shared_memory(group) if tensor.is_cpu else None
    _, size = _place(group, shared)
    if not tensor.dim() or tensor.shape[0] != size:
        shape = " × ".join(map(str, tensor.shape)) or "a single number"
        raise ValueError(f"all_to_all takes a tensor with a row for each of {size} ranks, not {shape}")
    out = torch.empty_like(tensor) if out is None else _check_room(out, tensor.numel(), tensor)
    if shared is not None and size > 1:
        shared.all_to_all(tensor, out)
        return out
    row, _ = prepare(tensor, "sum")
    if size == 1:
        out.copy_(tensor.view_as(out))
    elif _has_backend(group):
        dist.all_to_all_single(out.view(-1), row, group=_process_group(group))
    else:
        swap_parts(list(row.view(size, -1)), list(out.view(size, -1)), group or context.transport())
    return out


def shared_empty(*shape: int, dtype: torch.dtype = torch.float32, group: Transport | None = None) -> torch.Tensor:
    """Allocate a tensor that collectives use in place; every rank must call it, with the same shape and type.

    With `group`, it is for collectives among these ranks, each of which must call it. Where ranks share no memory
    (between hosts, on GPUs) it is an ordinary tensor, on the GPU if the backend is NCCL.
    """
    shared = _shared_memory(group)
    if group is None and isinstance(dist.group.WORLD, DlabGroup):
        return dist.group.WORLD.shared_empty(shape, dtype)
    if shared is None:
        return torch.empty(*shape, dtype=dtype, device=device() if _on_gpu() else None)
    return shared.empty(shape, dtype)


def _shared_memory(group: Transport | None = None) -> SharedCollectives | None:
    """Return the shared memory of a process group, or of a group of its ranks; all of them make it together, once.

    The backend `dlab` has its own. A rehearsal has none, so that its messages can be seen.
    """
    if group is not None:
        try:
            processes = group.processes
        except AttributeError:  # not checked before, because that takes longer
            raise _no_group(group) from None
        return group.once(_connect) if processes and not _on_gpu() else None
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no process group here: run this in a cluster, as in cluster.run(fn)")
    try:
        return _memory[world]
    except KeyError:
        _memory[world] = memory = _connect(TorchTransport()) if dist.get_backend() == "gloo" else None
        return memory


def _no_group(given: Any) -> TypeError:
    return TypeError(f"group={given!r} is not a group of ranks: give a line of a mesh, such as mesh['tp']")


def _connect(transport: Transport) -> SharedCollectives | None:
    """Connect the ranks through shared memory; in a worker, each collective is counted for the run's events."""
    if not context.is_worker():
        return SharedCollectives.connect(transport)
    group = {"group": list(transport.members), "axis": transport.axis} if isinstance(transport, Group) else {}
    return RecordedCollectives.connect_to(
        transport, lambda name: context.counter({"name": name, "algorithm": ALGORITHM, **group}).add
    )


def _place(group: Transport | None, shared: SharedCollectives | None) -> tuple[int, int]:
    """Return this rank's number in the group, and the group's size; asking torch is slower than a small collective."""
    known = group or shared
    return (known.rank, known.size) if known is not None else (dist.get_rank(), dist.get_world_size())


def _on_gpu() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _has_backend(group: Transport | None) -> bool:
    """Return whether torch.distributed has such a group: there, ranks are numbered in ascending order."""
    if group is None:
        return True
    return group.processes and dist.is_initialized() and list(group.members) == sorted(group.members)


def _process_group(group: Transport | None) -> dist.ProcessGroup | None:
    """Return torch.distributed's group of the same ranks, which all of them make together, once."""
    return None if group is None else group.once(_new_group)


def _new_group(group: Transport) -> dist.ProcessGroup:
    return dist.new_group(list(group.members), use_local_synchronization=True)


def _check_room(out: torch.Tensor, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return `out` if it can hold a result of so many numbers, and raise an error otherwise."""
    alike = out.dtype is like.dtype and ((out.is_cpu and like.is_cpu) or out.device == like.device)
    if not alike or out.numel() != count or not out.is_contiguous():
        raise ValueError(
            f"the result is {count} {like.dtype} on {like.device}, but out has room for {out.numel()} {out.dtype} on "
            f"{out.device}{'' if out.is_contiguous() else ', with gaps between them'}: give a tensor that fits"
        )
    return out.detach() if out.requires_grad else out
