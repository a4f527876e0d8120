"""A sharded network compared with the same network in one process: results, and the gradient of every operator.

If a communication is missing, all results can be right and the gradients wrong; only a comparison shows it. Taught in
`07_operator_parallel.ipynb`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlab import reduction
from dlab.layout import Layout, Placed, replicated
from dlab.sharding.communication import World, redistribute
from dlab.sharding.initial import put
from dlab.sharding.networks import untouched
from dlab.sharding.tensor import ShardedTensor, _plain, tensors_in, whole_of
from dlab.transports.threads import ThreadTransport, ThreadWorld

if TYPE_CHECKING:
    from dlab.sharding.parallel import AutoParallel


def compare_with_one_process(
    par: AutoParallel, inputs: Sequence[Any], keywords: Mapping[str, Any], tolerance: float | None
) -> str:
    """Raise an error that names what differs from the same network in one process; every rank must call it."""
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r}: give a share above 0, such as 1e-4, or leave it out")
    _compare_ranks(par, tensors_in((inputs, keywords)))
    alone = _unsharded(par)
    with untouched(par.net, par.parameters()):
        par.zero_grad()
        random = torch.get_rng_state()  # for dropout
        call = inputs, dict(keywords)
        given, whole = tree_map(_leaf, call), tree_map(_leaf, _whole_batch(par, call))
        cut, cut_gradients = _traced(par, par.world, *given)
        mine = par.whole(grad=True) | _gradients_of_inputs(_whole_batch(par, given, grad=True))
        torch.set_rng_state(random)
        one, one_gradients = _traced(alone, alone.world, *whole)
        truth = alone.whole(grad=True) | _gradients_of_inputs([each.grad for each in tensors_in(whole)])
        _compare(cut, one, cut_gradients, one_gradients, mine, truth, tolerance)
    count = "1 operator equal" if len(one) == 1 else f"{len(one)} operators equal"
    share = _tolerance(one[0][1], tolerance) if one else tolerance or 0.0
    return f"the results and gradients of {count} those of one process, to {share:g} of the largest number of each"


# what ranks were given


def _compare_ranks(par: AutoParallel, inputs: Sequence[torch.Tensor]) -> None:
    """Raise an error if a rank was given another batch than rank 0, or holds other copies of a weight."""
    world = par.world
    if world.size == 1 or world.transport is None:
        return
    for each in par._homes.values():
        each.adopt()
    homes = {each.name: each for each in par._homes.values()}
    own = par.dataset_strategy == "data_parallel"  # of inputs, only the shape is then the same
    tensors = {f"input {n}": torch.tensor(each.shape) if own else each for n, each in enumerate(inputs)}
    tensors |= {name: each.value() for name, each in homes.items()}
    mine = torch.tensor([_digest(each) for each in tensors.values()], dtype=torch.int64)
    by_rank = reduction.all_gather(mine, group=world.transport)
    for number, name in enumerate(tensors):
        home = homes.get(name)
        first_with: dict[str, int] = {}
        for rank in range(world.size):
            slices = None if home is None or home.placed is None else home.placed.slices_of(rank, home.shape)
            first = first_with.setdefault(str(slices), rank)
            if by_rank[rank, number] != by_rank[first, number]:
                if home is None and own:
                    raise ValueError(
                        f"rank {rank} was given an {name} of another shape than rank {first}: give every rank as many "
                        "samples"
                    )
                raise ValueError(
                    f"rank {rank} was given another {name} than rank {first}: give every rank the same tensors"
                    if home is None
                    else f"rank {rank} holds other numbers of {name} than rank {first}, in the same slice: make the "
                    "network from the same seed on every rank"
                )


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


# the two runs


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
        raise ValueError(
            "check makes a copy of the network for one process, and cannot copy what a function refers to: wrap an "
            "nn.Module whose forward calls it, and check that"
        )
    net = copy.deepcopy(par.net)
    for name, parameter in net.named_parameters():
        put(parameter, weights[name])  # type: ignore[arg-type]
        parameter.grad = None
    return type(par)(net, transport=ThreadTransport(ThreadWorld(1), 0))


def _traced(par: AutoParallel, world: World, inputs: Any, keywords: Any) -> tuple[list[Any], list[Any]]:
    """Run forward and backward; return each operator's whole result, and the whole gradient of it.

    Each number of a result counts in its own way: gradients of a plain sum are often zero, as after a softmax.
    """
    world.outputs = []
    try:
        with par._working(world):
            results = tensors_in(tree_map(whole_of, par._run(world, inputs, keywords)))
            made, world.outputs = world.outputs, None
            with torch._C.DisableTorchFunctionSubclass():  # of the very tensor that the next operator has used
                for _, each in made:
                    if each.requires_grad:
                        each.retain_grad()
            if any(each.requires_grad for each in results):
                sums = [(each * _wave(each)).sum() for each in results if each.requires_grad]
                torch.stack(sums).sum().backward()
            with torch.no_grad():
                wholes = [(f"{number} {name}", each.whole().detach()) for number, (name, each) in enumerate(made, 1)]
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


def _wave(like: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.arange(1, like.numel() + 1, dtype=torch.float64)).to(like.dtype).view(like.shape)


# the comparison

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def _tolerance(like: torch.Tensor, given: float | None) -> float:
    return _TOLERANCES.get(like.dtype, 1e-4) if given is None else given


def _compare(
    cut: list[Any],
    one: list[Any],
    cut_gradients: list[Any],
    one_gradients: list[Any],
    mine: Any,
    truth: Any,
    tolerance: float | None,
) -> None:
    largest = _largest([right for _, right in one])
    for (name, value), (_, right) in zip(cut, one, strict=True):
        if off := _difference(value, right, tolerance, largest):
            raise AssertionError(f"the result of {name} differs from that of one process by up to {off:.3g}")
    largest = _largest([*one_gradients, *truth.values()])
    for (name, _), value, right in reversed(list(zip(one, cut_gradients, one_gradients, strict=True))):
        if (value is None) != (right is None) or (right is not None and _difference(value, right, tolerance, largest)):
            raise AssertionError(
                f"the gradient of the result of {name} differs from that of one process, although all results are "
                "right: look at the communication between it and the operators that use it"
            )
    for name, right in truth.items():
        if right is not None and _difference(mine[name], right, tolerance, largest):
            raise AssertionError(f"the gradient of {name} differs from that of one process")


def _largest(tensors: Sequence[torch.Tensor | None]) -> float:
    return max((float(each.abs().max()) for each in tensors if each is not None and each.numel()), default=0.0)


def _difference(value: torch.Tensor, right: torch.Tensor, tolerance: float | None, largest: float) -> float:
    """Return the largest difference if it is more than a share of the largest number, else 0.

    Where the right numbers are all nearly 0, what is rounded away of the largest number of any tensor is allowed.
    """
    if not right.numel():
        return 0.0
    if not right.is_floating_point():
        return float((value != right).any())
    off = float((value - right).abs().max())
    rounding = 16 * torch.finfo(right.dtype).eps * largest
    return 0.0 if off <= _tolerance(right, tolerance) * float(right.abs().max()) + rounding else off


def _leaf(value: Any) -> Any:
    """Return a tensor with a gradient of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _gradients_of_inputs(gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {f"input {number}": each for number, each in enumerate(gradients)}
