"""AutoParallel: a network or a training step that is cut over ranks, and called as before: whole in, whole out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from dlab.sharding import dropout, loading, rules, saving  # noqa: F401  (they fill the table of rules)
from dlab.sharding.candidates import LATENCY
from dlab.sharding.choosing import Choices, Follower, choose_strategies, key_of, trace
from dlab.sharding.communication import World, redistribute
from dlab.sharding.explanation import Explanation
from dlab.sharding.initial import put
from dlab.sharding.plan import PLANNERS
from dlab.sharding.tensor import (
    _ANSWERS,
    RULES,
    Home,
    ShardedTensor,
    _cut,
    _getter,
    _plain,
    _to,
    call,
    cut_state,
    move,
    state,
    working,
)
from dlab.transports import Transport

MODES = ("semi_auto", "auto", "data_parallel", "stand_alone")
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
        if func not in _LOCAL:
            _refuse_parts(func, args)
        return func(*args, **kwargs)


# what may be done with this rank's part of a parameter, as an optimizer or a loop does
_LOCAL = {
    *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_"),
    *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.startswith("__i") and name != "__invert__"),
    *(torch.Tensor.__hash__, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim),
    *(torch.Tensor.element_size, torch.Tensor.detach, torch.Tensor.__repr__, torch.Tensor.register_hook),
    *(torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.is_grad_enabled, torch.set_grad_enabled),
    torch.Tensor.register_post_accumulate_grad_hook,
}


def _refuse_parts(func: Any, args: Any) -> None:
    """Raise an error if a function that dlab cannot cut would see a part of a parameter, or of its gradient, as all."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):  # an attribute such as `weight.grad`
        return
    known = dict(state.homes)
    if "norm" in name:  # as in the clipping of gradients
        known |= {id(home.parameter.grad): home for home in known.values() if home.parameter.grad is not None}
    for each in (value for arg in args for value in (arg if isinstance(arg, (tuple, list)) else (arg,))):
        home = known.get(id(each)) if isinstance(each, torch.Tensor) else None
        if home is not None and home.placed is not None and home.placed.used:
            raise NotImplementedError(
                f"dlab does not know how to cut {name!r}, and {home.name} is cut, {home.placed}: call it outside of "
                "the network that AutoParallel wraps, on par.whole(), or write it with functions that dlab can cut"
            )


