"""Sharded networks: forward and backward against DTensor on gloo and on dlab's backend, and against JAX; planning.

All contenders hold the same weights, cut in the same way, and get the same whole batch of 128 samples.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dlab
from dlab.bench.measure import Moments, alternate, in_fresh_process, moments, span
from dlab.bench.rows import AtMost, Row, faster, row
from dlab.layout import Layout
from dlab.processes.parent.cluster import Cluster
from dlab.processes.worker import context
from dlab.sharding.megatron import megatron_layouts

RANKS, BATCH, ROUNDS = (2, 4), 128, 12
DLAB, DTENSOR, DTENSOR_DLAB = "dlab", "DTensor on gloo", "DTensor on dlab's backend"
TARGETS = {DTENSOR: (2.2, 2.5), DTENSOR_DLAB: (1.4, 1.4)}
Make = Callable[[], nn.Module]


def column_row() -> nn.Module:
    """Return the MLP 784-512-784: its first layer is cut by columns, its second by rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512, bias=False), nn.ReLU(), nn.Linear(512, 784, bias=False))


def transformer() -> nn.Module:
    """Return a transformer of one block over the rows of an image."""
    torch.manual_seed(0)
    return dlab.models.RowTransformer()


def three_layers() -> nn.Module:
    """Return the MLP 784-512-512-10 without biases."""
    torch.manual_seed(0)
    layers = [nn.Linear(784, 512, bias=False), nn.Linear(512, 512, bias=False), nn.Linear(512, 10, bias=False)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


# what makes the network, the shape of a sample, and which layers are cut by columns and which by rows, for DTensor
CASES: dict[str, tuple[Make, tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "MLP 784-512-784": (column_row, (784,), ("0",), ("2",)),
    "RowTransformer": (transformer, (1, 28, 28), ("query", "key", "value", "fc1"), ("out", "fc2")),
}


def contenders(case: str) -> dict[str, Callable[[], Any]]:
    """Return every contender's forward and backward pass, after checking that all give one result. In a worker."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import dlab.backend

    make, shape, columns, rows = CASES[case]
    ranks, inputs = dist.get_world_size(), torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))
    networks: dict[str, Any] = {
        DLAB: dlab.AutoParallel(make(), layouts=megatron_layouts(make(), Layout((ranks,), ("tp",)))),
    }
    plain = dist.new_group(backend="dlab")
    for name, mesh in (
        (DTENSOR, init_device_mesh("cpu", (ranks,))),
        (DTENSOR_DLAB, DeviceMesh.from_group(plain, "cpu")),
    ):
        net = make()
        last = {layer: layer.rsplit(".", 1)[-1] for layer, _ in net.named_modules()}
        plan: dict[str, Any] = {layer: ColwiseParallel() for layer, word in last.items() if word in columns}
        plan |= {layer: RowwiseParallel() for layer, word in last.items() if word in rows}
        networks[name] = parallelize_module(net, mesh, plan)
    expected = make()(inputs)
    for name, network in networks.items():
        assert torch.allclose(network(inputs), expected, atol=1e-4), f"the result is wrong: {case}, {name}"
    return {name: partial(forward_backward, network, inputs) for name, network in networks.items()}


def forward_backward(network: Any, inputs: torch.Tensor) -> None:
    """Compute a loss and all gradients."""
    for parameter in network.parameters():
        parameter.grad = None
    network(inputs).square().sum().backward()


def take_turns(case: str, repeats: int, rounds: int) -> dict[str, list[Moments]]:
    """Measure every contender, in turn. Runs in a worker."""
    calls, barrier = contenders(case), context.transport().barrier
    turns = [partial(moments, call, repeats, barrier) for call in calls.values()]
    return dict(zip(calls, alternate(*turns, rounds=rounds), strict=True))


@cache
def measured(case: str, ranks: int, quick: bool) -> dict[str, list[float]]:
    """Return the milliseconds of every contender's forward and backward pass, a number for each round."""
    repeats, rounds = (2, 1) if quick else (15, ROUNDS)
    with Cluster(ranks, threads=1) as cluster:
        by_rank = cluster.run(take_turns, case, repeats, rounds)
    return {
        name: [1e3 * span(each) / repeats for each in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }


def against(case: str, ranks: int, theirs: str, name: str, quick: bool) -> Row:
    """Make a row: how many times faster forward and backward are than a contender's."""
    times, target = measured(case, ranks, quick), TARGETS[theirs][RANKS.index(ranks)]
    return faster(name, times[DLAB], times[theirs], target, "ms", f"forward and backward, whole batch of {BATCH}")


for _case in CASES:
    for _ranks in RANKS:
        for _theirs in TARGETS:
            row(f"{_case} cut by columns and rows, {_ranks} ranks, against {_theirs}")(
                partial(against, _case, _ranks, _theirs)
            )


# JAX


def jax_milliseconds(devices: int, steps: int) -> float:
    """Return the milliseconds of JAX's forward and backward pass on virtual devices. Runs in a process of its own."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("tp",))
    column, line = PartitionSpec(None, "tp"), PartitionSpec("tp", None)
    shapes = ((784, 512, column), (512, 512, line), (512, 10, PartitionSpec()))
    weights = [
        jax.device_put(jnp.full((n, m), 0.01, dtype=jnp.float32), NamedSharding(mesh, spec)) for n, m, spec in shapes
    ]
    inputs = jax.device_put(jnp.ones((BATCH, 784), dtype=jnp.float32), NamedSharding(mesh, PartitionSpec()))

    def loss(weights: Any, inputs: Any) -> Any:
        hidden = jax.nn.relu(jax.nn.relu(inputs @ weights[0]) @ weights[1])
        return jnp.square(hidden @ weights[2]).sum()

    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(5):
        jax.block_until_ready(step(weights, inputs))
    start = perf_counter()
    for _ in range(steps):
        jax.block_until_ready(step(weights, inputs))
    return 1e3 * (perf_counter() - start) / steps


def dlab_milliseconds(cluster: Cluster, steps: int) -> float:
    """Return the milliseconds of the same network's forward and backward pass in workers."""
    return 1e3 * span(cluster.run(three_layer_moments, steps)) / steps


def three_layer_moments(steps: int) -> Moments:
    """Measure the MLP 784-512-512-10, cut by columns, then by rows. Runs in a worker."""
    layout = Layout((dist.get_world_size(),), ("tp",))
    par = dlab.AutoParallel(three_layers(), layouts=megatron_layouts(three_layers(), layout))
    call = partial(forward_backward, par, torch.ones(BATCH, 784))
    for _ in range(5):
        call()
    return moments(call, steps, context.transport().barrier)


def against_jax(name: str, quick: bool) -> Row:
    """Make a row: how the steps per second compare with JAX's on virtual devices of one process."""
    ranks, steps, rounds = 4, *((3, 1) if quick else (60, 6))
    with Cluster(ranks, threads=1) as cluster:
        ours, theirs = alternate(
            partial(dlab_milliseconds, cluster, steps),
            partial(in_fresh_process, jax_milliseconds, ranks, steps),
            rounds=rounds,
        )
    return faster(name, ours, theirs, 0.7, "ms", "forward and backward; JAX on 4 virtual devices of one process")


if importlib.util.find_spec("jax") is not None:
    row("MLP 784-512-512-10 cut by columns and rows, 4 ranks, against JAX")(against_jax)


# what planning and Python cost


class Chain(nn.Module):
    """Products of small matrices with ReLUs between them: hardly any arithmetic, and no communication when cut."""

    def __init__(self, layers: int, matmul: Callable[..., Any], relu: Callable[..., Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(8)) for _ in range(layers)])
        self.matmul, self.relu = matmul, relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by all weights in turn."""
        for weight in self.weights:
            x = self.relu(self.matmul(x, weight))
        return x


def microseconds_per_operator(rounds: int) -> tuple[list[float], list[float]]:
    """Measure a sharded chain and the bare calls on this rank's part. Runs in a worker."""
    layers, repeats = 50, 10
    sharded = dlab.AutoParallel(Chain(layers, dlab.ops.MatMul().shard(((2, 1), (1, 1))), dlab.ops.ReLU()))
    bare, whole = Chain(layers, torch.matmul, torch.relu), torch.ones(16, 8)

    def time(call: Callable[[], Any]) -> float:
        start = perf_counter()
        for _ in range(repeats):
            call()
        return 1e6 * (perf_counter() - start) / repeats / (2 * layers)

    calls = partial(sharded, whole), partial(bare, whole[:8])
    for call in calls:
        call()
    ours, theirs = alternate(*(partial(time, call) for call in calls), rounds=rounds)
    return ours, theirs


@row("overhead of a sharded operator without communication, against 60 us")
def overhead(name: str, quick: bool) -> Row:
    """Measure what a sharded operator costs more than the bare call on a part."""
    with Cluster(2, threads=1) as cluster:
        ours, theirs = cluster.run(microseconds_per_operator, 1 if quick else ROUNDS)[0]
    more = median(ours) - median(theirs)
    note = f"{median(ours):.1f} us, of which the bare call on this rank's part takes {median(theirs):.1f} us"
    return Row(name, more, 60.0, more / 60, AtMost(1.0), "us", note)


class Wide(Chain):
    """A chain of 50 matmuls and ReLUs with larger matrices, which 4,096 ranks can cut; the weights have no memory."""

    def __init__(self) -> None:
        layout = Layout((16, 16, 16), ("dp", "sp", "tp"))
        matmul = dlab.ops.MatMul().shard((layout("dp", "tp"), layout("tp", None)))
        super().__init__(50, matmul, dlab.ops.ReLU().shard((layout(("dp", "sp"), None),)))
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(4096, 4096, device="meta")) for _ in range(50)])


def planning_seconds() -> list[float]:
    """Return how long the first and the second plan of a process take. Runs in a process of its own."""
    seconds = []
    for _ in range(2):
        net = Wide()
        start = perf_counter()
        plan = dlab.AutoParallel(net, ranks=4096).explain(torch.empty(4096, 4096, device="meta"))
        seconds.append(perf_counter() - start)
        assert len(plan.rows) == 100, "every operator has its row"
    return seconds


@row("planning 100 operators for 4,096 ranks, against 1 s")
def planning(name: str, quick: bool) -> Row:
    """Measure `explain`, which plans forward and backward, in a fresh process."""
    rounds = [in_fresh_process(planning_seconds) for _ in range(1 if quick else 5)]
    first, second = (median(each) for each in zip(*rounds, strict=True))
    note = f"the first plan of a process, which imports what torch needs for it; the second takes {second:.3f} s"
    return Row(name, first, 1.0, first, AtMost(1.0), "s", note)
