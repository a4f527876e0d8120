"""One epoch of all 60,000 images on four workers, as the course promises it."""

import pytest

import dlab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster():
    with dlab.Cluster(4) as cluster:
        yield cluster


def epoch(cluster, strategy, lr=0.05, momentum=0.9):
    return dlab.train(dlab.SimpleCNN, "mnist", strategy, on=cluster, lr=lr, momentum=momentum, seed=1234).wait(280)


@pytest.mark.parametrize(
    "strategy",
    [dlab.SyncSGD(), dlab.AllReduceSGD(), dlab.AllReduceSGD(sharded_update=True), dlab.DDP()],
    ids=["sync", "all-reduce", "sharded update", "DDP"],
)
def test_synchronous_strategies_reach_97_and_a_half_percent(cluster, strategy):
    result = epoch(cluster, strategy)
    assert len(result.losses) == 469
    assert result.evaluation.samples == 10_000
    assert result.accuracy >= 0.975
    assert result.identical


def test_asynchronous_training_reaches_95_percent(cluster):
    result = epoch(cluster, dlab.AsyncSGD(), lr=0.01, momentum=0.5)
    assert result.accuracy >= 0.95
    assert result.identical
