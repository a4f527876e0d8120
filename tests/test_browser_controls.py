"""The controls of a panel in a real browser: watching changes nothing; they follow the code and obey the user."""

import pytest
from kernels import eventually

pytest.importorskip("playwright", reason="needs playwright: pip install 'dlab[test]'")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SETUP = """
import hashlib, time
import dlab
digits = dlab.Partition(dlab.mnist(), range(2500))
cluster = dlab.cluster(2)
KNOBS = {
    "on": True, "off": False, "steps": 4, "none left": 0, "below": -7, "huge": 10**15, "tiny": 1e-7, "third": 1 / 3,
    "zero": 0.0, "negative": -0.05, "way": "ring", "nothing": None, "sizes": [1, 0.1, "a"], "gain": 1.0,
}

def begin(lr):
    return dlab.train(dlab.TwoLayer, digits, workers=2, lr=lr, order="global", test=False)

def digest():
    weights = run.wait().model.state_dict().values()
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()

def work(steps=100_000):
    for step in range(steps):
        time.sleep(0.005)
        dlab.log(step=step, loss=1 / (step + 1), **{name: dlab.knob(name, value) for name, value in KNOBS.items()})

def logs(run):
    return [event.data for event in run.events if event.kind == "log"]

def declared(run):
    return sorted((event.rank, repr(event.data)) for event in run.events if event.kind == "knob")

def leave_early():
    for step in range(20):
        dlab.log(step=step, loss=1 / (step + 1))
    while dlab.rank() == 1 and not dlab.knob("enough"):
        time.sleep(0.01)

def fast():
    raced(0.05)

def slow():
    raced(0.0125)

def raced(rate):
    step = 0
    while not dlab.knob("enough"):
        step += 1
        dlab.log(step=step, loss=1 / step, rate=dlab.knob("lr", rate))
        time.sleep(0.01)
"""
TRAIN, WORK, RACE, EARLY = 1, 2, 3, 4
CELLS = (
    "run = begin(lr)\nrun.delay(0, 0.25)\nrun",
    "run = cluster.start(work)\nrun",
    'run = race = dlab.race({"fast": fast, "slow": slow}, workers=2)\nrace',
    "run = cluster.start(leave_early)\nrun",
)


@pytest.fixture(scope="module")
def opened(server, chromium):
    with chromium.notebook(server.write("controls.ipynb", SETUP, *CELLS)) as notebook:
        notebook.page.set_viewport_size({"width": 1280, "height": 800})
        notebook.run_cell(0)
        yield notebook


def start(notebook, cell):
    """Start a run in a cell; gives its panel as soon as it draws."""
    notebook.run_cell(cell)
    assert notebook.failures() == []
    panel = notebook.output(cell)
    panel.locator("figure[data-view=curves][data-drawn]").wait_for()
    return panel


def field(panel, name):
    """The text of a value, beside its slider or with a label of its own."""
    box = panel.locator(".widget-hbox:not(:has(.widget-hbox))").filter(has=panel.page.get_by_text(name, exact=True))
    return box.locator("input[type=text]")


def shows(panel, name, text):
    eventually(lambda: field(panel, name).input_value() == text)


def enter(panel, name, text):
    field(panel, name).fill(text)
    field(panel, name).press("Enter")


@pytest.mark.parametrize("lr", [0.05, 0.025, 0.3])
def test_a_training_under_the_panel_ends_with_the_same_bits(notebook, lr):
    notebook.ask(f"[globals().update(lr={lr}), globals().update(run=begin({lr}))] and None")
    bare, told = notebook.ask("(digest(), declared(run))")
    panel = start(notebook, TRAIN)
    shows(panel, "lr", repr(lr))
    steps = notebook.ask("len(logs(run))")
    eventually(lambda: notebook.ask("len(logs(run))") >= steps + 6)  # time in which an echo would arrive
    notebook.ask("run.delay(0, 0)")
    eventually(lambda: notebook.ask("run.done"))
    assert notebook.ask("run.knobs") == {}
    assert notebook.ask("(digest(), declared(run))") == [bare, told]


def test_to_show_a_knob_of_any_kind_writes_nothing(notebook):
    panel = start(notebook, WORK)
    texts = notebook.ask("{name: str(value) for name, value in KNOBS.items() if not isinstance(value, bool)}")
    assert len(texts) == 12
    for name, text in texts.items():
        shows(panel, name, text)
    assert panel.get_by_label("on", exact=True).is_checked() and not panel.get_by_label("off", exact=True).is_checked()
    for rank in ("rank 1", "rank 0"):
        notebook.choose(panel, rank)
    steps = notebook.ask("len(logs(run))")
    eventually(lambda: notebook.ask("len(logs(run))") >= steps + 200)
    assert notebook.ask("run.knobs") == {} and notebook.ask("run.delays") == {}
    assert notebook.ask("all(repr(data[name]) == repr(KNOBS[name]) for data in logs(run) for name in KNOBS)")
    shown = notebook.ask("run.stop() or declared(run)")
    notebook.ask("globals().update(run=cluster.start(work, 3)) or run.wait() and None")
    assert notebook.ask("declared(run)") == shown


