"""What is not possible is refused in one sentence that says what to do, and no rank hangs afterwards."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from kernels import is_one_sentence

import dlab

WORKERS = 4  # of the cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


# ------------------------------------------------------------------------------------- clusters and functions


@pytest.mark.parametrize("workers", [0, -1, 2.0, "4", None])
def test_an_impossible_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match="workers is not possible: give a whole number, 1 or more") as error:
        dlab.Cluster(workers)
    assert is_one_sentence(str(error.value))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="there is no backend 'tcp': use 'auto', 'gloo', 'nccl' or 'dlab'") as error:
        dlab.Cluster(2, backend="tcp")
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("threads", [0, -2, 1.5])
def test_an_impossible_number_of_threads_is_refused(threads):
    with pytest.raises(ValueError, match=r"threads") as error:
        dlab.Cluster(1, threads=threads)
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("how", ["run", "start"])
def test_what_is_not_a_function_is_refused(cluster, how):
    with pytest.raises(TypeError, match=r"take a function first, not 3: write run\(fn, …\)") as error:
        getattr(cluster, how)(3)
    assert is_one_sentence(str(error.value))
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_an_argument_that_cannot_be_sent_is_refused_and_no_rank_hangs(cluster, tmp_path):
    with (
        (tmp_path / "file").open("w") as file,
        pytest.raises(TypeError, match="cannot be sent to the workers") as error,
    ):
        cluster.run(lambda f: f.name, file)
    assert is_one_sentence(str(error.value))
    assert "made inside the function" in str(error.value)
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_result_that_cannot_be_sent_is_named_with_its_rank_and_no_rank_hangs(cluster):
    def generator_on_rank_2():
        dist.barrier()
        return (i for i in range(3)) if dlab.rank() == 2 else 0

    with pytest.raises(
        dlab.WorkerError, match="rank 2 failed: TypeError: the result, a generator, cannot be sent"
    ) as error:
        cluster.run(generator_on_rank_2)
    assert error.value.rank == 2
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_result_that_cannot_be_read_here_is_named_with_its_rank(cluster):
    def unreadable():
        class Trap:
            def __reduce__(self):
                return int, ("not a number",)

        return Trap() if dlab.rank() == 3 else 0

    with pytest.raises(dlab.WorkerError, match=r"rank 3 .*invalid literal for int") as error:
        cluster.run(unreadable)
    assert error.value.rank == 3
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_cluster_inside_a_worker_is_refused_and_does_not_hang(cluster):
    with pytest.raises(dlab.WorkerError, match="a worker cannot have workers of its own: make the cluster"):
        cluster.run(lambda: dlab.Cluster(1), timeout=30)
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_function_that_uses_the_cluster_is_not_sent_to_it(cluster):
    with pytest.raises(RuntimeError, match="outside the function that runs on every rank") as error:
        cluster.run(lambda: cluster.run(dlab.rank))
    assert is_one_sentence(str(error.value))
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_knob_that_is_turned_before_any_rank_has_asked_for_it_is_kept(cluster):
    def late():
        time.sleep(0.3)
        return dlab.knob("lr", 0.1)

    run = cluster.start(late)
    run.set("lr", 0.5)
    assert run.wait(30) == [0.5] * 4


def test_a_knob_that_nobody_asks_for_gets_a_note_and_one_that_is_asked_for_none(cluster, capfd):
    run = cluster.start(steps)
    while "text" not in run.declared:
        time.sleep(0.005)
    assert run.declared == {"enough": None, "lr": 0.1, "text": ""}
    run.set("rate", 1)
    note = "no rank of steps has asked for a knob 'rate' so far, only for 'enough', 'lr', 'text': the value is kept"
    assert note in capfd.readouterr().err
    run.set("enough", True)
    assert run.wait(30) == ["done"] * 4
    assert capfd.readouterr().err == ""


def test_many_workers_on_few_cores_get_a_word_of_warning(monkeypatch, capfd):
    monkeypatch.setattr("dlab.processes.parent.cluster.MANY", 0)
    with dlab.Cluster(2) as two:
        assert two.run(dlab.rank) == [0, 1]
    assert "2 workers share" in capfd.readouterr().err
    monkeypatch.undo()
    with dlab.Cluster(2):
        assert "share" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------- runs


def steps():
    while not dlab.knob("enough"):
        dlab.knob("lr", 0.1)
        dlab.knob("text", "")
        time.sleep(0.005)
    return "done"


@pytest.mark.parametrize(
    ("disturb", "kind", "sentence"),
    [
        (lambda run: run.kill(9), IndexError, "there is no rank 9: this run has ranks 0 to 3"),
        (lambda run: run.kill(-1), IndexError, "there is no rank -1"),
        (lambda run: run.kill("0"), IndexError, "there is no rank"),
        (lambda run: run.delay(4, 0.1), IndexError, "there is no rank 4"),
        (
            lambda run: run.delay(0, -1),
            ValueError,
            "a delay of -1 s is not possible: give a number of seconds, 0 or more",
        ),
        (lambda run: run.delay(0, float("nan")), ValueError, "a delay of nan s is not possible"),
        (lambda run: run.delay(0, "1"), ValueError, "a delay of '1' s is not possible"),
        (lambda run: run.set(3, 1.0), TypeError, "a knob's name is a string, as in run.set"),
        (lambda run: run.set("lr", object()), TypeError, "a knob must be a number, a string"),
        (lambda run: run.set("lr", torch.ones(1)), TypeError, "a knob must be a number, a string"),
        (lambda run: run.set("text", "x" * 100_000), ValueError, "there is room for"),
    ],
)
def test_what_is_not_possible_is_refused_in_one_sentence_and_the_run_goes_on(cluster, disturb, kind, sentence):
    run = cluster.start(steps)
    with pytest.raises(kind, match=sentence) as error:
        disturb(run)
    assert is_one_sentence(str(error.value))
    assert not run.done
    run.set("enough", True)
    assert run.wait(30) == ["done"] * 4
