"""`dlab.train`: train on the warm workers of this kernel, in the background, and get a model at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dlab.data.batches import Samples
from dlab.processes.parent.cluster import Cluster, cluster
from dlab.processes.parent.run import Run
from dlab.strategies import Strategy, SyncSGD
from dlab.strategies.objective import Loss
from dlab.training.evaluation import Evaluation
from dlab.training.plan import MakeOptimizer, RankResult, Training
from dlab.training.saving import Folder


@dataclass
class Result:
    """The result of a training."""

    model: nn.Module  # on the CPU
    losses: list[float]  # for each step, the mean over the samples of the global batch
    evaluation: Evaluation | None  # on the test data, if there is any
    identical: bool  # whether the models of all ranks are equal to the last bit

    @property
    def accuracy(self) -> float | None:
        """The share of the test data that the model gets right; None without test data."""
        return self.evaluation.accuracy if self.evaluation else None

    def __repr__(self) -> str:
        tested = f", test accuracy {self.accuracy:.1%}" if self.accuracy is not None else ""
        return f"<Result: {len(self.losses)} steps, last loss {self.losses[-1]:.3f}{tested}>"


def train(
    model: Callable[[], nn.Module],
    data: Samples | str = "mnist",
    strategy: Strategy | None = None,
    workers: int = 4,
    *,
    epochs: int = 1,
    batch_size: int = 128,
    lr: float = 0.01,
    momentum: float = 0.5,
    loss: Loss = F.cross_entropy,
    optimizer: MakeOptimizer | None = None,
    order: str = "shards",
    seed: int = 1234,
    test: Samples | str | bool | None = None,
    accumulate: int = 1,
    amp: bool = False,
    watch: int | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    elastic: bool = False,
    on: Cluster | None = None,
) -> Run:
    """Train in real worker processes; returns a `Run` at once, whose `wait()` returns a `Result`.

    >>> run = dlab.train(dlab.SimpleCNN, "mnist", dlab.AllReduceSGD(), workers=4, lr=0.05, momentum=0.9)
    >>> run.wait().accuracy

    `model`: a class or function that makes the network. `data`: "mnist", or a Dataset of (input, label).
    `strategy`: how the workers arrive at one model, by default `SyncSGD()`. `batch_size` is that of all workers
    together. `loss` must be a mean over samples. `optimizer`: a function that makes one from parameters, instead of SGD
    with `lr` and `momentum`. `order`: "shards" gives every worker a shard of its own, "global" splits each global
    batch, so that the number of workers does not change the result. `test`: a Dataset to test on; by default MNIST's
    own for "mnist", none if False. `accumulate`: compute each worker's batch in this many micro-batches. `amp`:
    autocast to bfloat16. `watch`: stream gradient norms every so many steps. `checkpoint`: a folder to save to, `every`
    so many steps or, by default, after each epoch; the last two checkpoints are kept. `resume`: continue from the
    newest checkpoint in such a folder, or from one given checkpoint; the number of workers may differ. A folder that
    holds another training's checkpoints is refused, unless `overwrite=True` removes them. If you resume an older
    checkpoint and save to the same folder, the later ones are removed with the next save. `elastic`: when a worker
    dies, the others continue from the same weights. `on`: a cluster of your own instead of the kernel's shared one.

    While it trains, `run.set("lr", 0.01)` changes the learning rate.
    """
    training = Training(
        model=model,
        data=data,
        strategy=SyncSGD() if strategy is None else strategy,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        loss=loss,
        optimizer=optimizer,
        order=order,
        seed=seed,
        test=test,
        accumulate=accumulate,
        amp=amp,
        watch=watch,
        checkpoint=None if checkpoint is None else Path(checkpoint).absolute(),
        every=every,
        elastic=elastic,
        resume=None if resume is None else Path(resume).absolute(),
        overwrite=overwrite,
    )
    if training.checkpoint is not None:
        Folder(training.checkpoint).check_free()
    on = on or cluster(workers, training.servers)
    return on.start(training).then(partial(collect, training))


def collect(training: Training, results: list[RankResult | None]) -> Result | None:
    """Combine the results of all ranks into one; None if the run was stopped before the end."""
    there = [result for result in results if result is not None]
    bringer = next((result for result in there if result.weights is not None), None)
    if bringer is None or bringer.weights is None:
        return None
    with torch.random.fork_rng():  # making a model must not change the notebook's random numbers
        model = training.model()
    model.load_state_dict(bringer.weights)
    losses = []
    for step in range(len(bringer.losses)):
        counts = [result.counts[step] for result in there]
        total = sum(result.losses[step] * n for result, n in zip(there, counts, strict=True) if n)
        losses.append(total / sum(counts) if any(counts) else float("nan"))  # if only ranks that died had the loss
    return Result(model, losses, bringer.evaluation, len({result.digest for result in there}) == 1)
