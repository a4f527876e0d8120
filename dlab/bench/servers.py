"""Parameter servers for dlab's to be compared with: two by PyTorch's RPC, one by gloo's send and recv; and none.

Every process has one thread. They are asynchronous: whoever brings gradients gets the newest weights at once.
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
BATCHES = 8  # of each worker; it takes them in turn
WARM_UP = 20  # steps that do not count: memory is touched, caches fill


def rpc_updates(workers: int, batch: int, steps: int) -> float:
    """Updates per second of all workers together, in the design of PyTorch's tutorial: one RPC for each update, which
    takes gradients and gives the model."""
    return run(by_rpc, workers, batch, steps).per_second


def lean_rpc_updates(workers: int, batch: int, steps: int) -> float:
    """The same, but what comes back are the weights alone."""
    return run(by_lean_rpc, workers, batch, steps).per_second


def gloo_updates(workers: int, batch: int, steps: int) -> float:
    """The same by messages: a flat tensor there, from whichever worker comes first, and a flat tensor back."""
    return run(by_gloo, workers, batch, steps).per_second


def alone_updates(workers: int, batch: int, steps: int) -> float:
    """The same without a server, each worker for itself: what an exchange that costs nothing would give."""
    return run(alone, workers, batch, steps).per_second


# ------------------------------------------------------------------------------------------ running


class Plan(NamedTuple):
    """Who trains what, and where the processes find each other. The server's rank is the one after the workers'."""

    workers: int
    batch: int
    steps: int
    directory: str

    @property
    def updates(self) -> int:
        """How many there are of all workers together, with those before the clock."""
        return self.workers * (WARM_UP + 1 + self.steps)


class Timing(NamedTuple):
    """What the processes write into shared memory: a worker when it began and ended, the server the rest."""

    moments: torch.Tensor  # (workers, 2)
    updates: torch.Tensor  # ()
    weights: torch.Tensor  # (669706,)
    steps: int

    @property
    def per_second(self) -> float:
        """Updates of all workers, from the first one's begin to the last one's end."""
        return len(self.moments) * self.steps / span((begin, end) for begin, end in self.moments.tolist())


class Member(NamedTuple):
    """What a process knows: its rank, the plan, the outcome to write to, and the workers' common start."""

    rank: int
    plan: Plan
    outcome: Timing
    start: Any  # a Barrier

    @property
    def serves(self) -> bool:
        """Is this the server? All other ranks are workers."""
        return self.rank == self.plan.workers

    def measure(self, step: Callable[[], None]) -> None:
        """Take all steps of a worker, and note when the ones that count began and ended."""
        for _ in range(WARM_UP):
            step()
        taken = moments(step, self.plan.steps, self.start.wait)
        self.outcome.moments[self.rank] = torch.tensor(taken, dtype=torch.float64)

    def conclude(self, updates: int, weights: torch.Tensor) -> None:
        """Write down what the server has in the end."""
        self.outcome.updates.fill_(updates)
        self.outcome.weights.copy_(weights)


Design = Callable[[Member], None]  # what each process does


def run(design: Design, workers: int, batch: int, steps: int) -> Timing:
    """Start all processes of a design, and wait until they have ended. None is left, whatever happens."""
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
    """A copy of the model, and batches that look like MNIST's: random, and the same each time."""

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
        """The gradients of the next batch."""
        images, labels = next(self.batches)
        self.model.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def first_model() -> dlab.MLP:
    """The same for the server and for each worker."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dlab.MLP()


def flat(model: torch.nn.Module | None = None) -> torch.Tensor:
    """A copy of the parameters, by default the first ones, one after another in one tensor."""
    parameters = (model or first_model()).parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def alone(member: Member) -> None:
    """Each worker has an optimizer of its own."""
    worker = TrainingWorker(member.rank, member.plan.batch)
    optimizer = torch.optim.SGD(worker.parameters, LR)

    def step() -> None:
        worker.backward()
        optimizer.step()

    member.measure(step)


# ---------------------------------------------------------------------------------------------- RPC


class Served:
    """The model and its optimizer. RPC calls come in threads, so there is a lock."""

    def __init__(self) -> None:
        self.model = first_model()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, LR)
        self.updates = 0
        self.lock = threading.Lock()

    def update(self, gradients: list[torch.Tensor]) -> None:
        """One step of SGD with these gradients."""
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1


@cache
def served() -> Served:
    """The only one in this process."""
    return Served()


def update_and_fetch_model(gradients: list[torch.Tensor]) -> torch.nn.Module:
    """What the workers call; it runs in the server. As in the tutorial nobody copies the model.

    It leaves after the lock is free, so the next update may already be in some of its parameters.
    """
    served().update(gradients)
    return served().model


def update_and_fetch_weights(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same without what is around them."""
    served().update(gradients)
    return [parameter.detach() for parameter in served().parameters]


def by_rpc(member: Member) -> None:
    """A worker goes on with the model that comes back."""

    def step(worker: TrainingWorker, server: str) -> None:
        worker.use(rpc.rpc_sync(server, update_and_fetch_model, (worker.backward(),)))

    _call_server(member, step)


def by_lean_rpc(member: Member) -> None:
    """A worker puts the weights that come back into the model that it has."""

    def step(worker: TrainingWorker, server: str) -> None:
        weights = rpc.rpc_sync(server, update_and_fetch_weights, (worker.backward(),))
        for parameter, weight in zip(worker.parameters, weights, strict=True):
            parameter.data = weight

    _call_server(member, step)


def _call_server(member: Member, step: Callable[[TrainingWorker, str], None]) -> None:
    """The tensors go as they are, with no copy made by us at either end.

    Of TensorPipe's ways on one machine this is the one that costs least: its shared memory polls, which takes the
    processor from others, so sockets carry what is small, and the kernel copies tensors from process to process (cma).
    """
    plan = member.plan
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{plan.directory}/store", _transports=["uv"], _channels=["cma", "basic"]
    )
    if member.serves:
        served()  # before anybody calls
    warnings.filterwarnings("ignore", "You are using a Backend")  # init_rpc is, and it is torch that complains
    rpc.init_rpc(str(member.rank), rank=member.rank, world_size=plan.workers + 1, rpc_backend_options=options)
    if not member.serves:
        member.measure(partial(step, TrainingWorker(member.rank, plan.batch), str(plan.workers)))
    rpc.shutdown()  # waits for all
    if member.serves:
        member.conclude(served().updates, flat(served().model))


# --------------------------------------------------------------------------------------------- gloo


def by_gloo(member: Member) -> None:
    """Weights are received where the parameters are; gradients are copied once, into one tensor."""
    plan = member.plan
    size = plan.workers + 1
    store = dist.FileStore(f"{plan.directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=member.rank, world_size=size)
    weights = flat()
    gradients = torch.empty_like(weights)
    if member.serves:
        for _ in range(plan.updates):
            source = dist.recv(gradients)  # from anyone
            weights.add_(gradients, alpha=-LR)
            dist.send(weights, source)
        member.conclude(plan.updates, weights)
    else:
        worker = TrainingWorker(member.rank, plan.batch)
        torch.nn.utils.vector_to_parameters(weights, worker.parameters)  # they are parts of `weights` now

        def step() -> None:
            torch.cat([gradient.view(-1) for gradient in worker.backward()], out=gradients)
            dist.send(gradients, plan.workers)
            dist.recv(weights, plan.workers)

        member.measure(step)
    dist.barrier()  # who leaves early breaks the server's recv from anyone
    dist.destroy_process_group()
