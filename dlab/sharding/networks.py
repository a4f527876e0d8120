"""Which networks, parameters and buffers a function uses: those that it is a method of, closes over, or names."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn


def used_by(wrapped: Any) -> dict[str, Any]:
    """Return what a function or method refers to, by name, and so what other functions of its file do that it uses.

    A network or parameter in a list or tuple has its number behind the name.
    """
    found: dict[str, Any] = {}
    waiting, seen = [wrapped], {id(wrapped)}
    while waiting:
        one = waiting.pop(0)
        for name, value in _named_by(one).items():
            if isinstance(value, (list, tuple)):
                held = ((n, each) for n, each in enumerate(value) if isinstance(each, (nn.Module, nn.Parameter)))
                found |= {f"{name}.{number}": each for number, each in held}
            found.setdefault(name, value)
            if isinstance(value, FunctionType) and id(value) not in seen and _file_of(value) is _file_of(one):
                seen.add(id(value))
                waiting.append(value)
    return found


def _named_by(function: Any) -> dict[str, Any]:
    """Return the values of a function's free and global names, those of a method's object, or a partial's arguments."""
    if isinstance(function, functools.partial):
        given = {f"argument {number}": each for number, each in enumerate(function.args)} | function.keywords
        return given | _named_by(function.func)
    owner, code = getattr(function, "__self__", None), getattr(function, "__code__", None)
    found: dict[str, Any] = {}
    if code is not None:
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a name that has no value yet
                found[name] = cell.cell_contents
        found |= {name: function.__globals__[name] for name in _names_in(code) if name in function.__globals__}
    return found | (vars(owner) if hasattr(owner, "__dict__") else {})


@functools.lru_cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the global names of a function, and of comprehensions and functions inside it."""
    inside = (name for each in code.co_consts if isinstance(each, CodeType) for name in _names_in(each))
    return (*(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"), *inside)


def _file_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__globals__", None)


def networks_in(wrapped: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the networks that a wrapped network, method or function is, has, or refers to, each with its name."""
    whole = wrapped if isinstance(wrapped, nn.Module) else getattr(wrapped, "__self__", None)
    if isinstance(whole, nn.Module):
        yield whole, ""
        return
    networks: dict[nn.Module, str] = {}
    for name, each in used_by(wrapped).items():
        if isinstance(each, nn.Module):
            networks.setdefault(each, name)
    for each, name in networks.items():
        yield each, name if len(networks) > 1 else ""


def parameters_in(wrapped: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of these networks, and the loose ones, each by all of its names."""
    for module, prefix in networks_in(wrapped):
        yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from loose_parameters_in(wrapped)


def loose_parameters_in(wrapped: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a function refers to itself, alone or in a list, with their names."""
    if isinstance(wrapped, nn.Module):
        return
    for name, value in used_by(wrapped).items():
        if isinstance(value, nn.Parameter):
            yield name, value


def modules_in(wrapped: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of these networks, each by all of its names."""
    for module, prefix in networks_in(wrapped):
        yield from module.named_modules(prefix=prefix, remove_duplicate=False)


def buffers_in(wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of these networks that belong into a checkpoint, with their names."""
    for module, prefix in networks_in(wrapped):
        for name, each in module.named_modules(prefix=prefix):
            for key, buffer in each._buffers.items():
                if buffer is not None and key not in each._non_persistent_buffers_set:
                    yield f"{name}.{key}" if name else key, buffer


@contextmanager
def untouched(wrapped: Any, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Leave buffers, and the gradients of these parameters, as they are, whatever runs inside."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    buffers = [
        (module, key, buffer, buffer._version, buffer.clone())
        for _, module in modules_in(wrapped)
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, key, buffer, version, values in buffers:
            module._buffers[key] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(values)
