"""AutoParallel: a network or a training step that is cut over ranks, and called as before: whole in, whole out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dlab.layout import Layout, Placed, replicated
from dlab.processes.worker.context import transport as transport_of_this_worker
from dlab.sharding import rules  # noqa: F401  (fills the table of rules)
from dlab.sharding.communication import World, redistribute
from dlab.sharding.explanation import Explanation
from dlab.sharding.tensor import _ANSWERS, RULES, Home, ShardedTensor, _getter, _to, call, state, working
from dlab.transports import Transport

MODES = ("semi_auto", "data_parallel", "stand_alone")
_SHAPES: dict[Any, Callable[..., Any]] = {
    _getter("shape"): lambda shape: torch.Size(shape),
    torch.Tensor.size: lambda shape, dim=None: torch.Size(shape) if dim is None else shape[dim],
    torch.Tensor.numel: lambda shape: torch.Size(shape).numel(),
}


class Planned(BaseException):
    """Ends the planning of a training step after its backward pass: an optimizer must not step on a plan."""


class _ParameterMode(TorchFunctionMode):
    """Sees functions of parameters alone, such as `weight.t()`, which no sharded tensor takes part in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if state.aside or not args:
            return func(*args, **kwargs)
        home = state.homes.get(id(args[0])) if isinstance(args[0], nn.Parameter) else None
        if home is not None and home.placed is not None and func in _SHAPES:
            return _SHAPES[func](home.shape, *args[1:], **kwargs)
        if func in RULES and any(isinstance(each, nn.Parameter) and id(each) in state.homes for each in args):
            with torch._C.DisableTorchFunctionSubclass():
                return call(func, args, kwargs)
        return func(*args, **kwargs)


def _aside(*_: Any) -> None:
    state.aside = True


def _back(*_: Any) -> None:
    state.aside = False
    if state.world is not None:
        state.moved.clear()  # copies of weights that have just changed


register_optimizer_step_pre_hook(_aside)
register_optimizer_step_post_hook(_back)


