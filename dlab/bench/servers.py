"""Parameter servers to compare dlab's with: two over PyTorch's RPC, one over gloo's send and recv; and none.

Every process has one thread. They are asynchronous: a worker that sends gradients gets the newest weights at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F

import dlab
from dlab.bench.measure import moments, span
from dlab.bench.spawned import TIME_LIMIT

LR = 0.01
BATCHES = 8  # of each worker, which takes them in turn
WARM_UP = 20  # steps before the measurement, which touch memory and fill caches


def rpc_updates(workers: int, batch: int, steps: int) -> float:
    """Return the updates per second of all workers in the design of PyTorch's tutorial: one RPC per update, which takes
    gradients and returns the model."""
    return run(by_rpc, workers, batch, steps).per_second


def lean_rpc_updates(workers: int, batch: int, steps: int) -> float:
    """Return the updates per second of a design in which the RPC returns only the weights."""
    return run(by_lean_rpc, workers, batch, steps).per_second


def gloo_updates(workers: int, batch: int, steps: int) -> float:
    """Return the updates per second with gloo: a flat tensor of gradients from any worker, and one of weights back."""
    return run(by_gloo, workers, batch, steps).per_second


def alone_updates(workers: int, batch: int, steps: int) -> float:
    """Return the updates per second without a server, each worker alone: the bound for a free exchange."""
    return run(alone, workers, batch, steps).per_second


# ------------------------------------------------------------------------------------------ running


class Plan(NamedTuple):
    """Who trains what, and the rendezvous of the processes. The server has the rank after the workers'."""

    workers: int
    batch: int
    steps: int
    directory: str

    @property
    def updates(self) -> int:
        """The number of updates of all workers together, including the warm-up."""
        return self.workers * (WARM_UP + 1 + self.steps)


class Timing(NamedTuple):
    """What the processes write into shared memory: each worker its start and end, the server the rest."""

    moments: torch.Tensor  # (workers, 2)
    updates: torch.Tensor  # ()
    weights: torch.Tensor  # (669706,)
    steps: int

    @property
    def per_second(self) -> float:
        """Updates per second of all workers, from the first worker's start to the last worker's end."""
        return len(self.moments) * self.steps / span((begin, end) for begin, end in self.moments.tolist())


class Member(NamedTuple):
    """What a process knows: its rank, the plan, where to write the results, and the workers' barrier at the start."""

    rank: int
    plan: Plan
    outcome: Timing
    start: Any  # a Barrier

    @property
    def serves(self) -> bool:
        """Whether this is the server; all other ranks are workers."""
        return self.rank == self.plan.workers

    def measure(self, step: Callable[[], None]) -> None:
        """Take all steps of a worker, and record when the measured ones began and ended."""
        for _ in range(WARM_UP):
            step()
        taken = moments(step, self.plan.steps, self.start.wait)
        self.outcome.moments[self.rank] = torch.tensor(taken, dtype=torch.float64)

    def conclude(self, updates: int, weights: torch.Tensor) -> None:
        """Record the server's final state."""
        self.outcome.updates.fill_(updates)
        self.outcome.weights.copy_(weights)


Design = Callable[[Member], None]  # the function of each process


def run(design: Design, workers: int, batch: int, steps: int) -> Timing:
    """Start all processes of a design, and wait until they have ended; none is left behind, even after an error."""
    outcome = Timing(torch.zeros(workers, 2, dtype=torch.float64), torch.tensor(0), torch.zeros(flat().numel()), steps)
    for tensor in (outcome.moments, outcome.updates, outcome.weights):
        tensor.share_memory_()
    start = mp.get_context("spawn").Barrier(workers)
    deadline = monotonic() + TIME_LIMIT
    with tempfile.TemporaryDirectory() as directory:
        arguments = (design, Plan(workers, batch, steps, directory), outcome, start)
        group = mp.spawn(_member, arguments, nprocs=workers + (design is not alone), join=False)
        try:
            while not group.join(timeout=deadline - monotonic()):  # raises what a process has raised
                if monotonic() > deadline:
                    raise TimeoutError(f"{design.__name__}: {workers} workers took more than {TIME_LIMIT} s")
        finally:
            for process in group.processes:
                process.kill()
                process.join()
    return outcome


def _member(rank: int, design: Design, plan: Plan, outcome: Timing, start: Any) -> None:
    torch.set_num_threads(1)
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    design(Member(rank, plan, outcome, start))


# ----------------------------------------------------------------------------------------- training


