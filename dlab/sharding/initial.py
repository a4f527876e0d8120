"""Parameters that nobody holds whole: how each is made is written down, and a rank makes only its own part of it.

A part has the values that it has in one process with the same seed: the random numbers of the whole are drawn again, a
block at a time, and all but those of the part are thrown away. That costs time, and almost no memory. Taught in
`07_operator_parallel.ipynb`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dlab.sharding.recipe import DRAWS, Box, Recipe

_FILLS = {"fill_", "zero_"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like"}
_BY_ELEMENT = {
    *("mul", "div", "add", "sub", "rsub", "pow", "neg", "abs", "exp", "log", "sqrt", "erfinv", "tanh"),
    *("clamp", "clamp_min", "clamp_max", "_to_copy"),
}


class Postponed(torch.Tensor):
    """A tensor without memory that writes down how its values are to be made, until a rank makes its part.

    A postponed tensor that is not a parameter is made whole as soon as something computes with it; a parameter is not.
    """

    recipe: Recipe
    box: Box | None  # of a view: the part of the recipe's tensor that it shows

    @staticmethod
    def of(recipe: Recipe, requires_grad: bool = False, shape: Any = None, box: Box | None = None) -> Postponed:
        """Return a tensor that is made by a recipe."""
        made = torch.Tensor._make_wrapper_subclass(
            Postponed, recipe.shape if shape is None else shape, dtype=recipe.dtype, requires_grad=requires_grad
        )
        made.recipe, made.box = recipe, box
        if getattr(_open, "made", None) is not None:
            _open.made.append(made)
        return made

    # read and written by torch.nn.Parameter
    @property
    def _is_param(self) -> bool:
        return self.__dict__.get("parameter", False)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__dict__["parameter"] = self.recipe.waits = value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{'parameter' if self._is_param else 'tensor'} of {_sizes(self.shape)}, not made yet>"

    def __deepcopy__(self, memo: Any) -> Postponed:
        if id(self) not in memo:
            function, args = self.__reduce_ex__(2)
            memo[id(self)] = function(*args)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.recipe.copy(), self.requires_grad, self._is_param, self.recipe.waits)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self, name = args[0], func.overloadpacket.__name__
        if isinstance(self, Postponed) and self.recipe.made is None:
            plain = not any(isinstance(each, torch.Tensor) and each.dim() for each in args[1:])
            if (done := self._write_down(func, name, args[1:], kwargs) if plain else None) is not None:
                return done
        return _compute(func, args, kwargs)

    def _write_down(self, func: Any, name: str, args: Any, kwargs: Any) -> Postponed | None:
        """Add what torch is asked to do to the recipe, and return its result; None if it cannot be written down."""
        recipe = self.recipe
        if self.box is not None:
            if name not in _FILLS | {"copy_"}:
                return None
            recipe.filled.append((self.box, float(args[0]) if args else 0.0))
            return self
        if name in DRAWS | _FILLS:
            recipe.begin(func, args, kwargs.get("generator"))
            return self
        if name in ("detach", "alias"):
            return Postponed.of(recipe)
        if name == "clone":
            return Postponed.of(recipe.copy())
        if name.removesuffix("_") in _BY_ELEMENT and kwargs.get("device") in (None, torch.device("cpu")):
            if name.endswith("_"):
                recipe.add(func, args, kwargs)
                return self
            made = recipe.copy()
            made.add(func, args, kwargs)
            return Postponed.of(made)
        if name in _LIKE and recipe.waits:
            return self._like(name, args)
        if name in ("select", "slice") and (len(args) < 4 or args[3] == 1):
            return self._view(func, name, *args[:3])
        return None

    def _like(self, name: str, args: Any) -> Postponed:
        made = Postponed.of(Recipe(self.shape, self.dtype))
        made.fill_(args[0] if args else float(name == "ones_like"))
        made.recipe.waits = True  # an optimizer's state, to be cut as its parameter is
        return made

    def _view(self, func: Any, name: str, dim: int = 0, start: Any = 0, stop: Any = None) -> Postponed:
        length = self.shape[dim]
        start = min(max(start + length if start < 0 else start, 0), length)
        stop = start + 1 if name == "select" else length if stop is None else min(stop % (2 * length), length)
        box = [slice(0, each) for each in self.shape]
        box[dim] = slice(start, max(start, stop))
        args = (dim, start) if name == "select" else (dim, start, stop)
        shape = func(torch.empty(self.shape, device="meta"), *args).shape
        return Postponed.of(self.recipe, shape=shape, box=tuple(box))


def _rebuild(recipe: Recipe, requires_grad: bool, is_parameter: bool, waits: bool) -> Postponed:
    made = Postponed.of(recipe, requires_grad)
    if is_parameter:
        made._is_param = True
    recipe.waits = waits
    return made


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that needs values: tensors that are not parameters are made whole first."""

    def made(value: Any) -> Any:
        if not isinstance(value, Postponed):
            return value
        if value.recipe.made is None and value.recipe.waits:
            raise _refusal(value, func)
        if value.recipe.made is None:
            value.recipe.made = value.recipe.whole()
        return value.recipe.made if value.box is None else value.recipe.made[value.box].view(value.shape)

    result = func(*tree_map(made, args), **tree_map(made, kwargs))
    return args[0] if func._schema.is_mutable and isinstance(args[0], Postponed) else result


