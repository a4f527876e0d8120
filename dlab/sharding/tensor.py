"""A tensor of which each rank holds a part; the operators of torch that dlab can cut work on it as on a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlab.layout import Layout, Placed, replicated
from dlab.sharding.communication import World, redistribute
from dlab.sharding.home import Home
from dlab.sharding.operation import Operation, Resolved, Strategy, by_following, by_strategy, lengths_of, resolve
from dlab.sharding.refusals import check_arguments, not_known
from dlab.sharding.state import state

Rule = Callable[..., Operation]
RULES: dict[Any, Rule] = {}  # by the torch function; filled by `rules`
# What torch calls the arguments that rules get by their place.
_IN_ORDER = ("input", "tensors", "other", "target", "mat2", "vec", "exponent", "shape", "size", "dims")


def _getter(attribute: str) -> Any:
    """Return what torch calls when a tensor's attribute is read."""
    return getattr(torch.Tensor, attribute).__get__


_METADATA = {
    _getter("dtype"),
    _getter("device"),
    _getter("requires_grad"),
    _getter("is_leaf"),
    _getter("grad_fn"),
    _getter("layout"),
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.dim,
    _getter("ndim"),
    _getter("is_sparse"),
    torch.Tensor.is_complex,
    _getter("is_cuda"),
    torch.Tensor.element_size,
}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _getter("shape"): lambda self: torch.Size(self.whole_shape),
    torch.Tensor.size: lambda self, dim=None: torch.Size(self.whole_shape) if dim is None else self.whole_shape[dim],
    torch.Tensor.numel: lambda self: torch.Size(self.whole_shape).numel(),
    torch.Tensor.__len__: lambda self: self.whole_shape[0],
    torch.Tensor.contiguous: lambda self: self,
    torch.Tensor.backward: lambda self, *args, **more: self.whole().backward(*args, **more),
    torch.Tensor.item: lambda self: self.whole().item(),
    torch.Tensor.detach: lambda self: ShardedTensor.of(_plain(self).detach(), self.placed, self.whole_shape),
    torch.Tensor.tolist: lambda self: self.whole().tolist(),
    torch.Tensor.__float__: lambda self: float(self.whole()),
    torch.Tensor.__format__: lambda self, spec: format(self.whole(), spec) if spec else str(self),
}


class ShardedTensor(torch.Tensor):
    """This rank's part of a tensor, which knows the layout and the shape of the whole: `x.shape` is the whole shape.

    `x.placed` is its layout, `x.whole()` an ordinary tensor that every rank has. Its parts carry gradients.
    """

    placed: Placed
    whole_shape: tuple[int, ...]
    free: bool

    @staticmethod
    def of(local: torch.Tensor, placed: Placed, shape: Sequence[int], free: bool = False) -> ShardedTensor:
        """Return a rank's part as a sharded tensor."""
        made = local.as_subclass(ShardedTensor)
        made.placed, made.whole_shape, made.free = placed, tuple(shape), free
        return made

    def local(self) -> torch.Tensor:
        """Return this rank's part as an ordinary tensor."""
        return _plain(self)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, on every rank; gradients go back through it."""
        if state.chooser is not None:
            state.chooser.whole(self)
        nowhere = replicated(self.placed.layout, len(self.whole_shape))
        return move(self, nowhere, (), "the result")

    def __repr__(self) -> str:  # type: ignore[override]
        sizes = " × ".join(map(str, self.whole_shape)) or "a number"
        return f"<ShardedTensor {sizes}, {self.placed}, here {tuple(_plain(self).shape)}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ANSWERS:
                return _ANSWERS[func](*args, **kwargs)
            return call(func, args, kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, ShardedTensor) else tensor


def functions() -> list[str]:
    """Return the names of torch's functions that dlab knows how to cut."""
    return sorted({name for each in RULES if (name := getattr(each, "__name__", "")) and not name.startswith("__")})


def call(func: Any, args: Any, kwargs: Any, strategy: Strategy | None = None, result: Any = None) -> Any:
    """Call a torch function on sharded tensors, by its rule; a function that has none is refused by name."""
    rule = RULES.get(func)
    if rule is None:
        raise not_known(func, functions())
    for keyword in _IN_ORDER if kwargs else ():
        if keyword in kwargs:
            kwargs = dict(kwargs)
            args = (*args, kwargs.pop(keyword))
    try:
        operation = rule(*args, **kwargs)
    except TypeError:
        check_arguments(func, rule, args, kwargs)
        raise
    return execute(operation, strategy, result)


_resolved: dict[Any, tuple[Resolved, dict[str, int], tuple[int, ...]]] = {}  # a few hundred calls at most