class AutoParallel:
    """A network, or a function that makes a training step, cut over ranks: every rank calls it with the same tensors.

    What it returns is whole and carries gradients, so the code around it stays as it was. In mode `semi_auto` operators
    with a strategy are cut by it; the others follow their inputs. A parameter is cut as its first operator cuts it:
    each rank keeps its part only, in the same `nn.Parameter`, so that an optimizer made before works as well.
    `data_parallel` ignores strategies and cuts the batch alone; `stand_alone` cuts nothing. With
    `dataset_strategy="data_parallel"` each rank brings its own part of the batch. `layouts` cut an ordinary network
    from outside, by the names of parameters; that of a module's name is where its result is left.

    >>> par = dlab.AutoParallel(net)
    >>> loss = F.cross_entropy(par(images), labels)
    >>> loss.backward()
    """

    def __init__(
        self,
        net: nn.Module | Callable[..., Any],
        parallel_mode: str = "semi_auto",
        transport: Transport | None = None,
        dataset_strategy: str = "full_batch",
        layouts: Mapping[str, Placed] | None = None,
        planner: str = "rules",
        ranks: int | None = None,
    ) -> None:
        if parallel_mode not in MODES:
            raise ValueError(f"there is no parallel mode {parallel_mode!r}: use {', '.join(map(repr, MODES))}")
        if dataset_strategy not in ("full_batch", "data_parallel"):
            raise ValueError(f"dataset_strategy={dataset_strategy!r}: use 'full_batch' or 'data_parallel'")
        if not callable(net):
            raise ValueError(f"AutoParallel wraps a network or a function, not {net!r}")
        self.net, self.mode, self.dataset_strategy, self.planner = net, parallel_mode, dataset_strategy, planner
        if ranks is None:
            transport = transport_of_this_worker() if transport is None else transport
            self.world = World(transport.size, transport.rank, transport)
        else:  # for a plan alone: no rank need be there
            self.world = World(ranks)
        self._homes: dict[int, Home] = {}
        for module, prefix in self._modules():
            for name, parameter in module.named_parameters(prefix):
                self._homes.setdefault(id(parameter), Home(parameter, name))
        self._layouts = dict(layouts or {})
        self._place()

    def _modules(self) -> Iterator[tuple[nn.Module, str]]:
        """The networks that the wrapped thing is, has, or refers to."""
        if isinstance(self.net, nn.Module):
            yield self.net, ""
            return
        owner = getattr(self.net, "__self__", None)
        code = getattr(self.net, "__code__", None)
        cells = getattr(self.net, "__closure__", None) or ()
        found = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False)) if code else {}
        found |= (
            {name: self.net.__globals__[name] for name in code.co_names if name in self.net.__globals__} if code else {}
        )
        found |= vars(owner) if hasattr(owner, "__dict__") else {}
        networks = {name: each for name, each in found.items() if isinstance(each, nn.Module)}
        for name, each in networks.items():
            yield each, name if len(networks) > 1 else ""

    def _place(self) -> None:
        """Cut the parameters whose layouts are given, and let modules with a layout leave their results in it."""
        unknown = dict(self._layouts)
        by_name = {home.name: home for home in self._homes.values()}
        for name, placed in self._layouts.items():
            placed.layout.check_ranks(self.world.size)
            if name in by_name:
                unknown.pop(name)
                home = by_name[name]
                try:
                    placed.local_shape(home.shape)
                except ValueError as problem:
                    raise ValueError(f"{name}: {problem}") from None
                home.fixed = True
                if self.world.transport is None:
                    home.placed = placed
                else:
                    home.settle(placed, self.world.rank)
        for module, prefix in self._modules():
            for name, each in module.named_modules(prefix=prefix):
                if name in unknown:
                    each.register_forward_pre_hook(self._want(unknown[name], name))
                    each.register_forward_hook(self._leave(unknown.pop(name)))
        if unknown:
            raise ValueError(
                f"there is no parameter or module {', '.join(map(repr, unknown))}: the parameters are "
                f"{', '.join(by_name)}"
            )

    def _want(self, placed: Placed, name: str) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            if state.world is not None and isinstance(module, nn.Linear):
                state.wanted = placed

        return hook

    def _leave(self, placed: Placed) -> Any:
        def hook(module: nn.Module, _: Any, result: Any) -> Any:
            if isinstance(result, ShardedTensor) and state.world is not None and state.world.size > 1:
                return _to(result, placed, state.world.operator)
            return result

        return hook

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode == "stand_alone":
            return self.net(*args, **kwargs)
        with self._working(self.world):
            result = self._run(self.world, args, kwargs)
            return tree_map(_whole, result)

    def _run(self, world: World, args: Any, kwargs: Any) -> Any:
        shard = self._shard(world)
        args, kwargs = tree_map(shard, args), tree_map(shard, kwargs)
        with _ParameterMode():
            return self.net(*args, **kwargs)

    def _working(self, world: World) -> Any:
        state.aside = False
        return working(world, self._homes, not self._layouts, self.planner)

    def _shard(self, world: World) -> Callable[[Any], Any]:
        layout = Layout((world.size,), ("dp",))

        def shard(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                return value
            shape = tuple(value.shape)
            if world.transport is None and world.told is not None:
                value = torch.empty(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
            whole = replicated(layout, value.dim())
            if self.dataset_strategy == "data_parallel" and shape and world.size > 1:
                cut = Placed(layout, (("dp",), *((),) * (value.dim() - 1)))
                return ShardedTensor.of(value, cut, (shape[0] * world.size, *shape[1:]))
            return ShardedTensor.of(value.view_as(value), whole, shape, free=True)

        return shard

    # what ranks hold

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parts of the parameters, for any optimizer of torch."""
        return (home.parameter for home in self._homes.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parts of the parameters with their names."""
        return ((home.name, home.parameter) for home in self._homes.values())

    @property
    def layouts(self) -> dict[str, Placed | None]:
        """The layout of each parameter by name; None before its first operator has run."""
        return {home.name: home.placed for home in self._homes.values()}

    def whole(self, grad: bool = False) -> dict[str, torch.Tensor | None]:
        """Return all parameters whole, or with `grad` their gradients, by name; every rank must call it."""
        found: dict[str, torch.Tensor | None] = {}
        with torch.no_grad():
            for home in self._homes.values():
                value = home.parameter.grad if grad else home.parameter.detach()
                if value is not None and home.placed is not None and self.world.size > 1:
                    nowhere = replicated(home.placed.layout, len(home.shape))
                    value = redistribute(value, home.placed, nowhere, home.shape, self.world)
                found[home.name] = None if value is None else value.clone()
        return found

    # before it runs

    def explain(self, *inputs: Any, backward: bool = True) -> Explanation:
        """Return a table with a row for each operator: layouts, communication, bytes and memory per rank.

        Nothing is sent and nothing computed: tensors without values go through the network.
        """
        world = World(self.world.size, self.world.rank, told=[])
        before = {key: (home.placed, home.fixed) for key, home in self._homes.items()}
        gradients = {key: home.parameter.grad for key, home in self._homes.items()}
        try:
            with self._working(world):
                try:
                    result = tree_map(_whole, self._run(world, inputs, {}))
                    results = [each for each in _tensors(result) if each.requires_grad]
                    if backward and results:
                        torch.stack([each.sum() for each in results]).sum().backward()
                except Planned:
                    pass
        finally:
            parameters = {home.name: (home.placed, home.shape, home.parameter) for home in self._homes.values()}
            for key, home in self._homes.items():
                home.parameter.grad = gradients[key]
                home.placed, home.fixed = before[key]
        return Explanation(world, parameters)

    # a silent error

    def check(self, *inputs: Any, tolerance: float = 1e-4) -> str:
        """Compare results and gradients with those of one process; every rank calls it with the same small batch.

        Raises an error that names the first operator, on the way back, whose gradient differs. The gradients of the
        parameters stay as they are.
        """
        kept = {home.name: home.parameter.grad for home in self._homes.values()}
        for home in self._homes.values():
            home.parameter.grad = None
        try:
            cut, cut_gradients = self._traced(self.world, inputs)
            mine = self.whole(grad=True)
            alone = self._unsharded()
            one, one_gradients = alone._traced(alone.world, inputs)
            _compare(cut, one, cut_gradients, one_gradients, mine, alone.whole(grad=True), tolerance)
        finally:
            for home in self._homes.values():
                home.parameter.grad = kept[home.name]
        return f"the results and gradients of {len(one)} operators equal those of one process, to {tolerance:g}"

    def _unsharded(self) -> AutoParallel:
        weights = self.whole()
        if not isinstance(self.net, nn.Module):
            raise ValueError(
                "check compares networks: wrap the nn.Module itself, not the training step, and check that"
            )
        net = copy.deepcopy(self.net)
        for name, parameter in net.named_parameters():
            parameter.data = weights[name]  # type: ignore[assignment]
            parameter.grad = None
        from dlab.transports.threads import ThreadTransport, ThreadWorld

        return AutoParallel(net, transport=ThreadTransport(ThreadWorld(1), 0))

    def _traced(self, world: World, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run forward and backward; return each operator's whole result, and the whole gradient of it."""
        world.outputs = []
        try:
            with self._working(world):
                results = _tensors(tree_map(_whole, self._run(world, inputs, {})))
                made, world.outputs = world.outputs, None
                locals_ = [each.local() for _, each in made]
                for each in locals_:
                    if each.requires_grad:
                        each.retain_grad()
                torch.stack([each.sum() for each in results if each.requires_grad]).sum().backward()
                with torch.no_grad():
                    wholes = [(name, each.whole()) for name, each in made]
                    gradients = [
                        None if part.grad is None else _gradient(each, part.grad)
                        for (_, each), part in zip(made, locals_, strict=True)
                    ]
        finally:
            world.outputs = None
        return wholes, gradients


def _gradient(tensor: ShardedTensor, gradient: torch.Tensor) -> torch.Tensor:
    placed = Placed(tensor.placed.layout, tensor.placed.dims)  # the gradient of a partial sum is whole
    return ShardedTensor.of(gradient, placed, tensor.whole_shape).whole()


def _compare(
    cut: list[Any],
    one: list[Any],
    cut_gradients: list[Any],
    one_gradients: list[Any],
    mine: Any,
    truth: Any,
    tolerance: float,
) -> None:
    for (name, value), (_, right) in zip(cut, one, strict=True):
        if not torch.allclose(value, right, rtol=tolerance, atol=tolerance):
            off = (value - right).abs().max()
            raise AssertionError(f"the result of {name} differs from that of one process by up to {off:.3g}")
    for (name, _), value, right in reversed(list(zip(one, cut_gradients, one_gradients, strict=True))):
        if (value is None) != (right is None) or (
            value is not None and not torch.allclose(value, right, rtol=tolerance, atol=tolerance)
        ):
            raise AssertionError(
                f"the gradient of the result of {name} differs from that of one process, although all results are "
                "right: look at the communication between it and the operators that use it"
            )
    for name, right in truth.items():
        if right is not None and not torch.allclose(mine[name], right, rtol=tolerance, atol=tolerance):
            raise AssertionError(f"the gradient of the parameter {name} differs from that of one process")


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, ShardedTensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


def _backward(self: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    self.whole().backward(*args, **kwargs)
    if state.world is not None and state.world.transport is None and state.world.told is not None:
        raise Planned


_ANSWERS[torch.Tensor.backward] = _backward
