"""Parameter servers: sync equals one process, ssp with no staleness equals sync, and who dies is missed by nobody."""

import random
import time

import pytest
import torch
import torch.nn.functional as F
from test_strategies import adam, data, data_in_float, difference, network, network_in_float, options, plain
from test_training_elastic import wait_for_step

import dlab
from dlab.data.batches import take
from dlab.data.sampler import EpochSampler
from dlab.kvstore import parse_compression
from dlab.training.checkpoints import open_checkpoint


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def cluster(request):
    with dlab.Cluster(request.param, servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four():
    with dlab.Cluster(4, servers=1) as cluster:
        yield cluster


@pytest.mark.parametrize("changed", [{}, {"order": "global", "optimizer": adam, "accumulate": 3}])
def test_sync_equals_one_process_on_the_same_global_batches(cluster, changed):
    given = options(cluster.workers, **changed)
    result = dlab.train(network, data(), dlab.ParameterServer(servers=2), on=cluster, **given).wait(60)
    assert result.identical
    assert difference(result.model, plain(cluster.workers, **given)) < 1e-12


def test_the_number_of_servers_changes_nothing():
    given = options(2)
    result = dlab.train(network, data(), dlab.ParameterServer(servers=3), workers=2, **given).wait(60)
    assert result.identical
    assert difference(result.model, plain(2, **given)) < 1e-12


def test_no_staleness_is_sync_to_the_bit(cluster):
    given = options(cluster.workers)
    strategies = dlab.ParameterServer("sync"), dlab.ParameterServer("ssp", staleness=0)
    first, second = (dlab.train(network, data(), each, on=cluster, **given).wait(60) for each in strategies)
    assert first.identical and second.identical
    assert difference(first.model, second.model) == 0


@pytest.mark.parametrize("strategy", [dlab.ParameterServer("async"), dlab.ParameterServer("ssp", staleness=None)])
def test_one_worker_alone_is_never_stale(strategy):
    given = options(1)
    run = dlab.train(network, data(), strategy, workers=1, **given)
    assert difference(run.wait(60).model, plain(1, **given)) < 1e-12
    assert {number for event in run.events if event.kind == "log" for number in event.data["staleness"]} == {0}


@pytest.mark.parametrize("how", ["2bit", {"type": "topk", "ratio": 0.1}])
def test_compressed_gradients_are_those_that_a_plain_loop_makes(how):
    ranks, given = 3, {"lr": 0.1, "momentum": 0.9, "batch_size": 12, "epochs": 3}
    strategy = dlab.ParameterServer("sync", compression=how)
    result = dlab.train(network_in_float, data_in_float(), strategy, workers=ranks, **given).wait(60)

    samples, sampler, squeeze = data_in_float(), EpochSampler(data_in_float(), ranks, 12), parse_compression(how)
    torch.manual_seed(1234)
    model = network_in_float()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    count = sum(each.numel() for each in parameters)
    residuals = [torch.zeros(count) for _ in range(ranks)]
    code, sent = torch.empty(squeeze.nbytes(count), dtype=torch.uint8), torch.empty(count)
    for epoch in range(3):
        for step in range(sampler.steps):
            total = torch.zeros(count)
            for rank in range(ranks):
                inputs, labels = take(samples, sampler.positions(epoch, step, rank))
                loss = F.cross_entropy(model(inputs), labels) * sampler.weight(step, rank)
                gradient = torch.cat([each.view(-1) for each in torch.autograd.grad(loss, parameters)])
                squeeze.encode(gradient, residuals[rank], code)
                squeeze.decode(code, sent)
                total += sent
            for each, part in zip(parameters, (total / ranks).split([p.numel() for p in parameters]), strict=True):
                each.grad = part.view_as(each)
            optimizer.step()
    assert difference(result.model, model) < 1e-5
    assert (
        difference(result.model, dlab.train(network_in_float, data_in_float(), workers=ranks, **given).wait(60).model)
        > 1e-3
    )


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("how", [None, "2bit"])
def test_saving_disturbs_nothing_and_what_was_not_sent_is_saved(tmp_path, servers, how):
    given = {"lr": 0.1, "momentum": 0.9, "batch_size": 12, "epochs": 3, "workers": 2}
    strategy = dlab.ParameterServer("sync", servers=servers, compression=how)
    plain, whole, resumed = (
        dlab.train(network_in_float, data_in_float(), strategy, **given, **more).wait(60)
        for more in ({}, {"checkpoint": tmp_path, "every": 5}, {"resume": tmp_path / "step-00000010"})
    )
    assert difference(plain.model, whole.model) == 0
    assert difference(whole.model, resumed.model) == 0


def test_in_a_rehearsal_the_last_threads_serve():
    given = options(3)
    training = dlab.Training(model=network, data=data(), strategy=dlab.ParameterServer(servers=2), **given)
    shares = dlab.rehearse(training, ranks=5)
    assert [share is not None for share in shares] == [True] * 3 + [False] * 2
    assert len({share.digest for share in shares[:3]}) == 1
    model = network()
    model.load_state_dict(shares[0].weights)
    assert difference(model, plain(3, **given)) < 1e-12


def test_a_rehearsal_in_which_a_worker_fails_ends():
    def fail(prediction, labels):
        if len(labels) == 4 and torch.rand(()) < 0.2:
            raise ValueError("enough")
        return F.cross_entropy(prediction, labels)

    training = dlab.Training(model=network, data=data(), strategy=dlab.ParameterServer(), loss=fail, batch_size=12)
    with pytest.raises(Exception, match="enough"):
        dlab.rehearse(training, ranks=4)


# ------------------------------------------------------------------------------------- while it runs


def test_everybody_may_be_ahead_by_the_bound_and_no_further(four):
    """The slowest has logged step c - bound - 1 before anybody logs step c; and they do get ahead."""
    strategy = dlab.ParameterServer("ssp", staleness=2)
    run = dlab.train(network_in_float, data_in_float(), strategy, on=four, epochs=40, batch_size=12, lr=0.01)
    run.delay(3, 0.03)
    wait_for_step(run, 30)
    bound_2 = _leads(run, slow=3)
    run.set("staleness", 8)
    wait_for_step(run, 90)
    bound_8 = _leads(run, slow=3)
    run.delay(3, 0.0)
    assert run.wait(60).identical
    assert max(bound_2) == 3  # by what was logged: a step is logged after the next may begin
    assert 7 <= max(bound_8) <= 9
    staleness = [number for event in run.events if event.kind == "log" for number in event.data["staleness"]]
    assert len(staleness) == sum(event.kind == "log" for event in run.events)
    assert max(staleness) > 2


def _leads(run, slow):
    """How many steps more than the slow one each rank had logged, whenever it logged one."""
    events = sorted((e for e in run.events if e.kind == "log"), key=lambda event: event.time)
    logged, leads = [0, 0, 0, 0], []
    for event in events:
        logged[event.rank] += 1
        leads.append(logged[event.rank] - logged[slow])
    return leads


@pytest.mark.parametrize(("mode", "servers"), [("async", 1), ("ssp", 1), ("async", 0)])
def test_who_is_killed_is_missed_by_nobody(four, tmp_path, mode, servers):
    strategy, given = dlab.ParameterServer(mode, staleness=3, servers=servers), {"batch_size": 12, "lr": 0.01}
    saved = {"checkpoint": tmp_path, "every": 100}
    run = dlab.train(network_in_float, data_in_float(), strategy, on=four, epochs=60, **given, **saved)
    run.delay(1, 0.01)
    wait_for_step(run, 10)
    run.kill(2)
    result = run.wait(60)
    assert result.identical
    last = {rank: max(e.data["step"] for e in run.events if e.kind == "log" and e.rank == rank) for rank in range(4)}
    assert last[2] < last[0] == last[1] == last[3]
    assert open_checkpoint(tmp_path).ranks == 3
    assert four.run(dlab.rank) == [0, 1, 2, 3]


def test_in_sync_mode_who_is_killed_is_named(four):
    run = dlab.train(network_in_float, data_in_float(), dlab.ParameterServer(), on=four, epochs=500, batch_size=12)
    wait_for_step(run, 10)
    run.kill(2)
    with pytest.raises(dlab.WorkerError, match="rank 2 was killed"):
        run.wait(30)


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
def test_a_killed_server_ends_the_run_and_is_named(four, mode):
    strategy = dlab.ParameterServer(mode)
    run = dlab.train(network_in_float, data_in_float(), strategy, on=four, epochs=500, batch_size=12)
    wait_for_step(run, 10)
    run.kill(4)
    with pytest.raises(dlab.WorkerError, match=r"server 0 was killed by signal 9 \(SIGKILL\)"):
        run.wait(30)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("saved", [True, False], ids=["after a checkpoint", "before the first"])
def test_with_checkpoints_a_new_server_takes_the_place_of_a_killed_one(tmp_path, capfd, servers, saved):
    """Whatever the old one knew comes from the checkpoint, so the end is the same, to the bit."""
    given = {"epochs": 12, "batch_size": 12, "lr": 0.1, "momentum": 0.9, "every": 10 if saved else 10**6}
    strategy = dlab.ParameterServer("sync", servers=servers)
    with dlab.Cluster(3, servers=servers) as cluster:
        whole = dlab.train(network, data(), strategy, on=cluster, checkpoint=tmp_path / "a", **given).wait(60)
        run = dlab.train(network, data(), strategy, on=cluster, checkpoint=tmp_path / "b", **given)
        run.delay(1, 0.02)
        wait_for_step(run, 25)
        run.kill(3 + servers - 1)
        wait_for_step(run, 40)
        run.delay(1, 0.0)
        result = run.wait(60)
        assert cluster.run(dlab.rank) == [0, 1, 2]
    assert result.identical
    assert difference(result.model, whole.model) == 0
    assert len(result.losses) == len(whole.losses)
    assert f"a server has died: a new one continues from step {20 if saved else 0}" in capfd.readouterr().out


def test_so_it_does_whenever_a_server_dies(tmp_path):
    """In the middle of a step, of saving, or of beginning anew: it saves after every step and loses four servers."""
    given, dice = {"epochs": 30, "batch_size": 12, "lr": 0.01}, random.Random(1)
    strategy, samples = dlab.ParameterServer("sync", servers=2), data_in_float()
    with dlab.Cluster(3, servers=2) as cluster:
        whole = dlab.train(network_in_float, samples, strategy, on=cluster, **given).wait(60)
        run = dlab.train(network_in_float, samples, strategy, on=cluster, checkpoint=tmp_path, every=1, **given)
        for _ in range(4):
            time.sleep(dice.uniform(0.1, 0.6))
            run.kill(3 + dice.randrange(2))
        result = run.wait(60)
    assert difference(result.model, whole.model) == 0


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_so_it_does_where_nobody_waits(tmp_path, mode):
    given = {"epochs": 30, "batch_size": 12, "lr": 0.01, "checkpoint": tmp_path, "every": 10}
    with dlab.Cluster(3, servers=1) as cluster:
        run = dlab.train(network_in_float, data_in_float(), dlab.ParameterServer(mode), on=cluster, **given)
        run.delay(1, 0.01)
        for step in (25, 60):
            wait_for_step(run, step)
            run.kill(3)
        result = run.wait(60)
    assert result.identical
    assert len(result.losses) == 150


@pytest.mark.parametrize("strategy", [dlab.ParameterServer("async"), dlab.ParameterServer("ssp", staleness=None)])
def test_without_a_bound_a_slow_worker_slows_down_nobody_else(four, strategy):
    run = dlab.train(network_in_float, data_in_float(), strategy, on=four, epochs=40, batch_size=12)
    run.delay(0, 0.1)
    wait_for_step(run, 5)
    assert max(_leads(run, slow=0)) > 20
    run.delay(0, 0.0)
    assert run.wait(60).identical


def test_the_learning_rate_is_turned_on_the_servers(four):
    """One batch of all samples, again and again: when the rate is 0, the loss stays what it is."""
    strategy = dlab.ParameterServer("sync")
    run = dlab.train(
        network_in_float, data_in_float(), strategy, on=four, epochs=400, batch_size=53, momentum=0.0, order="global"
    )
    run.delay(0, 0.005)
    wait_for_step(run, 20)
    run.set("lr", 0.0)
    time.sleep(0.2)
    run.delay(0, 0.0)
    losses = run.wait(60).losses
    assert losses[0] - losses[-1] > 1e-3
    assert max(losses[-100:]) - min(losses[-100:]) < 1e-6


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": "lazy"}, "there is no mode 'lazy': use 'sync', 'async', 'ssp'"),
        ({"staleness": -1}, "staleness=-1: give a whole number of steps, 0 or more, or None"),
        ({"servers": -1}, "servers=-1: give a whole number, 0 or more"),
        ({"servers": 0, "mode": "sync"}, "servers=0 only works with mode='async': use that, or at least one server"),
        ({"servers": 0, "mode": "async", "compression": "2bit"}, "servers=0 sends nothing that could be compressed"),
        ({"compression": "3bit"}, "3bit"),
    ],
)
def test_bad_input_gets_a_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        dlab.ParameterServer(**given)


@pytest.mark.parametrize("bound", ["many", -1])
def test_a_bound_that_cannot_be_is_refused_also_while_it_trains(four, bound):
    run = dlab.train(network_in_float, data_in_float(), dlab.ParameterServer("ssp"), on=four, epochs=500, batch_size=12)
    wait_for_step(run, 3)
    with pytest.raises(ValueError, match=f"staleness={bound!r}: give a whole number of steps, 0 or more, or None"):
        run.set("staleness", bound)
    assert not run.done, "and it goes on"
    run.stop()


def test_a_cluster_without_servers_is_refused(four):
    with pytest.raises(
        ValueError, match=r"this needs 2 servers and the cluster has 1: make it with dlab.Cluster\(4, ser"
    ):
        dlab.train(network, data(), dlab.ParameterServer(servers=2), on=four)


def test_optimizers_that_servers_do_not_have(four):
    with pytest.raises(dlab.WorkerError, match="a server has no optimizer 'rmsprop': use one of sgd, adam, adagrad"):
        dlab.train(network, data(), dlab.ParameterServer(), on=four, optimizer=torch.optim.RMSprop).wait(30)
