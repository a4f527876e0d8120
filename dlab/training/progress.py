"""Train in a terminal: show a progress bar per rank, and the result at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlab import models, strategies
from dlab.kinds import LOG
from dlab.processes.parent.cluster import Cluster
from dlab.processes.parent.run import Run
from dlab.processes.worker.context import rank, world_size
from dlab.training.plan import RankResult, Training
from dlab.training.running import collect
from dlab.training.saving import Folder

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "simple_cnn": models.SimpleCNN,
    "small_cnn": models.SmallCNN,
    "mlp": models.MLP,
    "two_layer": models.TwoLayer,
    "row_transformer": models.RowTransformer,
}
STRATEGIES: dict[str, Callable[..., strategies.Strategy]] = {
    "sync": strategies.SyncSGD,
    "allreduce": strategies.AllReduceSGD,
    "zero": strategies.ZeRO,
    "averaging": strategies.ModelAveraging,
    "async": strategies.AsyncSGD,
    "ddp": strategies.DDP,
    "tensor": strategies.TensorParallel,
    "server": strategies.ParameterServer,
    "server_async": lambda: strategies.ParameterServer("async"),
    "server_ssp": lambda: strategies.ParameterServer("ssp"),
}
_SECONDS = 2.0  # between two lines under a launcher


def train_in_terminal(model: str, strategy: str, workers: int, stage: int | None = None, **options: Any) -> None:
    """Run `dlab train`: in a cluster of its own, or as one rank if a launcher such as torchrun started this process."""
    for name, known in ((model, MODELS), (strategy, STRATEGIES)):
        if name not in known:
            raise ValueError(f"{name!r} is not known: use one of {', '.join(known)}")
    if stage is not None and strategy != "zero":
        raise ValueError(f"--stage {stage} is for --strategy zero, and not for {strategy}")
    made = STRATEGIES[strategy]() if stage is None else STRATEGIES[strategy](stage)
    training = Training(model=MODELS[model], strategy=made, **options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _train_as_rank(training)
    else:
        _train_in_cluster(training, workers)


def _train_in_cluster(training: Training, workers: int) -> None:
    from rich.console import Console

    if training.checkpoint is not None:
        Folder(training.checkpoint).check_free()
    console, begun = Console(), time.monotonic()
    servers = f" and {training.servers} server processes" if training.servers else ""
    console.print(f"starting {workers} worker processes{servers} …")
    with Cluster(workers, servers=training.servers) as cluster:
        run = cluster.start(training)
        steps = training.epochs * (-(-len(training.load()) // training.batch_size))
        show_progress(run, steps, console)
        console.print(_tell(training, run.wait(), time.monotonic() - begun), highlight=False, soft_wrap=True)


def _train_as_rank(training: Training) -> None:
    """Train as one rank of a launcher's process group; rank 0 prints the progress and the result."""
    import dlab.processes.worker.compiler  # noqa: F401  (replaces torch's own, which takes 1.5 s to import)

    begun, told = time.monotonic(), 0.0
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    def tell(**data: Any) -> None:
        nonlocal told
        if rank() == 0 and time.monotonic() - told > _SECONDS:
            told = time.monotonic()
            loss = f"loss {data['loss']:.3f}" if "loss" in data else "the loss is on another rank"
            print(f"step {data['step']}, epoch {data['epoch']}: {loss}", flush=True)

    try:
        result = training(tell=tell)
        results: list[RankResult | None] = [None] * world_size()
        dist.gather_object(result, results if rank() == 0 else None)
        if rank() == 0:
            print(_tell(training, results, time.monotonic() - begun), flush=True)
    finally:
        dist.destroy_process_group()


def _tell(training: Training, results: list[RankResult | None], seconds: float) -> str:
    result = collect(training, results)
    if result is None:
        return "stopped before the end"
    accuracy = f"; test accuracy {result.accuracy:.2%}" if result.accuracy is not None else ""
    same = "equal to the last bit" if result.identical else "NOT equal"
    ranks = sum(result is not None for result in results)
    return (
        f"{training.strategy} on {ranks} ranks: {len(result.losses)} steps in {seconds:.1f} s, "
        f"last loss {result.losses[-1]:.4f}{accuracy}; the models of all ranks are {same}"
    )


def show_progress(run: Run, steps: int, console: object) -> None:
    """Show a progress bar for each rank until the run is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:  # type: ignore[arg-type]
        lines = [progress.add_task(f"rank {rank}", total=steps, loss="") for rank in range(run.ranks)]
        done, place = False, 0
        while not done:
            time.sleep(0.1)
            done = run.done
            fresh, place = run.since(place)
            events = (event for records in fresh for event in records.events)
            latest = {event.rank: event.data for event in events if event.kind == LOG}
            for number, data in latest.items():
                loss = f"loss {data['loss']:.3f}" if "loss" in data else ""  # the loss may be on another rank
                progress.update(lines[number], completed=data["step"] + 1, loss=loss)
