"""AutoParallel: a network or a training step that is cut over ranks, and called as before: whole in, whole out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlab.layout import Layout, Placed, replicated
from dlab.processes.worker.context import transport as transport_of_this_worker
from dlab.sharding import dropout, rules  # noqa: F401  (they fill the table of rules)
from dlab.sharding.as_module import AsModule
from dlab.sharding.candidates import LATENCY
from dlab.sharding.checking import compare_with_one_process
from dlab.sharding.choosing import Choices, Follower, choose_strategies, key_of, trace
from dlab.sharding.communication import World
from dlab.sharding.explanation import Explanation
from dlab.sharding.home import CUT, Home
from dlab.sharding.networks import modules_in, parameters_in, untouched
from dlab.sharding.parameters import ParameterMode
from dlab.sharding.placing import place
from dlab.sharding.plan import PLANNERS
from dlab.sharding.state import state, working
from dlab.sharding.tensor import _ANSWERS, ShardedTensor, tensors_in, whole_of
from dlab.transports import Transport

MODES = ("semi_auto", "auto", "data_parallel", "stand_alone")


class Planned(BaseException):
    """Ends the planning of a training step after its backward pass: an optimizer must not step on a plan."""


class AutoParallel(AsModule):
    """A network, or a function that makes a training step, cut over ranks: every rank calls it with the same tensors.

    What it returns is whole and carries gradients, so the code around it stays as it was. In mode `semi_auto` operators
    with a strategy are cut by it; the others follow their inputs. A parameter is cut as its first operator cuts it:
    each rank keeps its part only, in the same `nn.Parameter`, so that an optimizer made before works as well.
    `data_parallel` ignores strategies and cuts the batch alone, where it divides; `stand_alone` cuts nothing; `auto`
    chooses strategies that communicate least with at most `memory` bytes of parameters and gradients per rank (see
    `plan`). With `dataset_strategy="data_parallel"` each rank brings its own part of the batch, as many samples as each
    other; the first dimension of every input is that of the samples. `layouts` cut an ordinary network from outside, by
    the names of parameters; that of a module's name is where its result is left.
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
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ValueError(f"ranks={ranks!r}: give the number of ranks to plan for, 1 or more")
        if ranks is None:
            transport = transport_of_this_worker() if transport is None else transport
            if not isinstance(transport, Transport):
                raise TypeError(f"transport={transport!r}: give a transport, such as dlab.transport(), or leave it out")
            self.world = World(transport.size, transport.rank, transport)
        else:  # for a plan alone: no rank need be there
            self.world = World(ranks)
        self._homes: dict[int, Home] = {}
        named: dict[str, Home] = {}  # a tied parameter has several names
        for name, parameter in parameters_in(self.net):
            named[name] = self._homes.setdefault(id(parameter), Home(parameter, name))
        for home in self._homes.values():
            if home.placed is not None:
                home.placed.layout.check_ranks(self.world.size)
        if layouts is not None and not isinstance(layouts, Mapping):
            raise ValueError(f"layouts={layouts!r}: give a dict with the layout of each parameter by its name")
        self._layouts = dict(layouts or {})
        self._plans: dict[Any, Choices] = {}
        self._buffers = _buffers_of(self.net)
        self.memory, self.latency = memory, latency
        self._check_choice()
        place(self.net, named, self._layouts, self.world)
        if parallel_mode == "stand_alone" and self.world.transport is not None:
            for home in self._homes.values():
                home.settle(replicated(Layout((self.world.size,), ("all",)), len(home.shape)), self.world.rank)

    def _check_choice(self) -> None:
        if self.memory is not None and (type(self.memory) is not int or self.memory < 1 or self.mode != "auto"):
            raise ValueError(
                f"memory={self.memory!r} with parallel_mode={self.mode!r}: give a number of bytes per rank, in 'auto'"
            )
        if type(self.latency) is not int or self.latency < 0:
            raise ValueError(f"latency={self.latency!r}: give the bytes that a collective counts more, 0 or more")
        if self._layouts and self.mode != "semi_auto":
            does = "chooses the layouts itself" if self.mode == "auto" else "cuts no weights"
            raise ValueError(f"parallel_mode={self.mode!r} {does}: leave out layouts=, or use 'semi_auto'")

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_ranks_are_there()
        if state.world is not None:
            raise RuntimeError(
                "an AutoParallel is called inside of another: let the outer one wrap the network itself, which the "
                "inner one has as .net"
            )
        if self.mode == "stand_alone":
            return self.net(*args, **kwargs)
        with self._working(self.world):
            result = self._run(self.world, args, kwargs)
            return tree_map(whole_of, result)

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
            result = self.net(*args, **kwargs)
        for buffers in self._buffers:
            for name, buffer in buffers.items():
                if isinstance(buffer, ShardedTensor):
                    buffers[name] = whole_of(buffer)
        return result

    def _working(self, world: World) -> Any:
        state.aside = False
        for home in self._homes.values():
            home.adopt()
        free = not self._layouts and self.mode != "stand_alone"
        return working(world, self._homes, free, self.planner, self.mode)

    def _shard(self, world: World) -> Callable[[Any], Any]:
        layout = Layout((world.size,), ("dp",))
        in_parts = self.dataset_strategy == "data_parallel" and self.mode != "stand_alone" and world.size > 1

        def shard(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                return value
            shape = tuple(value.shape)
            if world.transport is None and world.told is not None:
                value = torch.empty(shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
            whole = replicated(layout, value.dim())
            if in_parts and shape:
                cut = Placed(layout, (("dp",), *((),) * (value.dim() - 1)))
                return ShardedTensor.of(value, cut, (shape[0] * world.size, *shape[1:]))
            return ShardedTensor.of(value.view_as(value), whole, shape, free=True)

        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoParallel:
        """Return the same on the same ranks, with a network of its own, whose parameters are cut as these are."""
        made = copy.copy(self)
        made.net = copy.deepcopy(self.net, memo)
        made._buffers = _buffers_of(made.net)
        made._homes = {}
        for home in self._homes.values():
            copied = copy.copy(home)
            copied.parameter = memo.get(id(home.parameter), home.parameter)
            if home.parameter in CUT:
                CUT[copied.parameter] = CUT[home.parameter]
            made._homes[id(copied.parameter)] = copied
        return made

    def __repr__(self) -> str:
        name = getattr(self.net, "__name__", type(self.net).__name__)
        return f"AutoParallel({name}, {self.mode!r}, {self.world.size} ranks)"

    # before it runs

    def explain(self, *inputs: Any, backward: bool = True, **keywords: Any) -> Explanation:
        """Return a table with a row for each operator: layouts, communication, bytes and memory per rank.

        Nothing is sent and nothing computed: tensors without values go through the network.
        """
        world = World(self.world.size, self.world.rank, told=[])
        before = {key: (home.placed, home.fixed) for key, home in self._homes.items()}
        try:
            with untouched(self.net, self.parameters()), self._working(world):
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
        key = key_of(self.training, args, kwargs)
        if key not in self._plans or not self._plans[key].valid(self._homes):
            cut = self.dataset_strategy == "data_parallel"
            with untouched(self.net, self.parameters()):
                nodes = trace(lambda shard: self._trial(shard, args, kwargs), self._homes, self.world.size, cut)
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


def _buffers_of(net: Any) -> list[dict[str, Any]]:
    """Return the dicts in which a network's modules keep buffers, to be looked through after each call."""
    return [module._buffers for _, module in modules_in(net) if module._buffers]


def _backward(self: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    self.whole().backward(*args, **kwargs)
    state.moved.clear()  # its graph is gone, and weights may now be changed by hand
    if state.world is not None and state.world.transport is None and state.world.told is not None:
        raise Planned


_ANSWERS[torch.Tensor.backward] = _backward