def _refusal(parameter: Postponed, func: Any) -> Exception:
    """Return an error that says why a function cannot have a parameter's values; its name is found in the stack."""
    name, initialiser = f"a parameter of {_sizes(parameter.recipe.shape)}", ""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "torch.nn.init":
            initialiser = frame.f_code.co_name
        for each in list(frame.f_locals.values()):
            if isinstance(each, nn.Module):
                for inner, found in each.named_parameters():
                    if isinstance(found, Postponed) and found.recipe is parameter.recipe:
                        name = f"the parameter {inner} of {_sizes(parameter.recipe.shape)}"
    if initialiser or func._schema.is_mutable or getattr(_open, "made", None) is not None:
        return NotImplementedError(
            f"{name} cannot be made part by part with {initialiser or func.overloadpacket.__name__!r}, which computes "
            "with values of the whole: use uniform_, normal_, fill_ and functions of single elements, or make this "
            "network outside of no_init_parameters()"
        )
    return RuntimeError(
        f"{name} has no values yet, because it was made inside no_init_parameters(): call the network through "
        "dlab.AutoParallel, which makes each rank's part, or make it outside"
    )


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def part_of(tensor: torch.Tensor, box: Box | None = None) -> torch.Tensor:
    """Return a copy of a part, or of all, of a tensor that has its values or has been postponed."""
    if isinstance(tensor, Postponed):
        return (tensor.recipe.whole() if box is None else tensor.recipe.part(box)).to(tensor.dtype)
    tensor = tensor.detach()
    return (tensor if box is None else tensor[box]).clone(memory_format=torch.contiguous_format)


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor other values, of another shape perhaps; it stays the same object, for optimizers that know it."""
    if not isinstance(tensor, Postponed):
        tensor.data = value
        return
    if tensor._is_param:
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)


# what is made inside the context

_open = threading.local()


class _PostponeMode(TorchFunctionMode):
    """Makes postponed tensors where torch would make one of floating-point numbers in memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FACTORIES or not set(kwargs) <= {"dtype", "device", "requires_grad", "size", "fill_value"}:
            return func(*args, **kwargs)
        more = dict(kwargs)
        size, *value = (more.pop("size"), *args) if "size" in more else args if func is torch.full else (args,)
        value = value or [more.pop("fill_value", None)]
        size = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        needs_gradient = more.pop("requires_grad", False)
        like = torch.empty(0, **more)
        if like.device.type != "cpu" or not like.is_floating_point() or not math.prod(size):
            return func(*args, **kwargs)
        made = Postponed.of(Recipe(size, like.dtype))
        _FACTORIES[func](made, *value)
        return made.requires_grad_(needs_gradient)


