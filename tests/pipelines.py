"""What several tests of pipelines share: small networks in stages, and what one process gets from them; for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import dlab
from dlab.pipeline import Pipeline
from dlab.transports.base import Transport

CLASSES = 5
Batch = tuple[Any, torch.Tensor]


class Answer(NamedTuple):
    """A loss, outputs, and the gradient of each parameter by stage and name."""

    loss: torch.Tensor
    outputs: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def small_stages(number: int, seed: int = 0) -> list[nn.Module]:
    """So many stages of two layers each, in float64."""
    torch.manual_seed(seed)
    widths = [6, *[8] * (number - 1), CLASSES]
    return [
        nn.Sequential(nn.Linear(widths[n], 7), nn.Tanh(), nn.Linear(7, widths[n + 1])).double() for n in range(number)
    ]


def samples(count: int, width: int = 6) -> Batch:
    make = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=make).double(), torch.randint(0, CLASSES, (count,), generator=make)


def through(stages: Iterable[nn.Module], inputs: Any) -> Any:
    """One stage after another, in one process."""
    value = inputs
    for stage in stages:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    return value


def gradients(stages: Iterable[tuple[int | str, nn.Module]]) -> dict[str, torch.Tensor | None]:
    return {
        f"{number}.{name}": None if each.grad is None else each.grad.clone()
        for number, stage in stages
        for name, each in stage.named_parameters()
    }


def alone(stages: Sequence[nn.Module], batch: Batch, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> Answer:
    """What the unsplit model gets from the whole batch."""
    stages = copy.deepcopy(list(stages))
    outputs = through(stages, batch[0])
    value = loss(outputs, batch[1])
    value.backward()
    return Answer(value.detach(), outputs.detach(), gradients(enumerate(stages)))


def piped(transport: Transport | None, stages: Sequence[nn.Module], batch: Batch, *args: Any, **more: Any) -> Any:
    """What a rank of a pipeline gets in its second step, and how many activations it held, and should have held."""
    pipe = Pipeline(copy.deepcopy(list(stages)), *args, transport=transport, **more)
    for _ in range(2):  # the second one knows the shapes
        pipe.zero_grad()
        loss = pipe.step(*batch)
    found = gradients(pipe.stages.items())  # pipe() leaves them alone
    peaks = pipe.peak_activations, pipe.schedule.peak_activations[pipe.transport.rank]
    return Answer(loss, pipe(batch[0]), found), peaks


def difference(found: Sequence[Answer], right: Answer) -> float:
    """The largest difference of any number on any rank; every gradient must be on some rank."""
    assert {name for each in found for name in each.gradients} == set(right.gradients)
    pairs = [(each.loss, right.loss) for each in found] + [(each.outputs, right.outputs) for each in found]
    for each in found:
        for name, gradient in each.gradients.items():
            other = right.gradients[name]
            assert (gradient is None) == (other is None)
            if gradient is not None and other is not None:
                pairs.append((gradient, other))
    return max((one - other).abs().max().item() for one, other in pairs)


def rehearsed(ranks: int, stages: Sequence[nn.Module], batch: Batch, *args: Any, **more: Any) -> list[Answer]:
    """A pipeline on threads; live activations must be those of the schedule."""
    found = dlab.rehearse(lambda transport: piped(transport, stages, batch, *args, **more), ranks=ranks)
    for _, (held, planned) in found:
        assert held == planned
    return [answer for answer, _ in found]
