"""The tour's training: N workers equal one process on the same batches, and its exercise knows right from wrong."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dlab
from dlab.data import partition_dataset
from dlab.demo import accuracy, average_gradients, train
from dlab.exercises import check_one_message

WORKERS = 4  # of the cluster


def _train_in_one_process(ranks, steps):
    torch.manual_seed(1234)
    model = dlab.SmallCNN()  # without dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    shards = [islice(partition_dataset(rank, ranks)[0], steps) for rank in range(ranks)]
    for batches in zip(*shards, strict=True):
        optimizer.zero_grad()
        for images, labels in batches:
            (F.cross_entropy(model(images), labels) / ranks).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters())


def test_four_workers_equal_one_process_and_each_other(cluster):
    models = cluster.run(train, average_gradients, 5, make=dlab.SmallCNN)
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert torch.allclose(weights[0], _train_in_one_process(4, 5), atol=1e-6)


def test_every_rank_prints_the_mean_loss_of_each_epoch(cluster, capfd):
    run = cluster.start(train, average_gradients, 3, make=dlab.TwoLayer)
    run.wait(60)
    printed = capfd.readouterr().out
    for rank in range(4):
        losses = [event.data["loss"] for event in run.events if event.kind == "log" and event.rank == rank]
        assert f"Rank {rank}, epoch 0: {sum(losses) / 3:.2f}\n" in printed


def test_without_averaging_the_workers_drift_apart(cluster):
    models = cluster.run(train, lambda model: None, 5)
    assert not torch.equal(models[0].fc2.weight, models[1].fc2.weight)


def test_accuracy_is_the_share_of_test_images_it_gets_right():
    torch.manual_seed(0)
    model = dlab.SimpleCNN().eval()
    test = dlab.mnist(train=False)
    right = 0
    with torch.no_grad():
        for start in range(0, 10_000, 500):
            images, labels = test[start : start + 500]
            right += sum(
                row.index(max(row)) == label for row, label in zip(model(images).tolist(), labels.tolist(), strict=True)
            )
    model.train()
    assert accuracy(model) == pytest.approx(right / 10_000)


def _cells_of_the_tour():
    import nbformat  # here, because the workers import this module for its functions

    return nbformat.read(Path(__file__).parent.parent / "notebooks" / "00_tour.ipynb", 4).cells


def _define(source):
    scope = {"torch": torch, "dist": dist, "dlab": dlab}
    exec(source, scope)
    return scope["my_average"]


def test_the_exercise_accepts_the_solution_of_the_tour(cluster):
    (cell,) = [cell.source for cell in _cells_of_the_tour() if "A solution" in cell.source]
    solution = _define(re.search(r"```python\n(.*?)```", cell, re.DOTALL)[1])
    assert check_one_message(solution, cluster).startswith("well done")


def test_the_stub_does_not_pass_and_the_tour_shows_it(cluster):
    cells = _cells_of_the_tour()
    (stub,) = [cell.source for cell in cells if cell.source.startswith("def my_average")]
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    answer = check_one_message(_define(stub), cluster)
    assert answer == "not yet: all_reduce was called 8 times: pack the gradients into one tensor first."
    assert f"{answer}\n" in shown
