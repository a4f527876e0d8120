"""The tour's training: four workers, one small network, and gradients averaged by all-reduce after every step.

The same function runs in `notebooks/00_tour.ipynb` and, with a progress line per rank, in `dlab demo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from torch import nn

from dlab.data import mnist, partition_dataset
from dlab.models import SimpleCNN
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker.context import device, knob, log, rank, world_size
from dlab.reduction import average_gradients
from dlab.training.progress import show_progress

__all__ = ["accuracy", "average_gradients", "main", "train"]

Average = Callable[[nn.Module], None]  # averages the gradients of a model over all ranks


def train(average: Average, steps: int, seed: int = 1234, make: Callable[[], nn.Module] = SimpleCNN) -> nn.Module:
    """Train on this rank's shard, with the same steps as all other ranks; runs on every worker."""
    torch.manual_seed(seed)  # the same initial weights on every rank
    batches, _ = partition_dataset(rank(), world_size(), seed=seed)  # of 128 // size images each
    model = make().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    losses: list[float] = []  # of the current epoch
    started = time.perf_counter()
    for step, (images, labels) in enumerate(islice(chain.from_iterable(repeat(batches)), steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device())), labels.to(device()))
        loss.backward()
        computed = time.perf_counter()
        average(model)  # every rank waits here for the slowest
        averaged = time.perf_counter()
        losses.append(loss.item())
        log(step=step, loss=losses[-1], samples=len(labels), compute=computed - started, wait=averaged - computed)
        started = averaged
        optimizer.param_groups[0]["lr"] = knob("lr", 0.01)
        optimizer.step()
        if len(losses) == len(batches) or step + 1 == steps:
            print(f"Rank {rank()}, epoch {step // len(batches)}: {sum(losses) / len(losses):.2f}")
            losses.clear()
    return model.cpu()


def accuracy(model: nn.Module) -> float:
    """Return the share of the 10,000 test images that the model classifies correctly."""
    images, labels = mnist(train=False)[:]
    model.eval()  # turns dropout off
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main(workers: int = 4, steps: int = 200) -> None:
    """Train in a terminal, with a progress line per rank."""
    from rich.console import Console

    console = Console()
    console.print(f"starting {workers} worker processes …")
    with Cluster(workers) as cluster:
        pids = ", ".join(map(str, cluster.pids))
        console.print(f"started (processes {pids}); each trains SimpleCNN on its own shard of MNIST")
        start = time.monotonic()
        run = cluster.start(train, average_gradients, steps)
        show_progress(run, steps, console)
        models = run.wait()
    seconds = time.monotonic() - start
    same = all(
        torch.equal(mine, first)
        for model in models
        for mine, first in zip(model.parameters(), models[0].parameters(), strict=True)
    )
    console.print(f"{steps} steps in {seconds:.1f} s; test accuracy {accuracy(models[0]):.1%}")
    console.print(f"all {workers} models are equal to the last bit: {same}")
