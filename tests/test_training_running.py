"""`dlab.train` from the notebook's side: what it gives, what can be turned while it trains, what it refuses."""

import os
import time
from functools import partial

import pytest
import torch
from test_strategies import BATCH, data, data_in_float, network, network_in_float
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlab

RANKS = 3
PACKAGE = os.path.dirname(dlab.__file__)  # where its own lines are


class Wide(nn.Sequential):
    def __init__(self, classes, width):
        super().__init__(nn.Linear(4, width), nn.Linear(width, classes))


def start(cluster, strategy=None, **given):
    given = {"model": network_in_float, "batch_size": BATCH, "lr": 0.1, "test": data_in_float()} | given
    return dlab.train(data=data_in_float(), strategy=strategy, on=cluster, **given)


def until(condition):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def logs(run, rank=None):
    return [e.data for e in run.events if e.kind == "log" and rank in (None, e.rank)]


def test_a_result_has_model_losses_and_evaluation(cluster):
    result = start(cluster, epochs=3).wait(60)
    assert isinstance(result.model, nn.Module)
    assert result.evaluation == dlab.evaluate(result.model, data_in_float())
    assert result.accuracy == result.evaluation.accuracy
    assert len(result.losses) == 15
    assert repr(result) == f"<Result: 15 steps, last loss {result.losses[-1]:.3f}, test accuracy {result.accuracy:.1%}>"


def test_the_losses_are_those_of_the_whole_batch(cluster):
    result = dlab.train(network, data(), on=cluster, batch_size=BATCH, lr=0.0, order="global").wait(60)
    torch.manual_seed(1234)
    model = network()
    whole = torch.nn.functional.cross_entropy(model(data().tensors[0]), data().tensors[1]).item()
    counts = [12, 12, 12, 12, 5]  # with a learning rate of 0 all batches are of one model
    assert sum(n * loss for n, loss in zip(counts, result.losses, strict=True)) / 53 == pytest.approx(whole)


def test_every_step_tells_loss_samples_compute_and_wait(cluster):
    run = start(cluster, epochs=2)
    run.wait(60)
    assert len(logs(run)) == 10 * RANKS
    for told in logs(run):
        assert {"step", "epoch", "loss", "samples", "compute", "wait"} <= told.keys()
        assert told["compute"] > 0
        assert told["wait"] >= 0
    assert sum(told["samples"] for told in logs(run)) == 2 * 53


def test_watch_streams_gradient_norms_and_the_path_of_each_gradient(cluster):
    run = start(cluster, dlab.AllReduceSGD(bucket_mb=0.0001), watch=2, epochs=2)
    run.wait(60)
    norms = [e.data for e in run.events if e.kind == "gradients" and e.rank == 1]
    assert [each["step"] for each in norms] == [0, 2, 4, 6, 8]
    assert list(norms[0]["norms"]) == ["0", "2", "4"]
    stages = [e.data["stage"] for e in run.events if e.kind == "gradient" and e.rank == 0 and e.data["layer"] == "2"]
    assert stages[:5] == ["computed", "bucketed", "sent", "reduced", "applied"]


def two_groups(parameters):
    """The second group learns twice as fast; every step tells the rates."""
    first, *rest = parameters
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])
    optimizer.register_step_post_hook(lambda *_: dlab.log(rates=[group["lr"] for group in optimizer.param_groups]))
    return optimizer


def test_the_learning_rate_can_be_turned_while_it_trains(cluster):
    run = start(cluster, epochs=2000, optimizer=two_groups)
    until(lambda: {"rates": [0.1, 0.2]} in logs(run, 1))
    run.set("lr", 0.02)
    until(lambda: logs(run, 1)[-2:] and {"rates": [0.02, 0.04]} in logs(run, 1)[-2:])
    run.stop()
    with pytest.raises(dlab.Stopped):
        run.wait()
    assert run.wait(partial=True) is None  # it was stopped before the end


def test_trainings_can_race(cluster):
    contenders = {
        name: dlab.Training(model=network_in_float, data=data_in_float(), strategy=strategy, batch_size=BATCH)
        for name, strategy in {"ring": dlab.SyncSGD(), "buckets": dlab.AllReduceSGD()}.items()
    }
    race = dlab.race(contenders, workers=2)
    shares = race.wait()
    assert shares["ring"][0].losses == pytest.approx(shares["buckets"][0].losses, rel=1e-4)


