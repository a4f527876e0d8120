"""`dlab train`: in a cluster of its own, under torchrun, under `dlab run`, and across two hosts: one result."""

import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import netns
import pytest
import torch

from dlab import cli
from dlab.training.checkpoints import open_checkpoint
from dlab.training.saving import Folder

FEW = ["--model", "two_layer", "--batch-size", "1200", "--lr", "0.1"]  # 50 steps
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def command(folder, strategy="sync", *more):
    return ["-m", "dlab", "train", "--strategy", strategy, *FEW, "--checkpoint", str(folder), *more]


def weights(folder):
    saved = open_checkpoint(folder)
    assert (saved.steps, saved.ranks) == (50, 2)
    return saved.common()["model"]


def assert_equal(one, other):
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What a cluster of two workers comes to, and where it is saved."""
    folder = tmp_path_factory.mktemp("cluster")
    answer = run(sys.executable, *command(folder), "--workers", "2")
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"SyncSGD.* on 2 ranks: 50 steps in [\d.]+ s, last loss 0\.\d+; test accuracy 9\d", answer.stdout)
    assert "equal to the last bit" in answer.stdout.replace("\n", " ")
    return weights(folder), folder


@pytest.mark.slow
def test_under_torchrun(truth, tmp_path):
    answer = run(*TORCHRUN, "--nproc-per-node", "2", *command(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "SyncSGD(allreduce=ring_allreduce) on 2 ranks: 50 steps" in answer.stdout
    assert_equal(weights(tmp_path), truth[0])


def test_the_folder_of_another_training_is_refused_in_one_line(truth, tmp_path, capsys):
    """The same for a rank of a launcher, which is told before it looks for the others."""
    shutil.copytree(truth[1], tmp_path, dirs_exist_ok=True)
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "2"}):
        with mock.patch.dict(os.environ, environment):
            assert cli.main(["train", *FEW, "--checkpoint", str(tmp_path)]) == 1
            complaint = capsys.readouterr().err
        assert complaint.startswith(f"dlab: {tmp_path} holds the checkpoints of another training, up to step-00000050")
        assert len(complaint.splitlines()) == 1


@pytest.mark.slow
def test_it_is_overwritten_and_gone_on_with_under_torchrun(truth, tmp_path):
    shutil.copytree(truth[1], tmp_path, dirs_exist_ok=True)
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", *command(tmp_path)]
    with Folder(tmp_path) as folder:  # somebody else is at it
        folder.take()
        answer = run(*torchrun, "--overwrite")
        assert answer.returncode != 0
        assert f"is in use, process {os.getpid()} on" in answer.stderr
    assert_equal(weights(tmp_path), truth[0])  # still there
    answer = run(*torchrun, "--overwrite", "--seed", "7", "--every", "20")
    assert answer.returncode == 0, answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000040"]
    answer = run(*torchrun, "--resume", str(tmp_path / "step-00000020"), "--seed", "7", "--every", "15")
    assert answer.returncode == 0, answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000045"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "async", "ddp", "tensor"])
def test_every_strategy_under_dlab_run(tmp_path, strategy):
    answer = run(sys.executable, "-m", "dlab", "run", "-m", "dlab", "-n", "2", "--", *command(tmp_path, strategy)[2:])
    assert answer.returncode == 0, answer.stderr
    assert "on 2 ranks: 50 steps" in answer.stdout
    assert "equal to the last bit" in answer.stdout
    weights(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(netns.why_not() is not None, reason=f"no two hosts here: {netns.why_not()}")
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_across_two_hosts_it_is_the_same(truth, tmp_path, strategy):
    with netns.TwoHosts() as hosts:
        node = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--master-addr={hosts.addresses[0]}"]
        commands = [[*node, f"--node-rank={host}", *command(tmp_path, strategy)] for host in range(2)]
        # threads as in the cluster: they decide in which order a matrix product adds up
        environment = {"GLOO_SOCKET_IFNAME": hosts.interface, "OMP_NUM_THREADS": "1"}
        answers = hosts.run(*commands, seconds=120, environment=environment)
    assert [answer.code for answer in answers] == [0, 0], answers
    assert "on 2 ranks: 50 steps" in answers[0].output
    assert "equal to the last bit" in answers[0].output
    found = weights(tmp_path)
    if strategy == "sync":  # the same sums in the same order
        assert_equal(found, truth[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "magic"], "'magic' is not known: use one of sync, allreduce"),
        (["--model", "gpt"], "'gpt' is not known: use one of simple_cnn"),
        (["--resume", "nowhere"], "no checkpoint in nowhere"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, words, capsys):
    assert cli.main(["train", *arguments]) == 1
    complaint = capsys.readouterr().err
    assert words in complaint
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lr", "-1"], "dlab: lr=-1.0: give a learning rate that is a number, 0 or more, such as 0.01"),
        (["--lr", "nan"], "dlab: lr=nan: give a learning rate that is a number, 0 or more, such as 0.01"),
        (["--momentum", "1"], "dlab: momentum=1.0: give a number from 0 to less than 1, such as 0.9"),
    ],
)
def test_a_rate_that_makes_no_sense_gets_one_line(capsys, arguments, sentence):
    assert cli.main(["train", *arguments]) == 1
    assert capsys.readouterr().err.strip() == sentence
