"""The tour's exercise: the mean by one all-reduce passes in whatever style, and each mistake is told apart."""

import os
import threading
import time

import pytest
import torch
from averages import RIGHT, as_in_the_tour, dlabs_allreduce
from averages_wrong import WRONG, broken_on_1, leaves_rank_2_out, one_by_one, sum_only

import dlab
from dlab.exercises import averaging
from dlab.exercises.averaging import check_one_message

WORKERS = 4


@pytest.mark.parametrize("right", RIGHT, ids=[right.__name__ for right in RIGHT])
def test_one_all_reduce_passes_in_whatever_style(cluster, right, monkeypatch):
    if right not in (as_in_the_tour, dlabs_allreduce):  # two are enough for the whole way
        monkeypatch.setattr(averaging, "OTHER_SIZES", (3,))
    assert check_one_message(right, cluster) == "well done: the right mean, with one message instead of eight."


def name(wrong):
    return getattr(getattr(wrong, "func", wrong), "__name__", "no function")


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[name(wrong) for wrong, _ in WRONG])
def test_each_mistake_gets_its_own_sentence(cluster, wrong, sentence):
    answer = check_one_message(wrong, cluster)
    assert answer.startswith("not yet: ") and "\n" not in answer
    assert sentence in answer


def test_a_loop_that_does_not_end_is_told(cluster, monkeypatch):
    monkeypatch.setattr(averaging, "LIMIT", 2.0)

    def spin(model):
        if dlab.rank() == 2:
            while True:
                time.sleep(60)
        as_in_the_tour(model)

    answer = check_one_message(spin, cluster)
    assert answer.startswith("not yet: ranks 0, 1, 2 and 3 did not finish spin within 2 s")
    assert "time.sleep(60)" in answer


def test_what_cannot_be_sent_to_workers_is_told(cluster):
    lock = threading.Lock()
    assert "cannot be sent to the workers" in check_one_message(lambda model: lock.acquire(), cluster)


def test_the_notebooks_random_numbers_are_left_alone(cluster):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_one_message(sum_only, cluster)
    assert torch.equal(torch.rand(1), expected)


def test_nothing_stays_behind_in_the_workers(cluster):
    def open_files():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    check_one_message(sum_only, cluster)
    before = cluster.run(open_files)
    for wrong in (sum_only, leaves_rank_2_out, broken_on_1):
        check_one_message(wrong, cluster)
    assert cluster.run(open_files) == before


@pytest.mark.parametrize(("workers", "backend"), [(1, "auto"), (2, "dlab")])
def test_it_works_on_a_cluster_of_any_size_and_backend(workers, backend, monkeypatch):
    monkeypatch.setattr(averaging, "OTHER_SIZES", (3,))
    with dlab.Cluster(workers, backend=backend) as another:
        assert check_one_message(as_in_the_tour, another).startswith("well done")
        assert "called 8 times" in check_one_message(one_by_one, another)
