"""A network of a function and its weights, computed by plain torch and cut over ranks; for tests."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch
from torch import nn

import dlab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this folder


class Net(nn.Module):
    """`body(weights, *inputs)` as a module; what it returns may be a tensor or a tuple of them."""

    def __init__(self, body: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.body = body
        self.weights = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])

    def forward(self, *inputs: Any) -> Any:
        return self.body(list(self.weights), *inputs)


def outcome(net: Callable[..., Any], inputs: Sequence[torch.Tensor], passes: int = 1) -> dict[str, Any]:
    """Results, and the gradients of all inputs for the same arbitrary gradients of the results."""
    mine = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    for _ in range(passes):
        made = net(*mine)
        results = made if isinstance(made, (tuple, list)) else (made,)
        total = sum((each * wave(each)).sum() for each in results)
        total.backward()
    found = {f"result {number}": each.detach() for number, each in enumerate(results)}
    return found | {f"gradient of input {number}": each.grad for number, each in enumerate(mine)}


def wave(like: torch.Tensor) -> torch.Tensor:
    """Numbers without any symmetry: an error cannot cancel in them."""
    return torch.sin(torch.arange(1, like.numel() + 1, dtype=like.dtype)).view(like.shape)


def by_torch(net: nn.Module, inputs: Sequence[torch.Tensor], passes: int = 1) -> dict[str, Any]:
    """The truth: everything in one process."""
    net = copy.deepcopy(net)
    found = outcome(net, inputs, passes)
    return found | {f"gradient of {name}": each.grad for name, each in net.named_parameters()}


def by_ranks(
    net: nn.Module, inputs: Sequence[torch.Tensor], transport: Any = None, passes: int = 1, **settings: Any
) -> dict[str, Any]:
    """The same by AutoParallel, on one rank."""
    par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, **settings)
    found = outcome(par, inputs, passes)
    return found | {f"gradient of {name}": each for name, each in par.whole(grad=True).items()}


def assert_same(found: dict[str, Any], truth: dict[str, Any], where: str = "", tolerance: float = 1e-10) -> None:
    assert found.keys() == truth.keys()
    for name, right in truth.items():
        value = found[name]
        if right is None:
            assert value is None, f"{where}: {name} should be None"
            continue
        assert value is not None and value.shape == right.shape, f"{where}: {name}: {value} is not like {right}"
        off, size = ((value - right).abs().max().item(), right.abs().max().item()) if right.numel() else (0.0, 0.0)
        assert off <= tolerance * max(1.0, size), f"{where}: {name} differs by {off:.3g}"


def check_on_threads(
    plain: nn.Module,
    cut: nn.Module | None,
    inputs: Sequence[torch.Tensor],
    ranks: int,
    where: str = "",
    passes: int = 1,
    **settings: Any,
) -> None:
    """Compare a network, cut over threads, with a plain one of the same weights: results and every gradient."""
    truth = by_torch(plain, inputs, passes)
    network = plain if cut is None else cut
    network.load_state_dict(plain.state_dict())
    found = dlab.rehearse(lambda transport: by_ranks(network, inputs, transport, passes, **settings), ranks=ranks)
    for rank, each in enumerate(found):
        assert_same(each, truth, f"{where} on rank {rank} of {ranks}")