def test_a_strategy_says_what_it_is():
    assert repr(dlab.SyncSGD()) == "SyncSGD(allreduce=ring_allreduce)"
    assert repr(dlab.AllReduceSGD(bucket_mb=2)) == "AllReduceSGD(bucket_mb=2, overlap=True)"
    assert repr(dlab.AsyncSGD()) == "AsyncSGD(clock=None, room=32)"
    assert repr(dlab.DDP()) == "DDP()"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": network_in_float()}, "give a function or class that makes the network"),
        ({"strategy": "sync"}, "give a strategy, such as dlab.SyncSGD"),
        ({"strategy": dlab.SyncSGD}, "give a strategy, such as dlab.SyncSGD"),
        ({"epochs": 0}, "epochs=0: give a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5: give a whole number"),
        ({"accumulate": 0}, "accumulate=0: give a whole number"),
        ({"data": "cifar"}, "no data set 'cifar': use 'mnist'"),
        ({"test": "cifar"}, "no data set 'cifar': use 'mnist'"),
        ({"lr": -0.1}, "lr=-0.1: give a learning rate that is a number, 0 or more"),
        ({"lr": float("nan")}, "lr=nan: give a learning rate"),
        ({"lr": float("inf")}, "lr=inf: give a learning rate"),
        ({"lr": "0.1"}, "lr='0.1': give a learning rate"),
        ({"momentum": 1.0}, "momentum=1.0: give a number from 0 to less than 1"),
        ({"momentum": 5}, "momentum=5: give a number"),
        ({"momentum": -0.5}, "momentum=-0.5: give a number"),
        ({"model": Wide}, r"Wide cannot be made without classes and width: .* model=lambda: Wide\(10, …\)"),
        ({"data": ["a word", "another"]}, r"data\[0\] contains text, 'a word': turn it into numbers"),
        ({"data": [("a word", 1)]}, r"data\[0\] contains text, 'a word': turn it into numbers"),
        ({"data": torch.zeros(20, 3)}, r"data\[0\] is a tensor of shape \(3,\) without a label: a sample is a pair"),
        ({"data": TensorDataset(torch.zeros(20, 3))}, r"data\[0\] is a tensor of shape \(3,\) without a label"),
        ({"data": [{"x": 1.0, "y": 0}] * 20}, r"data\[0\] is a dict without a label: a sample is a pair"),
        ({"data": [(1.0, 0, 3)] * 20}, r"data\[0\] has 3 parts: a sample is a pair, \(input, label\)"),
        ({"data": DataLoader(data_in_float())}, "data is a DataLoader: give its dataset"),
        ({"data": iter([(1.0, 0)])}, "data is a list_iterator: give a Dataset with a length"),
        ({"data": None}, "data is a NoneType: give a Dataset"),
        ({"data": []}, "data is empty: give at least one sample"),
        ({"test": torch.zeros(20, 3)}, r"test\[0\] is a tensor of shape"),
    ],
)
def test_bad_input_gets_a_sentence_before_any_worker_starts(given, words):
    given = {"model": network_in_float, "data": data_in_float()} | given
    with pytest.raises((TypeError, ValueError), match=words):
        dlab.train(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 2}, "a global batch of 2 cannot be cut for 3 workers"),
        ({"order": "random"}, "no order 'random'"),
        (
            {"strategy": dlab.ZeRO(), "optimizer": torch.optim.LBFGS},
            "LBFGS updates a whole",
        ),
        ({"model": lambda: nn.Flatten()}, "Flatten has no parameters to train: make its layers in __init__"),
        ({"model": lambda: nn.Linear}, "which is not a torch.nn.Module: let it return the network"),
    ],
)
def test_bad_input_that_only_workers_can_see(cluster, given, words):
    with pytest.raises(dlab.WorkerError, match=words) as error:
        start(cluster, **given).wait(60)
    assert PACKAGE not in str(error.value), "what the user did wrong is not in dlab's own lines"


def test_a_model_that_can_be_made_without_arguments_is_taken(cluster):
    class Sized(nn.Sequential):
        def __init__(self, *layers, width=2, **_):
            super().__init__(nn.Linear(4, width))

    for model in (Sized, lambda: Sized(width=3), partial(Sized, width=3)):
        dlab.Training(model=model, data=data_in_float())


@pytest.mark.parametrize("rate", [-1.0, "big", float("nan"), None])
def test_a_rate_that_makes_no_sense_is_refused_in_the_same_words_while_it_trains(cluster, rate):
    run = start(cluster, epochs=2000)
    with pytest.raises(ValueError, match=f"lr={rate!r}: give a learning rate that is a number, 0 or more"):
        run.set("lr", rate)
    assert not run.done, "and it goes on"
    run.stop()
    assert run.knobs == {}


def narrow():
    return nn.Linear(6, 1)


def test_a_label_without_an_output_is_told_as_that(cluster):
    with pytest.raises(dlab.WorkerError, match="there is a label 1, but the model has outputs only for labels below 1"):
        start(cluster, model=narrow).wait(60)


class Broken(nn.Sequential):
    def forward(self, images):
        hidden = self[0](images)
        return self[2](hidden.repeat(1, 2))  # twice as wide as the layer


def test_an_error_in_the_model_is_shown_with_the_lines_of_the_model_only(cluster):
    with pytest.raises(dlab.WorkerError, match="mat1 and mat2 shapes cannot be multiplied") as error:
        start(cluster, model=lambda: Broken(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))).wait(60)
    assert "return self[2](hidden.repeat(1, 2))" in error.value.traceback
    assert PACKAGE not in error.value.traceback and "torch/nn" not in error.value.traceback


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dlab.ModelAveraging(every=0), "every=0: give a whole number of steps"),
        (lambda: dlab.ModelAveraging(outer=3), "give a function that makes an optimizer"),
        (lambda: dlab.AllReduceSGD(bucket_mb=0), "bucket_mb=0: give a size"),
        (lambda: dlab.SyncSGD(allreduce="ring"), "takes a function allreduce"),
        (lambda: dlab.AsyncSGD(clock=3), "clock=3: give None for real time"),
        (lambda: dlab.AsyncSGD(room=0), "room=0: give a whole number"),
        (lambda: dlab.VirtualClock(speeds=[0]), "give speeds above 0"),
    ],
)
def test_a_strategy_refuses_what_it_cannot_be(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [dlab.SyncSGD(), dlab.AllReduceSGD(), dlab.AsyncSGD(), dlab.DDP()])
def test_on_gpus(strategy):
    ranks = torch.cuda.device_count()
    with dlab.Cluster(ranks) as cluster:
        result = dlab.train(network_in_float, data_in_float(), strategy, on=cluster, batch_size=12 * ranks).wait(120)
    assert result.identical
    assert next(result.model.parameters()).device.type == "cpu"
