"""A training that is stopped at any moment of its start leaves workers on which the next one gives the same bits."""

import os
import random
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dlab

STOPS = int(os.environ.get("DLAB_STOPS", "10"))  # each on workers that have imported nothing yet
SECONDS = 2.0  # in which a cold worker imports what DDP needs, and has begun to train with all others
STOPPED = {
    "SyncSGD": dlab.SyncSGD(),
    "AllReduceSGD": dlab.AllReduceSGD(),
    "ZeRO": dlab.ZeRO(),
    "ModelAveraging": dlab.ModelAveraging(every=2),
    "AsyncSGD": dlab.AsyncSGD(),
    "ParameterServer, sync": dlab.ParameterServer(mode="sync"),
    "ParameterServer, async": dlab.ParameterServer(mode="async"),
    "ParameterServer, ssp": dlab.ParameterServer(mode="ssp"),
    "ParameterServer, no server": dlab.ParameterServer(mode="async", servers=0),
    "DDP": dlab.DDP(),
}
NEXT = ("SyncSGD", "AllReduceSGD", "ZeRO", "ModelAveraging", "ParameterServer, sync")  # deterministic


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def start(cluster, name, epochs):
    source = torch.Generator().manual_seed(0)
    samples = torch.randn(240, 8, generator=source), torch.randint(0, 3, (240,), generator=source)
    return dlab.train(network, TensorDataset(*samples), STOPPED[name], on=cluster, epochs=epochs, batch_size=48)


def train(cluster, name):
    result = start(cluster, name, epochs=1).wait(timeout=60)
    return [*(weights.tolist() for weights in result.model.state_dict().values()), result.losses]


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * STOPS)
def test_after_a_stop_at_any_moment_trainings_give_the_same_as_on_fresh_workers():
    chance = random.Random(3)  # its tenth stop, that of DDP, comes in the middle of the imports
    with dlab.Cluster(2, servers=1) as cluster:
        undisturbed = {name: train(cluster, name) for name in ("DDP", *NEXT)}
    for number in range(STOPS):
        name, after = list(STOPPED)[number % len(STOPPED)], NEXT[number % len(NEXT)]
        seconds = chance.uniform(0, SECONDS)
        try:
            with dlab.Cluster(2, servers=1) as cluster:
                run = start(cluster, name, epochs=100_000)
                time.sleep(seconds)
                run.stop()
                assert {each: train(cluster, each) for each in ("DDP", after)} == {
                    each: undisturbed[each] for each in ("DDP", after)
                }
        except BaseException as problem:
            problem.add_note(f"stop {number}: {name} after {seconds:.2f} s, then DDP and {after}")
            raise
