"""Splitting data: nothing is lost or used twice, and the same seed gives the same split everywhere."""

import math
import random
import statistics
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import dlab
from dlab.data import DataPartitioner, Partition, mnist, partition_dataset
from dlab.data.partition import apportion

TEN = list(range(1, 11))
weights = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@pytest.fixture(scope="module")
def digits():
    return mnist(train=True)


class Labelled(Dataset):
    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        raise AssertionError("the labels are in targets")


# ------------------------------------------------------------------------------------------------------ Partition


def test_a_partition_is_the_data_at_its_indices():
    part = Partition("abcdef", [4, 0, 2])
    assert list(part) == ["e", "a", "c"] and len(part) == 3
    assert part.data == "abcdef" and part.index == [4, 0, 2]
    assert part[-1] == "c" and part[-3] == "e" and part[np.int64(1)] == "a"
    assert isinstance(part, Dataset)
    assert repr(part) == "Partition: 3 of 6 samples"


@pytest.mark.parametrize("index", [3, -4, [0, 3], torch.tensor([-4])], ids=str)
def test_beyond_a_partition_is_an_index_error(index):
    with pytest.raises(IndexError, match="out of range: there are 3 samples, use 0 to 2"):
        Partition(range(100), [4, 0, 2])[index]


def test_an_empty_partition_says_so():
    with pytest.raises(IndexError, match="no samples here"):
        Partition(TEN, [])[0]


def test_a_partition_of_what_is_not_there_is_refused_at_once():
    with pytest.raises(IndexError, match="index 10 is out of range: there are 10 samples"):
        Partition(TEN, [0, 10])


def test_many_samples_are_one_batch(digits):
    index = [50_000, 3, 59_999, 3]
    part = Partition(digits, index)
    for positions in ([2, 0], slice(None, None, 2), torch.tensor([-1, 0])):
        images, labels = part[positions]
        expected = digits[torch.tensor(index)[positions] if not isinstance(positions, slice) else index[positions]]
        assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
    assert part.targets.tolist() == [digits[i][1] for i in index]


def test_data_is_never_asked_for_a_negative_index():
    class Strict(Labelled):
        def __getitem__(self, index):
            return {0: "a", 1: "b", 2: "c"}[index]

    part = Partition(Strict([0] * 3), [2, 0, -2])
    assert part[[-1, 0]] == ["b", "c"] and part[-1] == "b"


def test_a_partition_of_a_partition(digits):
    outer = DataPartitioner(digits, [0.5, 0.5]).use(1)
    inner = DataPartitioner(outer, [0.25] * 4).use(2)
    assert torch.equal(inner[5][0], digits[outer.index[inner.index[5]]][0])
    assert inner.targets.tolist() == [digits[outer.index[i]][1] for i in inner.index]
    assert torch.equal(inner[[5, 6]][0], torch.stack([inner[5][0], inner[6][0]]))


def test_data_without_targets_gives_a_partition_without():
    assert not hasattr(Partition(TEN, [1]), "targets")


# ----------------------------------------------------------------------------------------------- DataPartitioner


def test_the_known_answer():
    parts = dlab.DataPartitioner(TEN)
    assert [list(parts.use(rank)) for rank in range(3)] == [[3, 9, 4, 6, 7, 5, 10], [1, 2], [8]]
    assert [[TEN[i] for i in index] for index in parts.partitions] == [[3, 9, 4, 6, 7, 5, 10], [1, 2], [8]]
    assert len(parts) == 3 and repr(parts) == "DataPartitioner: 10 samples in 3 shards"
    explicit = DataPartitioner(TEN, sizes=[0.7, 0.2, 0.1], seed=1234)
    assert explicit.partitions == parts.partitions


def test_another_seed_deals_otherwise():
    assert DataPartitioner(range(100), seed=1).partitions != DataPartitioner(range(100), seed=2).partitions


def test_thirds_of_ten_lose_nothing():
    parts = DataPartitioner(TEN, [1 / 3] * 3)
    assert [len(index) for index in parts.partitions] == [4, 3, 3]
    assert sorted(value for rank in range(3) for value in parts.use(rank)) == TEN


@given(st.integers(0, 300), weights, st.integers())
def test_sizes_that_sum_to_one_put_every_sample_in_exactly_one_shard(count, weights, seed):
    parts = DataPartitioner(range(count), [weight / sum(weights) for weight in weights], seed)
    assert sorted(i for index in parts.partitions for i in index) == list(range(count))


