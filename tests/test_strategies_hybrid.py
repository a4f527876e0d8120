"""A network on a mesh of data, tensor and pipeline parallelism trains as one process does, however the axes lie."""

import gc
import os
import signal
from functools import partial
from math import prod

import pytest
import torch
from kernels import is_one_sentence
from torch import nn
from torch.utils.data import TensorDataset

import dlab

SAMPLES = 53  # no multiple of anything: the last batches are unequal, and have fewer samples than micro-batches


def images(samples=SAMPLES):
    make = torch.Generator().manual_seed(7)
    pixels = torch.randn(samples, 1, 28, 28, generator=make, dtype=torch.float64)
    return TensorDataset(pixels, torch.randint(0, 10, (samples,), generator=make))


GIVEN = {"batch_size": 24, "lr": 0.1, "momentum": 0.9, "epochs": 2, "order": "global"}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


def mlp():
    return dlab.MLP().double()


def transformer():
    return dlab.RowTransformer(width=16, depth=2).double()


def two_layers():
    return dlab.TwoLayer().double()


def small():
    layers = [nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 10)]
    return nn.Sequential(nn.Flatten(), *layers).double()


def rehearsed(model, strategy, ranks, data=None, **changed):
    """The results of all ranks, which are threads of this process."""
    return dlab.rehearse(
        dlab.Training(model=model, data=data or images(), strategy=strategy, **GIVEN | changed), ranks=ranks
    )


ALONE = {}


def alone(model, **changed):
    """What one process gets, and that it has learned something."""
    key = model, *changed.items()
    if key not in ALONE:
        (ALONE[key],) = rehearsed(model, dlab.SyncSGD(), 1, **changed)
        torch.manual_seed(1234)
        assert distance(ALONE[key].weights, model().state_dict()) > 1e-3
    return ALONE[key]


def distance(one, other):
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def equal(results, right):
    first, *others = results
    assert distance(first.weights, right.weights) < 1e-10
    assert {each.digest for each in others} <= {first.digest}


def ranks_of(axes):
    return prod(axes.values())


MESHES = [
    {"dp": 2, "tp": 2, "pp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
    {"dp": 2, "pp": 2, "tp": 1},
    {"pp": 2, "tp": 4},
    {"tp": 2, "dp": 2},
    {"pp": 3},
    {"tp": 2},
    {"dp": 3},
    {"dp": 1},
]


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{name}{n}" for name, n in axes.items()))
@pytest.mark.parametrize("model", [mlp, transformer])
def test_every_mesh_equals_one_process(model, axes):
    equal(rehearsed(model, dlab.Hybrid(axes), ranks_of(axes)), alone(model))


@pytest.mark.parametrize("model", [mlp, transformer])
@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "gpipe", "microbatches": 3},
        {"schedule": "naive", "microbatches": 1, "zero": 1},
        {"schedule": "zb1p", "zero": 1},
        {"schedule": "1f1b", "recompute": True},
        {"schedule": dlab.schedule("gpipe", 2, 5)},
    ],
    ids=lambda given: "-".join(str(getattr(each, "name", each)) for each in given.values()),
)
def test_with_every_schedule(model, given):
    equal(rehearsed(model, dlab.Hybrid({"dp": 2, "tp": 2, "pp": 2}, **given), 8), alone(model))


@pytest.mark.parametrize("schedule", ["interleaved", "zb1p", "zbv"])
def test_with_several_stages_on_a_rank(schedule):
    strategy = dlab.Hybrid({"pp": 2, "tp": 2}, schedule, 4, virtual=2)
    equal(rehearsed(transformer, strategy, 4), alone(transformer))


@pytest.mark.parametrize("axes", [{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}])
def test_the_first_example_of_courses_in_two_parts_on_four_workers(axes):
    equal(rehearsed(two_layers, dlab.Hybrid(axes), 4), alone(two_layers))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("changed", [{"optimizer": adam}, {"accumulate": 3}, {"seed": 5}], ids=str)
