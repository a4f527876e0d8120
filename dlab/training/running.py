"""`dlab.train`: a training on the warm workers of this kernel, in the background, with a model at the end."""

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
    """What a training gives."""

    model: nn.Module  # on the CPU
    losses: list[float]  # of every step, the mean over all samples of the global batch
    evaluation: Evaluation | None  # on the test data, if there is any
    identical: bool  # did all ranks end with the same bits?

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
    """Train in real worker processes; gives a `Run` at once, whose `wait()` gives a `Result`.

    >>> run = dlab.train(dlab.SimpleCNN, "mnist", dlab.AllReduceSGD(), workers=4, lr=0.05, momentum=0.9)
    >>> run.wait().accuracy

    `model`: a class or function that makes the network. `data`: "mnist", or a Dataset of (input, label).
    `strategy`: how the workers come to one model, by default `SyncSGD()`. `batch_size` is that of all workers
    together. `loss` is a mean over samples. `optimizer`: a function that makes one from parameters, in place of SGD
    with `lr` and `momentum`. `order`: "shards" gives every worker a shard of its own, "global" cuts each global batch,
    so that the number of workers does not change the result. `test`: a Dataset to test on; MNIST's own for "mnist",
    unless False. `accumulate`: compute each worker's batch in so many pieces. `amp`: autocast to bfloat16. `watch`:
    stream gradient norms every so many steps. `checkpoint`: a folder to save to, `every` so many steps, or after each
    epoch; the last two are kept. `resume`: such a folder, to go on from its newest, or one of the checkpoints in it,
    also with another number of workers. The folder of one training is refused to another, unless `overwrite=True`
    removes what is there; who resumes an older checkpoint and saves to the same folder leaves the later ones behind:
    they are removed when the next one is saved. `elastic`: when a worker dies, the others go on from the same weights.
    `on`: a cluster of your own, not the kernel's shared one.

    While it trains, `run.set("lr", 0.01)` turns the learning rate.
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
    """One result of all ranks'; None if the run was stopped before the end."""
    there = [result for result in results if result is not None]
    bringer = next((result for result in there if result.weights is not None), None)
    if bringer is None or bringer.weights is None:
        return None
    with torch.random.fork_rng():  # making a model is none of the notebook's random numbers
        model = training.model()
    model.load_state_dict(bringer.weights)
    losses = []
    for step in range(len(bringer.losses)):
        counts = [result.counts[step] for result in there]
        total = sum(result.losses[step] * n for result, n in zip(there, counts, strict=True) if n)
        losses.append(total / sum(counts) if any(counts) else float("nan"))  # if only the dead knew it
    return Result(model, losses, bringer.evaluation, len({result.digest for result in there}) == 1)
