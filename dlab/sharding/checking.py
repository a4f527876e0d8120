"""A sharded network compared with the same network in one process: results, and the gradient of every operator.

A forgotten communication can leave all results right and gradients wrong; only a comparison shows it. Taught in
`07_operator_parallel.ipynb`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlab.layout import Layout, Placed, replicated
from dlab.sharding.communication import World, redistribute
from dlab.sharding.initial import put
from dlab.sharding.tensor import ShardedTensor, _plain, tensors_in, whole_of
from dlab.transports.threads import ThreadTransport, ThreadWorld

if TYPE_CHECKING:
    from dlab.sharding.parallel import AutoParallel


def compare_with_one_process(par: AutoParallel, inputs: Sequence[Any], tolerance: float) -> str:
    """Raise an error that names what differs from the same network in one process; every rank must call it."""
    kept = {home.name: home.parameter.grad for home in par._homes.values()}
    for home in par._homes.values():
        home.parameter.grad = None
    try:
        random = torch.get_rng_state()  # for dropout
        given, whole = tree_map(_leaf, inputs), tree_map(_leaf, _whole_batch(par, inputs))
        cut, cut_gradients = _traced(par, par.world, given)
        mine = par.whole(grad=True) | _gradients_of_inputs(_whole_batch(par, given, grad=True))
        alone = _unsharded(par)
        torch.set_rng_state(random)
        one, one_gradients = _traced(alone, alone.world, whole)
        truth = alone.whole(grad=True) | _gradients_of_inputs([each.grad for each in tensors_in(whole)])
        _compare(cut, one, cut_gradients, one_gradients, mine, truth, tolerance)
    finally:
        for home in par._homes.values():
            home.parameter.grad = kept[home.name]
    return f"the results and gradients of {len(one)} operators equal those of one process, to {tolerance:g}"


def _whole_batch(par: AutoParallel, inputs: Any, grad: bool = False) -> Any:
    """Return inputs, or a list of their gradients, whole, where each rank has brought a part of the batch."""

    def join(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not cut or not value.dim():
            return value
        layout = Layout((par.world.size,), ("dp",))
        placed = Placed(layout, (("dp",), *((),) * (value.dim() - 1)))
        shape = (value.shape[0] * par.world.size, *value.shape[1:])
        return redistribute(value.detach(), placed, replicated(layout, value.dim()), shape, par.world)

    cut = par.dataset_strategy == "data_parallel" and par.world.size > 1
    return tree_map(join, [each.grad for each in tensors_in(inputs)] if grad else inputs)


def _unsharded(par: AutoParallel) -> AutoParallel:
    weights = par.whole()
    if not isinstance(par.net, nn.Module):
        raise ValueError("check compares networks: wrap the nn.Module itself, not the training step, and check that")
    net = copy.deepcopy(par.net)
    for name, parameter in net.named_parameters():
        put(parameter, weights[name])  # type: ignore[arg-type]
        parameter.grad = None
    return type(par)(net, transport=ThreadTransport(ThreadWorld(1), 0))


def _traced(par: AutoParallel, world: World, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Run forward and backward; return each operator's whole result, and the whole gradient of it."""
    world.outputs = []
    try:
        with par._working(world):
            results = tensors_in(tree_map(whole_of, par._run(world, inputs, {})))
            made, world.outputs = world.outputs, None
            with torch._C.DisableTorchFunctionSubclass():  # of the very tensor that the next operator has used
                for _, each in made:
                    if each.requires_grad:
                        each.retain_grad()
            if any(each.requires_grad for each in results):
                torch.stack([each.sum() for each in results if each.requires_grad]).sum().backward()
            with torch.no_grad():
                wholes = [(f"{number} {name}", each.whole()) for number, (name, each) in enumerate(made, 1)]
                gradients = [_gradient(each) for _, each in made]
    finally:
        world.outputs = None
    return wholes, gradients


def _gradient(tensor: ShardedTensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient = tensor.grad
    if gradient is None:
        return None
    placed = Placed(tensor.placed.layout, tensor.placed.dims)  # the gradient of a partial sum is whole
    return ShardedTensor.of(_plain(gradient), placed, tensor.whole_shape).whole()


def _compare(
    cut: list[Any],
    one: list[Any],
    cut_gradients: list[Any],
    one_gradients: list[Any],
    mine: Any,
    truth: Any,
    tolerance: float,
) -> None:
    for (name, value), (_, right) in zip(cut, one, strict=True):
        if not torch.allclose(value, right, rtol=tolerance, atol=tolerance):
            off = (value - right).abs().max()
            raise AssertionError(f"the result of {name} differs from that of one process by up to {off:.3g}")
    for (name, _), value, right in reversed(list(zip(one, cut_gradients, one_gradients, strict=True))):
        if (value is None) != (right is None) or (
            value is not None and not torch.allclose(value, right, rtol=tolerance, atol=tolerance)
        ):
            raise AssertionError(
                f"the gradient of the result of {name} differs from that of one process, although all results are "
                "right: look at the communication between it and the operators that use it"
            )
    for name, right in truth.items():
        if right is not None and not torch.allclose(mine[name], right, rtol=tolerance, atol=tolerance):
            raise AssertionError(f"the gradient of {name} differs from that of one process")


def _leaf(value: Any) -> Any:
    """Return a tensor with a gradient of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _gradients_of_inputs(gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {f"input {number}": each for number, each in enumerate(gradients)}
