"""Split a model into stages: where to cut the row of its blocks, so that the largest stage is as small as possible.

Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlab.collectives import broadcast
from dlab.pipeline.microbatches import Tensors
from dlab.pipeline.stage import as_tuple, has_gradient
from dlab.processes.worker import context
from dlab.transports import Transport


class Blocks(nn.Sequential):
    """Blocks that run one after another; several inputs are a tuple for the first one, as between two of them."""

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run the blocks in turn, each on what the one before it returned."""
        return super().forward(_argument(inputs))


MEASURES = ("time", "parameters", "memory")
_REPEATS = 5


def split(
    model: nn.Module, n: int, by: str = "parameters", inputs: Any = None, transport: Transport | None = None
) -> list[nn.Module]:
    """Split a model into n stages of consecutive blocks, so that the largest stage is as small as possible.

    The model is an `nn.Sequential` (one within another counts as its blocks), or it has a method `sequence()` that
    returns its blocks as a list. The stages hold the same parameters as the model; a block has its number in the model
    as its name. `by` says what counts: the number of `parameters`; the `time` of forward and backward; or `memory`, the
    bytes of parameters and gradients and of what a block keeps for its backward. The last two need `inputs`, a batch
    of samples. As times differ, those of rank 0 count: in a process group every rank must call it, in a rehearsal with
    its `transport`.

    >>> [sum(each.numel() for each in stage.parameters()) for stage in dlab.split(dlab.MLP(), 2)]
    [401920, 267786]
    """
    blocks = blocks_of(model)
    if type(n) is not int or n < 1:
        raise ValueError(f"n={n!r}: give the number of stages, 1 or more")
    if n > len(blocks):
        raise ValueError(f"{type(model).__name__} has {len(blocks)} blocks, too few for {n} stages: use fewer stages")
    if by not in MEASURES:
        raise ValueError(f"by={by!r}: split by {', '.join(map(repr, MEASURES[:-1]))} or {MEASURES[-1]!r}")
    if by != "parameters" and inputs is None:
        raise ValueError(f"to split by {by} the blocks have to run: give a batch, inputs=…, or split by 'parameters'")
    if by == "parameters":
        costs = parameter_counts(blocks)
    elif by == "memory":
        costs = memory_of(blocks, inputs)
    else:
        costs = times_of(blocks, inputs, transport)
    cuts = [0, *cut_evenly(costs, n), len(blocks)]
    numbered = [(str(number), block) for number, block in enumerate(blocks)]
    return [Blocks(OrderedDict(numbered[begin:end])) for begin, end in pairwise(cuts)]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model in the order in which they run; between two of them it can be split."""
    listed = getattr(model, "sequence", None)
    if callable(listed):
        return [block for each in listed() for block in _unpacked(each)]
    if not _is_sequential(model):
        raise TypeError(
            f"{type(model).__name__} is no nn.Sequential, so dlab does not know the order of its blocks: give it a "
            "method sequence() that returns them as a list, or make the list of stages yourself"
        )
    return _unpacked(model)


def _unpacked(model: nn.Module) -> list[nn.Module]:
    return [block for each in model.children() for block in _unpacked(each)] if _is_sequential(model) else [model]


def _is_sequential(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward in (nn.Sequential.forward, Blocks.forward)


def _argument(inputs: Tensors) -> Any:
    return inputs if len(inputs) > 1 else inputs[0]


def parameter_counts(blocks: Sequence[nn.Module]) -> list[float]:
    """Return the number of parameters of each block; a tied one counts where it is first used."""
    seen = set[nn.Parameter]()
    counts = list[float]()
    for block in blocks:
        new = set(block.parameters()) - seen
        counts.append(sum(each.numel() for each in new))
        seen |= new
    return counts


def times_of(blocks: Sequence[nn.Module], inputs: Any, transport: Transport | None = None) -> list[float]:
    """Return the seconds of forward and backward of each block as rank 0 has measured them, the median of five."""
    if transport is None and dist.is_initialized():
        transport = context.transport()
    seconds = torch.zeros(len(blocks), dtype=torch.float64)
    if transport is None or transport.rank == 0:
        rounds = [_run(blocks, inputs)[0] for _ in range(1 + _REPEATS)][1:]  # the first one is slower
        seconds = torch.tensor([median(each) for each in zip(*rounds, strict=True)], dtype=torch.float64)
    if transport is not None:
        broadcast(seconds, transport)
    return seconds.tolist()


def memory_of(blocks: Sequence[nn.Module], inputs: Any) -> list[float]:
    """Return the bytes of each block: its parameters, their gradients, and what it keeps for its backward."""
    weights = [count * 2 * _item_size(block) for count, block in zip(parameter_counts(blocks), blocks, strict=True)]
    return [kept + each for kept, each in zip(_run(blocks, inputs)[1], weights, strict=True)]


def _item_size(block: nn.Module) -> int:
    return next((each.element_size() for each in block.parameters()), 0)


def _run(blocks: Sequence[nn.Module], inputs: Any) -> tuple[list[float], list[float]]:
    """Run all blocks forward and backward; return the seconds of each, and the bytes that it keeps in between.

    Gradients, buffers and random numbers are afterwards as they were before.
    """
    seconds, kept = list[float](), list[float]()
    buffers = [(buffer, buffer.clone()) for block in blocks for buffer in block.buffers()]
    x: Tensors = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    with torch.random.fork_rng(), torch.enable_grad():
        for number, block in enumerate(blocks):
            x = tuple(each.detach().requires_grad_(has_gradient(each) and number > 0) for each in x)
            parameters = [each for each in block.parameters() if each.requires_grad]
            saved = _SavedBytes(block)
            start = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
                outputs = as_tuple(block(_argument(x)), number)
            middle = time.perf_counter()
            roots = [each for each in outputs if each.requires_grad]
            ones = [torch.ones_like(each) for each in roots]
            wanted = [each for each in x if each.requires_grad] + parameters
            begin = time.perf_counter()
            if roots and wanted:
                torch.autograd.grad(roots, wanted, ones, allow_unused=True)
            seconds.append(middle - start + time.perf_counter() - begin)
            kept.append(saved.total)
            x = outputs
    for buffer, value in buffers:
        buffer.data.copy_(value)
    return seconds, kept


class _SavedBytes:
    """Adds up the bytes that a graph saves for its backward; those of parameters are there anyway."""

    def __init__(self, block: nn.Module) -> None:
        self._seen = {each.untyped_storage().data_ptr() for each in block.parameters()}
        self.total = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved, unless its memory has been counted already."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def cut_evenly(costs: Sequence[float], n: int) -> list[int]:
    """Return before which items to cut a row into n parts, none of them empty, so that the largest sum is smallest.

    Of equal cuts it takes the latest, so that a block that costs nothing stays with the one before it. It costs
    n len(costs)^2 / 2 comparisons.

    >>> cut_evenly([1, 2, 3, 0, 4, 2], 3)
    [2, 4]
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: the largest and the sum of squares of the parts of costs[:end], and where they begin
    best: list[tuple[float, float, list[int]] | None] = [None] * len(total)
    best[0] = (0.0, 0.0, [])
    for _ in range(n):
        longer: list[tuple[float, float, list[int]] | None] = [None] * len(total)
        for end in range(1, len(total)):
            for begin in range(end):
                before = best[begin]
                if before is None:
                    continue
                part = total[end] - total[begin]
                found = max(before[0], part), before[1] + part**2, [*before[2], begin]
                known = longer[end]
                if known is None or found[:2] <= known[:2]:
                    longer[end] = found
        best = longer
    chosen = best[-1]
    assert chosen is not None, "the number of parts was checked"
    return chosen[2][1:]