class TrainingWorker:
    """A copy of the model, and random batches in the shape of MNIST's, the same in every run."""

    def __init__(self, rank: int, batch: int) -> None:
        self.use(first_model())
        dice = torch.Generator().manual_seed(rank)
        images = torch.rand(BATCHES, batch, 1, 28, 28, generator=dice)
        labels = torch.randint(10, (BATCHES, batch), generator=dice)
        self.batches = cycle(zip(images, labels, strict=True))

    def use(self, model: torch.nn.Module) -> None:
        """Compute the next gradients with the weights of this model."""
        self.model, self.parameters = model, list(model.parameters())

    def backward(self) -> list[torch.Tensor]:
        """Return the gradients of the next batch."""
        images, labels = next(self.batches)
        self.model.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def first_model() -> dlab.MLP:
    """Return the initial model, which is the same for the server and for each worker."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dlab.MLP()


def flat(model: torch.nn.Module | None = None) -> torch.Tensor:
    """Copy the parameters, by default the initial ones, into one flat tensor."""
    parameters = (model or first_model()).parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def alone(member: Member) -> None:
    """Train each worker with its own optimizer."""
    worker = TrainingWorker(member.rank, member.plan.batch)
    optimizer = torch.optim.SGD(worker.parameters, LR)

    def step() -> None:
        worker.backward()
        optimizer.step()

    member.measure(step)


# ---------------------------------------------------------------------------------------------- RPC


class Served:
    """The model and its optimizer, with a lock because RPC calls run in threads."""

    def __init__(self) -> None:
        self.model = first_model()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, LR)
        self.updates = 0
        self.lock = threading.Lock()

    def update(self, gradients: list[torch.Tensor]) -> None:
        """Take one step of SGD with these gradients."""
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1


@cache
def served() -> Served:
    """Return the only one in this process."""
    return Served()


def update_and_fetch_model(gradients: list[torch.Tensor]) -> torch.nn.Module:
    """Update and return the model; workers call it, and it runs in the server. As in the tutorial the model is not
    copied.

    It is sent after the lock is free, so some of its parameters may already include the next update.
    """
    served().update(gradients)
    return served().model


def update_and_fetch_weights(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Update and return only the weights, without the model around them."""
    served().update(gradients)
    return [parameter.detach() for parameter in served().parameters]


def by_rpc(member: Member) -> None:
    """Train with the model that the server returns."""

    def step(worker: TrainingWorker, server: str) -> None:
        worker.use(rpc.rpc_sync(server, update_and_fetch_model, (worker.backward(),)))

    _call_server(member, step)


def by_lean_rpc(member: Member) -> None:
    """Train by copying the weights that the server returns into the worker's own model."""

    def step(worker: TrainingWorker, server: str) -> None:
        weights = rpc.rpc_sync(server, update_and_fetch_weights, (worker.backward(),))
        for parameter, weight in zip(worker.parameters, weights, strict=True):
            parameter.data = weight

    _call_server(member, step)


def _call_server(member: Member, step: Callable[[TrainingWorker, str], None]) -> None:
    """Send tensors without making copies at either end.

    This is TensorPipe's cheapest way on one machine: its shared memory polls, which takes processor time from others,
    so sockets carry small messages, and the kernel copies tensors from process to process (cma).
    """
    plan = member.plan
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{plan.directory}/store", _transports=["uv"], _channels=["cma", "basic"]
    )
    if member.serves:
        served()  # before the first call
    warnings.filterwarnings("ignore", "You are using a Backend")  # init_rpc uses one itself
    rpc.init_rpc(str(member.rank), rank=member.rank, world_size=plan.workers + 1, rpc_backend_options=options)
    if not member.serves:
        member.measure(partial(step, TrainingWorker(member.rank, plan.batch), str(plan.workers)))
    rpc.shutdown()  # waits for all
    if member.serves:
        member.conclude(served().updates, flat(served().model))


# --------------------------------------------------------------------------------------------- gloo


def by_gloo(member: Member) -> None:
    """Train with gloo: weights are received in the parameters' memory; gradients are copied once, into one tensor."""
    plan = member.plan
    size = plan.workers + 1
    store = dist.FileStore(f"{plan.directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=member.rank, world_size=size)
    weights = flat()
    gradients = torch.empty_like(weights)
    if member.serves:
        for _ in range(plan.updates):
            source = dist.recv(gradients)  # from any worker
            weights.add_(gradients, alpha=-LR)
            dist.send(weights, source)
        member.conclude(plan.updates, weights)
    else:
        worker = TrainingWorker(member.rank, plan.batch)
        torch.nn.utils.vector_to_parameters(weights, worker.parameters)  # makes them views of `weights`

        def step() -> None:
            torch.cat([gradient.view(-1) for gradient in worker.backward()], out=gradients)
            dist.send(gradients, plan.workers)
            dist.recv(weights, plan.workers)

        member.measure(step)
    dist.barrier()  # leaving early would break the server's recv from any worker
    dist.destroy_process_group()
