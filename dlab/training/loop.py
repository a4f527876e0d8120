"""The training loop: what every rank does, with a model, its part of the data, and a strategy that joins the ranks.

Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dlab.data import mnist
from dlab.data.batches import Samples, take
from dlab.data.dealing import Dealer
from dlab.processes.inside import device, knob, log, transport
from dlab.processes.watching import watch
from dlab.strategies import Strategy, SyncSGD
from dlab.training.evaluation import Evaluation, evaluate
from dlab.transports import Transport

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

_making = threading.Lock()  # ranks of a rehearsal are threads with one source of random numbers


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

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise TypeError(
                f"model is {type(self.model).__name__!r}: give a function or class that makes the network, as in "
                "train(dlab.SimpleCNN, …), so that every worker can make its own"
            )
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"strategy is {self.strategy!r}: give a strategy, such as dlab.SyncSGD()")
        for name in ("epochs", "batch_size", "accumulate"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
        if isinstance(self.data, str) and self.data != "mnist":
            raise ValueError(f"there is no data set {self.data!r}: use 'mnist', or give a Dataset")
        if isinstance(self.test, str) and self.test != "mnist":
            raise ValueError(f"there is no data set {self.test!r}: use 'mnist', or give a Dataset")

    def __call__(self, wire: Transport | None = None) -> Share:
        """What a rank does. Without a wire: over the one of this worker, and telling the notebook."""
        if wire is None:
            return _Rank(self, transport(), device(), log).run()
        return _Rank(self, wire, torch.device("cpu"), _say_nothing).run()

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
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


def _say_nothing(**_: Any) -> None:
    """There is nobody to tell in a rehearsal."""


class _Rank:
    """One rank at work."""

    def __init__(self, plan: Training, wire: Transport, device: torch.device, tell: Callable[..., None]) -> None:
        self.plan, self.wire, self.device, self.tell = plan, wire, device, tell
        self.data = plan.load()
        self.dealer = Dealer(self.data, wire.size, plan.batch_size, plan.order, plan.seed)
        with _making:
            torch.manual_seed(plan.seed)
            self.model = plan.model().to(device)
        torch.manual_seed(plan.seed + 1 + wire.rank)  # what is random in training differs from rank to rank
        self.optimizer = plan.make_optimizer(self.model.parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.strategy = copy.deepcopy(plan.strategy)
        self.module = self.strategy.begin(self.model, self.optimizer, wire)
        if plan.watch:
            watch(self.model, plan.watch)
        self.steps = 0
        self.losses: list[float] = []
        self.counts: list[int] = []

    def run(self) -> Share:
        for epoch in range(self.plan.epochs):
            for step in range(self.dealer.steps):
                self.learn(epoch, step)
        self.strategy.end()
        return self.share()

    def learn(self, epoch: int, step: int) -> None:
        """One step, and what there is to tell of it."""
        started = time.perf_counter()
        self.turn_knobs()
        inputs, labels, count = self.batch(epoch, step)
        self.strategy.clear()
        loss = self.backward(inputs, labels, self.dealer.weight(step, self.wire.rank))
        told = self.strategy.step()
        self.losses.append(loss)
        self.counts.append(count)
        compute = time.perf_counter() - started - told["wait"]
        self.tell(step=self.steps, epoch=epoch, loss=loss, samples=count, compute=compute, **told)
        self.steps += 1

    def batch(self, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """This rank's samples. One that has none left brings somebody's, which then weigh nothing."""
        positions = self.dealer.positions(epoch, step, self.wire.rank)
        inputs, labels = take(self.data, positions if len(positions) else [0, 0])
        return inputs.to(self.device), labels.to(self.device), len(positions)

    def backward(self, inputs: torch.Tensor, labels: torch.Tensor, weight: float) -> float:
        """Leave the gradient of the weighted mean loss in the model, in one pass or several; gives the mean loss."""
        pieces = min(self.plan.accumulate, len(labels))
        total = 0.0
        for number, (some, answers) in enumerate(
            zip(inputs.tensor_split(pieces), labels.tensor_split(pieces), strict=True), start=1
        ):
            with self.strategy.accumulating() if number < pieces else nullcontext():
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.amp):
                    loss = self.plan.loss(self.module(some), answers)
                share = len(answers) / len(labels)
                (loss * (weight * share)).backward()
                total += loss.item() * share
        return total

    def turn_knobs(self) -> None:
        """The learning rate may be changed while it trains; groups with rates of their own keep their proportions."""
        rate = knob("lr", self.rates[0])
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = own * (rate / self.rates[0]) if self.rates[0] else rate

    def share(self) -> Share:
        """The results, of which some are for one rank to bring."""
        test = self.plan.load_test()
        wire = self.strategy.wire  # of those who are still there
        evaluation = evaluate(self.model, test, wire, device=self.device) if test is not None else None
        weights = {name: each.detach().cpu() for name, each in self.model.state_dict().items()}
        digest = hashlib.sha256()
        for each in weights.values():
            digest.update(each.contiguous().view(-1).view(torch.uint8).numpy())
        return Share(self.losses, self.counts, digest.hexdigest(), weights if wire.rank == 0 else None, evaluation)
