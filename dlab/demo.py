"""The tour's training: four workers, one small network, and gradients averaged by all-reduce after every step.

The same function runs in `notebooks/00_tour.ipynb` and, with a progress line per rank, by `dlab demo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlab.data import mnist, partition_dataset
from dlab.models import SimpleCNN
from dlab.processes.cluster import Cluster
from dlab.processes.errors import WorkerError
from dlab.processes.inside import device, knob, log, rank, world_size
from dlab.reduction import average_gradients
from dlab.training.progress import show_progress

Average = Callable[[torch.nn.Module], None]  # makes the gradients of all ranks' models equal


def train(average: Average, steps: int, seed: int = 1234) -> torch.nn.Module:
    """What every worker does: its own shard, its own batches, the same step as all."""
    torch.manual_seed(seed)  # the same first weights on every rank
    batches, _ = partition_dataset(rank(), world_size(), seed=seed)
    model = SimpleCNN().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    epochs = chain.from_iterable(repeat(batches))
    started = time.perf_counter()
    for step, (images, labels) in enumerate(islice(epochs, steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device())), labels.to(device()))
        loss.backward()
        computed = time.perf_counter()
        average(model)  # here everybody waits for the slowest
        averaged = time.perf_counter()
        log(step=step, loss=loss.item(), samples=len(labels), compute=computed - started, wait=averaged - computed)
        started = averaged
        optimizer.param_groups[0]["lr"] = knob("lr", 0.01)
        optimizer.step()
    return model.cpu()


def accuracy(model: torch.nn.Module) -> float:
    """The share of the 10,000 test images that the model gets right."""
    images, labels = mnist(train=False)[:]
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def check_one_message(average: Average, cluster: Cluster) -> str:
    """The tour's exercise: gradients averaged with a single all-reduce. "well done …", or "not yet: …" and why."""
    try:
        problems = [problem for problem in cluster.run(_problem_of, average, timeout=60) if problem]
    except WorkerError as error:
        return f"not yet: {error}"
    return f"not yet: {problems[0]}." if problems else "well done: the right mean, with one message instead of eight."


def _problem_of(average: Average) -> str | None:
    model = SimpleCNN()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (rank() + 1.0) * (number + 1))
    calls, all_reduce = 0, dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = count
    try:
        average(model)
    finally:
        dist.all_reduce = all_reduce
    for number, (name, parameter) in enumerate(model.named_parameters()):
        mean = (world_size() + 1) / 2 * (number + 1)
        if parameter.grad is None or not torch.allclose(parameter.grad, torch.tensor(mean)):
            found = "None" if parameter.grad is None else f"{parameter.grad.flatten()[0].item():g}"
            return f"the gradient of {name} should be {mean:g} everywhere, the mean over the ranks, and is {found}"
    if calls != 1:
        return f"all_reduce was called {calls} times: pack the gradients into one tensor first"
    return None


def main(workers: int = 4, steps: int = 200) -> None:
    """Train in a terminal, with a progress line per rank."""
    from rich.console import Console

    console = Console()
    console.print(f"starting {workers} worker processes …")
    with Cluster(workers) as cluster:
        pids = ", ".join(map(str, cluster.pids))
        console.print(f"they are there (processes {pids}); each trains SimpleCNN on its own shard of MNIST")
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
