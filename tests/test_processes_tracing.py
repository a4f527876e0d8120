"""Watching a model: norms as plain torch computes them, stages in their order, and silence where nobody watches."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

import dlab
from dlab.processes.worker.tracing import STAGES, trace

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


@pytest.fixture
def told(cluster):
    """Runs a function and gives its results, and the data of rank 0's events of one kind."""

    def run(fn, kind, *args):
        started = cluster.start(fn, *args)
        results = started.wait(60)
        return results, [event.data for event in started.events if event.kind == kind and event.rank == 0]

    return run


def stages(paths):
    return [(data["step"], data["layer"], data["stage"]) for data in paths]


# ------------------------------------------------------------------------------------- norms


def test_watch_streams_the_gradient_norm_of_each_layer_as_plain_torch_computes_it(cluster):
    def train():
        torch.manual_seed(dlab.rank())
        model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10, bias=False), nn.LayerNorm(10))
        dlab.watch(model, every=1)
        truth = []
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 20)).square().sum().backward()
            layers = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
            truth.append(
                {
                    name: sum(p.grad.double().square().sum().item() for p in module.parameters()) ** 0.5
                    for name, module in layers.items()
                }
            )
        return truth

    run = cluster.start(train)
    for rank, truth in enumerate(run.wait(60)):
        seen = [event.data for event in run.events if event.kind == "gradients" and event.rank == rank]
        assert [data["step"] for data in seen] == [0, 1, 2]
        for data, norms in zip(seen, truth, strict=True):
            assert list(data["norms"]) == ["0", "2", "3"]
            assert data["norms"] == pytest.approx(norms, rel=1e-5)


def test_watch_looks_at_every_nth_backward_pass(told):
    def train():
        model = nn.Linear(2, 1)
        dlab.watch(model, every=3)
        for _ in range(8):
            model(torch.ones(1, 2)).sum().backward()

    assert [data["step"] for data in told(train, "gradients")[1]] == [0, 3, 6]
    assert {step for step, _, _ in stages(told(train, "gradient")[1])} == {0, 3, 6}


def test_watch_knows_frozen_unused_shared_and_accumulated_parameters(told):
    def train():
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("used", "frozen", "unused")})
        model["frozen"].requires_grad_(False)
        model["twin"] = model["used"]
        dlab.watch(model, every=1)
        x = torch.ones(2, 4)
        for _ in range(2):  # gradients add up
            model["frozen"](model["twin"](model["used"](x))).sum().backward()
        return sum(p.grad.square().sum().item() for p in model["used"].parameters()) ** 0.5

    (norm, _), (first, second) = told(train, "gradients")
    assert second["norms"] == {"used": pytest.approx(norm, rel=1e-5), "unused": 0.0}
    assert first["norms"]["used"] == pytest.approx(norm / 2, rel=1e-5)
    assert stages(told(train, "gradient")[1]) == [(0, "used", "computed"), (1, "used", "computed")]


def test_norms_of_mixed_types_and_those_that_are_not_finite(told):
    def train():
        model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2, bias=False)])
        dlab.watch(model, every=1)
        (model[0](torch.ones(1, 2).double()).sum() + model[1](torch.ones(1, 2)).sum() * float("inf")).backward()

    (data,) = told(train, "gradients")[1]
    assert data["norms"] == {"0": pytest.approx(6**0.5), "1": float("inf")}


@pytest.mark.parametrize(
    ("model", "every", "sentence"),
    [(nn.Linear(1, 1), 0, "every=0: give a whole number"), (nn.ReLU(), 1, "there is nothing to watch")],
)
def test_watch_refuses_what_makes_no_sense(model, every, sentence):
    with pytest.raises(ValueError, match=sentence):
        dlab.watch(model, every)


# ------------------------------------------------------------------------------------- paths