def _aside(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    state.aside = True
    cut_state(optimizer)


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
    `data_parallel` ignores strategies and cuts the batch alone; `stand_alone` cuts nothing; `auto` chooses strategies
    that communicate least with at most `memory` bytes of parameters and gradients per rank (see `plan`). With
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
        memory: int | None = None,
        latency: int = LATENCY,
    ) -> None:
        if parallel_mode not in MODES:
            raise ValueError(f"there is no parallel mode {parallel_mode!r}: use {', '.join(map(repr, MODES))}")
        if dataset_strategy not in ("full_batch", "data_parallel"):
            raise ValueError(f"dataset_strategy={dataset_strategy!r}: use 'full_batch' or 'data_parallel'")
        if planner not in PLANNERS:
            raise ValueError(f"there is no planner {planner!r}: use {' or '.join(map(repr, PLANNERS))}")
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
        for home in self._homes.values():
            if home.placed is not None:
                home.placed.layout.check_ranks(self.world.size)
        self._layouts = dict(layouts or {})
        self._plans: dict[Any, Choices] = {}
        self.memory, self.latency = memory, latency
        self._check_memory()
        self._place()
        if parallel_mode == "stand_alone" and self.world.transport is not None:
            for home in self._homes.values():
                home.settle(replicated(Layout((self.world.size,), ("all",)), len(home.shape)), self.world.rank)

    def _check_memory(self) -> None:
        if self.memory is not None and (type(self.memory) is not int or self.memory < 1 or self.mode != "auto"):
            raise ValueError(
                f"memory={self.memory!r} with parallel_mode={self.mode!r}: give a number of bytes per rank, in 'auto'"
            )
        if self.mode == "auto" and self._layouts:
            raise ValueError("parallel_mode='auto' chooses the layouts itself: leave out layouts=, or use 'semi_auto'")

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
                if home.placed not in (None, placed):
                    raise ValueError(
                        f"{name} is cut already, {home.placed}, by another AutoParallel of the same network: use one "
                        "layout for both"
                    )
                try:
                    placed.local_shape(home.shape)
                except ValueError as problem:
                    raise ValueError(f"{name}: {problem}") from None
                home.fixed = True
                if self.world.transport is None:
                    home.placed = placed
                elif home.placed is None:
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
        if self.mode != "auto" or world.size == 1:
            return self._call(self._shard(world), args, kwargs)
        state.chooser = Follower(self.plan(*args, **kwargs))
        try:
            return self._call(self._shard(world), args, kwargs)
        finally:
            state.chooser = None

    def _call(self, shard: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(shard, args), tree_map(shard, kwargs)
        with _ParameterMode():
            return self.net(*args, **kwargs)

    def _working(self, world: World) -> Any:
        state.aside = False
        for home in self._homes.values():
            home.adopt()
        return working(world, self._homes, not self._layouts, self.planner, self.mode)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoParallel:
        """Return the same on the same ranks, with a network of its own, whose parameters are cut as these are."""
        made = copy.copy(self)
        made.net = copy.deepcopy(self.net, memo)
        made._homes = {}
        for home in self._homes.values():
            copied = copy.copy(home)
            copied.parameter = memo.get(id(home.parameter), home.parameter)
            if home.parameter in _cut:
                _cut[copied.parameter] = _cut[home.parameter]
            made._homes[id(copied.parameter)] = copied
        return made

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
                value = home.parameter.grad if grad else home.value()
                if value is not None and home.placed is not None and self.world.size > 1:
                    nowhere = replicated(home.placed.layout, len(home.shape))
                    value = redistribute(value, home.placed, nowhere, home.shape, self.world)
                found[home.name] = None if value is None else value.clone()
        return found

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Save the parameters, and an optimizer, by slice: each rank writes what it is the first to hold.

        Every rank must call it, with a folder that all hosts share. What was saved there before stays, until all of
        the new files are complete.
        """
        saving.save(folder, self._homes.values(), self.world, dict(self._buffers()), optimizer)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what `save` has saved, in whatever layout and by however many ranks; every rank must call it.

        A rank reads its own parts only. A parameter of `no_init_parameters()` that has no layout yet is read when it
        is placed, and so is an optimizer's state for a parameter without a layout; their files stay open.
        """
        loading.load(folder, self._homes.values(), self.world, dict(self._buffers()), optimizer)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, prefix in self._modules():
            for name, each in module.named_modules(prefix=prefix):
                for key, buffer in each._buffers.items():
                    if buffer is not None and key not in each._non_persistent_buffers_set:
                        yield f"{name}.{key}" if name else key, buffer

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

    def plan(self, *args: Any, **kwargs: Any) -> Choices:
        """Return the strategies that mode `auto` chooses for these inputs, with the next best of each operator.

        They send the fewest bytes per rank, forward and backward, that `memory` allows: `choose_strategies` says what
        counts. Products are divided among all ranks, where their dimensions allow it. Nothing is sent; every rank comes
        to the same choice. A strategy given by hand stays.
        """
        if self.mode != "auto":
            raise ValueError(f"parallel_mode={self.mode!r} leaves nothing to choose: use parallel_mode='auto'")
        for home in self._homes.values():
            home.adopt()
        key = key_of(self.net, args, kwargs)
        if key not in self._plans or not self._plans[key].valid(self._homes):
            gradients = {key: home.parameter.grad for key, home in self._homes.items()}
            cut = self.dataset_strategy == "data_parallel"
            try:
                nodes = trace(lambda shard: self._trial(shard, args, kwargs), self._homes, self.world.size, cut)
            finally:
                for each, home in self._homes.items():
                    home.parameter.grad = gradients[each]
            bounds = self.world.size, self.memory, self.planner, self.latency
            self._plans[key] = choose_strategies(nodes, self._homes, *bounds)
        return self._plans[key]

    def _trial(self, shard: Callable[[Any], Any], args: Any, kwargs: Any) -> None:
        try:
            tree_map(_whole, self._call(shard, args, kwargs))
        except Planned:
            pass

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
            random = torch.get_rng_state()  # for dropout
            given, whole = tree_map(_leaf, inputs), tree_map(_leaf, self._whole_batch(inputs))
            cut, cut_gradients = self._traced(self.world, given)
            mine = self.whole(grad=True) | _gradients_of_inputs(self._whole_batch(given, grad=True))
            alone = self._unsharded()
            torch.set_rng_state(random)
            one, one_gradients = alone._traced(alone.world, whole)
            truth = alone.whole(grad=True) | _gradients_of_inputs([each.grad for each in _tensors(whole)])
            _compare(cut, one, cut_gradients, one_gradients, mine, truth, tolerance)
        finally:
            for home in self._homes.values():
                home.parameter.grad = kept[home.name]
        return f"the results and gradients of {len(one)} operators equal those of one process, to {tolerance:g}"

    def _whole_batch(self, inputs: Any, grad: bool = False) -> Any:
        """Return inputs, or a list of their gradients, whole, where each rank has brought a part of the batch."""

        def join(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not cut or not value.dim():
                return value
            layout = Layout((self.world.size,), ("dp",))
            placed = Placed(layout, (("dp",), *((),) * (value.dim() - 1)))
            shape = (value.shape[0] * self.world.size, *value.shape[1:])
            return redistribute(value.detach(), placed, replicated(layout, value.dim()), shape, self.world)

        cut = self.dataset_strategy == "data_parallel" and self.world.size > 1
        return tree_map(join, [each.grad for each in _tensors(inputs)] if grad else inputs)

    def _unsharded(self) -> AutoParallel:
        weights = self.whole()
        if not isinstance(self.net, nn.Module):
            raise ValueError(
                "check compares networks: wrap the nn.Module itself, not the training step, and check that"
            )
        net = copy.deepcopy(self.net)
        for name, parameter in net.named_parameters():
            put(parameter, weights[name])  # type: ignore[arg-type]
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
                with torch._C.DisableTorchFunctionSubclass():  # of the very tensor that the next operator has used
                    for _, each in made:
                        if each.requires_grad:
                            each.retain_grad()
                if any(each.requires_grad for each in results):
                    torch.stack([each.sum() for each in results if each.requires_grad]).sum().backward()
                with torch.no_grad():
                    wholes = [(f"{number} {name}", each.whole()) for number, (name, each) in enumerate(made, 1)]
                    gradients = [_gradient(each) for _, each in made]
        finally:
            world.outputs = None
        return wholes, gradients


def _gradient(tensor: ShardedTensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient = tensor.grad
    if gradient is None:
        return None
    placed = Placed(tensor.placed.layout, tensor.placed.dims)  # the gradient of a partial sum is whole
    return ShardedTensor.of(_plain(gradient), placed, tensor.whole_shape).whole()


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
            raise AssertionError(f"the gradient of {name} differs from that of one process")


def _leaf(value: Any) -> Any:
    """Return a tensor with a gradient of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _gradients_of_inputs(gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {f"input {number}": each for number, each in enumerate(gradients)}


def _whole(value: Any) -> Any:
    home = state.homes.get(id(value)) if isinstance(value, nn.Parameter) else None
    if home is not None and home.placed is not None and home.placed.used:
        return move(value, replicated(home.placed.layout, len(home.shape)), (), "the result", home)
    return value.whole() if isinstance(value, ShardedTensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


def _backward(self: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    self.whole().backward(*args, **kwargs)
    state.moved.clear()  # its graph is gone, and weights may now be changed by hand
    if state.world is not None and state.world.transport is None and state.world.told is not None:
        raise Planned


_ANSWERS[torch.Tensor.backward] = _backward
