"""What is saved and resumed goes on as if nothing had happened; a damaged checkpoint is refused by name."""

import errno
import json
import os
import shutil
import signal
import socket
import time
from math import isnan

import pytest
import torch
from test_strategies import BATCH, adam, data, difference, network, plain
from torch import nn

import dlab
from dlab.training.checkpoints import DamagedCheckpoint, open_checkpoint

RANKS = 3
SERVERS = 1  # of the cluster


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
    "ZeRO": dlab.ZeRO(bucket_mb=0.0005),
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


def broken(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels) * float("nan")


def test_a_loss_that_was_not_a_number_is_not_one_after_it_was_resumed(cluster, tmp_path):
    given = {"batch_size": BATCH, "epochs": 2, "every": 5, "loss": broken}
    whole = dlab.train(network, even(), on=cluster, checkpoint=tmp_path, **given).wait(60)
    assert repr(whole) == "<Result: 8 steps, last loss nan>"
    resumed = dlab.train(
        network, even(), on=cluster, resume=tmp_path / "step-00000005", checkpoint=tmp_path / "again", **given
    ).wait(60)
    assert len(resumed.losses) == 8 and all(map(isnan, whole.losses + resumed.losses))


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
    if order == "global" and name in ("sync", "all-reduce", "ZeRO", "DDP"):  # nothing was lost
        assert difference(result.model, plain(1, epochs=2, **(given | {"lr": 0.05}))) < 1e-12


def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_usable(cluster, tmp_path):
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path, every=1, epochs=1).wait(60)
    older, newest = sorted(tmp_path.iterdir())  # two are kept
    assert open_checkpoint(tmp_path).folder == newest
    victim = newest / "rank-1.pt"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{newest.name} is damaged: .*rank-1.pt differs .*resume from .*{older.name}"
    ):
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


FILES = {"common.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest["files"].clear(), "does not name the files of 3 ranks"),
        (lambda manifest: manifest["files"].pop("rank-2.pt"), "does not name the files of 3 ranks"),
        (lambda manifest: manifest["files"].update({"../x": "0" * 64}), "does not name the files of 3 ranks"),
        (lambda manifest: manifest.update(ranks=2), "does not name the files of 2 ranks"),
        (lambda manifest: manifest.update(ranks=10**12), "does not name the files of"),
        (lambda manifest: manifest.update(files=[1, 2, 3, 4]), "does not name the files of 3 ranks"),
        (lambda manifest: manifest.update(ranks=0), "ranks=0"),
        (lambda manifest: manifest.update(ranks=-3), "ranks=-3"),
        (lambda manifest: manifest.update(ranks="3"), "ranks='3'"),
        (lambda manifest: manifest.update(ranks=True), "ranks=True"),
        (lambda manifest: manifest.update(steps=None), "steps=None"),
        (lambda manifest: manifest["files"].update({"rank-0.pt": "0" * 64}), "rank-0.pt differs from what was written"),
        (lambda manifest: manifest.pop("ranks"), "manifest.json cannot be read"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(saved, tmp_path, change, words):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    older, newest = sorted(tmp_path.glob("step-*"))
    assert {path.name for path in newest.iterdir()} == FILES | {"manifest.json"}
    (tmp_path / "x").write_bytes(b"")
    manifest = json.loads((newest / "manifest.json").read_bytes())
    change(manifest)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match=rf"{newest.name} is damaged: .*{words}.*; resume from {older} instead"):
        open_checkpoint(tmp_path)
    (older / "rank-0.pt").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"holds no other complete one"):
        open_checkpoint(newest)


@pytest.fixture(scope="module")
def saved(cluster, tmp_path_factory):
    """The folder of a training of five steps: the fourth and the last are kept."""
    folder = tmp_path_factory.mktemp("saved")
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=folder, every=1).wait(60)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_belongs_to_one_training(cluster, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    given = {"on": cluster, "batch_size": BATCH, "checkpoint": tmp_path, "every": 2, "seed": 7}
    for elsewhere in ({}, {"resume": saved}):
        with pytest.raises(ValueError, match=r"another training, up to step-0+5: .* resume=.*another.*overwrite=True"):
            dlab.train(network, data(), **given, **elsewhere)
    with pytest.raises(dlab.WorkerError, match="another training"):  # by another way than dlab.train
        cluster.run(plan_made_before(tmp_path))
    assert names(tmp_path) == names(saved)
    same = given | {"every": 1, "seed": 1234}
    dlab.train(network, data(), **same, resume=tmp_path, epochs=2).wait(60)  # the same one goes on
    assert names(tmp_path) == ["step-00000009", "step-00000010"]

    mine = [tmp_path / "notes.txt", tmp_path / "step-by-step" / "x", tmp_path / "step-00000001" / "x"]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    (tmp_path / ".step-00000003.partial").mkdir()
    dlab.train(network, data(), **given, overwrite=True).wait(60)
    assert names(tmp_path) == [
        "notes.txt", "step-00000001", "step-00000002", "step-00000004", "step-by-step"
    ]  # fmt: skip
    assert [file.read_text() for file in mine] == ["mine"] * 3
    assert open_checkpoint(tmp_path).steps == 4


def plan_made_before(folder):
    """It was made when the folder was empty."""
    plan = dlab.Training(model=network, data=data(), batch_size=BATCH)
    plan.checkpoint = folder
    return plan


@pytest.mark.parametrize(("every", "left"), [(1, [9, 10]), (3, [8, 9]), (5, [8, 10])])
def test_who_resumes_an_older_one_leaves_the_later_ones(cluster, tmp_path, every, left):
    given = {"on": cluster, "batch_size": BATCH, "checkpoint": tmp_path, "epochs": 2}
    dlab.train(network, data(), **given | {"epochs": 4}, every=8).wait(60)
    assert names(tmp_path) == ["step-00000008", "step-00000016"]
    result = dlab.train(network, data(), **given, every=every, resume=tmp_path / "step-00000008").wait(60)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]
    newest = open_checkpoint(tmp_path)
    if newest.steps == 10:  # the line that was saved last, not the one that was left
        found = newest.common()["model"]
        assert all(torch.equal(found[name], each) for name, each in result.model.state_dict().items())