def test_the_controls_follow_the_code_and_write_nothing_back(notebook):
    panel = start(notebook, WORK)
    notebook.ask("[run.delay(1, 0.037), run.set('gain', 0.123456789), run.set('steps', -99), run.pause()] and None")
    notebook.ask("[run.set('on', False), run.set('way', 'tree'), run.set('nothing', 3)] and None")
    panel.get_by_role("button", name="resume", exact=True).wait_for()
    for name, text in (("gain", "0.123456789"), ("steps", "-99"), ("way", "tree"), ("nothing", "3")):
        shows(panel, name, text)
    assert not panel.get_by_label("on", exact=True).is_checked()
    assert notebook.slider(panel, "gain").get_attribute("aria-valuenow") == "-9.0"
    shows(panel, "delay (s)", "0.0")
    notebook.choose(panel, "rank 1")
    shows(panel, "delay (s)", "0.037")
    notebook.press(panel, "resume")
    panel.get_by_role("button", name="pause", exact=True).wait_for()
    steps = notebook.ask("len(logs(run))")
    eventually(lambda: notebook.ask("len(logs(run))") >= steps + 20)
    assert notebook.ask("(run.paused, run.delays)") == [False, {"1": 0.037}]
    turned = {"gain": 0.123456789, "steps": -99, "on": False, "way": "tree", "nothing": 3}
    assert notebook.ask("run.knobs") == turned


def test_a_hand_is_obeyed_exactly_or_told_why_not(notebook):
    panel = start(notebook, WORK)
    enter(panel, "gain", "0.0123456789012345")
    eventually(lambda: notebook.ask("logs(run)[-1]['gain']") == 0.0123456789012345)
    enter(panel, "gain", "abc")
    panel.get_by_text("'abc' is not a value for gain: give a number, such as 0.05").wait_for()
    shows(panel, "gain", "0.0123456789012345")
    handle = notebook.slider(panel, "third")
    handle.focus()
    handle.press("ArrowRight")
    eventually(lambda: notebook.ask("run.knobs.get('third')") == 0.416666666667)
    panel.get_by_text("'abc' is not a value").wait_for(state="hidden")
    shows(panel, "third", "0.416666666667")
    handle.press("ArrowLeft")
    eventually(lambda: notebook.ask("run.knobs['third'] == 1 / 3"))
    notebook.drag(panel, "delay (s)", 0.1)
    shows(panel, "delay (s)", "0.1")
    panel.get_by_label("off", exact=True).check()
    eventually(lambda: notebook.ask("logs(run)[-1]['off']") is True)
    assert set(notebook.ask("run.knobs")) == {"gain", "third", "off"}
    assert notebook.ask("run.delays") == {"0": 0.1}


def test_one_slider_multiplies_what_each_run_of_a_race_has(notebook):
    panel = start(notebook, RACE)
    shows(panel, "lr", "×1")
    panel.get_by_text("fast 0.05", exact=True).wait_for()
    steps = notebook.ask("len(logs(race.runs['fast']))")
    eventually(lambda: notebook.ask("len(logs(race.runs['fast']))") >= steps + 100)
    rates = "sorted({data['rate'] for data in logs(race.runs['%s'])})"
    assert notebook.ask(rates % "fast") == [0.05]
    handle = notebook.slider(panel, "lr")
    handle.focus()
    for _ in range(3):
        handle.press("ArrowRight")
    shows(panel, "lr", "×2")
    panel.get_by_text("fast 0.1", exact=True).wait_for()
    notebook.ask("race.runs['fast'].set('enough', True)")
    panel.get_by_text("slow 0.025", exact=True).wait_for()
    shows(panel, "lr", "×2")
    assert notebook.ask(rates % "slow") == [0.025]
    assert notebook.ask("[each.knobs for each in race.runs.values()]") == [{"enough": True}, {}]


def test_a_rank_that_is_done_says_so_and_cannot_be_killed(notebook):
    panel = start(notebook, EARLY)
    ranks = panel.locator("figure[data-view=ranks]")
    eventually(lambda: ranks.get_attribute("data-states") == "finished running")
    words = ranks.locator("canvas").get_attribute("aria-label")
    assert words.startswith("rank 0 finished, step 19; rank 1 running"), words
    notebook.press(panel, "kill")
    panel.get_by_text("rank 0 is no longer running: there is nothing to kill").wait_for()
    notebook.press(panel, "pause")  # the panel goes on
    panel.get_by_role("button", name="resume", exact=True).wait_for()
    panel.get_by_text("nothing to kill").wait_for(state="hidden")
    notebook.press(panel, "stop")
    page = panel.frame_locator("iframe").locator("figure[data-view=ranks]")
    eventually(lambda: page.get_attribute("data-states") == "finished stopped")
    assert notebook.ask("run.state") == "stopped"


def test_no_label_is_cut_and_all_is_on_a_small_screen(notebook):
    panel = start(notebook, WORK)
    shows(panel, "sizes", "[1, 0.1, 'a']")
    cut = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"
    assert panel.locator(".widget-label, .widget-button").evaluate_all(cut) == []
    values = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.value)"
    assert panel.locator("input[type=text]").evaluate_all(values) == []
    right = "(all) => all.map((each) => each.getBoundingClientRect().right)"
    edges = panel.locator(".widget-button, input:visible, select, .noUi-base").evaluate_all(right)
    assert len(edges) > 20 and max(edges) <= panel.locator(".jp-OutputArea-output").first.evaluate_all(right)[0]
    views = panel.locator("figure[data-view=ranks]").bounding_box()
    controls = panel.locator(".widget-button").first.bounding_box()
    assert views["y"] - controls["y"] < 300  # fourteen knobs, and the views are not pushed off the screen
