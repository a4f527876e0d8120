"""What is saved and resumed goes on as if nothing had happened; a damaged checkpoint is refused by name."""

import shutil

import pytest
import torch
from test_strategies import BATCH, adam, data, difference, network, plain
from torch import nn

import dlab
from dlab.training.checkpoints import open_checkpoint

RANKS = 3


@pytest.fixture(scope="module")
def cluster():
    with dlab.Cluster(RANKS, servers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fewer():
    with dlab.Cluster(2, servers=1) as cluster:
        yield cluster


class Restless(nn.Module):
    """Batch norm, whose buffers differ between ranks, and dropout, which draws random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)).double()

    def forward(self, inputs):
        return self.body(inputs)


def even():
    return torch.utils.data.TensorDataset(*(tensor[:48] for tensor in data().tensors))


STRATEGIES = {
    "sync": dlab.SyncSGD(),
    "all-reduce": dlab.AllReduceSGD(bucket_mb=0.0005),
    "sharded update": dlab.AllReduceSGD(bucket_mb=0.0005, sharded_update=True),
    "averaging": dlab.ModelAveraging(every=3),
    "DiLoCo": dlab.ModelAveraging(every=3, outer=dlab.strategies.nesterov),
    "asynchronous": dlab.AsyncSGD(dlab.VirtualClock(seed=1, speeds=(1, 2, 3))),
    "DDP": dlab.DDP(),
    "server": dlab.ParameterServer(),
}


@pytest.mark.parametrize("optimizer", [None, adam], ids=["SGD", "Adam"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_is_bit_for_bit_what_it_would_have_been(cluster, tmp_path, name, optimizer):
    given = {"batch_size": BATCH, "lr": 0.05, "momentum": 0.9, "optimizer": optimizer, "epochs": 4, "every": 5}
    whole = dlab.train(Restless, even(), STRATEGIES[name], on=cluster, checkpoint=tmp_path, **given).wait(60)
    assert len(whole.losses) == 16
    earlier = open_checkpoint(tmp_path / "step-00000010")
    assert (earlier.steps, earlier.ranks) == (10, RANKS)
    resumed = dlab.train(
        Restless, even(), STRATEGIES[name], on=cluster, resume=earlier.folder, checkpoint=tmp_path / "again", **given
    ).wait(60)
    # DDP lays out its buckets anew after its first step, so that sums there are made in another order
    assert difference(whole.model, resumed.model) <= (1e-9 if name == "DDP" else 0)
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-12)
    assert resumed.identical


@pytest.mark.parametrize("order", ["shards", "global"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_with_another_number_of_workers(cluster, fewer, tmp_path, name, order):
    given = {"batch_size": BATCH, "lr": 0.05, "momentum": 0.9, "order": order}
    dlab.train(network, data(), STRATEGIES[name], on=cluster, checkpoint=tmp_path, every=3, **given).wait(60)
    result = dlab.train(
        network, data(), STRATEGIES[name], on=fewer, resume=tmp_path / "step-00000003", epochs=2, **given
    ).wait(60)
    assert result.identical
    assert len(result.losses) >= 2 * 53 // BATCH
    if order == "global" and name in ("sync", "all-reduce", "sharded update", "DDP"):  # nothing was lost
        assert difference(result.model, plain(1, epochs=2, **(given | {"lr": 0.05}))) < 1e-12


def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_usable(cluster, tmp_path):
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path, every=1, epochs=1).wait(60)
    older, newest = sorted(tmp_path.iterdir())  # two are kept
    assert open_checkpoint(tmp_path).folder == newest
    victim = newest / "rank-1.pt"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{newest.name} is damaged: .*rank-1.pt is not .*resume from .*{older.name}"):
        dlab.train(network, data(), on=cluster, batch_size=BATCH, resume=tmp_path)
    result = dlab.train(network, data(), on=cluster, batch_size=BATCH, resume=older).wait(60)
    assert len(result.losses) > open_checkpoint(older).steps
    victim.unlink()
    with pytest.raises(ValueError, match=r"rank-1.pt is missing"):
        open_checkpoint(newest)
    (newest / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json cannot be read"):
        open_checkpoint(newest)


def test_one_that_was_interrupted_is_not_there(cluster, tmp_path):
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path, every=2).wait(60)
    newest = open_checkpoint(tmp_path).folder
    shutil.copytree(newest, tmp_path / ".step-99999999.partial")
    assert open_checkpoint(tmp_path).folder == newest


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resume": "nowhere"}, "no checkpoint in .*nowhere"),
        ({"every": 3}, "say where, too, by checkpoint=folder"),
        ({"checkpoint": "here", "every": 0}, "number of steps between checkpoints"),
    ],
)
def test_bad_input_gets_a_sentence(given, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        dlab.train(network, data(), **given)


def test_another_strategy_cannot_go_on(cluster, tmp_path):
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path).wait(60)
    with pytest.raises(dlab.WorkerError, match="was saved by SyncSGD: resume it with that, not with DDP"):
        dlab.train(network, data(), dlab.DDP(), on=cluster, batch_size=BATCH, resume=tmp_path).wait(60)
