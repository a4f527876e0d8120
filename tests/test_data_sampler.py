"""Who gets which samples: everything once per epoch, whatever divides or does not."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from dlab.data.sampler import EpochSampler, TrainingSampler

orders = pytest.mark.parametrize("order", ["shards", "global"])


def _epoch(sampler, epoch=0):
    """By step and rank, the positions as lists."""
    return [
        [sampler.positions(epoch, step, rank).tolist() for rank in range(sampler.ranks)]
        for step in range(sampler.steps)
    ]


@orders
@given(samples=some.integers(1, 60), ranks=some.integers(1, 5), batch=some.integers(1, 20), epoch=some.integers(0, 2))
def test_every_sample_once_an_epoch(order, samples, ranks, batch, epoch):
    if samples < ranks or batch < ranks:
        with pytest.raises(ValueError, match="workers"):
            EpochSampler(range(samples), ranks, batch, order)
        return
    sampler = EpochSampler(range(samples), ranks, batch, order)
    steps = _epoch(sampler, epoch)
    assert sorted(chain(*chain(*steps))) == list(range(samples))
    for step, dealt in enumerate(steps):
        assert sampler.counts(step) == [len(part) for part in dealt]
        assert 0 < sum(sampler.counts(step)) <= batch
        rest = sorted(chain(*chain(*steps[step:])))
        assert sorted(sampler.rest(epoch, step).tolist()) == rest


@orders
def test_the_weighted_mean_over_ranks_is_the_mean_over_samples(order):
    sampler, values = EpochSampler(range(23), 3, 7, order), torch.arange(23.0, dtype=torch.float64) ** 2
    for step, dealt in enumerate(_epoch(sampler)):
        means = [values[part].mean().item() if part else 0.0 for part in dealt]
        over_ranks = sum(sampler.weight(step, rank) * mean for rank, mean in enumerate(means)) / 3
        assert over_ranks == pytest.approx(values[list(chain(*dealt))].mean().item(), rel=1e-14)


@orders
def test_the_order_follows_from_the_seed_alone_and_changes_every_epoch(order):
    def one(seed, epoch):
        return _epoch(EpochSampler(range(40), 4, 8, order, seed), epoch)

    assert one(1, 0) == one(1, 0)
    assert one(1, 0) != one(1, 1)
    assert one(1, 0) != one(2, 0)


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    def batches(ranks):
        return [list(chain(*dealt)) for dealt in _epoch(EpochSampler(range(50), ranks, 12, "global"))]

    assert batches(1) == batches(2) == batches(3) == batches(4)


def test_a_rank_keeps_its_shard():
    sampler = EpochSampler(range(40), 4, 8, "shards")
    first, second = (
        [set(chain(*(dealt[rank] for dealt in _epoch(sampler, epoch)))) for rank in range(4)] for epoch in range(2)
    )
    assert first == second


def test_an_unknown_order_gets_a_sentence():
    with pytest.raises(ValueError, match="no order 'random': use 'shards'"):
        EpochSampler(range(4), 2, 2, "random")


def _walk(sampler, epochs, changes, ranks):
    """All samples that are seen, by epoch, where `changes` are (epoch, step, ranks) on the way."""
    seen = []
    for epoch in range(epochs):
        step, seen_now = 0, []
        while step < sampler.steps(epoch):
            if changes and changes[0][:2] == (epoch, step):
                ranks = changes[0][2]
                sampler.resplit(*changes.pop(0))
            dealt = [sampler.positions(epoch, step, rank).tolist() for rank in range(ranks)]
            total = sum(len(part) for part in dealt)
            for rank, part in enumerate(dealt):
                assert sampler.weight(epoch, step, rank) == pytest.approx(len(part) * ranks / total)
            seen_now += chain(*dealt)
            step += 1
        seen.append(seen_now)
    return seen


@orders
@pytest.mark.parametrize("changes", [[], [(0, 2, 3)], [(1, 0, 2)], [(0, 1, 3), (0, 3, 2), (1, 4, 1)], [(0, 5, 5)]])
def test_every_sample_once_an_epoch_also_when_the_number_of_ranks_changes(order, changes):
    sampler = TrainingSampler(range(47), 4, 8, order)
    for seen in _walk(sampler, 3, list(changes), 4):
        assert sorted(seen) == list(range(47))
    again = TrainingSampler(range(47), 4, 8, order, history=sampler.history)
    assert again.history == sampler.history == changes
    last = changes[-1][2] if changes else 4
    for rank in range(last):
        assert torch.equal(again.positions(2, 1, rank), sampler.positions(2, 1, rank))


def test_a_changed_number_of_ranks_does_not_change_global_batches():
    sampler, plain = TrainingSampler(range(47), 4, 8, "global"), TrainingSampler(range(47), 1, 8, "global")
    assert _walk(sampler, 2, [(0, 2, 3)], 4) == _walk(plain, 2, [], 1)
