"""Collectives as autograd functions: what each of them sends in the forward pass, and what in the backward pass.

If all ranks hold a tensor whole, all hold its whole gradient. If each holds a part, each holds that part's gradient. If
each holds a partial sum, all hold the whole gradient of the sum. Every `backward` below follows from these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlab import reduction
from dlab.layout import Layout, Placed
from dlab.sharding.redistribution import Transition, steps_between, volume
from dlab.transports import Group, Transport


@dataclass
class Transfer:
    """One collective of an operator: its direction, its group, and the bytes that a rank sends; a row of `explain`."""

    operator: str
    collective: str
    direction: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    bytes: int


@dataclass
class Call:
    """One call of an operator: where its inputs are when it computes, where its result is, and that result's bytes."""

    operator: str
    inputs: tuple[Placed, ...]
    result: Placed | None = None
    memory: int = 0


@dataclass
class World:
    """The ranks that a network is cut over, seen from one of them; without transport, collectives are only counted."""

    size: int
    rank: int = 0
    transport: Transport | None = None
    told: list[Transfer] | None = None  # a list to be filled
    operator: str = ""  # which one communicates
    calls: list[Call] = field(default_factory=list)  # filled like `told`
    outputs: list[Any] | None = None  # a list to be filled with the operators' results
    _groups: dict[tuple[int, ...], Transport] = field(default_factory=dict)

    def begin(self, name: str, found: Any) -> str:
        """Note that an operator begins, and return its name; where calls are noted, with the number of the call."""
        if self.told is not None:
            name = f"{len(self.calls) + 1} {name}"
            self.calls.append(Call(name, found.inputs))
        self.operator = name
        return name

    def end(self, result: Any) -> None:
        """Note the result of the operator that has just ended."""
        if self.told is not None:
            self.calls[-1].result = result.placed
            self.calls[-1].memory = result.local().numel() * result.element_size()
        if self.outputs is not None:
            self.outputs.append((self.operator, result))

    def line(self, layout: Layout, axes: Sequence[str]) -> Line:
        """Return the group of this rank along some axes."""
        return Line(self, tuple(layout.group(self.rank, axes)), tuple(axes))

    def group(self, members: tuple[int, ...], axes: tuple[str, ...]) -> Transport:
        """Return the transport of a group; it is kept, since connecting its ranks takes time."""
        assert self.transport is not None
        if members not in self._groups:
            whole = members == tuple(range(self.size))
            self._groups[members] = self.transport if whole else Group(self.transport, members, ", ".join(axes))
        return self._groups[members]


@dataclass(frozen=True)
class Line:
    """The ranks along some axes, and the collectives among them; the world notes each of them if it keeps a list."""

    world: World
    members: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.members.index(self.world.rank)

    def all_reduce(self, tensor: torch.Tensor, back: bool) -> torch.Tensor:
        """Return the sum over the ranks, in a tensor of its own."""
        if (group := self._open("all-reduce", tensor, back)) is None:
            return torch.empty_like(tensor)
        result = tensor.clone(memory_format=torch.contiguous_format)
        reduction.allreduce(result, group=group)
        return result

    def all_gather(self, tensor: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
        """Return the ranks' tensors joined along a dimension."""
        group = self._open("all-gather", tensor, back)
        shape = list(tensor.shape)
        shape[dim] *= self.size
        if group is None:
            return tensor.new_empty(shape)
        parts = reduction.all_gather(tensor.contiguous(), group=group)  # (ranks, *local)
        return parts.movedim(0, dim).reshape(shape)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
        """Return this rank's part, along a dimension, of the sum over the ranks."""
        group = self._open("reduce-scatter", tensor, back)
        parts = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0)  # (ranks, *local)
        if group is None:
            return torch.empty_like(parts[0])
        return reduction.reduce_scatter(parts.contiguous(), group=group).view(parts.shape[1:])

    def all_to_all(self, tensor: torch.Tensor, source: int, target: int, back: bool) -> torch.Tensor:
        """Return a tensor joined along `source` and cut along `target`, where it was cut along `source`."""
        group = self._open("all-to-all", tensor, back)
        parts = tensor.unflatten(target, (self.size, -1)).movedim(target, 0)  # (ranks, *local)
        shape = list(parts.shape[1:])
        shape[source] *= self.size
        if group is None:
            return tensor.new_empty(shape)
        return reduction.all_to_all(parts.contiguous(), group=group).movedim(0, source).reshape(shape)

    def cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along a dimension; nothing is sent."""
        return tensor.unflatten(dim, (self.size, -1)).select(dim, self.rank)

    def _open(self, collective: str, tensor: torch.Tensor, back: bool) -> Transport | None:
        world = self.world
        if back:
            refuse_twice()
        if world.told is not None:
            sent = volume(collective, self.size, tensor.numel()) * tensor.element_size()
            direction = "backward" if back else "forward"
            world.told.append(Transfer(world.operator, collective, direction, self.axes, self.members, sent))
        return None if world.transport is None else world.group(self.members, self.axes)


def refuse_twice() -> None:
    """Raise an error in a backward pass that is to be differentiated itself: autograd does not see what ranks send."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "communication between ranks cannot be differentiated twice, as create_graph=True asks: leave it out, or "
            "compute gradients of gradients with parallel_mode='stand_alone'"
        )


