"""A plan for a training: what to train, on which data, with which strategy. Every worker of a cluster can run it."""

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
    """The result of one rank."""

    losses: list[float]  # for each step, the mean over this rank's samples
    counts: list[int]  # for each step, the number of this rank's samples
    digest: str  # of the weights: two ranks' digests are equal if all bits of their weights are
    weights: dict[str, torch.Tensor] | None  # only in the result of rank 0
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
            raise ValueError(f"every={self.every!r} says how often to save: also say where, with checkpoint=folder")
        if self.elastic and (self.strategy.sharded or not self.strategy.elastic):
            more = "does not need it" if self.strategy.survives else "cannot restart without a rank that died"
            raise ValueError(f"elastic=True is for SyncSGD and AllReduceSGD; this strategy {more}")
        if self.overwrite and self.checkpoint is None:
            raise ValueError("overwrite=True removes a folder's checkpoints: say which folder, with checkpoint=folder")
        if self.resume is not None:
            open_checkpoint(self.resume)  # to report a damaged one at once
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
        """Train as one rank; without a transport, use this worker's own and log to the notebook.

        A strategy that needs servers uses those of the cluster; where there are none, as in a rehearsal or under
        torchrun, the last ranks act as servers for the others, and return None.
        """
        from dlab.training.loop import Trainer  # at the top it would be circular

        where, tell = (context.transport(), tell or log) if transport is None else (transport, tell or _discard)
        here = device() if transport is None else torch.device("cpu")

        def work(workers: Transport) -> RankResult:
            with nullcontext() if self.checkpoint is None else Folder(self.checkpoint) as folder:
                return Trainer(self, workers, here, tell, folder).run()

        return work(where) if not self.servers or servers() is not None else share_out(where, self.servers, work)

    @property
    def checks(self) -> dict[str, Callable[[Any], object]]:
        """For each knob, by name, a function that raises ValueError for a bad value."""
        return {"lr": check_rate, **self.strategy.checks}

    @property
    def survives(self) -> bool:
        """Whether the training continues without ranks that have died."""
        return self.elastic or self.strategy.survives

    @property
    def revives(self) -> bool:
        """Whether a server that dies is replaced and the training continues from its last checkpoint."""
        return self.checkpoint is not None and self.strategy.servers > 0

    @property
    def servers(self) -> int:
        """The number of servers that the strategy needs."""
        return self.strategy.servers

    def load(self) -> Samples:
        """Return the data to train on."""
        return mnist(train=True) if isinstance(self.data, str) else self.data

    def load_test(self) -> Samples | None:
        """Return the data to test on: by default MNIST's test set for MNIST, and None for other data."""
        if self.test is None or self.test is True:
            return mnist(train=False) if isinstance(self.data, str) else None
        if isinstance(self.test, str):
            return mnist(train=False)
        return self.test or None

    def make_optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer that was asked for, or else SGD with `lr` and `momentum`."""
        if self.optimizer is not None:
            return self.optimizer(parameters)
        parameters = list(parameters)
        # fused: one pass over the weights instead of three; torch 2.13 leaves weights of 16 bits as they are on a CPU
        fused = all(each.element_size() > 2 for each in parameters)
        optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=fused)
        if self.momentum:
            optimizer.register_step_pre_hook(_begin_momentum)
        return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Set missing momentum to zeros: torch's fused SGD fails if a layer is first used after others have momentum."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and not optimizer.state[each]:
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each.grad)


def _discard(**_: Any) -> None:
    """Discard what would be logged, since a rehearsal has no notebook to log to."""