@given(st.integers(0, 300), weights, st.integers(1, 40))
def test_smaller_sums_leave_the_rest_out(count, weights, rest):
    total = sum(weights) + rest
    parts = DataPartitioner(range(count), [weight / total for weight in weights])
    dealt = [i for index in parts.partitions for i in index]
    assert len(set(dealt)) == len(dealt)
    assert abs(count - len(dealt) - Fraction(rest * count, total)) < 1


@given(st.integers(0, 10_000), weights, st.integers(0, 40))
def test_counts_are_the_largest_remainders(count, weights, rest):
    """Against the definition, in exact fractions: floor or ceiling, and no smaller remainder was rounded up."""
    total = sum(weights) + rest
    exact = [Fraction(weight * count, total) for weight in weights]
    counts = apportion(count, [weight / total for weight in weights])
    up = [share % 1 for share, got in zip(exact, counts, strict=True) if got == math.floor(share) + 1]
    down = [share % 1 for share, got in zip(exact, counts, strict=True) if got == math.floor(share)]
    assert len(up) + len(down) == len(weights)
    assert not up or (min(up) >= max(down, default=0) and min(up) > 0)
    if not rest:
        assert sum(counts) == count


@pytest.mark.parametrize(("sizes", "counts"), [([0.29], [29]), ([0.1] * 10, [10] * 10), ([0.145, 0.855], [15, 85])])
def test_fractions_mean_what_people_read(sizes, counts):
    assert [len(index) for index in DataPartitioner(range(100), sizes).partitions] == counts


