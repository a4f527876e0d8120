"""The pictures in a real browser: labels are whole and apart, lanes are not empty, and a panel fits into a window."""

import io

import numpy as np
import pytest
from drawn import apart, exploded, failed, logged, named, pipelined, trained
from kernels import eventually
from PIL import Image

pytest.importorskip("playwright", reason="needs playwright: pip install 'dlab[test]'")


import dlab
from dlab.views import GradientFlow, LossCurves, Messages, PipelineChart, ShardView, Staleness, Throughput, Timeline
from dlab.views.page import write_page
from dlab.views.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

VIEWS = (Ranks, LossCurves, Throughput, Timeline, Staleness)
ALL = (*VIEWS, GradientFlow, Messages, ShardView, PipelineChart)
RUNS = {"four": trained, "one": lambda: trained(1), "many": lambda: trained(64), "apart": apart, "failed": failed}
RUNS |= {"exploded": exploded, "delayed": lambda: trained(delayed=2)}
# Notes every text that is drawn: where its corners are on the canvas, and whether it was squeezed.
NOTE = """
window.texts = new Map();
const {fillText, clearRect} = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  window.texts.set(this.canvas, []);
  return clearRect.apply(this, box);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {
  const size = this.measureText(text), turn = this.getTransform(), scale = window.devicePixelRatio;
  const corners = [[x - size.actualBoundingBoxLeft, y - size.actualBoundingBoxAscent],
    [x + size.actualBoundingBoxRight, y + size.actualBoundingBoxDescent]]
    .map(([a, b]) => turn.transformPoint({x: a, y: b}));
  const [xs, ys] = [corners.map((p) => p.x / scale), corners.map((p) => p.y / scale)];
  window.texts.get(this.canvas)?.push({
    text: String(text), squeezed: size.width > (most ?? Infinity), left: Math.min(...xs), right: Math.max(...xs),
    top: Math.min(...ys), bottom: Math.max(...ys), view: this.canvas.parentElement.dataset.view,
    width: this.canvas.width / scale, height: this.canvas.height / scale,
  });
  return fillText.call(this, text, x, y, most);
};
"""
SETUP = """
import time
import dlab
cluster = dlab.cluster(4)

def work():
    while not dlab.knob("go", False):
        time.sleep(0.02)
    for step in range(100_000):
        time.sleep(0.01)
        dlab.log(step=step, loss=1 / (step + 1), samples=32, compute=0.008, wait=0.002, rate=dlab.knob("lr", 0.1))
"""
# How high the board is in every frame, as it was painted.
HEIGHTS = """
() => {
    window.heights = [];
    const look = () => {
        const board = document.querySelector('.dlab-board');
        const drawn = board && !board.querySelector('figure:not([data-drawn])');
        if (drawn) window.heights.push(board.getBoundingClientRect().height);
        requestAnimationFrame(() => setTimeout(look));
    };
    look();
}
"""


START, BREAK = 1, 3  # the cells that begin a run


@pytest.fixture(scope="module")
def opened(server, chromium):
    starts = "run = cluster.start(work)\nrun"
    with chromium.notebook(server.write("pictures.ipynb", SETUP, starts, BREAKS, starts)) as notebook:
        yield notebook


@pytest.fixture
def show(chromium, tmp_path):
    """Open the views of events as a page of its own; gives the page."""
    opened = []

    def open_page(events, *views, width=980, dark=False):
        drawn = [view(events) for view in views or VIEWS]
        parts = [part for view in drawn if not view.empty or view.left_out for part in view.parts]
        (tmp_path / "page.html").write_text(write_page(parts, "test"))
        scheme = "dark" if dark else "light"
        context = chromium.page(viewport={"width": width, "height": 650}, color_scheme=scheme)
        page, _ = context.__enter__()
        opened.append(context)
        page.add_init_script(NOTE)
        page.goto((tmp_path / "page.html").as_uri())
        eventually(lambda: page.locator("figure[data-drawn]").count() == len(parts))
        return page

    yield open_page
    for context in opened:
        context.__exit__(None, None, None)