def execute(operation: Operation, strategy: Strategy | None = None, result: Any = None) -> ShardedTensor:
    """Cut an operator: bring each input to where the strategy needs it, compute this rank's part, place the result."""
    world = state.world
    if world is None:
        raise RuntimeError(
            f"{operation.name} got a sharded tensor outside of the network that AutoParallel wraps: let the network "
            "return it, then every rank has it whole"
        )
    wanted, state.wanted = state.wanted, None
    homes = [state.homes.get(id(each)) for each in operation.tensors]
    for each, home in zip(operation.tensors, homes, strict=True):
        if home is None and type(each) is nn.Parameter:
            raise ValueError(
                f"{operation.name} uses a parameter of shape {tuple(each.shape)} that AutoParallel has not found: put "
                "it into the network, or into an nn.Module or a list that the wrapped function names"
            )
    shapes = tuple(
        each.whole_shape if isinstance(each, ShardedTensor) else home.shape if home else tuple(each.shape)
        for each, home in zip(operation.tensors, homes, strict=True)
    )
    if state.chooser is not None:
        strategy, result = state.chooser.choose(operation, shapes, strategy, result)
    if world.size == 1 or state.mode in ("data_parallel", "stand_alone"):
        strategy = result = wanted = None
    if strategy is not None and operation.bias is not None and len(strategy) == len(operation.tensors) + 1:
        strategy = _without_bias(operation, strategy)
    placed = tuple(_placed(each, home, world) for each, home in zip(operation.tensors, homes, strict=True))
    fixed = tuple(home is not None and home.placed is not None for home in homes)
    free = (
        strategy is None
        and state.free
        and all(
            each.free
            if isinstance(each, ShardedTensor)
            else home is None or home.placed is None or not home.placed.used
            for each, home in zip(operation.tensors, homes, strict=True)
        )
    )
    call_of = operation.name, *operation.subscripts, operation.result, operation.uncut, operation.linear
    key = call_of, *operation.lengths.values(), operation.shape, shapes, placed, fixed, free, _key(strategy), world.size
    if key not in _resolved:
        _resolved[key] = _find(operation, shapes, placed, fixed, free, strategy, world.size)
    found, lengths, shape = _resolved[key]
    name = world.begin(operation.name, found)
    parts = [
        move(each, target, varying, name, home)
        for each, target, varying, home in zip(operation.tensors, found.inputs, found.varying, homes, strict=True)
    ]
    state.found = found
    made = ShardedTensor.of(operation.compute(parts, lengths), found.result, operation.shape or shape)
    if result is not None:
        made = _to(made, _out(operation, result, found, world), name)
    elif wanted is not None:
        made = _to(made, wanted, name)
    elif made.placed.partial and (strategy is not None or operation.bias is not None):
        made = _to(made, Placed(made.placed.layout, made.placed.dims), name)
    made.free = free and operation.linear
    if state.chooser is not None:
        state.chooser.made(made)
    world.end(made)
    return made if operation.bias is None else execute(_plus_bias(made, operation.bias))


def _plus_bias(made: ShardedTensor, bias: Any) -> Operation:
    """Return the addition of a bias; under autocast the sum keeps the product's type, as in torch's own layer."""
    addition = RULES[torch.add](made, bias)
    if not made.is_meta and torch.is_autocast_enabled(made.device.type):
        add = addition.compute
        addition.compute = lambda parts, lengths: add([parts[0], parts[1].to(parts[0].dtype)], lengths)
    return addition


def _without_bias(operation: Operation, strategy: Strategy) -> Strategy:
    """Return a strategy without the last entry, that of the bias, which must be cut as the result is."""

    def cuts(entry: Any) -> Any:
        return entry.dims if isinstance(entry, Placed) else tuple(entry) if isinstance(entry, (tuple, list)) else entry

    *others, weight, bias = strategy
    if not isinstance(cuts(weight), tuple) or cuts(bias) != cuts(weight)[:1]:
        raise ValueError(
            f"{operation.name}: the bias is added to the result, so it is cut as dimension 0 of the weight: its entry "
            f"cannot be {bias} where that of the weight is {weight}"
        )
    return *others, weight


def _key(strategy: Any) -> Any:
    return tuple(map(_key, strategy)) if isinstance(strategy, (tuple, list)) else strategy


def _find(
    operation: Operation, shapes: Any, placed: Any, fixed: Any, free: bool, strategy: Any, ranks: int
) -> tuple[Resolved, dict[str, int], tuple[int, ...]]:
    kept: tuple[str, ...] = ()
    lengths = lengths_of(operation, shapes)
    if strategy is not None:
        cuts, layout = by_strategy(operation, shapes, strategy, ranks)
    else:
        cuts, layout = by_following(operation, shapes, placed, fixed, ranks)
        first = next(
            (word[0] for word in operation.subscripts[:1] if word and word[0] not in operation.uncut + "."), None
        )
        if (
            free
            and not operation.linear
            and not any(cuts.values())
            and first
            and first in operation.result
            and lengths[first] % ranks == 0
        ):
            layout = Layout((ranks,), ("dp",))
            cuts = {first: ("dp",)}
        if operation.linear and len(operation.tensors) == 1 and placed[0] is not None:
            kept = placed[0].partial
            layout = placed[0].layout if kept else layout
    found = resolve(operation.subscripts, operation.result, cuts, layout, operation.partial, kept)
    local = dict(lengths)
    for subscript, axes in cuts.items():
        for axis in axes:
            local[subscript] //= layout.lengths[axis]
    return found, local, tuple(lengths.get(subscript, 1) for subscript in operation.result)