def test_more_shards_than_samples():
    assert sorted(len(index) for index in DataPartitioner(TEN, [1 / 40] * 40).partitions) == [0] * 30 + [1] * 10


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([], "sizes is empty: give one fraction per shard"),
        ([0.5, -0.1], "size -0.1 is not a fraction.*use numbers from 0 to 1"),
        ([0.5, 0.6], "sizes sum to 1.1, more than 1: divide each by 1.1"),
        ([2], "use numbers from 0 to 1"),
        ([float("nan"), 0.5], "size nan is not a fraction"),
        ([float("inf")], "size inf is not a fraction"),
        ([0, 0.0], "all sizes are 0: make at least one"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        DataPartitioner(TEN, sizes)


def test_a_number_instead_of_sizes_is_explained():
    with pytest.raises(TypeError, match=r"one fraction per shard, such as \[1 / 4\] \* 4"):
        DataPartitioner(TEN, 4)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_without_a_shard_is_explained(rank):
    with pytest.raises(IndexError, match=f"rank {rank} has no shard: there are 3, for ranks 0 to 2; give"):
        DataPartitioner(TEN).use(rank)


# ----------------------------------------------------------------------------------------------------------- skew

skews = st.floats(1e-6, 1e6)


@settings(max_examples=60)
@given(st.lists(st.integers(-3, 6), max_size=200), weights, st.integers(0, 40), skews, st.integers())
def test_a_skewed_split_deals_each_class_once(targets, weights, rest, skew, seed):
    total = sum(weights) + rest
    sizes = [weight / total for weight in weights]
    parts = DataPartitioner(Labelled(targets), sizes, seed, skew=skew)
    dealt = [i for index in parts.partitions for i in index]
    assert len(set(dealt)) == len(dealt) and len(parts) == len(sizes)
    assert all(not index for index, size in zip(parts.partitions, sizes, strict=True) if size == 0)
    counts = Counter(targets[i] for i in dealt)
    for label, members in Counter(targets).items():
        if rest:
            assert abs(counts[label] - Fraction(members * sum(weights), total)) < 1
        else:
            assert counts[label] == members


@pytest.mark.parametrize(("sizes", "skew"), [([0.25] * 4, 0.5), ([0.6, 0.3, 0.1], 2.0), ([0.3, 0.1], 1.0)])
def test_the_shares_of_a_class_are_dirichlet_around_the_sizes(sizes, skew):
    """Mean and variance of the shares over many classes, against the formulas of the distribution."""
    classes, members = 1000, 200
    data = Labelled([label for label in range(classes) for _ in range(members)])
    parts = DataPartitioner(data, sizes, seed=0, skew=skew)
    alphas = [skew * len(sizes) * size for size in sizes]
    total = sum(alphas)
    for index, alpha in zip(parts.partitions, alphas, strict=True):
        counts = Counter(data.targets[i] for i in index)
        shares = [counts[label] / (members * sum(sizes)) for label in range(classes)]
        mean, variance = alpha / total, alpha * (total - alpha) / (total**2 * (total + 1))
        assert statistics.fmean(shares) == pytest.approx(mean, abs=4 * math.sqrt(variance / classes))
        assert statistics.pvariance(shares) == pytest.approx(variance, rel=0.15)


def test_a_smaller_skew_number_is_more_uneven(digits):
    def largest_share(skew):
        parts = DataPartitioner(digits, [0.25] * 4, skew=skew)
        return statistics.fmean(max(row.histogram.values()) / row.count for row in parts.table().rows if row.count)

    assert 0.1 < largest_share(1000) < 0.13 < largest_share(1) < largest_share(0.05)


def test_a_skewed_split_is_the_same_everywhere():
    """Pinned, because ranks on other machines and other versions of Python must deal alike."""
    parts = DataPartitioner(Labelled([0, 1, 2] * 4), [0.5, 0.5], skew=0.5)
    assert parts.partitions == [[2, 8], [3, 4, 11, 6, 5, 9, 10, 0, 1, 7]]


def test_inside_a_skewed_shard_the_classes_are_mixed(digits):
    order = list(range(60_000))
    random.Random(1234).shuffle(order)
    place = {i: position for position, i in enumerate(order)}
    for index in DataPartitioner(digits, [0.5, 0.5], skew=1).partitions:
        assert [place[i] for i in index] == sorted(place[i] for i in index)


@pytest.mark.parametrize("skew", [0, -1, math.nan, math.inf])
def test_a_skew_that_cannot_be_is_refused(digits, skew):
    with pytest.raises(ValueError, match=r"skew is .*use a number above 0"):
        DataPartitioner(digits, skew=skew)


@pytest.mark.parametrize("data", [TEN, [(1, 0.5), (2, 0.7)], TensorDataset(torch.arange(4))])
def test_a_skewed_split_needs_labels(data):
    with pytest.raises(ValueError, match="needs whole-number labels: give the data"):
        DataPartitioner(data, skew=1.0)


def test_labels_may_be_in_the_samples():
    pairs = [(None, i % 3) for i in range(60)]
    tensors = TensorDataset(torch.zeros(60), torch.arange(60) % 3)
    targets = Labelled([i % 3 for i in range(60)])
    splits = [DataPartitioner(data, skew=0.3).partitions for data in (pairs, tensors, targets)]
    assert splits[0] == splits[1] == splits[2]


# ----------------------------------------------------------------------------------------------- partition_dataset


@pytest.mark.parametrize("size", [1, 3, 4])
def test_together_the_ranks_see_every_image_once(digits, size):
    seen = torch.zeros(10, dtype=torch.int64)
    indices = []
    for rank in range(size):
        loader, batch_size = partition_dataset(rank, size)
        assert batch_size == 128 // size
        indices += loader.dataset.index
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(images.shape == (batch_size, 1, 28, 28) for images, _ in batches[:-1])
        for _, labels in batches:
            seen += torch.bincount(labels, minlength=10)
    assert sorted(indices) == list(range(60_000))
    assert torch.equal(seen, torch.bincount(digits.targets))


def test_the_shard_is_the_one_of_the_partitioner_reshuffled_every_epoch(digits):
    loader, _ = partition_dataset(2, 4, seed=7)
    assert loader.dataset.index == DataPartitioner(digits, [0.25] * 4, seed=7).partitions[2]
    first, second = next(iter(loader))[0], next(iter(loader))[0]
    assert not torch.equal(first, second)
    again, _ = partition_dataset(2, 4, seed=7)
    assert torch.equal(next(iter(again))[0], first)
    other, _ = partition_dataset(2, 4, seed=8)
    assert not torch.equal(next(iter(other))[0], first)


def test_it_can_be_skewed(digits):
    loader, _ = partition_dataset(1, 4, skew=0.2)
    assert loader.dataset.index == DataPartitioner(digits, [0.25] * 4, skew=0.2).partitions[1]


@pytest.mark.parametrize("size", [0, -2, 129])
def test_a_batch_that_cannot_be_cut_is_explained(size):
    with pytest.raises(ValueError, match=f"for {size} ranks: use 1 to 128"):
        partition_dataset(0, size)


def test_the_most_ranks_get_one_image_each_per_step():
    assert partition_dataset(127, 128)[1] == 1


def test_a_rank_outside_is_explained():
    with pytest.raises(IndexError, match="rank 4 has no shard"):
        partition_dataset(4, 4)