def test_two_at_once_are_refused_by_name(cluster, fewer, tmp_path):
    first = dlab.train(slow_network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path, every=1, epochs=1000)
    while not list(tmp_path.glob("step-*")):
        time.sleep(0.01)
    holder = rf"process {cluster.pids[0]} on {socket.gethostname()}"
    given = {"on": fewer, "batch_size": BATCH, "checkpoint": tmp_path}
    for how in ({"resume": tmp_path}, {"overwrite": True}):
        with pytest.raises(ValueError, match=f"is in use, {holder} saves its checkpoints there"):
            dlab.train(network, data(), **given, **how)
    plan = plan_made_before(tmp_path)
    plan.overwrite = True
    with pytest.raises(dlab.WorkerError, match=f"is in use, {holder}"):  # by another way than dlab.train
        fewer.run(plan)
    os.kill(cluster.pids[0], signal.SIGKILL)
    with pytest.raises(dlab.WorkerError):
        first.wait(60)
    dlab.train(network, data(), **given, overwrite=True).wait(60)  # the dead are in nobody's way
    assert names(tmp_path) == ["step-00000005"]


def slow_network():
    time.sleep(0.1)
    return network()


def network_without_room():
    """On rank 0 the disk is full when its second file is written."""
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) == 2:
            os.fsync = fsync
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    if dlab.rank() == 0:
        os.fsync = full
    return network()


def test_a_folder_that_cannot_be_used_gets_a_sentence(cluster, tmp_path):
    (tmp_path / "file").write_text("")
    given = {"on": cluster, "batch_size": BATCH}
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=f"checkpoint=.*{tmp_path / 'file'} is a file; give a folder"):
            dlab.train(network, data(), **given, checkpoint=path)
    with pytest.raises(dlab.WorkerError, match=r"no checkpoint can be saved in /proc/here \(.*\): make room, or give"):
        dlab.train(network, data(), **given, checkpoint="/proc/here").wait(60)
    with pytest.raises(dlab.WorkerError, match=r"no checkpoint can be saved in .* \(No space left on device\): make"):
        dlab.train(network_without_room, data(), **given, checkpoint=tmp_path / "full").wait(60)
    assert names(tmp_path / "full") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_gets_a_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot be written to; give another folder"):
        dlab.train(network, data(), checkpoint=tmp_path / "below")


def test_names_are_on_the_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    """In this order: every file, the folder that has their names, its new name, and the folder that has that."""
    done = []
    rename, fsync = os.rename, os.fsync

    def synced(file):
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda one, other: (done.append("renamed"), rename(one, other)))
    training = dlab.Training(model=network, data=data(), batch_size=BATCH, checkpoint=tmp_path / "new")
    dlab.rehearse(training, ranks=1)
    partial = "new/.step-00000005.partial"
    files = [f"{partial}/{name}" for name in ("rank-0.pt", "common.pt", "manifest.json")]
    assert done == [".", "new", *files, partial, "renamed", "new"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resume": "nowhere"}, "no checkpoint in .*nowhere"),
        ({"every": 3}, "also say where, with checkpoint=folder"),
        ({"checkpoint": "here", "every": 0}, "number of steps between checkpoints"),
        ({"overwrite": True}, "say which folder, with checkpoint=folder"),
    ],
)
def test_bad_input_gets_a_sentence(given, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        dlab.train(network, data(), **given)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"strategy": dlab.DDP()}, "was saved with strategy=SyncSGD: resume it with that, not with DDP"),
        ({"optimizer": torch.optim.Adam}, "was saved with optimizer=SGD: resume it with that, not with Adam"),
        ({"batch_size": 2 * BATCH}, f"was saved with batch_size={BATCH}: resume it with that, not with {2 * BATCH}"),
        ({"order": "global"}, "was saved with order=shards: resume it with that, not with global"),
        ({"seed": 5}, "was saved with seed=1234: resume it with that, not with 5"),
        ({"model": dlab.MLP}, "holds the weights of another model: resume it with the model that was saved"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_training_cannot_go_on(cluster, tmp_path, changed, sentence):
    same = {"model": network, "data": data(), "on": cluster, "batch_size": BATCH}
    dlab.train(**same, checkpoint=tmp_path).wait(60)
    with pytest.raises(dlab.WorkerError, match=sentence):
        dlab.train(**same | changed, resume=tmp_path, epochs=2).wait(60)


def test_with_other_data_it_cannot_go_on(cluster, tmp_path):
    dlab.train(network, data(), on=cluster, batch_size=BATCH, checkpoint=tmp_path).wait(60)
    fewer = dlab.Partition(data(), range(len(data()) - 1))
    with pytest.raises(dlab.WorkerError, match=f"was saved with samples={len(data())}: resume it with that"):
        dlab.train(network, fewer, on=cluster, batch_size=BATCH, resume=tmp_path, epochs=2).wait(60)
