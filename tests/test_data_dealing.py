"""Who gets which samples: everything once per epoch, whatever divides or does not."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from dlab.data.dealing import Dealer

orders = pytest.mark.parametrize("order", ["shards", "global"])


def _epoch(dealer, epoch=0):
    """By step and rank, the positions as lists."""
    return [
        [dealer.positions(epoch, step, rank).tolist() for rank in range(dealer.ranks)] for step in range(dealer.steps)
    ]


@orders
@given(samples=some.integers(1, 60), ranks=some.integers(1, 5), batch=some.integers(1, 20), epoch=some.integers(0, 2))
def test_every_sample_once_an_epoch(order, samples, ranks, batch, epoch):
    if samples < ranks or batch < ranks:
        with pytest.raises(ValueError, match="workers"):
            Dealer(range(samples), ranks, batch, order)
        return
    dealer = Dealer(range(samples), ranks, batch, order)
    steps = _epoch(dealer, epoch)
    assert sorted(chain(*chain(*steps))) == list(range(samples))
    for step, dealt in enumerate(steps):
        assert dealer.counts(step) == [len(part) for part in dealt]
        assert 0 < sum(dealer.counts(step)) <= batch
        rest = sorted(chain(*chain(*steps[step:])))
        assert sorted(dealer.rest(epoch, step).tolist()) == rest


@orders
def test_the_weighted_mean_over_ranks_is_the_mean_over_samples(order):
    dealer, values = Dealer(range(23), 3, 7, order), torch.arange(23.0, dtype=torch.float64) ** 2
    for step, dealt in enumerate(_epoch(dealer)):
        means = [values[part].mean().item() if part else 0.0 for part in dealt]
        over_ranks = sum(dealer.weight(step, rank) * mean for rank, mean in enumerate(means)) / 3
        assert over_ranks == pytest.approx(values[list(chain(*dealt))].mean().item(), rel=1e-14)


@orders
def test_the_order_follows_from_the_seed_alone_and_changes_every_epoch(order):
    def one(seed, epoch):
        return _epoch(Dealer(range(40), 4, 8, order, seed), epoch)

    assert one(1, 0) == one(1, 0)
    assert one(1, 0) != one(1, 1)
    assert one(1, 0) != one(2, 0)


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    def batches(ranks):
        return [list(chain(*dealt)) for dealt in _epoch(Dealer(range(50), ranks, 12, "global"))]

    assert batches(1) == batches(2) == batches(3) == batches(4)


def test_a_rank_keeps_its_shard():
    dealer = Dealer(range(40), 4, 8, "shards")
    first, second = (
        [set(chain(*(dealt[rank] for dealt in _epoch(dealer, epoch)))) for rank in range(4)] for epoch in range(2)
    )
    assert first == second


def test_an_unknown_order_gets_a_sentence():
    with pytest.raises(ValueError, match="no order 'random': use 'shards'"):
        Dealer(range(4), 2, 2, "random")