def test_with_any_optimizer_and_in_pieces(zero, changed):
    strategy = dlab.Hybrid({"dp": 2, "pp": 2, "tp": 2}, microbatches=2, zero=zero)
    equal(rehearsed(small, strategy, 8, **changed), alone(small, **changed))


def test_copies_have_shards_of_the_data_and_average_their_gradients():
    first, *_ = rehearsed(small, dlab.Hybrid({"pp": 2, "dp": 2, "tp": 2}), 8, order="shards")
    replicas, *_ = rehearsed(small, dlab.SyncSGD(), 2, order="shards")
    assert distance(first.weights, replicas.weights) < 1e-10


def test_tokens_can_be_cut_between_the_pairs():
    layouts = partial(dlab.megatron_layouts, sequence=True)
    equal(rehearsed(transformer, dlab.Hybrid({"tp": 2, "pp": 2}, layouts=layouts), 4), alone(transformer))


def cut_attention(model, layout):
    attention = "blocks.0.attention"
    return {f"{attention}.{name}.weight": layout("tp", None) for name in ("query", "key", "value")}


def three_heads():
    return dlab.RowTransformer(width=18, heads=3, depth=2).double()


@pytest.mark.parametrize("layouts", [None, cut_attention])
def test_heads_that_do_not_divide_stay_whole_or_are_gathered(layouts):
    equal(rehearsed(three_heads, dlab.Hybrid({"tp": 2, "pp": 2}, layouts=layouts), 4), alone(three_heads))


class Mixed(nn.Sequential):
    """Convolutions, which dlab cannot cut, and then a pair of layers that it can."""

    def __init__(self):
        head = [nn.Flatten(), nn.Linear(4 * 13 * 13, 8), nn.ReLU(), nn.Linear(8, 10)]
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), *head)
        self.double()


def cut_at(place):
    def split(model, n):
        blocks = list(model)
        return [nn.Sequential(*blocks[:place]), nn.Sequential(*blocks[place:])]

    return split


def test_a_stage_in_which_nothing_is_cut_runs_as_it_is():
    strategy = dlab.Hybrid({"tp": 2, "pp": 2}, microbatches=1, split=cut_at(3))
    data = images(48)
    right = alone(Mixed, data=data)
    equal(rehearsed(Mixed, strategy, 4, data=data), right)
    assert right.weights["1.num_batches_tracked"] == 4
    two = rehearsed(Mixed, dlab.Hybrid({"tp": 2, "pp": 2}, microbatches=2, split=cut_at(3)), 4, data=data)
    assert two[0].weights["1.num_batches_tracked"] == 8  # a batch norm sees one micro-batch at a time


class Tied(nn.Sequential):
    """The first and the last layer but one share their weight."""

    def __init__(self):
        layers = [nn.Linear(784, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 10)]
        layers[3].weight = layers[1].weight
        super().__init__(nn.Flatten(), *layers)
        self.double()


def first_pair(model, layout):
    return {"1.weight": layout("tp", None), "1.bias": layout("tp"), "2.weight": layout(None, "tp")}


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_weights_of_several_stages_learn_as_in_one_process(zero):
    strategy = dlab.Hybrid({"dp": 2, "tp": 2, "pp": 2}, layouts=first_pair, split=cut_at(4), zero=zero)
    equal(rehearsed(Tied, strategy, 8), alone(Tied))


