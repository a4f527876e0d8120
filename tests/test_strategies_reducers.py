"""Three ways to average a long gradient in pieces behave alike: any transport, a backend, shared memory."""

import pytest
import torch

import dlab
from dlab.collectives.shared_allreduce import SharedAllReduce
from dlab.strategies.reducers import BackendReducer, Reducer, SharedReducer, reducer_for

RANKS, COUNT = 3, 1000
PIECES = [(700, 1000), (99, 700), (0, 99)]
CPU = torch.device("cpu")


def _content(rank, turn):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(10 * rank + turn), dtype=torch.float64)


def _make(kind):
    transport = dlab.transport()
    if kind is SharedReducer:
        return SharedReducer(transport, CPU, SharedAllReduce.connect(transport))
    return kind(transport, CPU)


def _means(kind):
    reducer = _make(kind)
    flat = reducer.empty(COUNT, torch.float64)
    reducer.cut(flat, None, PIECES, spread=True)
    found = []
    for turn in range(4):
        flat.copy_(_content(dlab.rank(), turn))
        for piece in range(len(PIECES)):
            reducer.ready(piece)
        reducer.finish()
        found.append(flat.clone())
    return found


@pytest.mark.parametrize("kind", [Reducer, BackendReducer, SharedReducer])
def test_all_ranks_get_the_mean(cluster, kind):
    results = cluster.run(_means, kind, timeout=60)
    for turn in range(4):
        mean = sum(_content(rank, turn) for rank in range(RANKS)) / RANKS
        for rank in range(RANKS):
            torch.testing.assert_close(results[rank][turn], mean, rtol=0, atol=1e-14)
            assert torch.equal(results[rank][turn], results[0][turn])


def _sharded(kind):
    """Plain gradient descent, each rank on its own part of the weights."""
    reducer = _make(kind)
    flat, weights = reducer.empty(COUNT, torch.float64), reducer.common(COUNT, torch.float64)
    weights.fill_(1.0)
    reducer.transport.barrier()
    reducer.cut(flat, weights, PIECES, spread=False)
    for turn in range(4):
        flat.copy_(_content(dlab.rank(), turn))
        for piece in range(len(PIECES)):
            reducer.ready(piece)
        reducer.finish()
        for piece in range(len(PIECES)):
            part = reducer.part(piece)
            begin = part.storage_offset() - flat.storage_offset()
            weights[begin : begin + len(part)] -= 0.1 * part
        reducer.publish()
    return weights.clone()


@pytest.mark.parametrize("kind", [Reducer, BackendReducer, SharedReducer])
def test_parts_that_ranks_have_updated_come_together(cluster, kind):
    expected = torch.ones(COUNT, dtype=torch.float64)
    for turn in range(4):
        expected -= 0.1 * sum(_content(rank, turn) for rank in range(RANKS)) / RANKS
    for weights in cluster.run(_sharded, kind, timeout=60):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-14)


def _chosen():
    return type(reducer_for(dlab.transport(), CPU)).__name__


def test_on_one_host_memory_is_shared(cluster):
    assert cluster.run(_chosen) == ["SharedReducer"] * RANKS


@pytest.mark.gpu
def test_on_gpus_it_is_the_backend():
    with dlab.Cluster(torch.cuda.device_count()) as cluster:
        names = cluster.run(lambda: type(reducer_for(dlab.transport(), dlab.device())).__name__)
    assert set(names) == {"BackendReducer"}