class Copy(torch.autograd.Function):
    """Forward: nothing, every rank has the tensor. Backward: all-reduce, since each rank used it only for its own part.

    Without it the forward pass is still right, and the gradients are wrong.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line, operator: str) -> torch.Tensor:
        ctx.line, ctx.operator = line, operator
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.line.world.operator = ctx.operator
        return ctx.line.all_reduce(gradient, back=True), None, None


class AllReduce(torch.autograd.Function):
    """Forward: the sum of the ranks' partial sums. Backward: nothing, each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line) -> torch.Tensor:
        return line.all_reduce(tensor, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_twice()
        return gradient, None


class Slice(torch.autograd.Function):
    """Forward: each rank keeps its part of a whole tensor. Backward: all-gather of the gradients of the parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line, dim: int, operator: str) -> torch.Tensor:
        ctx.line, ctx.dim, ctx.operator = line, dim, operator
        return line.cut(tensor, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.line.world.operator = ctx.operator
        return ctx.line.all_gather(gradient, ctx.dim, back=True), None, None, None


class AllGather(torch.autograd.Function):
    """Forward: joins the ranks' parts. Backward: each keeps the gradient of its part; with `summed`, a reduce-scatter,
    where each rank has used the whole tensor for a part of the result only (all-gather and `Copy` in one)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line, dim: int, summed: bool, operator: str) -> torch.Tensor:
        ctx.line, ctx.dim, ctx.summed, ctx.operator = line, dim, summed, operator
        return line.all_gather(tensor, dim, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.line.world.operator = ctx.operator
        if ctx.summed:
            return ctx.line.reduce_scatter(gradient, ctx.dim, back=True), None, None, None, None
        refuse_twice()
        # a tensor of its own: a parameter may keep it as its gradient and add to it
        part = ctx.line.cut(gradient, ctx.dim).clone(memory_format=torch.contiguous_format)
        return part, None, None, None, None


class ReduceScatter(torch.autograd.Function):
    """Forward: each rank gets its part of the sum of all partial sums. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line, dim: int, operator: str) -> torch.Tensor:
        ctx.line, ctx.dim, ctx.operator = line, dim, operator
        return line.reduce_scatter(tensor, dim, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.line.world.operator = ctx.operator
        return ctx.line.all_gather(gradient, ctx.dim, back=True), None, None, None


class AllToAll(torch.autograd.Function):
    """Forward: the cut moves from one dimension to another. Backward: it moves back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, line: Line, source: int, target: int, operator: str) -> torch.Tensor:
        ctx.line, ctx.source, ctx.target, ctx.operator = line, source, target, operator
        return line.all_to_all(tensor, source, target, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.line.world.operator = ctx.operator
        return ctx.line.all_to_all(gradient, ctx.target, ctx.source, back=True), None, None, None, None


def take(step: Transition, tensor: torch.Tensor, world: World, summed: bool = False) -> torch.Tensor:
    """Execute one step of a plan on this rank's part of a tensor."""
    line, name = world.line(step.before.layout, step.axes), world.operator
    apply: dict[str, Callable[[], torch.Tensor]] = {
        "slice": lambda: Slice.apply(tensor, line, step.target, name),
        "all-gather": lambda: AllGather.apply(tensor, line, step.source, summed, name),
        "all-reduce": lambda: AllReduce.apply(tensor, line),
        "reduce-scatter": lambda: ReduceScatter.apply(tensor, line, step.target, name),
        "all-to-all": lambda: AllToAll.apply(tensor, line, step.source, step.target, name),
    }
    return apply[step.collective]()


def redistribute(
    local: torch.Tensor,
    source: Placed,
    target: Placed,
    shape: tuple[int, ...],
    world: World,
    varying: tuple[str, ...] = (),
    planner: str = "rules",
) -> torch.Tensor:
    """Bring this rank's part into another layout; `varying` are axes of the target along which ranks will use their
    copies for different parts of a result, so that the gradients of the copies must be added up."""
    steps = steps_between(source, target, shape, planner)
    for number, step in enumerate(steps):
        summed = number == len(steps) - 1 and adds_up(step, target, varying)
        local = take(step, local, world, summed)
        if summed:
            return local
    if varying and local.requires_grad and torch.is_grad_enabled():
        local = Copy.apply(local, world.line(target.layout, varying), world.operator)
    return local


def adds_up(step: Transition, target: Placed, varying: tuple[str, ...]) -> bool:
    """Return whether the backward pass of the last step, an all-gather among these ranks, can add up gradients too."""
    return step.collective == "all-gather" and _span(step.before.layout, step.axes) == _span(target.layout, varying)


def _span(layout: Layout, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return which parts of a rank's number change along some axes, as pairs of strides: first, and after the last."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted((layout.strides[axis], layout.strides[axis] * layout.lengths[axis]) for axis in axes):
        if spans and spans[-1][1] == low:
            spans[-1] = spans[-1][0], high
        elif low < high:
            spans.append((low, high))
    return spans
