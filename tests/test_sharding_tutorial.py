"""The tutorial's network in both forms and with both kinds of strategy trains as in one process, also by `dlab run`."""

import copy
import importlib.util
import re
import subprocess
import sys

import pytest
import torch

import dlab

STEPS = 40
SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dlab

layout = dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))
layout2 = dlab.Layout((8,), ("tp",))
TUPLES = ((2, 4), (4, 1)), ((1, 8), (8, 1))
LAYOUTS = (
    (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")),
    (layout2("None", "tp"), layout2("tp", "None")),
)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.randn(784, 512) * 0.02)
        self.fc2_weight = nn.Parameter(torch.randn(512, 512) * 0.02)
        self.fc3_weight = nn.Parameter(torch.randn(512, 10) * 0.02)

    def forward(self, images):
        x = self.relu1(self.matmul1(images.flatten(1), self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


class ClassForm(Network):
    def __init__(self, strategies):
        super().__init__()
        self.matmul1 = dlab.ops.MatMul().shard(strategies[0])
        self.relu1 = dlab.ops.ReLU().shard(((4, 1),))
        self.matmul2 = dlab.ops.MatMul().shard(strategies[1])
        self.relu2 = dlab.ops.ReLU()
        self.matmul3 = dlab.ops.MatMul()


class FunctionalForm(Network):
    def __init__(self, strategies):
        super().__init__()
        self.matmul1 = dlab.shard(torch.matmul, in_strategy=strategies[0])
        self.relu1 = dlab.shard(torch.relu, in_strategy=((4, 1),))
        self.matmul2 = dlab.shard(torch.matmul, in_strategy=strategies[1])
        self.relu2, self.matmul3 = torch.relu, torch.matmul


def batches(steps):
    data = dlab.mnist(train=True)
    for first in range(0, 32 * steps, 32):
        pairs = [data[index] for index in range(first, first + 32)]
        yield torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


def train(net, parameters, data):
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    losses = []
    for step, (images, labels) in enumerate(data):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"epoch: 0, step: {step}, loss is {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    par = dlab.AutoParallel(ClassForm(LAYOUTS))
    data = list(batches(int(sys.argv[1])))
    print(f"forward_sum is {par(data[0][0]).sum().item():.6f}", flush=True)
    train(par, par.parameters(), data)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("tutorial") / "tutorial.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def tutorial(script):
    """The script as a module, with its data."""
    spec = importlib.util.spec_from_file_location("tutorial", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.data = list(module.batches(STEPS))
    return module


@pytest.fixture(scope="module")
def one_process(tutorial):
    """The losses, the weights and the sum of the first result of plain torch, without any operator of dlab."""
    torch.manual_seed(1)
    weights = [(torch.randn(*shape) * 0.02).requires_grad_() for shape in ((784, 512), (512, 512), (512, 10))]

    def network(images):
        x = torch.relu(images.flatten(1) @ weights[0])
        return torch.relu(x @ weights[1]) @ weights[2]

    total = network(tutorial.data[0][0]).sum().item()
    return tutorial.train(network, weights, tutorial.data), weights, total


@pytest.mark.parametrize("kind", ["TUPLES", "LAYOUTS"])
@pytest.mark.parametrize("form", ["ClassForm", "FunctionalForm"])
def test_every_form_has_the_losses_and_weights_of_one_process(tutorial, one_process, form, kind):
    torch.manual_seed(1)
    made = getattr(tutorial, form)(getattr(tutorial, kind))

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(made), transport=transport)
        losses = tutorial.train(par, par.parameters(), tutorial.data)
        return losses, par.whole(), [tuple(each.shape) for each in par.parameters()]

    losses, weights, _ = one_process
    assert losses[-1] < losses[0] - 0.03
    for mine, whole, shapes in dlab.rehearse(work, ranks=8):
        assert mine == pytest.approx(losses, abs=1e-5)
        assert all(torch.allclose(each, right, atol=1e-6) for each, right in zip(whole.values(), weights, strict=True))
        assert shapes == [(196, 512), (64, 512), (512, 10)]  # each rank keeps its part


def test_the_communication_is_what_the_facts_say(tutorial):
    par = dlab.AutoParallel(tutorial.ClassForm(tutorial.TUPLES), ranks=8)
    told = par.explain(torch.empty(32, 1, 28, 28))
    first, second = [each for each in told.messages if each.collective == "all-reduce" and each.direction == "forward"]
    assert first.group == (0, 1, 2, 3)  # of rank 0; the other group is {4, 5, 6, 7}
    assert second.group == tuple(range(8))
    between = dlab.redistribution(told.rows[2].result, told.rows[3].inputs[0], shape=(32, 512))
    assert between.collectives  # from rows cut by 4 to columns cut by 8


@pytest.mark.slow  # eight processes import torch
def test_eight_processes_by_the_launcher_write_their_losses_into_logs(script, one_process):
    logs = script.parent / "log_output"
    command = [sys.executable, "-m", "dlab", "run", str(script), "-n", "8", "--logs", str(logs), "--", str(STEPS)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    expected = {f"worker_{rank}.log" for rank in range(8)} | {"scheduler.log"}
    assert {file.name for file in logs.iterdir()} == expected
    losses, _, total = one_process
    for rank in range(8):
        first, *lines = (logs / f"worker_{rank}.log").read_text().splitlines()
        assert float(first.removeprefix("forward_sum is ")) == pytest.approx(total, abs=1e-3)
        found = [re.fullmatch(r"epoch: 0, step: (\d+), loss is (\d\.\d{6})", line).groups() for line in lines]
        assert [int(step) for step, _ in found] == [0, 10, 20, 30]
        assert [float(loss) for _, loss in found] == pytest.approx(losses[::10], abs=1e-5)


def test_a_rank_without_a_process_group_is_told_to_make_one(tutorial, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(
        RuntimeError, match=r"rank 3 of 8 has no process group yet: call .*init_process_group\(.gloo.\)"
    ):
        dlab.AutoParallel(tutorial.ClassForm(tutorial.TUPLES))
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="there is no process group here: run this in a cluster"):
        dlab.AutoParallel(tutorial.ClassForm(tutorial.TUPLES))
