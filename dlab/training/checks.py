"""Check the arguments of a training before any worker starts; an error says what was given and what to give instead."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def check_model(model: Any) -> None:
    """Check that `model` makes a network when called without arguments, so that every worker can make its own."""
    if isinstance(model, nn.Module) or not callable(model):
        raise TypeError(
            f"model is {type(model).__name__!r}: give a function or class that makes the network, as in "
            "train(dlab.SimpleCNN, …), so that every worker can make its own"
        )
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # the arguments of a class written in C cannot be inspected
        return
    empty = inspect.Parameter.empty
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in signature.parameters.values() if p.default is empty and p.kind not in optional]
    if missing:
        name = getattr(model, "__name__", type(model).__name__)
        raise TypeError(
            f"{name} cannot be made without {' and '.join(missing)}: give a function that makes the network, "
            f"as in model=lambda: {name}({'10, …' if len(missing) > 1 else '10'})"
        )


def check_network(network: Any) -> nn.Module:
    """Check that `model()` returned a network with parameters to train."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"model() returned {network!r}, which is not a torch.nn.Module: let it return the network")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(
            f"{type(network).__name__} has no parameters to train: make its layers in __init__, as attributes of the "
            "network, and leave requires_grad on"
        )
    return network


def check_rate(rate: Any) -> float:
    """Check that a learning rate is a number, 0 or more."""
    if not _is_number(rate) or rate < 0:
        raise ValueError(f"lr={rate!r}: give a learning rate that is a number, 0 or more, such as 0.01")
    return rate


def check_momentum(momentum: Any) -> float:
    """Check that 0 <= momentum < 1: from 1 on, earlier gradients never fade and the weights diverge."""
    if not _is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: give a number from 0 to less than 1, such as 0.9")
    return momentum


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_samples(data: Any, name: str) -> None:
    """Check that data has a length and that its first sample is a pair of numbers or tensors, (input, label)."""
    if isinstance(data, DataLoader):
        raise TypeError(f"{name} is a DataLoader: give its dataset, {name}=loader.dataset; train makes the batches")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TypeError(f"{name} is {_name(data)}: give a Dataset with a length and (input, label) at each position")
    if not len(data):
        raise ValueError(f"{name} is empty: give at least one sample for each worker")
    sample = data[0]
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    if text := next((part for part in parts if isinstance(part, str | bytes)), None):
        raise TypeError(
            f"{name}[0] contains text, {text[:20]!r}: turn it into numbers first, such as each word's index in a list"
        )
    if len(parts) == 1:
        raise TypeError(
            f"{name}[0] is {_name(parts[0])} without a label: a sample is a pair, (input, label); "
            "to learn without labels, give the input twice"
        )
    if len(parts) != 2:
        raise TypeError(f"{name}[0] has {len(parts)} parts: a sample is a pair, (input, label)")


def _name(value: Any) -> str:
    """Describe a value for an error message: `a tensor of shape (1, 28, 28)`, `a dict`."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