def train_with(average, passes=1, steps=3):
    """Train a watched model of two layers, `passes` backward passes to a step, beside one that nobody watches."""
    watched, other = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (watched, other)]
    dlab.watch(watched, every=2)
    for _ in range(steps):
        for model, optimizer in zip((other, watched), reversed(optimizers), strict=True):
            for _ in range(passes):
                model(torch.ones(1, 3)).sum().backward()
            average(model)
            optimizer.step()
            optimizer.zero_grad()


def test_a_gradient_is_computed_sent_reduced_and_applied(told):
    paths = told(train_with, "gradient", dlab.average_gradients)[1]
    expected = ["computed", "sent", "reduced", "applied"]
    for step in (0, 2):
        for layer in ("0", "1"):
            assert [each["stage"] for each in paths if (each["step"], each["layer"]) == (step, layer)] == expected
        computed = [each["layer"] for each in paths if each["step"] == step and each["stage"] == "computed"]
        assert computed == ["1", "0"], "the backward pass comes to the last layer first"
    assert len(paths) == 16, "the second of the three steps, and the other model, trace nothing"


def in_buckets(model):
    """As a strategy that sends all gradients at once tells it."""
    parameters = list(model.parameters())
    for stage in ("bucketed", "sent", "sent", "bucketed", "reduced"):  # twice, and too late: told once, in order
        trace(stage, *parameters)


def test_whoever_moves_gradients_tells_the_stages_in_between_once(told):
    paths = told(train_with, "gradient", in_buckets, 1, 1)[1]
    for layer in ("0", "1"):
        assert [each["stage"] for each in paths if each["layer"] == layer] == list(STAGES)


def test_a_gradient_that_is_accumulated_over_passes_is_applied_after_the_last(told):
    paths = told(train_with, "gradient", dlab.average_gradients, 3, 1)[1]
    first = [each["stage"] for each in paths if (each["step"], each["layer"]) == (0, "0")]
    last = [each["stage"] for each in paths if (each["step"], each["layer"]) == (2, "0")]
    assert first == ["computed"], "a later pass that is watched takes over"
    assert last == ["computed", "sent", "reduced", "applied"]
    paths = told(train_with, "gradient", dlab.average_gradients, 2, 1)[1]
    assert [each["stage"] for each in paths if each["layer"] == "0"] == ["computed", "sent", "reduced", "applied"]


def test_a_pass_that_breaks_off_does_not_end_the_watching(told):
    def train():
        model = nn.Linear(2, 1)
        dlab.watch(model, every=1)
        x = torch.ones(1, 2, requires_grad=True)
        x.register_hook(lambda _: 1 / 0)
        for inputs in (x, torch.ones(1, 2), torch.ones(1, 2)):
            try:
                model(inputs).sum().backward()
            except ZeroDivisionError:
                pass

    assert [data["step"] for data in told(train, "gradients")[1]] == [0, 1]


def test_a_watched_model_can_be_sent_back_and_is_not_kept(cluster):
    def train():
        import gc
        import weakref

        models = [nn.Linear(2, 1) for _ in range(2)]
        for model in models:
            dlab.watch(model, every=1)
            model(torch.ones(1, 2)).sum().backward()
        alive = weakref.ref(models.pop().weight)
        del model
        gc.collect()
        return models[0], alive() is None

    for model, gone in cluster.run(train, timeout=60):
        assert isinstance(model, nn.Linear) and gone


def test_a_model_that_nobody_watches_tells_nothing(cluster):
    def train():
        model = nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        dlab.average_gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    run = cluster.start(train)
    run.wait(60)
    assert run.events == []


def test_outside_a_worker_nothing_is_told_and_no_hook_is_left(capsys):
    model = nn.Linear(2, 1)
    dlab.watch(model, every=1)
    model(torch.ones(1, 2)).sum().backward()
    trace("sent", model.weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not model.weight._post_accumulate_grad_hooks
    assert capsys.readouterr().out == ""


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"'received' is not a stage of a gradient: use computed, .* applied"):
        trace("received", torch.ones(1))
