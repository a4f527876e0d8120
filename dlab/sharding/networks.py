"""Which networks a function uses: those that it is a method of, closes over, or names as globals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def networks_in(wrapped: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the networks that a wrapped network, method or function is, has, or refers to, each with its name."""
    if isinstance(wrapped, nn.Module):
        yield wrapped, ""
        return
    owner = getattr(wrapped, "__self__", None)
    code = getattr(wrapped, "__code__", None)
    cells = getattr(wrapped, "__closure__", None) or ()
    found = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False)) if code else {}
    found |= {name: wrapped.__globals__[name] for name in code.co_names if name in wrapped.__globals__} if code else {}
    found |= vars(owner) if hasattr(owner, "__dict__") else {}
    networks = {name: each for name, each in found.items() if isinstance(each, nn.Module)}
    for name, each in networks.items():
        yield each, name if len(networks) > 1 else ""


def buffers_in(wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of these networks that belong into a checkpoint, with their names."""
    for module, prefix in networks_in(wrapped):
        for name, each in module.named_modules(prefix=prefix):
            for key, buffer in each._buffers.items():
                if buffer is not None and key not in each._non_persistent_buffers_set:
                    yield f"{name}.{key}" if name else key, buffer
