"""A network in stages trains as one process does, alone and beside copies of itself on a mesh."""

import os
import signal
from functools import partial

import pytest
import torch
from kernels import is_one_sentence
from torch import nn
from torch.utils.data import TensorDataset

import dlab
from dlab.pipeline import Pipeline

SAMPLES = 53  # no multiple of anything: the last batches are unequal, and have fewer samples than micro-batches


def images():
    make = torch.Generator().manual_seed(7)
    pixels = torch.randn(SAMPLES, 1, 28, 28, generator=make, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 10, (SAMPLES,), generator=make))


GIVEN = {"batch_size": 12, "lr": 0.1, "momentum": 0.9, "epochs": 2, "order": "global", "test": images()}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


def small():
    layers = [nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 10)]
    return nn.Sequential(nn.Flatten(), *layers).double()


def normed():
    layers = [nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)]
    return nn.Sequential(nn.Flatten(), *layers).double()


class Tied(nn.Sequential):
    """The first and the third layer share their weight."""

    def __init__(self):
        layers = [nn.Linear(784, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 10)]
        layers[3].weight = layers[1].weight
        super().__init__(nn.Flatten(), *layers)
        self.double()


def cut_in_the_middle(model, n):
    blocks = list(model)
    return [nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])]


def doubled(model):
    return lambda: model().double()


@pytest.fixture(scope="module")
def clusters():
    with dlab.Cluster(1) as one, dlab.Cluster(2) as two, dlab.Cluster(4) as four:
        yield {1: one, 2: two, 4: four}


def trained(clusters, workers, model, strategy, data=None, **changed):
    return dlab.train(model, data or images(), strategy, on=clusters[workers], **GIVEN | changed).wait(60)


def difference(one, other):
    return max(
        (a - b).abs().max().item() for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def right(clusters):
    """What one process gets, by the network and what else is given."""
    known = {}

    def train(model, **changed):
        key = model, *changed.items()
        if key not in known:
            known[key] = trained(clusters, 1, model, dlab.SyncSGD(), **changed)
        return known[key]

    return train


@pytest.fixture(scope="module")
def row_transformer():
    return doubled(partial(dlab.RowTransformer, depth=2))


def same(result, alone):
    assert result.identical
    assert difference(result.model, alone.model) < 1e-10
    assert result.losses == pytest.approx(alone.losses, abs=1e-10)
    assert result.evaluation.loss == pytest.approx(alone.evaluation.loss, abs=1e-10)


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (2, dlab.PipelineSGD(2)),
        (4, dlab.PipelineSGD(2, "gpipe", 3)),
        (4, dlab.PipelineSGD(4, "naive", 2)),
        (4, dlab.PipelineSGD(2, "interleaved", 4, virtual=2)),
        (4, dlab.PipelineSGD(4, "zb1p", recompute=True)),
        (2, dlab.PipelineSGD(2, "zbv", 5)),
        (4, dlab.PipelineSGD(1)),
        (2, dlab.PipelineSGD(2, [["0F0", "0F1", "0B1", "0B0"], ["1F1", "1B1", "1F0", "1I0", "1W0"]])),
    ],
    ids=["1f1b", "gpipe", "naive", "interleaved", "zb1p", "zbv", "one", "table"],
)
def test_losses_weights_and_evaluation_equal_those_of_one_process(clusters, right, workers, strategy):
    alone = right(small)
    same(trained(clusters, workers, small, strategy), alone)
    torch.manual_seed(1234)
    assert difference(alone.model, small()) > 1e-2  # something was learned


def test_models_of_the_course(clusters, right, row_transformer):
    same(trained(clusters, 2, row_transformer, dlab.PipelineSGD(2)), right(row_transformer))
    mlp = doubled(dlab.MLP)
    same(trained(clusters, 4, mlp, dlab.PipelineSGD(2)), right(mlp))


@pytest.mark.parametrize("changed", [{"optimizer": adam}, {"accumulate": 3}, {"seed": 5}])
def test_with_any_optimizer_and_in_pieces(clusters, right, changed):
    result = trained(clusters, 4, small, dlab.PipelineSGD(2, microbatches=2), **changed)
    assert result.identical
    assert difference(result.model, right(small, **changed).model) < 1e-10


def test_lines_have_shards_of_the_data_and_average_their_gradients(clusters):
    result = trained(clusters, 4, small, dlab.PipelineSGD(2), order="shards")
    replicas = trained(clusters, 2, small, dlab.SyncSGD(), order="shards")
    assert difference(result.model, replicas.model) < 1e-10
    assert result.losses == pytest.approx(replicas.losses, abs=1e-10)


