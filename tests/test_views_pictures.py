"""What holds for every still: labels are whole and apart, colours stay, and it can be read on any page."""

import base64
import io
import re
from itertools import combinations

import numpy as np
import pytest
from drawn import apart, exploded, failed, pipelined, state, trained
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image

import dlab
from dlab.views import LossCurves, PipelineChart, ShardView, Staleness, Throughput, Timeline, base
from dlab.views.base import COLOURS, places_of
from dlab.views.curves import _running_mean
from dlab.views.page import BROWSER
from dlab.views.ranks import Ranks

VIEWS = (Ranks, LossCurves, Throughput, Timeline, Staleness)
RUNS = {
    "four ranks": trained(),
    "one of them delayed": trained(delayed=2),
    "one": trained(ranks=1),
    "sixty-four": trained(ranks=64),
    "one that never logs": [*trained(), state(4, "running")],
    "apart": apart(),
    "exploded": exploded(),
    "failed": failed(),
}


def _texts(figure):
    """Everything that is written in a figure, and where; ticks beyond the ends of an axis are not drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts, hidden = set(figure.findobj(Text)), set()
    for axes in figure.findobj(Axes):
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in axis.get_major_ticks():
                outside = not low <= tick.get_loc() <= high
                hidden |= {label for label in (tick.label1, tick.label2) if outside or not label.get_visible()}
    return {
        text: text.get_window_extent(canvas.get_renderer())
        for text in texts - hidden
        if text.get_text().strip() and text.get_visible()
    }


PIPELINES = {
    "1f1b": pipelined(dlab.schedule("1f1b", 4, 8)),
    "only planned": pipelined(dlab.schedule("zbv", 4, 8), steps=0),
    "sixteen ranks": pipelined(dlab.schedule("interleaved", 16, 32, 2)),
    "sixty-four ranks": pipelined(dlab.schedule("gpipe", 64, 8)),
    "one rank": pipelined(dlab.schedule("1f1b", 1, 1)),
}


@pytest.mark.parametrize(
    ("view", "events"),
    [
        *(pytest.param(view, RUNS[run], id=f"{run}-{view.__name__}") for run in RUNS for view in VIEWS),
        *(pytest.param(PipelineChart, PIPELINES[run], id=f"{run}-PipelineChart") for run in PIPELINES),
    ],
)
def test_no_label_is_cut_and_none_lies_on_another(view, events):
    figure = view(events).figure()
    texts = _texts(figure)
    for text, box in texts.items():
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} is cut"
    for (one, a), (other, b) in combinations(texts.items(), 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 3, f"{one.get_text()!r} lies on {other.get_text()!r}"


@pytest.mark.parametrize("view", VIEWS)
def test_a_still_can_be_read_on_a_white_and_on_a_dark_page(view):
    """A white card with round corners: whatever is below it, what is drawn has the ground it was drawn for."""
    image = Image.open(io.BytesIO(base64.b64decode(view(RUNS["four ranks"]).still().png))).convert("RGBA")
    assert all(image.getpixel((x, y))[3] == 0 for x in (0, image.width - 1) for y in (0, image.height - 1))
    inner = np.asarray(image)[10:-10, 10:-10]
    assert (inner[..., 3] == 255).all()
    assert (inner[..., :3] == 255).all(axis=-1).mean() > 0.4


def test_an_explosion_leaves_the_rest_readable_and_is_marked():
    view = LossCurves(exploded())
    axes = view.figure().axes[0]
    assert 2.3 < axes.get_ylim()[1] < 10
    assert view.note() == (
        "▲ up to 2.6e+08; ✕ the loss of rank 0 and rank 2 has been infinite since step 58, "
        "the loss of rank 1 and rank 3 has not been a number since step 58: is the learning rate too large?"
    )
    assert view.note() in str(view) and view.note() in view.alt
    assert axes.get_title(loc="right").replace("\n", " ") == view.note()
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "^"]
    assert marks == [41] * 4  # the first step that is above the picture
    crosses = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "X"]
    assert crosses == [58] * 4 and axes.get_xlim()[1] > 59  # and the steps after it have their place
    for curve in view.data()["curves"][:4]:
        assert [(end["sign"], end["step"]) for end in curve["lost"]] == [("▲", 41), ("✕", 58)]
    calm = LossCurves(trained())
    assert calm.note() == "" and calm.top() is None and calm.lost() == {}


@pytest.mark.parametrize(
    ("broken", "words"),
    [(float("nan"), "not been a number"), (float("inf"), "been infinite"), (-float("inf"), "been minus infinity")],
)
def test_where_a_loss_is_no_longer_finite_is_marked(broken, words):
    losses = [2.0, 1.5, broken, broken]
    view = LossCurves(
        [dlab.Event(float(step), 0, "log", {"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    )
    (cross,) = [line for line in view.figure().axes[0].lines if line.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2, 1.5)  # when, and as high as the last finite one
    said = f"✕ the loss of rank 0 has {words} since step 2: is the learning rate too large?"
    assert said in str(view) and said in view.alt and "✕✕" in str(view)
    only = LossCurves([dlab.Event(0.0, 0, "log", {"step": 0, "loss": broken})])
    assert "✕" in str(only) and only.figure() and only.data()


def test_a_spike_does_not_lift_the_mean_around_it():
    values = np.ones(400)
    values[200] = 1e30
    assert np.allclose(np.delete(_running_mean(values, top=5.0), 200), 1)


def test_a_spike_at_the_start_is_not_the_tallest_thing():
    events = [dlab.Event(100 + 0.001 * step, 0, "log", {"step": step, "samples": 64}) for step in range(5)]
    events += [dlab.Event(100.2 + 0.1 * step, 0, "log", {"step": 5 + step, "samples": 64}) for step in range(60)]
    view = Throughput(events)
    axes = view.figure().axes[0]
    settled = view.rates()[1][0][-100:]
    assert np.nanmax(view.rates()[1][0]) > 1.5 * settled.max()  # there is one
    assert settled.max() < axes.get_ylim()[1] < 1.6 * settled.max()
    assert "first moment" in axes.get_title(loc="right") and view.data()["top"] < 1.6 * settled.max()
    steady = Throughput(trained())
    assert steady.note() == "" and steady.figure().axes[0].get_ylim()[1] > max(r.max() for _, r in steady.lines()[1])


def test_a_rank_has_its_colour_in_every_view_also_when_others_tell_nothing():
    events = [event for event in trained() if event.rank in (1, 3)]
    curves, throughput, staleness = LossCurves(events), Throughput(events), Staleness(events)
    assert [curve["colour"] for curve in curves.data()["curves"]] == [1, 3, -1]
    assert [line["rank"] for line in throughput.data()["lines"]] == [1, 3, -1]
    assert [row["rank"] for row in staleness.data()["rows"]] == [1, 3, -1]
    for view in (curves, throughput):
        drawn = {line.get_label(): to_hex(line.get_color()).upper() for line in view.figure().axes[0].lines}
        assert drawn["rank 1"] == COLOURS[1] and drawn["rank 3"] == COLOURS[3]
    bars = [to_hex(axes.patches[0].get_facecolor()).upper() for axes in staleness.figure().axes]
    assert bars[:2] == [COLOURS[1], COLOURS[3]]
    slices = [
        dlab.Event(0.0, r, "slice", {"tensor": "w", "shape": [4, 6], "slice": [[r, r + 1], [0, 6]]}) for r in (1, 3)
    ]
    patches = ShardView(slices).figure().subfigs[0].axes[0].patches
    assert [to_hex(patch.get_facecolor()).upper() for patch in patches] == [COLOURS[1], COLOURS[3]]


def test_the_browser_has_the_same_colours():
    (line,) = re.findall(r"const COLOURS = \[(.*)\];", (BROWSER / "base.js").read_text())
    assert tuple(re.findall(r"#\w+", line)) == COLOURS


def test_a_run_that_is_compared_keeps_its_colour_in_later_pictures(monkeypatch):
    monkeypatch.setattr(base, "_named", {})  # no picture has been drawn yet
    first = LossCurves({"plain": trained(), "ringed": trained(), "stale": trained()})
    colours = {curve["name"]: curve["colour"] for curve in first.data()["curves"]}
    assert len(set(colours.values())) == 3
    later = LossCurves({"stale": trained(), "new": trained(), "plain": trained()})
    again = {curve["name"]: curve["colour"] for curve in later.data()["curves"]}
    assert again["stale"] == colours["stale"] and again["plain"] == colours["plain"]
    assert len(set(again.values())) == 3
    lines = {line.get_label(): to_hex(line.get_color()).upper() for line in later.figure().axes[0].lines}
    assert lines["stale"] == COLOURS[colours["stale"]]
    many = places_of(f"contender {number}" for number in range(8))
    assert sorted(many) == list(range(8))
    assert places_of(f"contender {number}" for number in reversed(range(8))) == many[::-1]


def test_a_long_sentence_keeps_its_proportions():
    figure = Ranks(failed()).figure()
    sizes = {text.get_fontsize() for text in figure.axes[0].texts}
    assert sizes == {9.0}
    assert "see the traceback above" in " ".join(text.get_text().replace("\n", " ") for text in figure.axes[0].texts)
