"""Batches: every sample once per epoch, in an order that follows from seed and epoch alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset, default_collate

from dlab.data import MNIST, Batches, Partition, mnist


class Counted(Dataset):
    """0, 1, 2, … with a `take`; single samples are not to be asked for."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("asked for a single sample")

    def take(self, index):
        self.asked += 1
        return torch.arange(self.length)[index]


@given(st.integers(0, 50), st.integers(1, 20), st.booleans(), st.booleans(), st.integers())
def test_an_epoch_holds_every_sample_once(length, batch_size, shuffle, drop_last, seed):
    batches = Batches(Counted(length), batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    seen = [batch.tolist() for batch in batches]
    assert len(seen) == len(batches) == batches.dataset.asked
    flat = [i for batch in seen for i in batch]
    assert len(set(flat)) == len(flat)
    if drop_last:
        assert all(len(batch) == batch_size for batch in seen) and length - len(flat) < batch_size
    else:
        assert sorted(flat) == list(range(length)) and all(len(batch) == batch_size for batch in seen[:-1])
    if not shuffle:
        assert flat == list(range(len(flat)))


def flat(batches):
    return torch.cat(list(batches)).tolist()


def test_each_epoch_has_a_new_order_that_can_be_repeated():
    one, other = Batches(Counted(100), 7, seed=5), Batches(Counted(100), 9, seed=5)
    epochs = [flat(one) for _ in range(3)]
    assert [flat(other) for _ in range(3)] == epochs  # the order does not depend on the batch size
    assert len({tuple(order) for order in epochs}) == 3
    resumed = Batches(Counted(100), 7, seed=5)
    resumed.epoch = 2
    assert flat(resumed) == epochs[2] == one.order(2).tolist()


def test_seed_and_epoch_do_not_run_into_each_other():
    orders = {
        tuple(Batches(Counted(50), 1, seed=seed).order(epoch).tolist()) for seed in range(6) for epoch in range(6)
    }
    assert len(orders) == 36


def test_an_epoch_that_was_left_early_still_counts():
    batches = Batches(Counted(20), 4)
    next(iter(batches))
    assert batches.epoch == 1
    assert flat(batches) == batches.order(1).tolist()


def test_two_iterators_do_not_disturb_each_other():
    batches = Batches(Counted(20), 4)
    first, second = iter(batches), iter(batches)
    assert torch.cat(list(second)).tolist() == batches.order(1).tolist()
    assert torch.cat(list(first)).tolist() == batches.order(0).tolist()


def test_mnist_comes_without_a_look_at_single_images(monkeypatch):
    digits = mnist(train=False)
    truth = [digits[i] for i in Batches(digits, 32).order(0)[:32].tolist()]
    monkeypatch.setattr(MNIST, "__getitem__", lambda *args: pytest.fail("asked for a single image"))
    for data in (digits, Partition(digits, range(10_000))):
        images, labels = next(iter(Batches(data, 32)))
        expected_images, expected_labels = default_collate(truth)
        assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Partition(data, range(len(data)))])
def test_other_data_is_collated(wrap):
    data = TensorDataset(torch.randn(10, 3), torch.arange(10))
    (inputs, labels), *rest = Batches(wrap(data), 4, shuffle=False)
    assert torch.equal(inputs, data.tensors[0][:4]) and labels.tolist() == [0, 1, 2, 3] and len(rest) == 2


def test_a_tensor_is_a_data_set_of_its_rows():
    rows = torch.randn(6, 2)  # Tensor.take would pick from the flattened values
    (batch,) = Batches(rows, 6, shuffle=False)
    assert torch.equal(batch, rows)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        Batches([1, 2], 0)
