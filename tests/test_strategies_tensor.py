"""A network that is cut over ranks trains as one process does, alone and beside copies of itself on a mesh."""

from functools import partial

import pytest
import torch
from kernels import is_one_sentence
from torch import nn
from torch.utils.data import TensorDataset

import dlab

SAMPLES = 53  # no multiple of anything: the last batches are unequal


def images():
    make = torch.Generator().manual_seed(7)
    pixels = torch.randn(SAMPLES, 1, 28, 28, generator=make, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 10, (SAMPLES,), generator=make))


GIVEN = {"batch_size": 12, "lr": 0.1, "momentum": 0.9, "epochs": 2, "order": "global", "test": images()}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 10))


def dropping():
    layers = (nn.Linear(784, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 12), nn.Dropout(0.3), nn.Linear(12, 10))
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), *layers).double()


def doubled(model):
    return lambda: model().double()


@pytest.fixture(scope="module")
def clusters():
    with dlab.Cluster(1) as one, dlab.Cluster(2) as two, dlab.Cluster(4) as four:
        yield {1: one, 2: two, 4: four}


def trained(clusters, workers, model, strategy, **changed):
    return dlab.train(model, images(), strategy, on=clusters[workers], **GIVEN | changed).wait(60)


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
            known[key] = trained(clusters, 1, doubled(model), dlab.SyncSGD(), **changed)
        return known[key]

    return train


