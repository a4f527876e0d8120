"""A plan for a training: what to train, on which data, by which strategy; can be run in every worker of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dlab.data import mnist
from dlab.data.batches import Samples
from dlab.kvstore.serving import share_out
from dlab.processes.worker import context
from dlab.processes.worker.context import device, log, servers
from dlab.strategies import Strategy, SyncSGD
from dlab.strategies.objective import Loss
from dlab.training.checkpoints import open_checkpoint
from dlab.training.checks import check_model, check_momentum, check_rate, check_samples
from dlab.training.evaluation import Evaluation
from dlab.training.saving import Folder
from dlab.transports import Transport

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class RankResult:
    """What one rank brings home."""

    losses: list[float]  # of each step, the mean over its own samples
    counts: list[int]  # and how many they were
    digest: str  # of the weights: equal where all bits are
    weights: dict[str, torch.Tensor] | None  # rank 0's
    evaluation: Evaluation | None


@dataclass(kw_only=True)
class Training:
    """A training that can be run: call it in every worker of a cluster, or with a transport in a rehearsal.

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
    overwrite: bool = False
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
        if self.elastic and (self.strategy.sharded or not self.strategy.elastic):
            more = "goes on by itself" if self.strategy.survives else "cannot: a rank alone does not hold all it needs"
            raise ValueError(f"elastic=True is for SyncSGD and AllReduceSGD; this strategy {more}")
        if self.overwrite and self.checkpoint is None:
            raise ValueError("overwrite=True removes the checkpoints in a folder: say which, too, by checkpoint=folder")
        if self.resume is not None:
            open_checkpoint(self.resume)  # to be told at once
        if self.checkpoint is not None:
            Folder(self.checkpoint).check(self.resume, self.overwrite)
        for name, data in (("data", self.data), ("test", self.test)):
            if isinstance(data, str) and data != "mnist":
                raise ValueError(f"there is no data set {data!r}: use 'mnist', or give a Dataset")
            if not isinstance(data, str) and not (name == "test" and (data is None or isinstance(data, bool))):
                check_samples(data, name)

    def __call__(
        self, transport: Transport | None = None, tell: Callable[..., None] | None = None
    ) -> RankResult | None:
        """What a rank does. Without a transport: over the one of this worker, and telling the notebook.

        A strategy that needs servers has those of the cluster; where nobody has started any, as in a rehearsal or
        under torchrun, the last ranks serve the others, and return nothing.
        """
        from dlab.training.loop import Trainer  # which knows this class

        where, tell = (context.transport(), tell or log) if transport is None else (transport, tell or _say_nothing)
        here = device() if transport is None else torch.device("cpu")

        def work(workers: Transport) -> RankResult:
            with nullcontext() if self.checkpoint is None else Folder(self.checkpoint) as folder:
                return Trainer(self, workers, here, tell, folder).run()

        return work(where) if not self.servers or servers() is not None else share_out(where, self.servers, work)

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
        """How many servers the strategy needs."""
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
        optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=True)
        if self.momentum:
            optimizer.register_step_pre_hook(_begin_momentum)
        return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """With zeros: PyTorch's fused SGD fails if a layer is first used when others have their momentum already."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and not optimizer.state[each]:
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each.grad)


def _say_nothing(**_: Any) -> None:
    """There is nobody to tell in a rehearsal."""
