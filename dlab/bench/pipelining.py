"""Pipelines: steps per second against torch.distributed.pipelining on gloo and on dlab's backend, and the bubble.

All contenders hold the same four layers of 512, in as many stages as there are ranks, run the same schedule on the same
batch of 8 micro-batches of 16 samples, and compute the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlab.bench.measure import Moments, alternate, moments, span
from dlab.bench.rows import AtMost, Row, faster, row
from dlab.kinds import ACTION
from dlab.pipeline import Pipeline
from dlab.pipeline import schedule as make_schedule
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker import context

MICROBATCHES, ROWS, WIDTH, LAYERS, ROUNDS = 8, 16, 512, 4, 12
DLAB, TORCH, TORCH_DLAB = "dlab", "torch on gloo", "torch on dlab's backend"
SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}
TARGETS = {TORCH: {(2, "1f1b"): 1.4}, TORCH_DLAB: {}}  # by ranks and schedule
OTHERWISE = {TORCH: 1.8, TORCH_DLAB: 1.1}


def layers() -> list[nn.Module]:
    """Return four linear layers."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


def stages(ranks: int) -> list[nn.Module]:
    """Return the layers in as many stages as there are ranks."""
    each = LAYERS // ranks
    every = layers()
    return [nn.Sequential(*every[begin : begin + each]) for begin in range(0, LAYERS, each)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets for all micro-batches."""
    make = torch.Generator().manual_seed(1)
    shape = MICROBATCHES * ROWS, WIDTH
    return torch.randn(shape, generator=make), torch.randn(shape, generator=make)


def contenders(name: str) -> dict[str, Callable[[], Any]]:
    """Return every contender's step, after checking that all compute the same gradients. Runs in a worker."""
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch()
    calls: dict[str, Callable[[], Any]] = {}
    modules: dict[str, nn.Module] = {}

    pipe = Pipeline(stages(ranks), name, MICROBATCHES, loss=nn.functional.mse_loss)
    modules[DLAB] = pipe.stages[str(rank)]
    calls[DLAB] = partial(clearing, modules[DLAB], partial(pipe.step, inputs, targets))
    for key, group in ((TORCH, None), (TORCH_DLAB, dist.new_group(backend="dlab"))):
        modules[key] = stages(ranks)[rank]
        stage = pipelining.PipelineStage(modules[key], rank, ranks, torch.device("cpu"), group=group)
        schedule = getattr(pipelining, SCHEDULES[name])(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        given = (inputs,) if rank == 0 else ()
        keywords = {"target": targets, "losses": []} if rank == ranks - 1 else {}
        calls[key] = partial(clearing, modules[key], partial(schedule.step, *given, **keywords))
    for call in calls.values():
        call()
    for key, module in modules.items():
        for ours, theirs in zip(modules[DLAB].parameters(), module.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), f"the gradients differ: {name}, {key}"
    return calls


def clearing(module: nn.Module, step: Callable[[], Any]) -> None:
    """Compute all gradients, without those of the step before."""
    for parameter in module.parameters():
        parameter.grad = None
    step()


def take_turns(name: str, repeats: int, rounds: int) -> dict[str, list[Moments]]:
    """Measure every contender, in turn. Runs in a worker."""
    calls, barrier = contenders(name), context.transport().barrier
    turns = [partial(moments, call, repeats, barrier) for call in calls.values()]
    return dict(zip(calls, alternate(*turns, rounds=rounds), strict=True))


@cache
def measured(name: str, ranks: int, quick: bool) -> dict[str, list[float]]:
    """Return the milliseconds of every contender's step, a number for each round."""
    repeats, rounds = (2, 1) if quick else (20, ROUNDS)
    with Cluster(ranks, threads=1) as cluster:
        by_rank = cluster.run(take_turns, name, repeats, rounds)
    return {
        key: [1e3 * span(each) / repeats for each in zip(*(rank[key] for rank in by_rank), strict=True)]
        for key in by_rank[0]
    }


def against(schedule: str, ranks: int, theirs: str, name: str, quick: bool) -> Row:
    """Make a row: how many times faster a step is than a contender's."""
    times = measured(schedule, ranks, quick)
    target = TARGETS[theirs].get((ranks, schedule), OTHERWISE[theirs])
    note = f"{LAYERS} layers of {WIDTH}, {MICROBATCHES} micro-batches of {ROWS}"
    return faster(name, times[DLAB], times[theirs], target, "ms", note)


for _schedule in SCHEDULES:
    for _ranks in (2, 4):
        for _theirs in TARGETS:
            row(f"pipeline, {_schedule}, {_ranks} stages, against {_theirs}")(
                partial(against, _schedule, _ranks, _theirs)
            )


# the bubble


class Shift(nn.Module):
    """Adds a learned number, so that the layers after it compute gradients of their inputs, in the first stage, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the learned number to every input."""
        return x + self.bias


def recorded_actions(name: str, microbatches: int, steps: int) -> list[tuple[int, float, float]]:
    """Return the step of each action, and when it began and ended. Runs in a worker."""
    told: list[tuple[int, float, float]] = []

    def emit(kind: str, data: Mapping[str, Any]) -> None:
        if kind == ACTION:
            told.append((data["step"], data["start"], data["end"]))

    equal = [nn.Sequential(Shift(), *layers()) for _ in range(dist.get_world_size())]
    pipe = Pipeline(equal, name, microbatches, loss=nn.functional.mse_loss)
    pipe.record(emit)
    inputs = torch.randn(microbatches * 256, WIDTH)
    for _ in range(steps):
        pipe.zero_grad()
        pipe.step(inputs, inputs)
    return told


def bubbles(by_rank: Sequence[Sequence[tuple[int, float, float]]]) -> list[float]:
    """Return, for each step but the first, the time in which ranks wait, divided by the time in which they compute."""
    found = []
    for step in sorted({action[0] for action in by_rank[0]})[1:]:
        rows = [[(start, end) for number, start, end in actions if number == step] for actions in by_rank]
        whole = max(end for row in rows for _, end in row) - min(start for row in rows for start, _ in row)
        busy = sum(end - start for row in rows for start, end in row) / len(rows)
        found.append(whole / busy - 1)
    return found


def bubble(schedule: str, microbatches: int, name: str, quick: bool) -> Row:
    """Make a row: by how much the measured bubble differs from the formula."""
    steps = 3 if quick else 40
    with Cluster(2, threads=1) as cluster:
        found = bubbles(cluster.run(recorded_actions, schedule, microbatches, steps))
    formula = make_schedule(schedule, 2, microbatches).bubble
    away = abs(median(found) / formula - 1)
    note = f"two equal stages, {microbatches} micro-batches; median of {len(found)} steps, {100 * away:.0f} % away"
    return Row(name, median(found), formula, away, AtMost(0.15), "idle / busy", note)


for _schedule in SCHEDULES:
    for _microbatches in (2, 4):
        row(f"bubble of {_schedule}, 2 stages, {_microbatches} micro-batches, against (p-1)/m")(
            partial(bubble, _schedule, _microbatches)
        )
