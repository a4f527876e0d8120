"""MNIST as a Dataset: equal to torchvision's, bit for bit, and by whole batches."""

import gzip
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import dlab
from dlab.data import MNIST, mnist

PACKED = Path(__file__).resolve().parents[1] / "data" / "mnist"


@pytest.fixture(scope="module")
def digits():
    return mnist(train=True)


@pytest.fixture(scope="module")
def theirs():
    return mnist(train=True, as_torchvision=True)


def test_a_sample_is_a_normalised_image_and_a_number(digits):
    image, label = digits[7]
    assert image.dtype == torch.float32 and image.shape == (1, 28, 28) and type(label) is int
    content = gzip.decompress((PACKED / "train-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(60_000, 28, 28)
    np.testing.assert_allclose(image[0].numpy(), (pixels[7] / 255.0 - 0.1307) / 0.3081, rtol=0, atol=1e-6)
    labels = gzip.decompress((PACKED / "train-labels-idx1-ubyte.gz").read_bytes())
    assert digits.targets.tolist() == list(labels[8:])
    assert digits.targets.dtype == torch.int64
    assert digits.images.dtype == torch.uint8 and torch.equal(digits.images, torch.tensor(pixels))


def test_the_normalised_training_pixels_have_mean_0_and_deviation_1(digits):
    images, _ = digits[::7]
    assert abs(float(images.mean())) < 0.01 and abs(float(images.std()) - 1) < 0.01


def test_torchvision_gives_equal_tensors(digits, theirs):
    from torchvision import datasets

    assert type(theirs) is datasets.MNIST
    assert torch.equal(theirs.data, digits.images) and torch.equal(theirs.targets, digits.targets)
    for i in range(0, 60_000, 499):
        image, label = theirs[i]
        assert torch.equal(digits[i][0], image) and digits[i][1] == label
    batch, labels = next(iter(DataLoader(theirs, batch_size=64)))
    assert torch.equal(digits[:64][0], batch) and torch.equal(digits[:64][1], labels)


def test_every_shade_of_grey_is_rounded_as_torchvision_does(theirs):
    from PIL import Image

    digits, other = mnist(train=False), mnist(train=False)
    shades = np.resize(np.arange(256, dtype=np.uint8), (28, 28))
    digits.images[3] = torch.from_numpy(shades)
    assert torch.equal(digits[3][0], theirs.transform(Image.fromarray(shades)))
    assert not torch.equal(other.images[3], digits.images[3])  # writing changed our copy, not the file


def test_the_test_set_agrees_as_well():
    ours, theirs = mnist(train=False), mnist(train=False, as_torchvision=True)
    assert torch.equal(theirs.data, ours.images) and torch.equal(theirs.targets, ours.targets)


@pytest.mark.parametrize(
    "index",
    [
        [1, 2, 3],
        [5, 5, -1],
        (4, 9),
        range(3, 40, 7),
        slice(10, 20),
        slice(None, None, -9000),
        slice(5, 5),
        [],
        torch.tensor([59_999, 0, 17]),
        torch.tensor([], dtype=torch.int64),
        np.array([8, 3], dtype=np.int32),
    ],
    ids=str,
)
def test_a_batch_is_its_samples_in_order(digits, index):
    every = np.arange(60_000)
    truth = [digits[int(i)] for i in (every[index] if isinstance(index, slice) else list(index))]
    for images, labels in (digits[index], digits.take(index)):
        assert images.dtype == torch.float32 and images.shape == (len(truth), 1, 28, 28)
        assert labels.dtype == torch.int64 and labels.tolist() == [label for _, label in truth]
        assert all(torch.equal(one, other) for one, (other, _) in zip(images, truth, strict=True))


def test_a_boolean_mask_picks_a_class(digits):
    images, labels = digits[digits.targets == 3]
    assert len(images) == 6131 and set(labels.tolist()) == {3}


def test_one_sample_by_any_whole_number(digits):
    for index in (np.int64(4), torch.tensor(4), -59_996):
        assert torch.equal(digits[index][0], digits[4][0])


@pytest.mark.parametrize("index", [60_000, -60_001, [0, 60_000], [-60_001], torch.tensor([70_000])], ids=str)
def test_an_index_out_of_range_is_explained(digits, index):
    with pytest.raises(IndexError, match="out of range: there are 60000 samples, use 0 to 59999"):
        digits[index]


@pytest.mark.parametrize("index", [[0.5], [[1, 2]], torch.tensor([True, False])], ids=str)
def test_an_index_that_makes_no_sense_is_explained(digits, index):
    with pytest.raises(TypeError, match="use whole numbers"):
        digits[index]


def test_a_batch_may_be_changed_without_changing_the_data(digits):
    before = digits[[0]][0].clone()
    digits[[0]][0].zero_()
    assert torch.equal(digits[[0]][0], before)


def test_it_travels_as_a_name(digits):
    packed = pickle.dumps(digits)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed).images, digits.images)


def test_torchvision_is_imported_only_when_asked_for_and_nothing_warns():
    code = """
import sys, dlab.data
dlab.data.mnist()[[0, 1]]
assert "torchvision" not in sys.modules
dlab.data.mnist(as_torchvision=True)[0]
assert "torchvision" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_it_says_what_it_is(digits):
    assert repr(digits) == "MNIST(train=True): 60000 images of 28x28, 10 classes"
    assert dlab.mnist is mnist and isinstance(digits, MNIST)


@pytest.mark.parametrize("train", ["test", "train", 0, None])
def test_which_images_is_said_by_true_or_false(train):
    with pytest.raises(TypeError, match=r"say mnist\(train=True\) for training images, mnist\(train=False\) for test"):
        dlab.mnist(train)