_FACTORIES: dict[Any, Callable[..., Any]] = {
    torch.empty: lambda made, _: made,
    torch.zeros: lambda made, _: made.zero_(),
    torch.ones: lambda made, _: made.fill_(1.0),
    torch.full: lambda made, value: made.fill_(value),
    torch.rand: lambda made, _: made.uniform_(0, 1),
    torch.randn: lambda made, _: made.normal_(0, 1),
}


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Make networks inside whose parameters nobody holds whole, and optimizers for them.

    Each rank makes its own part of a parameter when `dlab.AutoParallel` has placed it, with the values that one process
    with the same seed has, bit for bit: the random numbers are drawn twice, once here to leave the generator as one
    process does, and once for the part. Buffers, and parameters that are made from given numbers, have their values at
    once. An initialiser that computes with values of the whole, such as `orthogonal_`, is refused.

    >>> with dlab.no_init_parameters():
    ...     net = Net()
    ...     optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    >>> par = dlab.AutoParallel(net)
    """
    outer = getattr(_open, "made", None)
    _open.made = []
    try:
        with _PostponeMode():
            yield
    finally:
        made, _open.made = _open.made, outer
    while made:
        tensor = made.pop()
        recipe, used_elsewhere = tensor.recipe, sys.getrefcount(tensor) > 2  # beside this name and the call
        stays = recipe.waits and recipe.made is None
        if used_elsewhere and not stays and tensor.box is None:
            if recipe.made is None:
                recipe.made = recipe.whole()  # kept, for another tensor with the same memory
            put(tensor, recipe.made)


def parameter(init: str, *shape: int, dtype: torch.dtype | None = None, **options: float) -> nn.Parameter:
    """Make a parameter by the name of its initialiser; inside `no_init_parameters()`, one that nobody holds whole.

    "zeros"; "ones"; "normal" (std=0.01, mean=0); "uniform" (bound=0.07), between -bound and bound; "kaiming"
    (gain=√2) and "xavier" (gain=1), uniform, with the rows as inputs, as `x @ weight` uses them.

    >>> weight = dlab.parameter("normal", 784, 512)
    """
    if init not in INITIALISERS:
        raise ValueError(f"there is no initialiser {init!r}: use {', '.join(map(repr, INITIALISERS))}")
    make, defaults = INITIALISERS[init]
    for name in options:
        if name not in defaults:
            known = f"its options are {', '.join(defaults)}" if defaults else "it has no options"
            raise ValueError(f"the initialiser {init!r} has no option {name!r}: {known}")
    if not all(type(length) is int and length > 0 for length in shape):
        raise ValueError(f"a parameter of shape {shape} is not possible: give whole numbers, 1 or more")
    if init in ("kaiming", "xavier") and len(shape) < 2:
        raise ValueError(f"the initialiser {init!r} needs inputs and outputs, two dimensions, but the shape is {shape}")
    made = nn.Parameter(torch.empty(*shape, dtype=dtype) if shape else torch.empty((), dtype=dtype))
    with torch.no_grad():
        make(made, **(defaults | options))
    return made


def _kaiming(made: torch.Tensor, gain: float) -> None:
    bound = gain * math.sqrt(3 / (made.numel() / made.shape[-1]))
    made.uniform_(-bound, bound)


INITIALISERS: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "zeros": (lambda made: made.zero_(), {}),
    "ones": (lambda made: made.fill_(1.0), {}),
    "normal": (lambda made, std, mean: made.normal_(mean, std), {"std": 0.01, "mean": 0.0}),
    "uniform": (lambda made, bound: made.uniform_(-bound, bound), {"bound": 0.07}),
    "kaiming": (_kaiming, {"gain": math.sqrt(2)}),
    "xavier": (lambda made, gain: nn.init.xavier_uniform_(made, gain), {"gain": 1.0}),
}