@pytest.mark.parametrize(("workers", "ranks"), [(2, 2), (4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("model", [dlab.MLP, dlab.TwoLayer, dlab.RowTransformer])
def test_losses_weights_and_evaluation_equal_those_of_one_process(clusters, right, model, workers, ranks):
    result, alone = trained(clusters, workers, doubled(model), dlab.TensorParallel(ranks)), right(model)
    assert result.identical
    assert difference(result.model, alone.model) < 1e-10
    assert result.losses == pytest.approx(alone.losses, abs=1e-10)
    assert result.evaluation.loss == pytest.approx(alone.evaluation.loss, abs=1e-10)
    torch.manual_seed(1234)
    assert difference(alone.model, model().double()) > 1e-2  # something was learned


def test_in_single_precision_too(clusters):
    def cast():
        return TensorDataset(images().tensors[0].float(), images().tensors[1])

    one, four = (
        dlab.train(dlab.MLP, cast(), strategy, on=clusters[workers], **GIVEN | {"test": False}).wait(60)
        for workers, strategy in ((1, dlab.SyncSGD()), (4, dlab.TensorParallel(2)))
    )
    assert four.losses == pytest.approx(one.losses, abs=1e-5)
    assert difference(one.model, four.model) < 1e-5


@pytest.mark.parametrize("changed", [{"optimizer": adam}, {"accumulate": 3}, {"seed": 5}])
def test_with_any_optimizer_and_in_pieces(clusters, right, changed):
    result = trained(clusters, 4, doubled(small), dlab.TensorParallel(2), **changed)
    assert result.identical
    assert difference(result.model, right(small, **changed).model) < 1e-10


def test_lines_have_shards_of_the_data_and_average_their_gradients(clusters):
    result = trained(clusters, 4, doubled(small), dlab.TensorParallel(2), order="shards")
    replicas = trained(clusters, 2, doubled(small), dlab.SyncSGD(), order="shards")
    assert difference(result.model, replicas.model) < 1e-10
    assert result.losses == pytest.approx(replicas.losses, abs=1e-10)


def test_tokens_can_be_cut_between_the_pairs(clusters, right):
    strategy = dlab.TensorParallel(2, layouts=partial(dlab.megatron_layouts, sequence=True))
    result = trained(clusters, 4, doubled(dlab.RowTransformer), strategy)
    assert result.identical
    assert difference(result.model, right(dlab.RowTransformer).model) < 1e-10


class Told(dlab.TensorParallel):
    """Tells what a rank holds."""

    def step(self):
        told = super().step()
        held = sum(each.numel() for each in self.model.parameters())
        state = sum(value.numel() for each in self.optimizer.state.values() for value in each.values())
        return told | {"held": held, "state": state}


def test_each_rank_holds_its_part_of_weights_and_optimizer_and_one_of_a_line_tells_the_loss(clusters):
    run = dlab.train(doubled(dlab.MLP), images(), Told(4), on=clusters[4], **GIVEN)
    run.wait(60)
    logs = [event for event in run.events if event.kind == "log"]
    pair = 784 * 512 + 512 + 512 * 512  # a quarter of it; what is added to whole results, and the last layer, is whole
    assert {event.data["held"] for event in logs} == {pair // 4 + 512 + 512 * 10 + 10}
    assert {event.data["state"] for event in logs} == {pair // 4 + 512 + 512 * 10 + 10}
    assert {event.rank for event in logs if "loss" in event.data} == {0}
    assert sum(event.data["samples"] for event in logs) == 2 * SAMPLES  # each of them once


# ------------------------------------------------------------------------------------------ dropout


def test_peers_drop_the_same_and_so_does_one_process(clusters):
    for workers, ranks in ((4, 4), (4, 2)):
        result = trained(clusters, workers, dropping, dlab.TensorParallel(ranks))
        replicas = trained(clusters, workers // ranks, dropping, dlab.SyncSGD())
        assert result.identical
        assert difference(result.model, replicas.model) < 1e-10
        assert result.losses == pytest.approx(replicas.losses, abs=1e-10)
    assert difference(result.model, trained(clusters, 1, dropping, dlab.SyncSGD()).model) > 1e-3  # other masks matter


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_network_is_saved_whole_and_resumed_by_other_numbers_of_ranks(clusters, right, tmp_path):
    given = {"optimizer": adam}
    network, alone = doubled(small), right(small, optimizer=adam)
    whole = trained(clusters, 4, network, dlab.TensorParallel(2), checkpoint=tmp_path, every=3, **given)
    middle = sorted(tmp_path.glob("step-*"))[0]
    saved = torch.load(middle / "common.pt", weights_only=True)["model"]
    assert {name: each.shape for name, each in saved.items()} == {n: e.shape for n, e in small().state_dict().items()}
    again = trained(clusters, 4, network, dlab.TensorParallel(2), resume=middle, **given)
    assert difference(again.model, whole.model) == 0
    assert again.losses == whole.losses
    for workers, ranks in ((4, 4), (4, 1), (2, 2), (1, 1)):
        other = trained(clusters, workers, network, dlab.TensorParallel(ranks), resume=middle, **given)
        assert difference(other.model, alone.model) < 1e-10
        assert other.losses == pytest.approx(alone.losses, abs=1e-10)
    with pytest.raises(dlab.WorkerError, match="holds the weights of another model: resume it with the model"):
        trained(clusters, 2, doubled(dlab.TwoLayer), dlab.TensorParallel(2), resume=middle, **given)


def test_peers_still_drop_the_same_after_a_resume_with_other_ranks(clusters, tmp_path):
    trained(clusters, 4, dropping, dlab.TensorParallel(2), checkpoint=tmp_path, every=3)
    middle = sorted(tmp_path.glob("step-*"))[0]
    assert trained(clusters, 4, dropping, dlab.TensorParallel(4), resume=middle).identical


# ------------------------------------------------------------------------------------------ on threads, and refusals


def test_it_trains_in_a_rehearsal(right):
    given = {name: value for name, value in GIVEN.items() if name != "test"}
    plan = dlab.Training(model=doubled(small), data=images(), strategy=dlab.TensorParallel(2), **given)
    first, *others = dlab.rehearse(plan, ranks=4)
    assert {each.digest for each in others} == {first.digest}
    alone = right(small).model.state_dict()
    assert max((first.weights[name] - alone[name]).abs().max().item() for name in alone) < 1e-10
    with pytest.raises(NotImplementedError, match="threads of a rehearsal share one random number generator"):
        plan = dlab.Training(model=dropping, data=images(), strategy=dlab.TensorParallel(2), **given)
        dlab.rehearse(plan, ranks=2)


@pytest.mark.parametrize(
    ("model", "strategy", "sentence"),
    [
        (small, dlab.TensorParallel(3), "4 workers cannot hold networks that are cut over 3 ranks each"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
            dlab.TensorParallel(2),
            "nothing in Sequential can be",
        ),
        (dlab.SmallCNN, dlab.TensorParallel(4), "dlab does not know how to cut 'conv2d'"),
        (
            small,
            dlab.TensorParallel(4, layouts=lambda model, layout: {"5.weight": layout("tp", None)}),
            "5.weight: dim",
        ),
        (small, dlab.TensorParallel(4, layouts=lambda model, layout: {"9": layout("tp", None)}), "module '9'"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_all_ranks(clusters, model, strategy, sentence):
    with pytest.raises(dlab.WorkerError, match=sentence) as error:
        trained(clusters, 4, doubled(model), strategy)
    assert "ranks 0, 1, 2 and 3 failed" in str(error.value)
    assert model is dlab.SmallCNN or is_one_sentence(str(error.value).splitlines()[0])  # that one lists functions


def test_bad_arguments_are_refused_before_a_worker_is_asked():
    for wrong in (0, -1, 2.0, True, None, "2"):
        with pytest.raises(ValueError, match=r"ranks=.*: give the number of ranks that hold one network, 1 or more"):
            dlab.TensorParallel(wrong)
    with pytest.raises(TypeError, match="give a function layouts"):
        dlab.TensorParallel(2, layouts={"0.weight": None})
    with pytest.raises(ValueError, match="cannot restart without a rank that died"):
        dlab.train(small, images(), dlab.TensorParallel(2), elastic=True)
    assert repr(dlab.TensorParallel(4)) == "TensorParallel(ranks=4, layouts=None, bucket_mb=1.0, overlap=True)"
