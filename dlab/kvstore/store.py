"""A key-value store for weights, like MXNet's: push gradients, pull weights; and the stores that need no server.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dlab.collectives import all_gather, broadcast
from dlab.kvstore.compression import Compression, parse_compression
from dlab.kvstore.joining import workers
from dlab.kvstore.optimizers import ServerOptimizer, Updater, recipe
from dlab.kvstore.placement import Key
from dlab.processes.worker.context import transport
from dlab.reduction import allreduce

Tensors = torch.Tensor | Sequence[torch.Tensor]  # one, or one for each device


class KVStore(ABC):
    """Stores values by key, a number or a name. Every worker creates one and calls its methods in the same order.

    `push` takes a gradient, or a list with one for each device, which are summed. The store sums those of all workers
    and updates the value with its updater; without one, the sum replaces the value. `pull` returns the value, after all
    of this worker's pushes. With a list of keys and a list of values, each method works on all of them.
    """

    rank: int = 0
    num_workers: int = 1

    def __init__(self, type: str) -> None:
        self.type = type
        self._known: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._compression: Compression | None = None
        self._residuals: dict[tuple[Key, int], torch.Tensor] = {}  # by key and device, or part

    # for users

    def init(self, key: Key | Sequence[Key], value: Tensors, rows: bool = False) -> None:
        """Set the first value of a key on all workers to that of rank 0.

        `rows=True` is for a table whose rows will be pushed and pulled: if it is large, servers divide it by rows.
        """
        for one, given in _pairs(key, value):
            if not isinstance(one, int | str) or isinstance(one, bool):
                raise TypeError(f"{one!r} cannot be a key: use a whole number or a string")
            if one in self._known:
                raise ValueError(f"key {one!r} has a value already: push to it, or use another key")
            if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
                raise TypeError(f"the value of key {one!r} must be one dense tensor, not {type(given).__name__}")
            self._known[one] = (given.shape, given.dtype)
            if rows and not given.ndim:
                raise ValueError(f"key {one!r} is a single number: it has no rows")
            self._init(one, given.detach(), rows)
        self.barrier()

    def push(self, key: Key | Sequence[Key], value: Tensors | Sequence[Tensors]) -> None:
        """Send a gradient, or one for each device, to be applied to the key's value."""
        for one, given in _pairs(key, value):
            self._push(one, self._gradients(one, given))

    def pull(self, key: Key | Sequence[Key], out: Tensors | Sequence[Tensors] | None = None) -> Any:
        """Copy the value into `out`, or into each tensor of a list; without `out`, return a new tensor."""
        if out is None:
            if isinstance(key, list | tuple):
                return [self.pull(one) for one in key]
            shape, dtype = self._about(key)
            out = torch.empty(shape, dtype=dtype)
            self.pull(key, out)
            return out
        for one, target in _pairs(key, out):
            targets = [target] if isinstance(target, torch.Tensor) else list(target)
            for each in targets:
                self._check(one, each, "pulled into")
            self._pull(one, targets)
        return None

    def pushpull(self, key: Key | Sequence[Key], value: Tensors | Sequence[Tensors], out: Any = None) -> Any:
        """Push and pull, without compression; without `out`, return a new tensor."""
        before, self._compression = self._compression, None
        try:
            self.push(key, value)
            return self.pull(key, out)
        finally:
            self._compression = before

    def row_sparse_pull(self, key: Key, row_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pull only some rows of a table, in the order of `row_ids`."""
        shape, dtype = self._about(key)
        if row_ids.ndim != 1 or row_ids.dtype.is_floating_point:
            raise TypeError(f"row_ids is {row_ids.dtype} of shape {tuple(row_ids.shape)}: give a list of whole numbers")
        if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < shape[0]:
            raise IndexError(f"key {key!r} has rows 0 to {shape[0] - 1}: give row_ids in that range")
        out = torch.empty((len(row_ids), *shape[1:]), dtype=dtype) if out is None else out
        if out.shape != (len(row_ids), *shape[1:]) or out.dtype != dtype:
            raise ValueError(f"{len(row_ids)} rows of key {key!r} do not fit into {tuple(out.shape)} of {out.dtype}")
        self._pull_rows(key, row_ids.long(), out)
        return out

    def set_optimizer(self, optimizer: str | torch.optim.Optimizer, **numbers: Any) -> None:
        """Update values with "sgd", "adam" or "adagrad" and its hyperparameters, or like one of torch's own optimizers.

        `rescale` multiplies every gradient.
        """
        self._use(ServerOptimizer(made := recipe(optimizer, **numbers)), {"optimizer": made})

    def set_updater(self, updater: Updater) -> None:
        """Update values with `updater(key, gradient, stored)`, which changes `stored`.

        Servers have received it with the function that the workers run; a worker only sends its name and digest.
        """
        if not callable(updater):
            raise TypeError(f"an updater is a function (key, gradient, stored), not {updater!r}")
        self._use(updater, {"updater": updater})

    def set_gradient_compression(self, params: Mapping[str, Any] | str) -> None:
        """Compress what is pushed: {"type": "2bit", "threshold": 0.5}, "1bit", "topk" or "bfloat16"."""
        self._compression = parse_compression(params)
        self._compress(params)

    def prefix(self, name: str) -> str:
        """Return the prefix of this worker's checkpoint files, as in MXNet: `name` for rank 0, `name-r` for rank r.

        >>> torch.save(model.state_dict(), kv.prefix("mnist") + ".pt")  # mnist.pt, mnist-1.pt, mnist-2.pt, …
        """
        return name if self.rank == 0 else f"{name}-{self.rank}"

    def barrier(self) -> None:  # noqa: B027  (a store without other workers need not wait)
        """Wait for all workers."""

    # for subclasses

    @abstractmethod
    def _init(self, key: Key, value: torch.Tensor, rows: bool) -> None: ...

    @abstractmethod
    def _push(self, key: Key, gradients: list[torch.Tensor]) -> None: ...

    @abstractmethod
    def _pull(self, key: Key, targets: list[torch.Tensor]) -> None: ...

    @abstractmethod
    def _pull_rows(self, key: Key, rows: torch.Tensor, out: torch.Tensor) -> None: ...

    @abstractmethod
    def _use(self, updater: Updater, told: dict[str, Any]) -> None: ...

    def _compress(self, params: Mapping[str, Any] | str) -> None:  # noqa: B027  (optional)
        """Send the compression to the servers, if there are any."""

    def _about(self, key: Any) -> tuple[torch.Size, torch.dtype]:
        if not isinstance(key, int | str) or key not in self._known:
            raise LookupError(f"key {key!r} has no value yet: call kv.init({key!r}, value) first, on every worker")
        return self._known[key]

    def _check(self, key: Key, tensor: Any, verb: str) -> None:
        shape, dtype = self._about(key)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"key {key!r} cannot be {verb} {type(tensor).__name__}: give a tensor, or a list of them")
        if tensor.shape != shape:
            raise ValueError(f"key {key!r} has shape {tuple(shape)}; {tuple(tensor.shape)} cannot be {verb} it")
        if tensor.dtype != dtype:
            raise TypeError(f"key {key!r} is {dtype}; {tensor.dtype} cannot be {verb} it: call .to({dtype}) first")

    def _gradients(self, key: Key, value: Any) -> list[torch.Tensor]:
        """Return the gradients as a list, after checking the shape and dtype of each."""
        gradients = [value] if isinstance(value, torch.Tensor) else list(value)
        if not gradients:
            raise ValueError(f"there is nothing to push to key {key!r}: give a tensor, or a list with one per device")
        for gradient in gradients:
            self._check(key, gradient, "pushed to")
            if self._compression is not None and (gradient.dtype != torch.float32 or gradient.is_sparse):
                raise TypeError(f"compression is for dense float32; key {key!r} is pushed {gradient.dtype}")
        return [gradient.detach() for gradient in gradients]

    def _code(self, key: Key, number: int, gradient: torch.Tensor, code: torch.Tensor) -> None:
        """Compress a gradient into `code`; what is lost is added to the next gradient of the same key and number."""
        assert self._compression is not None
        flat = gradient.reshape(-1).cpu()
        if (key, number) not in self._residuals:
            self._residuals[key, number] = torch.zeros_like(flat)
        self._compression.encode(flat, self._residuals[key, number], code)

    def residual(self, key: Key, number: int = 0) -> torch.Tensor:
        """Return what compression has not sent yet of one device's gradient, or of one part of a divided key."""
        count = self._about(key)[0].numel()
        return self._residuals.get((key, number), torch.zeros(count))

    def set_residual(self, key: Key, residual: torch.Tensor, number: int = 0) -> None:
        """Set what compression has not sent yet, from a checkpoint."""
        self._residuals[key, number] = residual.clone()

    def __repr__(self) -> str:
        return f"<KVStore {self.type}, rank {self.rank} of {self.num_workers}, {len(self._known)} keys>"


class LocalStore(KVStore):
    """The types `local` and `device`, which keep all values in this process; `device` can compress gradients."""

    def __init__(self, type: str) -> None:
        super().__init__(type)
        self._stored: dict[Key, torch.Tensor] = {}
        self._updater: Updater | None = None

    def _init(self, key: Key, value: torch.Tensor, rows: bool) -> None:
        self._stored[key] = value.clone()

    def _push(self, key: Key, gradients: list[torch.Tensor]) -> None:
        if self._compression is not None:
            gradients = [self._squeeze(key, number, each) for number, each in enumerate(gradients)]
        self._update(key, add_up(gradients))

    def _update(self, key: Key, total: torch.Tensor) -> None:
        stored = self._stored[key]
        total = (total.to_dense() if total.is_sparse else total).to(stored.device)
        if self._updater is None:
            stored.copy_(total)
        else:
            self._updater(key, total, stored)

    def _squeeze(self, key: Key, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Compress and decompress a gradient, to get what other devices would receive."""
        assert self._compression is not None
        code = torch.empty(self._compression.nbytes(gradient.numel()), dtype=torch.uint8)
        self._code(key, number, gradient, code)
        out = torch.empty(gradient.numel())
        self._compression.decode(code, out)
        return out.view(gradient.shape)

    def _pull(self, key: Key, targets: list[torch.Tensor]) -> None:
        for target in targets:
            target.detach().copy_(self._stored[key])

    def _pull_rows(self, key: Key, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._stored[key][rows])

    def _use(self, updater: Updater, told: dict[str, Any]) -> None:
        self._updater = updater

    def _compress(self, params: Mapping[str, Any] | str) -> None:
        if self.type == "local":
            raise ValueError("nothing is sent by a 'local' store: compress in 'device', 'dist_sync' or 'dist_async'")


class DeviceSyncStore(LocalStore):
    """The type `dist_device_sync`, without servers: gradients are summed by all-reduce; each worker updates its copy.

    Values on GPUs are summed by NCCL, others on the CPU, through shared memory if possible. Every worker must push the
    same keys in the same order. With compression each worker gets the codes of all.
    """

    def __init__(self, type: str) -> None:
        super().__init__(type)
        if workers() is not None:
            raise RuntimeError("dist_device_sync needs no servers: create it outside of dlab.kvstore.run, on all ranks")
        self._transport = transport()
        self.rank, self.num_workers = self._transport.rank, self._transport.size

    def _init(self, key: Key, value: torch.Tensor, rows: bool) -> None:
        super()._init(key, value.contiguous(), rows)
        broadcast(self._stored[key], self._transport)

    def _push(self, key: Key, gradients: list[torch.Tensor]) -> None:
        total = add_up(gradients)
        if self._compression is None:
            total = total.to_dense() if total.is_sparse else total.clone(memory_format=torch.contiguous_format)
            allreduce(total)
        else:
            code = torch.empty(self._compression.nbytes(total.numel()), dtype=torch.uint8)
            self._code(key, 0, total, code)
            parts = []
            for each in all_gather(code.to(total.device), self._transport):
                parts.append(torch.empty(total.numel()))
                self._compression.decode(each.cpu(), parts[-1])
            total = add_up(parts).view(total.shape)
        self._update(key, total)

    def barrier(self) -> None:
        """Wait for all workers."""
        self._transport.barrier()


def add_up(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors on the first one's device; a single tensor is returned itself."""
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other.to(total.device)
    return total


def _pairs(key: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the pairs of a key and its value, for one of each or for a list of each."""
    if not isinstance(key, list | tuple):
        return iter([(key, value)])
    if not isinstance(value, list | tuple) or len(value) != len(key):
        raise ValueError(f"{len(key)} keys need a list of as many values")
    return zip(key, value, strict=True)