def texts(page):
    return page.evaluate("() => [...window.texts.values()].flat()")


@pytest.mark.parametrize("width", [380, 980, 1600])
@pytest.mark.parametrize("run", RUNS)
def test_no_text_is_cut_squeezed_or_written_over_another(show, run, width):
    found = texts(show(RUNS[run](), width=width))
    assert len(found) > 20
    check_texts(found)


def check_texts(found):
    """Every text is whole and on the picture, and none lies on another."""
    for text in found:
        assert not text["squeezed"], text
        assert text["left"] >= -1 and text["right"] <= text["width"] + 1, text
        assert text["top"] >= -1 and text["bottom"] <= text["height"] + 1, text
    words = [text for text in found if len(text["text"]) > 1]  # marks may lie on each other, as what they mark does
    for place, one in enumerate(words):
        for other in words[place + 1 :]:
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            assert one["view"] != other["view"] or across <= 1 or down <= 1, (one, other)


@pytest.mark.parametrize("width", [380, 980, 1600])
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "steps"),
    [("1f1b", 2, 3, 2), ("zbv", 4, 8, 2), ("interleaved", 16, 64, 2), ("gpipe", 4, 8, 0), ("1f1b", 64, 8, 1)],
)
def test_the_chart_of_a_pipeline_can_be_read(show, name, ranks, microbatches, steps, width):
    schedule = dlab.schedule(name, ranks, microbatches, 2 if name == "interleaved" else 1)
    page = show(pipelined(schedule, steps), PipelineChart, width=width)
    found = texts(page)
    check_texts(found)
    said = " ".join(text["text"] for text in found)
    assert "F: forward" in said and "rank 0" in said and "planned" in said
    assert ("measured in step" in said and "time, ms" in said) == bool(steps)


def test_a_pipeline_is_replayed_in_the_time_of_its_step_and_a_box_says_what_it_is(show):
    page = show(pipelined(dlab.schedule("1f1b", 2, 3)), PipelineChart)
    labels = [text["text"] for text in texts(page)]
    assert labels.count("0B2") == labels.count("1F1") == 2  # planned and measured
    (box, _) = [text for text in texts(page) if text["text"] == "1F1"]
    canvas = page.locator("figure[data-view=pipeline] canvas").bounding_box()
    page.mouse.move(canvas["x"] + box["left"] + 2, canvas["y"] + box["top"] + 2)
    assert page.locator(".dlab-note").text_content().startswith("1F1, rank 1\nfrom 4.")
    place, slider = page.locator(".dlab-replay output"), page.get_by_role("slider", name="position in time")
    assert " ms of 1" in place.text_content()
    slider.evaluate("(input) => { input.value = 300; input.oninput(); }")
    eventually(lambda: "0B2" not in [text["text"] for text in texts(page)])
    assert [text["text"] for text in texts(page)].count("0F0") == 2


@pytest.mark.parametrize("width", [980, 1600])
def test_views_fill_the_width(show, width):
    page = show(trained(), width=width)
    boxes = {
        view: page.locator(f"figure[data-view={view}]").bounding_box() for view in ("curves", "throughput", "timeline")
    }
    assert boxes["curves"]["y"] == boxes["throughput"]["y"]
    assert (
        boxes["curves"]["width"] + boxes["throughput"]["width"] > 0.97 * boxes["timeline"]["width"] > 0.95 * (width - 8)
    )


def lane(page, name):
    """The pixels of a lane of the timeline."""
    (text,) = [each for each in texts(page) if each["view"] == "timeline" and each["text"] == name]
    shot = page.locator("figure[data-view=timeline] canvas").screenshot()
    image = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
    return image[int(text["top"]) - 3 : int(text["top"]) + 18, 90:]


def count(pixels, colour):
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    return int((np.abs(pixels - wanted).max(axis=-1) < 12).sum())


