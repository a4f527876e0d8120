"""An epoch of 60,000 images on four workers, as the course promises it; each strategy does what one process does."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dlab
from dlab.data.sampler import EpochSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RANKS, SEED, STEPS, BATCH = 4, 1234, 25, 128


def train(cluster, strategy, model=dlab.SmallCNN, data="mnist", lr=0.05, momentum=0.9):
    return dlab.train(model, data, strategy, on=cluster, lr=lr, momentum=momentum, seed=SEED).wait(280)


def test_synchronous_training_reaches_97_and_a_half_percent(cluster):
    result = train(cluster, dlab.AllReduceSGD(), model=dlab.SimpleCNN)
    assert len(result.losses) == 469
    assert result.evaluation.samples == 10_000
    assert result.accuracy >= 0.975
    assert result.identical


def precise_model():
    return dlab.SmallCNN().double()


@pytest.fixture(scope="module")
def few_images():
    """In double precision, so that it does not matter in which order a sum is made."""
    images, labels = dlab.mnist()[: STEPS * BATCH]
    return TensorDataset(images.double(), labels)


@pytest.fixture(scope="module")
def alone(few_images):
    """The losses of one process on the same global batches, and the weights that it comes to."""
    sampler, losses = EpochSampler(few_images, RANKS, BATCH, "shards", SEED), []
    torch.manual_seed(SEED)
    model = precise_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        images, labels = few_images[torch.cat([sampler.positions(0, step, rank) for rank in range(RANKS)])]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    "strategy",
    [dlab.SyncSGD(), dlab.AllReduceSGD(), dlab.ZeRO(), dlab.DDP()],
    ids=["sync", "all-reduce", "ZeRO", "DDP"],
)
def test_each_synchronous_strategy_does_what_one_process_does(cluster, few_images, alone, strategy):
    result = train(cluster, strategy, precise_model, few_images)
    losses, weights = alone
    found = torch.nn.utils.parameters_to_vector(result.model.parameters()).detach()
    assert result.losses == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
    assert result.identical


def test_asynchronous_training_reaches_95_percent(cluster):
    result = train(cluster, dlab.AsyncSGD(), lr=0.01, momentum=0.5)
    assert result.accuracy >= 0.95
    assert result.identical
