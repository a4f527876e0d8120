"""What a network may do with a parameter of which a rank holds a part: its shape is the whole one, and what dlab cannot
cut is refused; an optimizer works on the part itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from dlab.sharding.home import CUT, cut_state
from dlab.sharding.state import state
from dlab.sharding.tensor import RULES, _getter, call

# their update of a number depends on others of the same layer
WHOLE = ("LBFGS", "Muon", "Adafactor")
_SHAPES: dict[Any, Callable[..., Any]] = {
    _getter("shape"): lambda shape: torch.Size(shape),
    torch.Tensor.size: lambda shape, dim=None: torch.Size(shape) if dim is None else shape[dim],
    torch.Tensor.numel: lambda shape: torch.Size(shape).numel(),
}


class ParameterMode(TorchFunctionMode):
    """Intercepts functions whose only tensors are parameters, such as `weight.t()`, since no sharded tensor does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if state.aside:
            return func(*args, **kwargs)
        home = state.homes.get(id(args[0])) if args and isinstance(args[0], nn.Parameter) else None
        if home is not None and home.placed is not None and func in _SHAPES:
            return _SHAPES[func](home.shape, *args[1:], **kwargs)
        given = (*args, *kwargs.values()) if kwargs else args
        if func in RULES and any(isinstance(each, nn.Parameter) and id(each) in state.homes for each in _flat(given)):
            with torch._C.DisableTorchFunctionSubclass():
                return call(func, args, kwargs)
        if func not in _LOCAL:
            _refuse_parts(func, given)
        return func(*args, **kwargs)


# what may be done with this rank's part of a parameter, as an optimizer or a loop does
_LOCAL = {
    *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_"),
    *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.startswith("__i") and name != "__invert__"),
    *(torch.Tensor.__hash__, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim),
    *(torch.Tensor.element_size, torch.Tensor.__repr__, torch.Tensor.register_hook),
    *(torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.is_grad_enabled, torch.set_grad_enabled),
    torch.Tensor.register_post_accumulate_grad_hook,
}


def _flat(args: Any) -> Iterator[Any]:
    """Yield arguments, and in place of a list what is in it, as `torch.cat` takes its tensors."""
    for arg in args:
        yield from arg if isinstance(arg, (tuple, list)) else (arg,)


def _refuse_parts(func: Any, args: Any) -> None:
    """Raise an error if a function that dlab cannot cut would see a part of a parameter, or of its gradient, as all."""
    name = getattr(func, "__name__", str(func))  # of an attribute: __get__
    if name in ("__get__", "__set__", "__delete__"):  # an attribute such as `weight.grad`
        return
    known = state.homes
    if "norm" in name:  # as in the clipping of gradients
        known = known | {id(home.parameter.grad): home for home in known.values() if home.parameter.grad is not None}
    for each in _flat(args):
        home = known.get(id(each)) if isinstance(each, torch.Tensor) else None
        if home is not None and home.placed is not None and home.placed.used:
            raise NotImplementedError(
                f"dlab does not know how to cut {name!r}, and {home.name} is cut, {home.placed}: call it outside of "
                "the network that AutoParallel wraps, on par.whole(), or write it with functions that dlab can cut"
            )


def check_whole(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer that looks at a whole layer has one of which this rank holds a part."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if (known := CUT.get(parameter)) is not None and known[0].used:
            raise ValueError(
                f"{type(optimizer).__name__} updates a whole layer at a time, but a parameter of shape {known[1]} is "
                "cut over ranks: use an optimizer that updates each number by itself, such as SGD or Adam"
            )


def _aside(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    state.aside = True
    cut_state(optimizer)
    if type(optimizer).__name__ in WHOLE:
        check_whole(optimizer)


def _back(*_: Any) -> None:
    state.aside = False
    if state.world is not None:
        state.moved.clear()  # copies of weights that have just changed


register_optimizer_step_pre_hook(_aside)
register_optimizer_step_post_hook(_back)