def test_ranks_that_were_done_first_are_in_the_timeline_and_delay_has_a_colour(show):
    page = show(apart(), Timeline)
    for name in ("rank 0", "rank 1", "rank 3"):
        assert count(lane(page, name), "#0072B2") > 100
        assert count(lane(page, name), "#CC79A7") == 0
    slow = lane(page, "rank 2")
    assert count(slow, "#CC79A7") > 10 * count(slow, "#0072B2")
    assert "delay" in [text["text"] for text in texts(page)]
    assert "delay" not in [text["text"] for text in texts(show(trained(), Timeline))]


def test_an_exploding_loss_leaves_the_curve_before_it_readable(show):
    found = [text["text"] for text in texts(show(exploded(), LossCurves))]
    assert {"2", "4"} <= set(found)  # on the axis
    said = " ".join(text for text in found if len(text) > 1)
    assert "▲" in found and LossCurves(exploded()).note() in said


@pytest.mark.parametrize("name", ["<!--<script>", "</script><b>", "\u2028&lt;'\""])
def test_a_page_is_drawn_whatever_the_names_in_it_are(show, name):
    page = show(named(name), *ALL)
    assert page.locator("figure[data-drawn]").count() == len(ALL) and page.locator("body > *").count() <= 2
    seen = " ".join(name.split())  # a line's end is written as a space
    assert any(seen in text["text"] for text in texts(page) if text["view"] == "shards")
    runs = LossCurves({name: named(name), "other": named("x")})
    assert seen in [text["text"] for text in texts(show({name: named(name), "other": named("x")}, LossCurves))]
    assert seen in str(runs)


def test_numbers_of_all_sizes_are_drawn_and_what_is_left_out_is_told(show):
    nan, inf = float("nan"), float("inf")
    odd = logged(0, step=[5, -3, 2.5, "x"], loss=[-1.0, nan, 1e300, 10**400], samples=[1, 2, inf, "x"])
    odd += logged(1, step=[nan, inf, 10**400, None], loss=[nan, inf, -inf, None], compute=[0.1, nan, 0.2, inf])
    page = show(odd, LossCurves, Throughput, Timeline)
    assert "Loss: 1 event left out: its loss is not a number" in page.locator("figcaption").all_text_contents()
    nothing = [dlab.Event(1.0, 0, kind, {}) for kind in ("message", "gradients", "shard", "slice", "state", "action")]
    page = show([*nothing, *logged(0, loss=["x"], samples=["x"], wait=["x"], staleness=["x"])], *ALL)
    captions = page.locator("figcaption").all_text_contents()
    assert len(captions) == len(ALL) and all("left out" in caption for caption in captions)


@pytest.mark.parametrize("dark", [False, True])
def test_where_a_loss_breaks_there_is_a_cross_and_a_sentence(show, dark):
    broken = [
        event for rank in range(2) for event in logged(rank, step=range(20), loss=[2.0] * 12 + [float("nan")] * 8)
    ]
    page = show(broken, LossCurves, width=380, dark=dark)
    found = texts(page)
    said = " ".join(text["text"] for text in found)
    assert "the loss of rank 0 and rank 1 has not been a number since step 12: is the learning rate too large?" in said
    (cross, _) = [text for text in found if text["text"] == "✕"]
    middle = (cross["left"] + cross["right"]) / 2
    ends = [text for text in found if text["text"] in ("10", "15")]
    assert ends[0]["left"] < middle < ends[1]["right"] and 0.2 < cross["top"] / cross["height"] < 0.8


BREAKS = """
import math, time
import dlab
cluster = dlab.cluster(2)

def work():
    for step in range(40):
        time.sleep(0.02)
        loss = math.nan if dlab.rank() == 1 and step >= 12 else 1 / (step + 1)
        dlab.log(step=step, loss=loss, samples=32, compute=0.01, wait=0.01, staleness=1)
        dlab.log(step=step, loss=10**400 if step > 30 else "much")
    while not dlab.knob("enough", False):
        time.sleep(0.02)
"""


