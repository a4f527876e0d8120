"""A pipeline in processes: over shared memory and gloo it equals the unsplit model; who dies or fails is named."""

import os
import signal
import time

import pytest
import torch
from pipelines import alone, difference, piped, samples, small_stages
from torch import nn

import dlab
from dlab.transports import TorchTransport

WORKERS, BACKEND = 4, "gloo"
EXACT = 1e-12


def over_gloo(*args):
    return piped(TorchTransport(), *args)


def over_shared_memory(*args):
    return piped(None, *args)


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2)])
@pytest.mark.parametrize("work", [over_shared_memory, over_gloo])
def test_it_equals_the_unsplit_model(cluster, work, name, virtual):
    stages, batch = small_stages(4 * virtual), samples(11)
    found = cluster.run(work, stages, batch, name, 5, timeout=60)
    assert difference([answer for answer, _ in found], alone(stages, batch)) < EXACT
    assert all(held == planned for _, (held, planned) in found)


def wide_stages():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).double() for _ in range(4)]


@pytest.mark.parametrize("work", [over_shared_memory, over_gloo])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_that_are_larger_than_a_ring_of_shared_memory(cluster, work, name):
    make = torch.Generator().manual_seed(1)
    batch = torch.randn(8 * 5000, 64, generator=make, dtype=torch.float64), torch.randint(0, 64, (8 * 5000,))
    stages = wide_stages()  # 2.4 MiB for each micro-batch
    found = cluster.run(work, stages, batch, name, 8, timeout=120)
    assert difference([answer for answer, _ in found], alone(stages, batch)) < EXACT


class Stops(nn.Linear):
    """Ends its process in the middle of a later step."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def train_until_it_dies(transport=None):
    stages = [nn.Linear(6, 6), nn.Linear(6, 6), Stops(6, 6), nn.Linear(6, 5)]
    pipe = dlab.Pipeline(stages, "1f1b", 4, transport=transport and transport())
    inputs, labels = samples(8)
    for _ in range(100):
        pipe.step(inputs.float(), labels)


@pytest.mark.parametrize("transport", [None, TorchTransport], ids=["shared memory", "gloo"])
def test_a_stage_that_dies_is_named_and_nobody_hangs(cluster, the_next_run_works, transport):
    start = time.monotonic()
    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(train_until_it_dies, transport, timeout=60)
    assert error.value.rank == 2
    assert "SIGKILL" in str(error.value)
    assert time.monotonic() - start < 30


def refuse():
    stages = [nn.Linear(6, 6) for _ in range(4)]
    dlab.Pipeline(stages, "1f1b", 4, lambda outputs, _: outputs).step(samples(8)[0].float(), samples(8)[1])


def test_a_loss_that_is_no_number_is_refused_on_all_ranks(cluster, the_next_run_works):
    with pytest.raises(dlab.WorkerError) as error:
        cluster.run(refuse, timeout=60)
    said = str(error.value).splitlines()[0]
    assert "ValueError: loss() returned a tensor (2, 6): it must return the mean over the samples" in said
    assert said.startswith("ranks 0, 1, 2 and 3 failed")


def train_some_steps(steps):
    inputs, labels = samples(8)
    pipe = dlab.Pipeline([each.float() for each in small_stages(4)], "1f1b", 4)
    for _ in range(steps):
        pipe.step(inputs.float(), labels)
    return pipe.waited


def test_the_run_has_the_schedule_and_the_actions_of_every_tenth_step(cluster):
    run = cluster.start(train_some_steps, 12)
    assert all(waited > 0 for waited in run.wait(60))
    plans = [event for event in run.events if event.kind == "schedule"]
    actions = [event for event in run.events if event.kind == "action"]
    assert sorted(event.rank for event in plans) == [0, 1, 2, 3]
    assert {event.data["name"] for event in plans} == {"1f1b"}
    assert {event.data["step"] for event in actions} == {0, 1, 10}
    for rank, row in enumerate(dlab.schedule("1f1b", 4, 4).rows):
        mine = [event.data for event in actions if event.rank == rank and event.data["step"] == 10]
        assert [each["action"] for each in mine] == list(row)
    messages = [event.data for event in run.events if event.kind == "message"]
    assert len(messages) == 3 * (2 * 3 * 4 + 3)  # of these steps, too: there and back, and the loss to three ranks
    last = {each.data["action"]: each.data for each in actions if each.data["step"] == 10}
    assert last["1F2"]["start"] >= last["0F2"]["start"]
    assert last["0B2"]["end"] >= last["1B2"]["start"]
