"""Which networks and parameters a function uses: those that it is a method of, closes over, or names as globals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def used_by(wrapped: Any) -> dict[str, Any]:
    """Return what a function or method refers to, by name."""
    owner, code = getattr(wrapped, "__self__", None), getattr(wrapped, "__code__", None)
    found: dict[str, Any] = {}
    if code is not None:
        cells = getattr(wrapped, "__closure__", None) or ()
        found |= dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False))
        found |= {name: wrapped.__globals__[name] for name in code.co_names if name in wrapped.__globals__}
    return found | (vars(owner) if hasattr(owner, "__dict__") else {})


def networks_in(wrapped: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the networks that a wrapped network, method or function is, has, or refers to, each with its name."""
    whole = wrapped if isinstance(wrapped, nn.Module) else getattr(wrapped, "__self__", None)
    if isinstance(whole, nn.Module):
        yield whole, ""
        return
    networks = {name: each for name, each in used_by(wrapped).items() if isinstance(each, nn.Module)}
    for name, each in networks.items():
        yield each, name if len(networks) > 1 else ""


def parameters_in(wrapped: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of these networks, and those that a function refers to, alone or in a list, with names."""
    for module, prefix in networks_in(wrapped):
        yield from module.named_parameters(prefix)
    if not isinstance(wrapped, nn.Module):
        for name, value in used_by(wrapped).items():
            if isinstance(value, nn.Parameter):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for number, each in enumerate(value):
                    if isinstance(each, nn.Parameter):
                        yield f"{name}.{number}", each


def buffers_in(wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of these networks that belong into a checkpoint, with their names."""
    for module, prefix in networks_in(wrapped):
        for name, each in module.named_modules(prefix=prefix):
            for key, buffer in each._buffers.items():
                if buffer is not None and key not in each._non_persistent_buffers_set:
                    yield f"{name}.{key}" if name else key, buffer