def test_a_run_whose_loss_breaks_keeps_its_panel_and_has_a_still(notebook):
    said = "the loss of rank 1 has not been a number since step 12"
    notebook.run_cell(BREAK - 1)
    notebook.run_cell(BREAK)
    panel = notebook.output(BREAK)
    curves = panel.locator("figure[data-view=curves]")
    eventually(lambda: said in (curves.locator("canvas").get_attribute("aria-label") or ""))
    eventually(lambda: "62 events left out: their loss is not a number" in curves.locator("figcaption").text_content())
    assert panel.locator("figure[data-view=staleness]").count() == 1
    notebook.ask("run.set('enough', True)")
    notebook.ask("run.wait(30) and None")
    still = panel.locator("iframe")
    still.wait_for(state="attached")
    alts = panel.locator("img").evaluate_all("(all) => all.map((one) => one.alt)")
    assert any(said in alt for alt in alts)
    inside = panel.frame_locator("iframe").locator("figure[data-view=curves][data-drawn] canvas")
    assert said in inside.get_attribute("aria-label")


def test_thin_curves_can_be_seen_in_the_dark(show):
    page = show(trained(2), LossCurves, dark=True)
    shot = page.locator("figure[data-view=curves] canvas").screenshot()
    light = (np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")) / 255.0) ** 2.2 @ [0.2126, 0.7152, 0.0722]
    rgb = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
    blue = (rgb[..., 2] > rgb[..., 0] + 30) & (rgb[..., 2] > rgb[..., 1] + 15)
    ground = float(np.median(light))
    assert ((light + 0.05) / (ground + 0.05) > 2.0)[blue].sum() > 200


def test_the_slider_of_a_replay_says_what_it_moves(show):
    page = show(trained(), LossCurves, Timeline)
    label = page.get_by_text("replay, position in time")
    assert label.is_visible()
    slider = page.get_by_role("slider", name="position in time")
    before = page.locator(".dlab-replay output").text_content()
    slider.evaluate("(input) => { input.value = 300; input.oninput(); }")
    eventually(lambda: page.locator(".dlab-replay output").text_content() != before)
    assert " s of " in before and page.get_by_label("speed").is_visible()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
def test_a_panel_with_its_controls_fits_into_a_window_and_keeps_its_height(notebook, width, height):
    notebook.page.set_viewport_size({"width": width, "height": height})
    notebook.run_cell(START - 1)
    notebook.page.locator(".dlab-board").wait_for(state="detached")  # that of the run before
    notebook.page.evaluate(HEIGHTS)
    notebook.run_cell(START)
    panel = notebook.output(START)
    board = panel.locator(".dlab-board")
    for view in ("ranks", "curves", "throughput", "timeline"):
        board.locator(f"figure[data-view={view}][data-drawn]").wait_for()
    before = board.bounding_box()
    panel.get_by_label("go").check()
    timeline = board.locator("figure[data-view=timeline]")
    eventually(lambda: "compute" in (timeline.locator("canvas").get_attribute("aria-label") or ""))
    notebook.slider(panel, "lr").wait_for()
    after = board.bounding_box()
    assert before["height"] == after["height"]
    heights = [each for each in notebook.page.evaluate("() => window.heights") if each]
    assert max(heights) - min(heights) <= 1, sorted(set(heights))
    whole = panel.locator(".jp-OutputArea-output").first.bounding_box()
    seen = notebook.page.locator(".jp-WindowedPanel-outer").first.bounding_box()
    assert whole["height"] < seen["height"] and whole["height"] <= (650 if width == 1280 else 750)
    curves, throughput = (
        board.locator(f"figure[data-view={view}]").bounding_box() for view in ("curves", "throughput")
    )
    assert curves["y"] == throughput["y"]
    assert throughput["x"] + throughput["width"] > whole["x"] + 0.95 * whole["width"]
