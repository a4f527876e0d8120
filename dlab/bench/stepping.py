"""A training step: AllReduceSGD and ZeRO against PyTorch's DDP on gloo, in the same loop; and its telemetry.

Global batch 128, float32, on MNIST; the strategies take turns, a few steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

import dlab
from dlab.bench.measure import Moments, alternate, span
from dlab.bench.rows import AtMost, Row, faster, row
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker import context
from dlab.processes.worker.context import device, log
from dlab.strategies import DDP, AllReduceSGD, Strategy, ZeRO
from dlab.training.loop import Trainer
from dlab.training.plan import Training

RANKS = (2, 4)
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "MLP": (dlab.MLP, 60),
    "SimpleCNN": (dlab.SimpleCNN, 30),
}
STRATEGIES: dict[str, Strategy] = {
    "DDP": DDP(),
    "AllReduceSGD": AllReduceSGD(),
    "ZeRO stage 1": ZeRO(stage=1),
}
TARGETS = {
    ("AllReduceSGD", "MLP"): (1.8, 2.2),
    ("AllReduceSGD", "SimpleCNN"): (1.03, 1.1),
    ("ZeRO stage 1", "MLP"): (2.2, 3.0),
    ("ZeRO stage 1", "SimpleCNN"): (1.05, 1.2),
}
ROUNDS, WARM_UP = 12, 5


def against_ddp(ranks: int, model: str, strategy: str, name: str, quick: bool) -> Row:
    """Make a row: how many times faster a step is than DDP's."""
    times = measured(ranks, model, quick)
    target = TARGETS[strategy, model][RANKS.index(ranks)]
    return faster(name, times[strategy], times["DDP"], target, "ms", f"batch {128 // ranks} on each of {ranks} ranks")


@cache
def measured(ranks: int, model: str, quick: bool) -> dict[str, list[float]]:
    """Return the milliseconds per step of every strategy, a number for each round."""
    make, steps = MODELS[model]
    plans = [Training(model=make, strategy=strategy, lr=0.01) for strategy in STRATEGIES.values()]
    times = milliseconds(ranks, plans, [True] * len(plans), *((5, 1) if quick else (steps, ROUNDS)))
    return dict(zip(STRATEGIES, times, strict=True))


def milliseconds(
    ranks: int, plans: Sequence[Training], telling: Sequence[bool], steps: int, rounds: int
) -> list[list[float]]:
    """Return the milliseconds of a step, from the first rank's start to the last rank's end, by plan and round."""
    with Cluster(ranks) as cluster:
        by_rank: list[list[list[Moments]]] = cluster.run(take_turns, plans, telling, steps, rounds)
    return [
        [1e3 * span(moments) / steps for moments in zip(*ranks_of_one, strict=True)]
        for ranks_of_one in zip(*by_rank, strict=True)
    ]


def take_turns(plans: Sequence[Training], telling: Sequence[bool], steps: int, rounds: int) -> list[list[Moments]]:
    """Train each plan a little, in turn, in the same process, so that a slowdown affects all. Runs in a worker."""
    trainers = [
        Trainer(plan, context.transport(), device(), log if tells else _keep_silent)
        for plan, tells in zip(plans, telling, strict=True)
    ]
    for trainer in trainers:
        trainer.begin()
        _take_steps(trainer, WARM_UP)
    return alternate(*(partial(_take_steps, trainer, steps) for trainer in trainers), rounds=rounds)


def _take_steps(trainer: Trainer, steps: int) -> Moments:
    if trainer.step + steps > trainer.sampler.steps(0):
        trainer.step = 0
    trainer.transport.barrier()
    begin = perf_counter()
    for _ in range(steps):
        trainer.learn()
    return begin, perf_counter()


def _keep_silent(**_: Any) -> None:
    """Take the place of `dlab.log` and do nothing."""


@row("a step that tells everything, against one that tells nothing")
def telemetry(name: str, quick: bool) -> Row:
    """Measure steps that log loss, samples and times, and in every tenth step gradient norms and paths."""
    ranks, steps, rounds = 4, 20, 1 if quick else 80
    loud, silent = (Training(model=dlab.MLP, strategy=AllReduceSGD(), lr=0.01, watch=watch) for watch in (10, None))
    telling, keeping = milliseconds(ranks, [loud, silent], [True, False], steps, rounds)
    ratio = median(ours / theirs for ours, theirs in zip(telling, keeping, strict=True))
    note = f"{rounds} rounds of {steps} steps of the MLP on {ranks} ranks; the ratio is the median of all rounds'"
    return Row(name, median(telling), median(keeping), ratio, AtMost(1.02), "ms", note)


for _ranks in RANKS:
    for _strategy, _model in TARGETS:
        _name = f"a step of {_model}, {_ranks} ranks, {_strategy}, against DDP"
        row(_name)(partial(against_ddp, _ranks, _model, _strategy))
