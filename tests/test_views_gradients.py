"""The view of gradients: the norms that torch computes, every stage of every gradient, the same live and afterwards."""

import math
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import dlab
from dlab.views import GradientFlow
from dlab.views.gradients import STAGES, _limits

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

LAYERS, STEPS = ["first", "second"], [0, 2, 4]


def train():
    """Five steps, every second watched; gives the norms of this rank's own gradients in each."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(6, 5))
    model.add_module("second", nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlab.watch(model, every=2)
    truth = []
    for step in range(5):
        torch.manual_seed(10 * step + dlab.rank())
        optimizer.zero_grad()
        model(torch.randn(3, 6)).square().sum().backward()
        truth.append(
            [torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item() for layer in model.children()]
        )
        dlab.average_gradients(model)
        optimizer.step()
    return truth


@pytest.fixture(scope="module")
def run():
    with dlab.Cluster(2) as cluster:
        run = cluster.start(train)
        yield run.wait(60), run.events


def test_norms_are_those_that_torch_computes(run):
    truth, events = np.array(run[0]), run[1]  # rank x step x layer
    view = GradientFlow(events)
    assert view.layers == LAYERS and view.ranks == [0, 1]
    assert np.allclose(view.table(), truth[:, 4].T, rtol=1e-5)
    assert np.allclose(view.history(STEPS), truth[:, STEPS].transpose(1, 2, 0), rtol=1e-5)
    norms = view.data()["norms"]
    assert norms.dtype == np.float32 and np.allclose(norms, view.history(STEPS))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_gradient_goes_through_its_stages_in_order_on_every_rank(run, layer, step):
    path = GradientFlow(run[1], layer=layer, step=step).path()
    assert list(path) == [0, 1]
    for stages in path.values():
        assert list(stages) == ["computed", "sent", "reduced", "applied"]
        assert 0 <= stages["computed"] <= stages["sent"] <= stages["reduced"] <= stages["applied"] < 60_000
    sent = max(stages["sent"] for stages in path.values())
    assert all(stages["reduced"] >= sent for stages in path.values()), "reduced before everybody had sent"


def test_the_path_begins_with_the_first_gradient_of_its_step(run):
    paths = [GradientFlow(run[1], layer=layer).path() for layer in LAYERS]
    assert min(stages["computed"] for path in paths for stages in path.values()) == 0.0
    assert GradientFlow(run[1]).step == 4 and GradientFlow(run[1]).layer == "first"


def test_the_browser_gets_all_of_it(run):
    data = GradientFlow(run[1], layer="second", step=2).data()
    assert (data["layer"], data["step"], data["steps"].tolist()) == (1, 1, STEPS)
    assert data["moments"].shape == (3, 2, 2, len(STAGES)) and data["times"].shape == (3, 2)
    bucketed = list(STAGES).index("bucketed")
    assert np.isnan(data["moments"][..., bucketed]).all(), "nobody made buckets"
    assert np.isfinite(np.delete(data["moments"], bucketed, axis=-1)).all()
    path = GradientFlow(run[1], layer="second", step=2).path()
    assert data["moments"][1, 1, 1, -1] == pytest.approx(path[1]["applied"], rel=1e-5)


def test_added_bit_by_bit_equals_all_at_once(run):
    whole, bits = GradientFlow(run[1]), GradientFlow()
    for event in run[1]:
        bits.add([event])
    assert str(bits) == str(whole) and bits.alt == whole.alt and bits.layers == whole.layers
    for name, value in whole.data().items():
        np.testing.assert_array_equal(bits.data()[name], value)


def test_a_picture_has_a_row_per_layer_a_column_per_rank_and_a_mark_per_stage(run):
    view = GradientFlow(run[1], layer="second")
    figure = view.figure()
    heat, lines, path, bar = (figure.axes[place] for place in (0, 2, 3, 1))
    assert heat.images[0].get_array().shape == (2, 2)
    assert [text.get_text() for text in heat.get_yticklabels()] == LAYERS
    assert (heat.get_xlabel(), heat.get_ylabel(), bar.get_ylabel()) == ("rank", "layer", "gradient norm")
    curves = [line for line in lines.lines if len(line.get_xdata()) == len(STEPS)]
    assert len(curves) == len(LAYERS) and lines.get_xlabel() == "step"
    assert path.get_xlabel() == "milliseconds since the first gradient of step 4 was computed"
    marks = {marks.get_label(): marks.get_offsets() for marks in path.collections}
    assert list(marks) == ["computed", "sent", "reduced", "applied"]
    for stage, places in marks.items():
        assert np.allclose(places, [(view.path()[rank][stage], rank) for rank in (0, 1)])
    assert "step 4" in view.alt and "2 layers on 2 ranks" in view.alt


def test_the_text_is_a_table_of_layers_and_ranks_and_the_path(run):
    lines = str(GradientFlow(run[1])).splitlines()
    assert lines[0] == "gradient norm after step 4"
    assert lines[1].split() == ["layer", "rank", "0", "rank", "1"]
    assert lines[3].split() == ["second", *(f"{norms[4][1]:.3g}" for norms in run[0])]
    assert lines[5].startswith("rank 0  computed ") and "  applied " in lines[5]


def test_a_page_and_a_notebook_hold_it(run, tmp_path):
    view = GradientFlow(run[1])
    view.save_html(tmp_path / "flow.html")
    assert "views.gradients" in (tmp_path / "flow.html").read_text()
    assert view.alt in view.bundle()["text/html"]


def test_a_layer_or_step_that_was_not_watched_is_refused(run):
    with pytest.raises(ValueError, match="no layer 'third': the watched ones are first, second"):
        GradientFlow(run[1], layer="third")
    with pytest.raises(ValueError, match="step 3 was not watched: 0, 2, 4 were"):
        GradientFlow(run[1], step=3)


def test_without_a_watched_model_there_is_nothing_to_show():
    view = GradientFlow([dlab.Event(1.0, 0, "log", {"step": 0, "loss": 0.5})])
    assert view.empty and "dlab.watch(model)" in str(view) and "no model" in view.alt
    assert isinstance(view.figure(), Figure)


def test_ranks_with_layers_of_their_own_and_norms_that_are_broken_or_zero():
    norms = [{"a": 1.0, "b": 0.0}, {"c": math.nan}, {"a": math.inf, "c": 2.0}]
    view = GradientFlow(
        [dlab.Event(0.0, rank, "gradients", {"step": 0, "norms": each}) for rank, each in enumerate(norms)]
    )
    np.testing.assert_array_equal(
        view.table(), np.array([[1, math.nan, math.inf], [0, math.nan, math.nan], [math.nan, math.inf, 2]], np.float32)
    )
    assert [line.split() for line in str(view).splitlines()[2:]] == [
        ["a", "1", "–", "broken"],
        ["b", "0", "–", "–"],
        ["c", "–", "broken", "2"],
    ]
    assert "not a finite number" in view.alt
    assert isinstance(view.figure(), Figure) and view.path() == {}


def test_a_long_run_sends_a_bounded_number_of_steps_with_the_last_and_the_chosen_one():
    norms = {f"layer {number}": 1.0 for number in range(30)}
    events = [dlab.Event(float(step), 0, "gradients", {"step": step, "norms": norms}) for step in range(0, 50_000, 10)]
    steps = GradientFlow(events, step=12_340).data()["steps"].tolist()
    assert len(steps) <= 122 and steps == sorted(steps)
    assert {0, 12_340, 49_990} <= set(steps)


def test_equal_norms_get_a_scale_of_a_factor_of_ten():
    low, high = _limits(np.full((2, 2), 3.0, np.float32))
    assert high / low == pytest.approx(10) and low < 3 < high
