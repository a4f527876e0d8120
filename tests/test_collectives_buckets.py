"""A long tensor reduced in pieces: the plain mean, whoever is early or late, in any number of rounds."""

import random
import time

import pytest
import torch

import dlab
from dlab.collectives.buckets import Buckets
from dlab.collectives.shared_allreduce import SharedAllReduce

RANKS = 3
PIECES = [(700, 1000), (100, 700), (99, 100), (0, 99)]


def _content(rank, turn, dtype=torch.float64):
    return torch.randn(1000, generator=torch.Generator().manual_seed(100 * rank + turn), dtype=torch.float64).to(dtype)


def _reduce(dtype, spread, turns=20, order=None):
    shared = SharedAllReduce.connect(dlab.transport())
    flat = shared.empty((1000,), dtype)
    buckets = Buckets(shared, flat, PIECES, "mean", spread)
    dice, found = random.Random(shared.rank), []
    for turn in range(turns):
        content = _content(shared.rank, turn, dtype)
        for piece in order or range(len(PIECES)):
            begin, end = PIECES[piece]
            flat[begin:end] = content[begin:end]
            if dice.random() < 0.3:
                time.sleep(0.002 * dice.random())
            buckets.ready(piece)
        buckets.finish()
        parts = [buckets.part(piece).clone() for piece in range(len(PIECES))]
        found.append(flat.clone() if spread else parts)
        if not spread:
            shared.table.meet()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_of_all_and_the_same_bits(cluster, dtype):
    results = cluster.run(_reduce, dtype, spread=True, timeout=60)
    for turn in range(20):
        mean = sum(_content(rank, turn, dtype).double() for rank in range(RANKS)) / RANKS
        assert all(torch.equal(results[rank][turn], results[0][turn]) for rank in range(RANKS))
        tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 0.05}[dtype]
        torch.testing.assert_close(results[0][turn].double(), mean, rtol=0, atol=tolerance)


def test_each_rank_keeps_its_part(cluster):
    results = cluster.run(_reduce, torch.float64, spread=False, timeout=60)
    for turn in range(20):
        mean = sum(_content(rank, turn) for rank in range(RANKS)) / RANKS
        for piece, (begin, end) in enumerate(PIECES):
            whole = torch.cat([results[rank][turn][piece] for rank in range(RANKS)])
            torch.testing.assert_close(whole, mean[begin:end], rtol=0, atol=1e-15)


def test_pieces_may_get_ready_in_another_order(cluster):
    results = cluster.run(_reduce, torch.float64, spread=True, order=[3, 1, 0, 2], timeout=60)
    mean = sum(_content(rank, 5) for rank in range(RANKS)) / RANKS
    torch.testing.assert_close(results[1][5], mean, rtol=0, atol=1e-15)


def _early():
    """Rank 0 says that its pieces are ready long before the others do: it must not wait there."""
    shared = SharedAllReduce.connect(dlab.transport())
    flat = shared.empty((1000,), torch.float64)
    buckets = Buckets(shared, flat, PIECES, "sum")
    flat.fill_(shared.rank)
    ready = 0.0
    if shared.rank == 0:
        for piece in range(len(PIECES)):
            buckets.ready(piece)
        ready = time.monotonic()
        dlab.transport().barrier()
    else:
        dlab.transport().barrier()  # only now does anybody else begin
        for piece in range(len(PIECES)):
            buckets.ready(piece)
    buckets.finish()
    return ready, flat.unique().tolist()


def test_to_be_ready_never_waits(cluster):
    assert [values for _, values in cluster.run(_early, timeout=30)] == [[3.0]] * RANKS


def test_a_tensor_that_is_not_shared_is_refused():
    def work(transport):
        Buckets(SharedAllReduce.connect(transport), torch.zeros(10), [(0, 10)], "sum")

    with pytest.raises(ValueError, match="make it with shared_empty"):
        dlab.rehearse(work, ranks=2)