@pytest.mark.parametrize(("workers", "stages"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("changed", [{}, {"accumulate": 2}])
def test_tied_weights_stay_equal_and_learn_as_in_one_process(clusters, right, workers, stages, changed):
    strategy = dlab.PipelineSGD(stages, split=cut_in_the_middle)
    result = trained(clusters, workers, Tied, strategy, **changed)
    assert difference(result.model, right(Tied, **changed).model) < 1e-10
    assert torch.equal(result.model[2].weight, result.model[4].weight)


def test_with_autocast_it_trains_in_bfloat16(clusters):
    def single():
        return small().float()

    def data():
        return TensorDataset(images().tensors[0].float(), images().tensors[1])

    given = GIVEN | {"amp": True, "test": False}
    one, two = (
        dlab.train(single, data(), strategy, on=clusters[workers], **given).wait(60)
        for workers, strategy in ((1, dlab.SyncSGD()), (2, dlab.PipelineSGD(2)))
    )
    assert two.losses == pytest.approx(one.losses, abs=0.1)


class Told(dlab.PipelineSGD):
    """Tells what a rank holds."""

    def step(self):
        told = super().step()
        held = sum(each.numel() for each in self.model.parameters())
        state = sum(value.numel() for each in self.optimizer.state.values() for value in each.values())
        return told | {"held": held, "state": state}


def test_each_rank_holds_its_stages_and_one_of_a_line_tells_the_loss(clusters):
    run = dlab.train(doubled(dlab.MLP), images(), Told(2), on=clusters[4], watch=3, **GIVEN)
    run.wait(60)
    logs = [event for event in run.events if event.kind == "log"]
    first, second = 784 * 512 + 512, 512 * 512 + 512 + 512 * 10 + 10
    assert {(event.rank, event.data["held"]) for event in logs} == {(0, first), (1, second), (2, first), (3, second)}
    assert all(event.data["state"] == event.data["held"] for event in logs)
    assert {event.rank for event in logs if "loss" in event.data} == {0, 2}
    assert sum(event.data["samples"] for event in logs) == 2 * SAMPLES  # each of them once
    assert all(event.data["wait"] > 0 and event.data["compute"] > 0 for event in logs)
    norms = [event for event in run.events if event.kind == "gradients"]
    assert {layer for event in norms for layer in event.data["norms"]} == {"1", "3", "5"}
    actions = [event for event in run.events if event.kind == "action"]
    assert {event.rank for event in actions} == {0, 1, 2, 3}
    assert {event.data["stage"] for event in actions if event.rank % 2} == {1}


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_network_is_saved_whole_and_resumed_by_other_stages_and_ranks(clusters, right, tmp_path):
    given = {"optimizer": adam}
    alone = right(small, optimizer=adam)
    whole = trained(clusters, 4, small, dlab.PipelineSGD(2), checkpoint=tmp_path, every=3, **given)
    middle = sorted(tmp_path.glob("step-*"))[0]
    saved = torch.load(middle / "common.pt", weights_only=True)["model"]
    assert {name: each.shape for name, each in saved.items()} == {n: e.shape for n, e in small().state_dict().items()}
    again = trained(clusters, 4, small, dlab.PipelineSGD(2), resume=middle, **given)
    assert difference(again.model, whole.model) == 0
    assert again.losses == whole.losses
    for workers, strategy in (
        (4, dlab.PipelineSGD(4)),
        (4, dlab.PipelineSGD(1)),
        (2, dlab.PipelineSGD(2, "interleaved", virtual=2)),
        (1, dlab.PipelineSGD(1)),
    ):
        other = trained(clusters, workers, small, strategy, resume=middle, **given)
        assert difference(other.model, alone.model) < 1e-10
        assert other.losses == pytest.approx(alone.losses, abs=1e-10)
    with pytest.raises(dlab.WorkerError, match="holds the weights of another model: resume it with the model"):
        trained(clusters, 2, doubled(dlab.TwoLayer), dlab.PipelineSGD(2), resume=middle, **given)


def test_running_means_are_saved_too_and_found_again_in_other_stages(clusters, tmp_path):
    def training(workers, *strategy, **more):
        return trained(clusters, workers, normed, dlab.PipelineSGD(*strategy, microbatches=2, **more), even, **given)

    even = TensorDataset(*(each[:48] for each in images().tensors))  # a norm needs two samples in each micro-batch
    given = {"checkpoint": tmp_path, "every": 3}
    whole = training(4, 2)
    assert whole.model[2].num_batches_tracked == 2 * len(whole.losses)
    middle = sorted(tmp_path.glob("step-*"))[0]
    given = {"resume": middle}
    assert difference(training(4, 2).model, whole.model) == 0
    given = {"checkpoint": tmp_path / "line", "every": 3}
    one_line = training(2, 2)
    given = {"resume": sorted((tmp_path / "line").glob("step-*"))[0]}
    for name in ("interleaved", "zbv"):
        other = training(2, 2, name, virtual=2)
        assert difference(other.model, one_line.model) < 1e-10


# ------------------------------------------------------------------------------------------ dropout


def dropping():
    layers = [nn.Linear(784, 50), nn.Dropout(0.5), nn.Linear(50, 50), nn.Dropout(0.5), nn.Linear(50, 10)]
    return nn.Sequential(nn.Flatten(), *layers).double()


class Draws(dlab.PipelineSGD):
    """Tells a random number of each rank."""

    def step(self):
        return super().step() | {"drawn": torch.rand(1).item()}


def test_stages_and_lines_draw_different_numbers_for_dropout_and_results_repeat(clusters):
    first, second = (trained(clusters, 4, dropping, dlab.PipelineSGD(2)) for _ in range(2))
    assert difference(first.model, second.model) == 0
    recomputed = trained(clusters, 4, dropping, dlab.PipelineSGD(2, recompute=True))
    assert difference(first.model, recomputed.model) < 1e-12
    run = dlab.train(dropping, images(), Draws(2), on=clusters[4], **GIVEN)
    run.wait(60)
    drawn = {event.rank: event.data["drawn"] for event in run.events if event.kind == "log" and not event.data["step"]}
    assert len(set(drawn.values())) == 4


# ------------------------------------------------------------------------------------------ on threads, and refusals


def test_it_trains_in_a_rehearsal(right):
    given = {name: value for name, value in GIVEN.items() if name != "test"}
    plan = dlab.Training(model=small, data=images(), strategy=dlab.PipelineSGD(2, "zb1p"), **given)
    first, *others = dlab.rehearse(plan, ranks=4)
    assert {each.digest for each in others} == {first.digest}
    alone = right(small).model.state_dict()
    assert max((first.weights[name] - alone[name]).abs().max().item() for name in alone) < 1e-10


class Dies(nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def mortal():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Linear(8, 8), Dies(), nn.Linear(8, 10)).double()


def test_a_stage_that_dies_is_named(clusters):
    with pytest.raises(dlab.WorkerError) as error:
        trained(clusters, 4, mortal, dlab.PipelineSGD(2, split=cut_in_the_middle))
    assert error.value.rank in (0, 2)
    assert "SIGKILL" in str(error.value)


@pytest.mark.parametrize(
    ("model", "strategy", "sentence"),
    [
        (small, dlab.PipelineSGD(3), "4 workers cannot hold networks in stages on 3 ranks each: use a multiple of 3"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).double(),
            dlab.PipelineSGD(2),
            "rank 0 of a pipeline would hold no parameters of Sequential, which is too small for 2 stages",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2)), dlab.PipelineSGD(4), "Sequential has 1 blocks, too few for 4 stages"),
        (dlab.SmallCNN, dlab.PipelineSGD(2), "SmallCNN is no nn.Sequential"),
        (small, dlab.PipelineSGD(2, split=lambda model, n: [model]), r"split\(\) made 1 stages of Sequential, but"),
        (
            small,
            dlab.PipelineSGD(2, split=lambda model, n: [model[1], model[3]]),
            "no stage of Sequential holds 5.weight, 5.bias, 6.weight: each of its blocks must be in a stage",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(clusters, model, strategy, sentence):
    with pytest.raises(dlab.WorkerError, match=sentence) as error:
        trained(clusters, 4, model, strategy)
    assert "ranks 0, 1, 2 and 3 failed" in str(error.value)
    assert is_one_sentence(str(error.value).splitlines()[0])


def test_bad_arguments_are_refused_before_a_worker_is_asked():
    for wrong in (0, -1, 2.0, True, None, "2"):
        with pytest.raises(ValueError, match=r"stages=.*: give the number of ranks that hold one network, 1 or more"):
            dlab.PipelineSGD(wrong)
    for given, sentence in (
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"virtual": 0}, "virtual=0: give the number of stages on each rank"),
        ({"virtual": 2}, "1f1b has one stage per rank"),
        ({"schedule": dlab.schedule("1f1b", 3)}, "for 3 stages on 3 ranks, but there are 3 stages on 2 ranks"),
        ({"schedule": [["0B0", "0F0"]]}, "row 0, column 0"),
        ({"split": 3}, r"split=3: give a function split\(model, n\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            dlab.PipelineSGD(2, **given)
    with pytest.raises(ValueError, match="cannot restart without a rank that died"):
        dlab.train(small, images(), dlab.PipelineSGD(2), elastic=True)
    told = "stages=4, schedule=gpipe, microbatches=8, virtual=1, recompute=False, split=split"
    assert repr(dlab.PipelineSGD(4, "gpipe")) == f"PipelineSGD({told}, bucket_mb=1.0)"


def test_the_loss_of_a_label_that_is_too_large_is_explained_on_all_ranks(clusters):
    wrong = TensorDataset(images().tensors[0], torch.full((SAMPLES,), 10))
    with pytest.raises(dlab.WorkerError, match="there is a label 10, but the model has outputs only for labels below"):
        dlab.train(small, wrong, dlab.PipelineSGD(2), on=clusters[2], **GIVEN).wait(60)


def test_it_is_a_pipeline_of_its_own(clusters):
    """The strategy only puts together what there is: `Pipeline` on a line of a mesh, and averages between lines."""

    def work(transport):
        strategy = dlab.PipelineSGD(2)
        strategy.data_group(transport)
        model = strategy.build(small, transport)
        pipe = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), transport)
        return type(pipe), pipe.mine

    assert dlab.rehearse(work, ranks=4) == [(Pipeline, [0]), (Pipeline, [1])] * 2
