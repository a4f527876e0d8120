"""Updates per second of asynchronous parameter servers: dlab's, against PyTorch's RPC and against gloo's messages.

One server and three workers on the MLP, each process with one thread; then with more servers.
"""

from __future__ import annotations

from functools import cache, partial
from statistics import median

import torch

from dlab.bench.measure import Moments, alternate, moments, span
from dlab.bench.rows import AtLeast, Grid, Row, number, row
from dlab.bench.servers import (
    LR,
    WARM_UP,
    TrainingWorker,
    alone_updates,
    flat,
    gloo_updates,
    lean_rpc_updates,
    rpc_updates,
)
from dlab.kvstore.distributed import DistStore
from dlab.kvstore.locked import LockedStore
from dlab.kvstore.optimizers import recipe
from dlab.kvstore.protocol import AT_ONCE
from dlab.models import FlatBuffer
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker.context import rank, transport

WORKERS, BATCH, STEPS, ROUNDS = 3, 32, 250, 9
SERVERS = (1, 2, 4)
RIVALS = ("PyTorch's RPC, as in its tutorial", "a server by gloo's send and recv")


def dlab_updates(servers: int, batch: int, steps: int) -> float:
    """Return the updates per second of all workers; without servers they update shared weights under a lock."""
    with Cluster(WORKERS, servers=servers, threads=1) as cluster:
        taken: list[Moments] = cluster.run(push_and_pull, servers, batch, steps)
    return WORKERS * steps / span(taken)


def push_and_pull(servers: int, batch: int, steps: int) -> Moments:
    """Train on the shared weights. Runs in a worker."""
    worker, weights = TrainingWorker(rank(), batch), flat()
    buffer = FlatBuffer(worker.parameters)
    kv = open_store(weights) if servers else LockedStore(weights, recipe("sgd", lr=LR), transport())

    def step() -> None:
        kv.push_pieces("weights", [gradient.view(-1) for gradient in worker.backward()], AT_ONCE)
        buffer.view_in(kv.borrow("weights", weights))

    for _ in range(WARM_UP):
        step()
    return moments(step, steps, transport().barrier)


def open_store(weights: torch.Tensor) -> DistStore:
    """Open a store whose weights are split over all servers."""
    kv = DistStore("dist_async")
    kv.big = 1
    kv.init("weights", weights)
    kv.set_optimizer("sgd", lr=LR)
    return kv


@cache
def measured(quick: bool) -> dict[str, list[float]]:
    """Return the updates per second of each design, a number for each round."""
    steps, rounds = (20, 1) if quick else (STEPS, ROUNDS)
    designs = {
        "a server": partial(dlab_updates, 1, BATCH, steps),
        "a lock": partial(dlab_updates, 0, BATCH, steps),
        RIVALS[0]: partial(rpc_updates, WORKERS, BATCH, steps),
        RIVALS[1]: partial(gloo_updates, WORKERS, BATCH, steps),
        "weights by RPC": partial(lean_rpc_updates, WORKERS, BATCH, steps),
        "no exchange": partial(alone_updates, WORKERS, BATCH, steps),
    }
    return dict(zip(designs, alternate(*designs.values(), rounds=rounds), strict=True))


def against(design: str, rival: str, target: float, name: str, quick: bool) -> Row:
    """Make a row: the number of updates, divided by the rival's."""
    rates = measured(quick)
    ours, theirs = median(rates[design]), median(rates[rival])
    ratios = [mine / other for mine, other in zip(rates[design], rates[rival], strict=True)]
    note = (
        f"{len(ratios)} rounds, {number(min(ratios))}x to {number(max(ratios))}x; {WORKERS} workers, MLP, "
        f"batch {BATCH}; RPC that gives back weights, not the model: {number(median(rates['weights by RPC']))} 1/s; "
        f"workers that exchange nothing: {number(median(rates['no exchange']))} 1/s"
    )
    return Row(name, ours, theirs, ours / theirs, AtLeast(target), "1/s", note)


@row("updates per second with several servers")
def several(name: str, quick: bool) -> Grid:
    """Measure with several servers, over which the weights are split."""
    steps, rounds = (20, 1) if quick else (STEPS, ROUNDS)
    designs = [partial(dlab_updates, servers, batch, steps) for batch in (32, 128) for servers in SERVERS]
    rates = [number(median(each)) for each in alternate(*designs, rounds=rounds)]
    lines = [
        (f"batch {batch}", *rates[place : place + len(SERVERS)]) for batch, place in ((32, 0), (128, len(SERVERS)))
    ]
    note = f"{rounds} rounds; {WORKERS} workers, asynchronous, the MLP; processes share the cores of this machine"
    return Grid(name, ("", *(f"{servers} server{'s' * (servers > 1)}" for servers in SERVERS)), lines, note)


for _rival in RIVALS:
    row(f"updates per second of an asynchronous server, against {_rival}")(partial(against, "a server", _rival, 2.3))
row("updates per second of shared weights under a lock, against PyTorch's RPC, as in its tutorial")(
    partial(against, "a lock", RIVALS[0], 2.9)
)