class Ignoring(nn.Module):
    """Has a weight that it does not use."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x


class TiedUnused(nn.Sequential):
    """The first stage has a weight that only the second one uses."""

    def __init__(self):
        used = nn.Linear(8, 8)
        super().__init__(nn.Flatten(), nn.Linear(784, 8), Ignoring(used.weight), nn.Tanh(), used, nn.Linear(8, 10))
        self.double()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_tied_weight_that_one_stage_does_not_use_learns_there_too(zero):
    strategy = dlab.Hybrid({"dp": 2, "pp": 2}, split=cut_at(4), zero=zero)
    equal(rehearsed(TiedUnused, strategy, 4), alone(TiedUnused))


def test_tied_weights_are_not_cut_in_two_ways():
    with pytest.raises(ValueError, match=r"4.weight is another name of 2.weight, which has the layout .*: give one"):
        rehearsed(Tied, dlab.Hybrid({"tp": 2, "pp": 2}, split=cut_at(4)), 4)


# ------------------------------------------------------------------------------------------ checkpoints


def test_any_mesh_resumes_what_another_has_saved(tmp_path):
    given = {"optimizer": adam}
    right = alone(small, **given)

    def middle(name, axes, **how):
        rehearsed(small, dlab.Hybrid(axes, **how), ranks_of(axes), checkpoint=tmp_path / name, every=3, **given)
        return sorted((tmp_path / name).glob("step-*"))[0]

    plain, sharded = middle("plain", {"dp": 2, "tp": 2, "pp": 2}), middle("zero", {"pp": 2, "dp": 3}, zero=1)
    saved = torch.load(plain / "common.pt", weights_only=True)["model"]
    assert {name: each.shape for name, each in saved.items()} == {n: e.shape for n, e in small().state_dict().items()}
    for axes, how in (
        ({"dp": 2, "tp": 2, "pp": 2}, {}),
        ({"pp": 2, "tp": 2, "dp": 2}, {"zero": 1}),
        ({"pp": 2, "tp": 4}, {"schedule": "zb1p"}),
        ({"dp": 3}, {"zero": 1}),
        ({"pp": 2}, {"schedule": "interleaved", "virtual": 2}),
        ({"tp": 1}, {}),
    ):
        for folder in (plain, sharded):
            first, *_ = rehearsed(small, dlab.Hybrid(axes, **how), ranks_of(axes), resume=folder, **given)
            assert distance(first.weights, right.weights) < 1e-10
    with pytest.raises(ValueError, match="holds the weights of another model: resume it with the model that was saved"):
        rehearsed(two_layers, dlab.Hybrid({"tp": 2, "pp": 2}), 4, resume=plain, **given)
    with pytest.raises(ValueError, match="holds the weights of another model"):
        rehearsed(wider, dlab.Hybrid({"tp": 2, "pp": 2}), 4, resume=plain, **given)


def wider():
    model = small()
    model[6] = nn.Linear(8, 11).double()
    return model


def test_with_zero_a_rank_has_the_optimizer_state_of_its_shard_only():
    def kept(transport):
        strategy = dlab.Hybrid({"dp": 2, "tp": 2, "pp": 2}, zero=1)
        strategy.data_group(transport)
        model = strategy.build(mlp, transport)
        optimizer = adam(model.parameters())
        module = strategy.begin(model, optimizer, transport)
        strategy.clear()
        batch = dlab.strategies.objective.Batch(*images(8).tensors, 1.0)
        strategy.backward(module, batch, dlab.strategies.objective.Objective(nn.functional.cross_entropy))
        strategy.step()
        state = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
        return sum(each.numel() for each in model.parameters()), state

    first, second = 784 * 256 + 256, 512 * 256 + 512 + 512 * 10 + 10
    assert dlab.rehearse(kept, ranks=8) == [(first, first), (second, second)] * 4  # two numbers each, for half of them


# ------------------------------------------------------------------------------------------ in processes


@pytest.fixture(scope="module")
def eight():
    with dlab.Cluster(8) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four():
    with dlab.Cluster(4) as cluster:
        yield cluster


def trained(cluster, model, strategy, data=None, **changed):
    return dlab.train(model, data or images(), strategy, on=cluster, **GIVEN | changed).wait(60)


class Telling(dlab.Hybrid):
    """Tells a random number of each rank."""

    def step(self):
        return super().step() | {"drawn": torch.rand(1).item()}


@pytest.mark.parametrize(("model", "zero"), [(mlp, 0), (transformer, 1)])
def test_eight_processes_equal_one_and_tell_what_they_do(eight, model, zero):
    strategy = Telling({"dp": 2, "pp": 2, "tp": 2}, zero=zero)
    run = dlab.train(model, images(), strategy, on=eight, **GIVEN | {"watch": 2, "test": images(20)})
    result = run.wait(60)
    right = alone(model, test=images(20))
    assert result.identical
    assert distance(result.model.state_dict(), right.weights) < 1e-10
    assert result.losses == pytest.approx(right.losses, abs=1e-10)
    assert result.evaluation.loss == pytest.approx(right.evaluation.loss, abs=1e-10)

    logs = [event for event in run.events if event.kind == "log"]
    assert {event.rank for event in logs if "loss" in event.data} == {0, 4}  # the first of each copy
    assert sum(event.data["samples"] for event in logs) == 2 * SAMPLES  # each of them once
    assert all(event.data["wait"] > 0 and event.data["compute"] > 0 for event in logs)
    drawn = {event.rank: event.data["drawn"] for event in logs if not event.data["step"]}
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[4] == drawn[5] and drawn[6] == drawn[7]
    assert len(set(drawn.values())) == 4  # stages and copies draw others
    names = {name.rpartition(".")[0] or name for name, _ in model().named_parameters()}
    norms = [event for event in run.events if event.kind == "gradients"]
    assert set().union(*(event.data["norms"] for event in norms)) == names
    actions = {(event.rank, event.data["stage"]) for event in run.events if event.kind == "action"}
    assert actions == {(rank, rank % 4 // 2) for rank in range(8)}


def dropping():
    layers = (nn.Linear(784, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 12), nn.Dropout(0.3), nn.Linear(12, 10))
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), *layers).double()


def test_peers_drop_the_same_also_after_a_resume_on_another_mesh(four, tmp_path):
    two = dlab.Hybrid({"dp": 2, "tp": 2})
    cut = trained(four, dropping, two, checkpoint=tmp_path, every=2)
    with dlab.Cluster(2) as pair:
        replicas = trained(pair, dropping, dlab.SyncSGD())
    assert distance(cut.model.state_dict(), replicas.model.state_dict()) < 1e-10
    middle = sorted(tmp_path.glob("step-*"))[0]
    assert distance(trained(four, dropping, two, resume=middle).model.state_dict(), cut.model.state_dict()) == 0
    # the ranks of a line along tp were in different lines before
    assert trained(four, dropping, dlab.Hybrid({"tp": 2, "dp": 2}), resume=middle).identical
    assert trained(four, dropping, dlab.Hybrid({"pp": 2, "tp": 2}), resume=middle).identical


def test_with_autocast_it_trains_in_bfloat16(four):
    def single():
        return small().float()

    data = TensorDataset(images().tensors[0].float(), images().tensors[1])
    (one,) = rehearsed(single, dlab.SyncSGD(), 1, data=data)
    mixed = trained(four, single, dlab.Hybrid({"tp": 2, "pp": 2}, zero=1), data=data, amp=True, test=False)
    assert mixed.losses == pytest.approx(one.losses, abs=0.1)
    assert mixed.losses != pytest.approx(one.losses, abs=1e-6)


class Dies(nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 30 and dlab.rank() % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def mortal():
    layers = [nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), Dies(), nn.Linear(8, 10)]
    return nn.Sequential(nn.Flatten(), *layers).double()


def test_a_rank_that_dies_is_named(four):
    with pytest.raises(dlab.WorkerError) as error:
        trained(four, mortal, dlab.Hybrid({"pp": 2, "tp": 2}, split=cut_at(4)))
    assert error.value.rank == 3
    assert "SIGKILL" in str(error.value)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("model", "strategy", "sentence"),
    [
        (small, dlab.Hybrid({"dp": 2, "tp": 3}), "dp 2 × tp 3 needs 6 workers, but there are 4: the product"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
            dlab.Hybrid({"tp": 2, "dp": 2}),
            "nothing in Sequential can be cut over 2 ranks",
        ),
        (dlab.SmallCNN, dlab.Hybrid({"tp": 4}), "dlab does not know how to cut 'conv2d'"),
        (dlab.SmallCNN, dlab.Hybrid({"pp": 2, "dp": 2}), "SmallCNN is no nn.Sequential"),
        (small, dlab.Hybrid({"pp": 2, "tp": 2}, layouts=lambda model, layout: {"9": layout("tp", None)}), "module '9'"),
        (
            lambda: dlab.RowTransformer(width=15, heads=3, depth=2).double(),
            dlab.Hybrid({"pp": 2, "tp": 2}, layouts=cut_attention),
            r"blocks.0.attention.query.weight: dimension 0 of the shape \(15, 15\) cannot be cut into 2 equal parts",
        ),
        (two_layers, dlab.Hybrid({"pp": 4}), "rank 0 of a pipeline would hold no parameters of TwoLayer"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), dlab.Hybrid({"pp": 4}), "Sequential has 1 blocks, too few for 4 st"),
        (
            small,
            dlab.Hybrid({"pp": 2, "dp": 2}, split=lambda model, n: [model[1], model[3]]),
            "no stage of Sequential holds 5.weight, 5.bias, 6.weight: each of its blocks must be in a stage",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_on_all_ranks(four, model, strategy, sentence):
    with pytest.raises(dlab.WorkerError, match=sentence) as error:
        trained(four, model, strategy)
    assert "ranks 0, 1, 2 and 3 failed" in str(error.value)
    assert "conv2d" in sentence or is_one_sentence(str(error.value).splitlines()[0])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (([("dp", 2)],), "axes=.*: give the length of each axis, slowest first"),
        (({},), "axes={}: give the length of each axis"),
        (({"dp": 2, "ep": 2},), "a hybrid has no axis 'ep': its axes are 'dp' .*, 'tp' .*, 'pp'"),
        (({"dp": 0},), "the axis 'dp' has the length 0: give a number of ranks, 1 or more"),
        (({"tp": 2.0},), "the axis 'tp' has the length 2.0"),
        (({"tp": True},), "the axis 'tp' has the length True"),
    ],
)
def test_bad_axes_are_refused_before_a_worker_is_asked(given, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        dlab.Hybrid(*given)
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"zero": 2}, "zero=2: use 1, to shard the optimizer's state along dp, or 0"),
        ({"zero": True}, "zero=True: use 1"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"virtual": 0}, "virtual=0: give the number of stages on each rank"),
        ({"virtual": 2}, "1f1b has one stage per rank"),
        ({"schedule": dlab.schedule("1f1b", 3)}, "for 3 stages on 3 ranks, but there are 3 stages on 2 ranks"),
        ({"split": 3}, r"split=3: give a function split\(model, n\)"),
        ({"layouts": {}}, r"layouts={}: give a function layouts\(model, layout\)"),
        ({"bucket_mb": 0}, "bucket_mb=0"),
    ],
)
def test_bad_arguments_are_refused_before_a_worker_is_asked(given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as error:
        dlab.Hybrid({"dp": 2, "pp": 2}, **given)
    assert is_one_sentence(str(error.value))


def test_it_does_not_outlive_a_rank_and_optimizers_of_whole_layers_are_refused():
    with pytest.raises(ValueError, match="cannot restart without a rank that died"):
        dlab.train(small, images(), dlab.Hybrid({"dp": 2}), elastic=True)
    with pytest.raises(ValueError, match="LBFGS updates a whole layer at a time, but zero=1 splits layers: use zero=0"):
        rehearsed(small, dlab.Hybrid({"dp": 2}, zero=1), 2, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="Adafactor updates a whole layer at a time, but a parameter of shape"):
        rehearsed(small, dlab.Hybrid({"tp": 2}), 2, optimizer=torch.optim.Adafactor)
    told = "axes={'dp': 2, 'pp': 2}, schedule=gpipe, microbatches=None, zero=1, virtual=1, recompute=False"
    assert repr(dlab.Hybrid({"dp": 2, "pp": 2}, "gpipe", zero=1)).startswith(f"Hybrid({told}")


def test_shared_memory_is_given_back_as_soon_as_a_training_has_ended():
    train = partial(rehearsed, small, dlab.Hybrid({"dp": 2, "pp": 2}), 4, epochs=1)
    train()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()  # which gives it back sometime
    try:
        for _ in range(3):
            train()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
