"""AutoParallel: a network or a training step that is cut over ranks, and called as before: whole in, whole out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlab.layout import Layout, Placed, check_placed, replicated
from dlab.processes.worker.context import transport as transport_of_this_worker
from dlab.sharding import dropout, loading, rules, saving  # noqa: F401  (they fill the table of rules)
from dlab.sharding.candidates import LATENCY
from dlab.sharding.checking import compare_with_one_process
from dlab.sharding.choosing import Choices, Follower, choose_strategies, key_of, trace
from dlab.sharding.clipping import clip_gradients
from dlab.sharding.communication import World, redistribute
from dlab.sharding.explanation import Explanation
from dlab.sharding.home import CUT, Home
from dlab.sharding.networks import buffers_in, networks_in, parameters_in
from dlab.sharding.parameters import ParameterMode
from dlab.sharding.plan import PLANNERS
from dlab.sharding.state import state, working
from dlab.sharding.tensor import _ANSWERS, ShardedTensor, _to, tensors_in, whole_of
from dlab.transports import Transport

MODES = ("semi_auto", "auto", "data_parallel", "stand_alone")


class Planned(BaseException):
    """Ends the planning of a training step after its backward pass: an optimizer must not step on a plan."""


class AutoParallel:
    """A network, or a function that makes a training step, cut over ranks: every rank calls it with the same tensors.

    What it returns is whole and carries gradients, so the code around it stays as it was. In mode `semi_auto` operators
    with a strategy are cut by it; the others follow their inputs. A parameter is cut as its first operator cuts it:
    each rank keeps its part only, in the same `nn.Parameter`, so that an optimizer made before works as well.
    `data_parallel` ignores strategies and cuts the batch alone, where it divides; `stand_alone` cuts nothing; `auto`
    chooses strategies that communicate least with at most `memory` bytes of parameters and gradients per rank (see
    `plan`). With `dataset_strategy="data_parallel"` each rank brings its own part of the batch. `layouts` cut an
    ordinary network from outside, by the names of parameters; that of a module's name is where its result is left.
    With `ranks`, in place of real ones, there is a plan alone (see `explain`).

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
        if not callable(net) or isinstance(net, type):
            raise ValueError(f"AutoParallel wraps a network or a function, not {net!r}: make the network first")
        if ranks is not None and transport is not None:
            raise ValueError(
                "ranks= is for a plan alone, without any rank, and transport= for real ones: give one of them"
            )
        self.net, self.mode, self.dataset_strategy, self.planner = net, parallel_mode, dataset_strategy, planner
        if ranks is None:
            transport = transport_of_this_worker() if transport is None else transport
            self.world = World(transport.size, transport.rank, transport)
        else:  # for a plan alone: no rank need be there
            self.world = World(ranks)
        self._homes: dict[int, Home] = {}
        for name, parameter in parameters_in(self.net):
            self._homes.setdefault(id(parameter), Home(parameter, name))
        for home in self._homes.values():
            if home.placed is not None:
                home.placed.layout.check_ranks(self.world.size)
        if layouts is not None and not isinstance(layouts, Mapping):
            raise ValueError(f"layouts={layouts!r}: give a dict with the layout of each parameter by its name")
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

    def _place(self) -> None:
        """Cut the parameters whose layouts are given, and let modules with a layout leave their results in it."""
        unknown = dict(self._layouts)
        by_name = {home.name: home for home in self._homes.values()}
        for name, placed in self._layouts.items():
            check_placed(placed, f"the layout of {name}")
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
        for module, prefix in networks_in(self.net):
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
        self._check_ranks_are_there()
        if self.mode == "stand_alone":
            return self.net(*args, **kwargs)
        with self._working(self.world):
            result = self._run(self.world, args, kwargs)
            return tree_map(whole_of, result)

    def _check_ranks_are_there(self) -> None:
        if self.world.transport is None:
            raise RuntimeError(
                "this network is only planned, with ranks=: no rank is there to compute it; leave out ranks= where "
                "every rank calls it, or ask for explain()"
            )

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
        with ParameterMode():
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
            if home.parameter in CUT:
                CUT[copied.parameter] = CUT[home.parameter]
            made._homes[id(copied.parameter)] = copied
        return made

    # what ranks hold

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parts of the parameters, for any optimizer of torch that updates each number by itself."""
        return (home.parameter for home in self._homes.values())

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole ones is at most `max_norm`; return the norm that they had.

        `clip_grad_norm_` of torch would see the norm of this rank's parts. Every rank must call it.
        """
        return clip_gradients(self._homes.values(), self.world, max_norm)

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
        saving.save(folder, self._homes.values(), self.world, dict(buffers_in(self.net)), optimizer)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what `save` has saved, in whatever layout and by however many ranks; every rank must call it.

        A rank reads its own parts only. A parameter of `no_init_parameters()` that has no layout yet is read when it
        is placed, and so is an optimizer's state for a parameter without a layout; their files stay open.
        """
        loading.load(folder, self._homes.values(), self.world, dict(buffers_in(self.net)), optimizer)

    # before it runs

    def explain(self, *inputs: Any, backward: bool = True, **keywords: Any) -> Explanation:
        """Return a table with a row for each operator: layouts, communication, bytes and memory per rank.

        Nothing is sent and nothing computed: tensors without values go through the network.
        """
        world = World(self.world.size, self.world.rank, told=[])
        before = {key: (home.placed, home.fixed) for key, home in self._homes.items()}
        gradients = {key: home.parameter.grad for key, home in self._homes.items()}
        try:
            with self._working(world):
                try:
                    result = tree_map(whole_of, self._run(world, inputs, keywords))
                    results = [each for each in tensors_in(result) if each.requires_grad]
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
            tree_map(whole_of, self._call(shard, args, kwargs))
        except Planned:
            pass

    # a silent error

    def check(self, *inputs: Any, tolerance: float | None = None, **keywords: Any) -> str:
        """Compare results and gradients with those of one process; every rank calls it with the same small batch.

        Raises an error that names the first operator, on the way back, whose gradient differs, or the rank that was
        given another batch or other weights. Of each tensor the largest difference counts, as a share of its largest
        number: `tolerance`, by default 1e-4 for float32. The gradients of the parameters stay as they are.
        """
        self._check_ranks_are_there()
        return compare_with_one_process(self, inputs, keywords, tolerance)


def _backward(self: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    self.whole().backward(*args, **kwargs)
    state.moved.clear()  # its graph is gone, and weights may now be changed by hand
    if state.world is not None and state.world.transport is None and state.world.told is not None:
        raise Planned


_ANSWERS[torch.Tensor.backward] = _backward
