"""A killed rank: a synchronous run stops and names it, or goes on without it; an asynchronous one just goes on."""

import time

import pytest
import torch
from test_strategies import data_in_float, network_in_float

import dlab
from dlab.training.checkpoints import open_checkpoint

RANKS = 4


@pytest.fixture
def cluster():
    with dlab.Cluster(RANKS) as cluster:
        yield cluster


def slowly(parameters):
    """An optimizer whose steps take a while, so that there is time to kill somebody."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.01))
    return optimizer


def start(cluster, strategy, **given):
    given = {"epochs": 12, "batch_size": 12, "optimizer": slowly} | given
    return dlab.train(network_in_float, data_in_float(), strategy, on=cluster, **given)


def wait_for_step(run, step, rank=0):
    for _ in range(1000):
        if any(event.kind == "log" and event.rank == rank and event.data["step"] >= step for event in run.events):
            return
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} did not get to step {step}")


@pytest.mark.parametrize("strategy", [dlab.SyncSGD(), dlab.AllReduceSGD(), dlab.ZeRO()])
def test_a_synchronous_run_stops_and_names_the_rank(cluster, strategy):
    run = start(cluster, strategy)
    wait_for_step(run, 5)
    run.kill(2)
    with pytest.raises(dlab.WorkerError, match="rank 2") as caught:
        run.wait(30)
    assert caught.value.rank == 2
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


SYNC, ALL_REDUCE = dlab.SyncSGD(), dlab.AllReduceSGD(bucket_mb=0.0005)


@pytest.mark.parametrize(  # each victim with each strategy and with each order, and each of these with each other
    ("victims", "strategy", "order"),
    [
        ((2,), SYNC, "shards"),
        ((2,), ALL_REDUCE, "global"),
        ((0,), SYNC, "global"),
        ((0,), ALL_REDUCE, "shards"),
        ((0, 3), SYNC, "shards"),
        ((0, 3), ALL_REDUCE, "global"),
    ],
)
def test_elastic_goes_on_with_the_remaining_ranks(cluster, capfd, strategy, order, victims):
    run = start(cluster, strategy, elastic=True, order=order)
    for number, victim in enumerate(victims):
        wait_for_step(run, 5 + 10 * number, rank=1)
        run.kill(victim)
    result = run.wait(20)
    assert result.identical
    logs = [event for event in run.events if event.kind == "log"]
    last = max(event.data["step"] for event in logs)
    assert {event.rank for event in logs if event.data["step"] == last} == set(range(RANKS)) - set(victims)
    assert sum(result.losses[-10:]) < sum(result.losses[:10])
    for epoch in range(6, 12):  # in every later epoch all samples again, among those who are left
        assert sum(event.data["samples"] for event in logs if event.data["epoch"] == epoch) == 53
    dead = {event.rank for event in run.states if event.data["state"] == "dead"}
    assert dead == set(victims)
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]  # the cluster is whole again


def test_the_weights_are_those_of_the_last_finished_step(cluster):
    """With the global order nobody's death changes what a step learns, once the batch has been cut anew."""
    given = {"order": "global", "epochs": 4}
    run = start(cluster, dlab.SyncSGD(), elastic=True, **given)
    wait_for_step(run, 3)
    run.kill(3)
    found = torch.nn.utils.parameters_to_vector(run.wait(20).model.parameters())
    whole = torch.nn.utils.parameters_to_vector(start(cluster, dlab.SyncSGD(), **given).wait(20).model.parameters())
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("victim", [0, 2])
def test_an_asynchronous_run_just_goes_on(cluster, victim):
    run = start(cluster, dlab.AsyncSGD())
    wait_for_step(run, 5, rank=victim)
    run.kill(victim)
    result = run.wait(20)
    assert result.identical
    logs = [event for event in run.events if event.kind == "log"]
    assert all(max(e.data["step"] for e in logs if e.rank == rank) == 59 for rank in set(range(RANKS)) - {victim})
    assert max(event.data["step"] for event in logs if event.rank == victim) < 59
    assert sum(result.losses[-10:]) < sum(result.losses[:10])
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


@pytest.mark.parametrize("clock", [None, dlab.VirtualClock(seed=1)], ids=["real time", "virtual time"])
def test_the_rest_of_an_asynchronous_run_also_saves_and_goes_on_from_there(cluster, tmp_path, clock):
    run = start(cluster, dlab.AsyncSGD(clock), checkpoint=tmp_path, every=15)
    wait_for_step(run, 5, rank=2)
    run.kill(2)
    whole = run.wait(20)
    assert whole.identical
    assert [open_checkpoint(tmp_path / f"step-000000{steps}").ranks for steps in (45, 60)] == [3, 3]
    with dlab.Cluster(3) as three:
        for ranks in (three, cluster):
            run = start(ranks, dlab.AsyncSGD(clock), resume=tmp_path / "step-00000045")
            assert run.wait(20).identical
            logs = [event.data for event in run.events if event.kind == "log"]
            assert sum(told["samples"] for told in logs if told["epoch"] == 11) == 53  # nobody's part is left out


def test_a_straggler_holds_up_a_synchronous_run_and_no_asynchronous_one(cluster):
    """Not how fast, but who waits: with a sleeper, the others of a synchronous run are never ahead of it."""
    ahead = {}
    for name, strategy in {"sync": dlab.SyncSGD(), "async": dlab.AsyncSGD()}.items():
        run = start(cluster, strategy, epochs=4)
        run.delay(1, 0.1)
        run.wait(20)
        place, ahead[name] = [0] * RANKS, 0
        for event in sorted((e for e in run.events if e.kind == "log"), key=lambda event: event.time):
            place[event.rank] = event.data["step"]
            ahead[name] = max(ahead[name], place[0] - place[1])
    assert ahead["sync"] <= 1
    assert ahead["async"] > 3


def test_what_cannot_be_elastic_is_refused():
    for strategy, words in [
        (dlab.DDP(), "cannot"),
        (dlab.ZeRO(), "cannot"),
        (dlab.AsyncSGD(), "does not need it"),
    ]:
        with pytest.raises(ValueError, match=words):
            dlab.train(network_in_float, data_in_float(), strategy, elastic=True)
