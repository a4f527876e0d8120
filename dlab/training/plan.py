"""A plan for a training: what to train, on which data, by which strategy; can be run in every worker of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dlab.data import mnist
from dlab.data.batches import Samples
from dlab.kvstore.serving import share_out
from dlab.processes.inside import device, log, servers, transport
from dlab.strategies import Strategy, SyncSGD
from dlab.training.checkpoints import open_checkpoint
from dlab.training.checks import check_model, check_momentum, check_rate, check_samples
from dlab.training.evaluation import Evaluation
from dlab.transports import Transport

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Share:
    """What one rank brings home."""

    losses: list[float]  # of each step, the mean over its own samples
    counts: list[int]  # and how many they were
    digest: str  # of the weights: equal where all bits are
    weights: dict[str, torch.Tensor] | None  # rank 0's
    evaluation: Evaluation | None


@dataclass(kw_only=True)
class Training:
    """A training that can be run: call it in every worker of a cluster, or with a wire in a rehearsal.

    `dlab.train` starts one; `dlab.race({"sync": dlab.Training(…), …})` lets several compete. See `dlab.train` for
    what the fields mean.

    >>> dlab.rehearse(dlab.Training(model=dlab.MLP, data=digits, strategy=dlab.SyncSGD()), ranks=2)
    """

    model: Callable[[], nn.Module]
    data: Samples | str = "mnist"
    strategy: Strategy = field(default_factory=SyncSGD)
    epochs: int = 1
    batch_size: int = 128
    lr: float = 0.01
    momentum: float = 0.5
    loss: Loss = F.cross_entropy
    optimizer: MakeOptimizer | None = None
    order: str = "shards"
    seed: int = 1234
    test: Samples | str | bool | None = None
    accumulate: int = 1
    amp: bool = False
    watch: int | None = None
    checkpoint: str | Path | None = None
    every: int | None = None
    resume: str | Path | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        check_model(self.model)
        check_rate(self.lr)
        check_momentum(self.momentum)
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"strategy is {self.strategy!r}: give a strategy, such as dlab.SyncSGD()")
        for name in ("epochs", "batch_size", "accumulate"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
        if self.every is not None and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(f"every={self.every!r}: give the number of steps between checkpoints, 1 or more")
        if self.every is not None and self.checkpoint is None:
            raise ValueError(f"every={self.every!r} says how often to save: say where, too, by checkpoint=folder")
        if self.elastic and not self.strategy.elastic:
            more = "goes on by itself" if self.strategy.survives else "cannot: a rank alone does not hold all it needs"
            raise ValueError(
                f"elastic=True is for SyncSGD and AllReduceSGD without sharded_update; this strategy {more}"
            )
        if self.resume is not None:
            open_checkpoint(self.resume)  # to be told at once
        for name, data in (("data", self.data), ("test", self.test)):
            if isinstance(data, str) and data != "mnist":
                raise ValueError(f"there is no data set {data!r}: use 'mnist', or give a Dataset")
            if not isinstance(data, str) and not (name == "test" and (data is None or isinstance(data, bool))):
                check_samples(data, name)

    def __call__(self, wire: Transport | None = None, tell: Callable[..., None] | None = None) -> Share | None:
        """What a rank does. Without a wire: over the one of this worker, and telling the notebook.

        A strategy that needs servers has those of the cluster; where nobody has started any, as in a rehearsal or
        under torchrun, the last ranks serve the others, and return nothing.
        """
        from dlab.training.loop import Trainee  # which knows this class

        where, tell = (transport(), tell or log) if wire is None else (wire, tell or _say_nothing)
        here = device() if wire is None else torch.device("cpu")
        if not self.servers or servers() is not None:
            return Trainee(self, where, here, tell).run()
        return share_out(where, self.servers, lambda workers: Trainee(self, workers, here, tell).run())

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """For each knob, by name: what raises ValueError if a value makes no sense."""
        return {"lr": check_rate, **self.strategy.checks}

    @property
    def survives(self) -> bool:
        """Does it go on without ranks that have died?"""
        return self.elastic or self.strategy.survives

    @property
    def revives(self) -> bool:
        """Does it go on from its last checkpoint with a new server in the place of one that has died?"""
        return self.checkpoint is not None and self.strategy.servers > 0

    @property
    def servers(self) -> int:
        """How many it needs."""
        return self.strategy.servers

    def load(self) -> Samples:
        """The data to train on."""
        return mnist(train=True) if isinstance(self.data, str) else self.data

    def load_test(self) -> Samples | None:
        """The data to test on: MNIST's own for MNIST, unless told otherwise."""
        if self.test is None or self.test is True:
            return mnist(train=False) if isinstance(self.data, str) else None
        if isinstance(self.test, str):
            return mnist(train=False)
        return self.test or None

    def make_optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The one asked for, or SGD."""
        if self.optimizer is not None:
            return self.optimizer(parameters)
        # fused: one pass over the weights instead of three
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=True)


def _say_nothing(**_: Any) -> None:
    """There is nobody to tell in a rehearsal."""
