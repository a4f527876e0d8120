"""The cost of telemetry: a `dlab.log` of 14 numbers and a collective in every step of a small training loop."""

from __future__ import annotations

import time
from itertools import chain
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import dlab
from dlab.bench.rows import AtMost, Row, row
from dlab.collectives.recorded import ALGORITHM
from dlab.processes.parent.cluster import Cluster

WORKERS, BATCH = 4, 32
LAYERS = {f"layer_{layer}": 0.1 * layer for layer in range(12)}  # with step and loss: 14 numbers


class Times(NamedTuple):
    """Times of one worker in milliseconds: steps without telemetry, steps with it, and the telemetry alone."""

    silent: list[float]
    logged: list[float]
    calls: list[float]


@row("dlab.log, as a share of an MLP step")
def log_cost(name: str, quick: bool) -> Row:
    """Measure in four workers that train at once, while the parent collects their events."""
    blocks, steps = (2, 20) if quick else (20, 25)
    with Cluster(WORKERS) as cluster:
        by_rank: list[Times] = cluster.run(train, blocks, steps)
    silent, logged, calls = (list(chain(*times)) for times in zip(*by_rank, strict=True))
    step, call = median(silent), median(calls)
    note = (
        f"one log and the count of one collective (mean {1e3 * mean(calls):.0f} us) over the step, "
        f"784-512-512-10, batch {BATCH}, {WORKERS} workers; steps with and without it in turn differ by "
        f"{100 * (median(logged) / step - 1):+.1f} %"
    )
    return Row(name, call, step, call / step, AtMost(0.02), "ms", note)


def train(blocks: int, steps: int) -> Times:
    """Train without and with log, in alternating blocks of steps. Runs in a worker."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    times, transport = Times([], [], []), dlab.transport()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def step(number: int, log: bool) -> None:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if log:
            before = time.perf_counter()
            transport.note_collective("all-reduce", ALGORITHM, nbytes, time.time(), buckets=2)
            dlab.log(step=number, loss=value, **LAYERS)
            times.calls.append(1e3 * (time.perf_counter() - before))
        (times.logged if log else times.silent).append(1e3 * (time.perf_counter() - start))

    for number in range(5):
        step(number, log=True)  # the first steps allocate memory
    for taken in times:
        taken.clear()
    for block in range(2 * blocks):
        for number in range(steps):
            step(number, log=block % 2 == 1)
    return times
