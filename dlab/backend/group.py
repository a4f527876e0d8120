"""A torch.distributed process group whose collectives are those of `dlab.collectives`."""

# torch.distributed always passes lists and options, where its hints also allow other forms
# mypy: disable-error-code="override,assignment,misc"

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from dlab import collectives
from dlab.backend.hosts import GlooPointToPoint, GlooTransport
from dlab.backend.monitored import meet_monitored
from dlab.backend.point_to_point import ANY_SOURCE, PointToPoint
from dlab.backend.works import Pending, TaskQueue
from dlab.collectives.ops import finish, prepare
from dlab.collectives.recorded import ALGORITHM
from dlab.collectives.ring import collect_chunks, pass_chunks, swap_parts
from dlab.collectives.shared import SharedCollectives
from dlab.transports import Emit, Recorder, SharedTransport, StoreTransport, Transport, connect

Tensors = Sequence[torch.Tensor]
OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}


class DlabGroup(dist.ProcessGroup):
    """Runs every collective through one task queue, so that all ranks do them in the order in which they were called.

    On one host the ranks share memory; between hosts gloo carries the messages.
    """

    _emit: Emit | None = None  # where collectives are told, if anywhere

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        allreduce: Callable[..., Any] | None = None,
        emit: Emit | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = self._description = ""
        self._store, self._timeout, self._monitored = store, timedelta(seconds=timeout), 0
        rendezvous = StoreTransport(store, rank, size)
        transport = connect(rendezvous, timeout)
        self._post: PointToPoint | GlooPointToPoint
        if isinstance(transport, SharedTransport):
            messages = connect(transport, timeout)
            assert isinstance(messages, SharedTransport)
            self._post, self._shared = (
                PointToPoint(messages, "dlab-post"),
                SharedCollectives.connect(transport, timeout),
            )
        else:
            gloo = dist.ProcessGroupGloo(store, rank, size, self._timeout)
            transport, self._post, self._shared = GlooTransport(gloo), GlooPointToPoint(gloo), None
        self._bare: Transport = transport
        self._transport: Transport = Recorder(transport, emit) if emit and allreduce else transport
        self._emit = emit if allreduce is None else None  # else each message is told
        self._task_queue = TaskQueue("dlab-task queue")
        self._plugged = allreduce
        self._takes_op = allreduce is not None and "op" in inspect.signature(allreduce).parameters

    # names: torch stores those of a group in its backends, which a group written in Python does not have

    def getBackendName(self) -> str:
        """The name under which torch.distributed knows this backend: `dlab`."""
        return "dlab"

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch.distributed gives the group, for messages that mention it."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name by which DTensor finds the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Keep the description that the maker of the group has given it."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the description of the group, for torch.distributed's logs."""
        return self._description

    _set_group_name, group_name = setGroupName, property(getGroupName)
    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    # reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Combine the tensors of all ranks; every rank ends with the result in its own tensor."""

        def task() -> None:
            for tensor in tensors:
                self._reduce_everywhere(tensor, _op(opts))

        return self._do(self._told(task, "all-reduce", tensors), tensors, opts)

    allreduce_coalesced = allreduce

    def _reduce_everywhere(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.is_sparse:
            self._reduce_sparse(tensor, op)
            return
        row, _ = prepare(tensor, op)
        self._transport.label("all-reduce", 0)  # so that an unlabelled function does not inherit the previous label
        if self._plugged is None:
            if self._shared is not None:
                self._shared.allreduce(row, op)
            else:
                collectives.ring_allreduce(row, self._transport, op)
        elif self._takes_op:
            self._plugged(row, self._transport, op=op)
        elif op in ("sum", "mean"):
            self._plugged(row, self._transport)
            finish(row, op, self.size())
        else:
            collectives.ring_allreduce(row, self._transport, op)

    def _reduce_sparse(self, tensor: torch.Tensor, op: str) -> None:
        """Send every rank's entries to all ranks, and let each add them up."""
        if op != "sum":
            raise ValueError(f"sparse tensors can be summed, not reduced by {op!r}: call .to_dense() first")
        mine = tensor.detach().coalesce()
        counts = collectives.all_gather(torch.tensor([mine._nnz()]), self._transport)
        total = torch.zeros_like(mine)
        parts = []
        for content in (mine.indices().t().contiguous(), mine.values().contiguous()):
            rows = [content.new_empty((int(count), *content.shape[1:])) for count in counts]
            self._share(rows, content)
            parts.append(rows)
        for indices, values in zip(*parts, strict=True):
            total += torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False)
        tensor.copy_(total)

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Combine the tensors of all ranks in the root's tensor; the other ranks' tensors stay unchanged."""

        def task() -> None:
            for tensor in tensors:
                collectives.reduce(tensor, self._transport, opts.rootRank, _op(opts))

        return self._do(self._told(task, "reduce", tensors), tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Pending:
        """Give rank r the combination of all ranks' r-th tensors."""

        def task() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                mine = self._combine_parts([part.detach().reshape(-1) for part in parts], _op(opts))
                output.detach().copy_(mine.view(output.shape))

        return self._do(self._told(task, "reduce-scatter", chain(*inputs)), outputs, opts)

    @property
    def _memory(self) -> SharedCollectives | None:
        """The shared memory to use, or None if the all-reduce is the user's own, whose messages are to be visible."""
        return self._shared if self._plugged is None and self.size() > 1 else None

    def _combine_parts(self, parts: Tensors, op: str) -> torch.Tensor:
        _, combine = prepare(parts[0], op)
        if (memory := self._memory) is not None:
            mine = torch.empty_like(parts[self.rank()])
            memory.reduce_scatter(torch.cat(list(parts)), mine, op)
            return mine
        chunks = [part.clone() for part in parts]
        collect_chunks(chunks, self._transport, combine)
        finish(chunks[self.rank()], op, self.size())
        return chunks[self.rank()]

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Pending:
        """Reduce and scatter parts that lie one after another in one tensor."""
        return self.reduce_scatter([output], [self._cut(input)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        """Do several reduce-scatters in one call."""
        return self.reduce_scatter(outputs, [self._cut(each) for each in inputs], opts)

    # moving whole tensors

    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        """Copy the root's tensor to all ranks."""

        def task() -> None:
            for tensor in tensors:
                collectives.broadcast(tensor, self._transport, opts.rootRank)

        return self._do(self._told(task, "broadcast", tensors), tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Pending:
        """Give every rank the tensors of all ranks, as a list."""

        def task() -> None:
            for rows, mine in zip(outputs, inputs, strict=True):
                self._share(rows, mine)

        return self._do(self._told(task, "all-gather", inputs), outputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Pending:
        """Do several all-gathers in one call, with the outputs ordered by rank instead of by tensor."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Pending:
        """Gather the tensors of all ranks one after another in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        """Do several all-gathers in one call."""

        def task() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                fits = output.is_contiguous() and output.numel() == self.size() * mine.numel()
                if fits and (memory := self._memory) is not None:
                    memory.all_gather(mine.detach().contiguous(), output.detach())
                else:
                    self._share(self._cut(output), mine)

        return self._do(self._told(task, "all-gather", inputs), list(outputs), opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Give the root the tensors of all ranks, as a list."""

        def task() -> None:
            gathered = collectives.gather(inputs[0].contiguous(), self._transport, opts.rootRank)
            for output, found in zip(outputs[0] if gathered else (), gathered or (), strict=True):
                output.detach().copy_(found)

        return self._do(self._told(task, "gather", inputs), outputs, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Pending:
        """Give each rank one of the root's tensors."""

        def task() -> None:
            parts = [part.contiguous() for part in inputs[0]] if inputs else None
            collectives.scatter(outputs[0], self._transport, parts, opts.rootRank)

        return self._do(self._told(task, "scatter", chain(*inputs)), outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        """Give rank s all ranks' s-th tensors."""

        def task() -> None:
            rows = [_contiguous(output) for output in outputs]
            swap_parts([part.detach().contiguous() for part in inputs], rows, self._transport)
            _copy_back(rows, outputs)

        return self._do(self._told(task, "all-to-all", inputs), outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Pending:
        """Exchange parts that lie one after another in one tensor; the splits are the numbers of their rows."""
        return self.alltoall(self._cut(output, output_splits), self._cut(input, input_splits), opts)

    def barrier(self, opts: Any = None) -> Pending:
        """Return when all ranks have called it."""
        return self._do(self._bare.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait at a barrier at which rank 0 names who has not come within the timeout: the first of them, or all."""
        self._monitored += 1
        place = f"monitored barrier {self._monitored}"
        meet_monitored(
            self._store, place, self.rank(), self.size(), self._timeout if timeout is None else timeout, wait_all_ranks
        )

    # point to point

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> Any:
        """Send one tensor to a rank; the receive with the same tag takes it."""
        return self._post.send(tensors[0], destination, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Receive one tensor from a rank, sent with the same tag."""
        return self._post.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receive one tensor from whichever rank sends first."""
        return self._post.receive(tensors[0], ANY_SOURCE, tag)

    # the names that older code and C++ use

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # memory and shutdown

    def shared_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory that `allreduce` need not copy. Every rank must call it."""
        if self._shared is None:
            return torch.empty(shape, dtype=dtype)
        made: list[torch.Tensor] = []
        shared = self._shared
        self._task_queue.do(lambda: made.append(shared.empty(shape, dtype)), None, later=False).wait()
        return made[0]

    def shutdown(self) -> None:
        """End the group; operations that still wait fail with an error."""
        self._post.close()
        self._task_queue.close()
        if isinstance(self._bare, SharedTransport):
            self._bare.peers.closed = True
        if self._shared is not None:
            self._shared.table.peers.closed = True

    abort = shutdown

    def _do(self, task: Callable[[], object], value: Any, opts: Any) -> Pending:
        return self._task_queue.do(task, value, later=opts is None or opts.asyncOp)

    def _told(self, task: Callable[[], object], name: str, tensors: Iterable[torch.Tensor]) -> Callable[[], object]:
        """A task that also tells of itself: its name, and the bytes of the tensors that this rank has for it."""
        if self._emit is None or self.size() == 1:
            return task
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return partial(self._do_and_tell, task, name, nbytes)

    def _do_and_tell(self, task: Callable[[], object], name: str, nbytes: int) -> None:
        start = time.time()
        task()
        self._listener.note_collective(name, "gloo" if self._shared is None else ALGORITHM, nbytes, start)

    @cached_property
    def _listener(self) -> Recorder:
        """Who hears of collectives. Torch knows the ranks of a group when it has been made, not before."""
        assert self._emit is not None
        listener, ranks = Recorder(self._bare, self._emit), dist.get_process_group_ranks(self)
        return listener if len(ranks) == dist.get_world_size() else listener.within(ranks, self._description)

    def _share(self, rows: Tensors, mine: torch.Tensor) -> None:
        """Gather all ranks' tensors into existing ones."""
        chunks = [_contiguous(row) for row in rows]
        alike = all(chunk.numel() == mine.numel() for chunk in chunks)
        if alike and (memory := self._memory) is not None:
            together = torch.empty(self.size() * mine.numel(), dtype=mine.dtype)
            memory.all_gather(mine.detach().reshape(-1), together)
            for chunk, found in zip(chunks, together.view(self.size(), -1), strict=True):
                chunk.copy_(found.view(chunk.shape))
        else:
            chunks[self.rank()].copy_(mine.detach().view(chunks[self.rank()].shape))
            pass_chunks(chunks, self._transport)
        _copy_back(chunks, rows)

    def _cut(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Cut a tensor into one part per rank: equal parts, or parts with the given numbers of rows."""
        rows = tensor.detach().contiguous() if tensor.dim() else tensor.detach().view(1)
        if sizes:
            return list(rows.split(list(sizes)))
        if tensor.numel() % self.size():
            raise ValueError(f"a tensor of {tensor.numel()} items cannot be cut into {self.size()} equal parts: pad it")
        return list(rows.view(self.size(), -1))


def _op(opts: Any) -> str:
    if opts is None:
        return "sum"
    for op, name in OPS.items():
        if opts.reduceOp == op:
            return name
    raise ValueError(f"the dlab backend has no {opts.reduceOp}: use {', '.join(op.name for op in OPS)}")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy_back(rows: Tensors, outputs: Tensors) -> None:
    for row, output in zip(rows, outputs, strict=True):
        if row.data_ptr() != output.data_ptr():
            output.detach().copy_(row)