def _placed(tensor: Any, home: Home | None, world: World) -> Placed | None:
    if isinstance(tensor, ShardedTensor):
        return tensor.placed
    if home is not None:
        return home.placed
    return replicated(Layout((world.size,), ("all",)), tensor.dim())


def _out(operation: Operation, result: Any, found: Resolved, world: World) -> Placed:
    """Return where `out_strategy` leaves the result: a layout, or cuts of each dimension."""
    if isinstance(result, (tuple, list)) and len(result) == 1 and not isinstance(result[0], int):
        result = result[0]
    if isinstance(result, Placed):
        result.layout.check_ranks(world.size)
        return result
    if not isinstance(result, (tuple, list)) or len(result) != len(operation.result):
        raise ValueError(
            f"{operation.name}: out_strategy={result!r} does not fit its result of {len(operation.result)} dimensions: "
            "give a layout, or a number of cuts for each dimension"
        )
    now, layout = found.result, found.result.layout
    dims = []
    left = [axis for axis in layout.names if axis in now.partial]
    for number, (cuts, axes) in enumerate(zip(result, now.dims, strict=True)):
        have = now.cuts(number)
        if cuts != have:  # the cuts of a partial sum may be scattered over a dimension
            for axis in list(left):
                if have < cuts:
                    axes, have = (*axes, axis), have * layout.lengths[axis]
                    left.remove(axis)
        if cuts != have:
            return _cut_evenly(operation, result, world)
        dims.append(axes)
    return Placed(layout, tuple(dims))


def _cut_evenly(operation: Operation, cuts: Sequence[int], world: World) -> Placed:
    whole = Operation(
        f"the result of {operation.name}", [None], [operation.result], operation.result, operation.compute
    )
    subscripts, layout = by_strategy(whole, [list(cuts)], (tuple(cuts),), world.size)
    return Placed(layout, tuple(subscripts.get(subscript, ()) for subscript in operation.result))


def _to(tensor: ShardedTensor, target: Placed, name: str) -> ShardedTensor:
    return ShardedTensor.of(move(tensor, target, (), name), target, tensor.whole_shape)


def move(tensor: Any, target: Placed, varying: tuple[str, ...], name: str, home: Home | None = None) -> torch.Tensor:
    """Return this rank's part of a tensor in another layout; what has been moved there before is not moved again."""
    world = state.world
    assert world is not None
    world.operator = name
    key = id(tensor), _version(tensor), target, varying, torch.is_grad_enabled()
    if (kept := state.moved.get(key)) is not None:
        return kept[1]
    target.layout.check_ranks(world.size)
    if home is not None:
        if home.placed is None:
            target.local_shape(home.shape)
            if world.transport is None:
                home.placed = target
            else:
                home.settle(target, world.rank)
        assert home.placed is not None
        source, shape = home.placed, home.shape
        local = stand_in(home, source) if world.transport is None else home.parameter
    elif isinstance(tensor, ShardedTensor):
        source, shape, local = tensor.placed, tensor.whole_shape, _plain(tensor)
    else:
        source, shape, local = replicated(target.layout, tensor.dim()), tuple(tensor.shape), tensor
        if world.transport is None and not tensor.is_meta:
            local = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    target.local_shape(shape)
    moved = redistribute(local, source, target, shape, world, varying, state.planner)
    if moved is not local:
        state.moved[key] = tensor, moved  # with the tensor, so that no other gets its id
    return moved


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been changed in place: what was moved before is then out of date."""
    return 0 if isinstance(tensor, ShardedTensor) or tensor.is_inference() else tensor._version


def stand_in(home: Home, placed: Placed) -> torch.Tensor:
    """Return a tensor without values in place of a parameter's part, for a plan."""
    key = ("stand-in", id(home))
    if key not in state.moved:
        like = home.parameter
        part = torch.empty(placed.local_shape(home.shape), dtype=like.dtype, device="meta")
        state.moved[key] = part.requires_grad_(like.requires_grad)
    return state.moved[key]


def whole_of(value: Any) -> Any:
    """Return a sharded tensor, or a parameter of which this rank holds a part, whole; anything else as it is."""
    home = state.homes.get(id(value)) if isinstance(value, nn.Parameter) else None
    if home is not None and home.placed is not None and home.placed.used:
        return move(value, replicated(home.placed.layout, len(home.shape)), (), "the result", home)
    return value.whole() if isinstance(value, ShardedTensor) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, such as a tuple or a dict of them."""
    found: list[torch.Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found
