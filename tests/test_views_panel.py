"""The panel of a run: the views that fit its events, controls that act while it trains, and a still at its end."""

import threading
import time
from itertools import pairwise

import ipywidgets
import pytest

import dlab
from dlab.demo import average_gradients, train
from dlab.views import panel as panels
from dlab.views.panel import Live, Panel, RacePanel, knob_control, race_controls


@pytest.fixture(scope="module")
def cluster():
    with dlab.Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def run(cluster):
    run = cluster.start(train, average_gradients, 100_000)
    yield run
    run.stop()


class _Handle:
    """Keeps what a notebook would have shown."""

    def __init__(self):
        self.shown = []

    def display(self, *data, **_):
        self.shown += data

    update = display


def _eventually(fact, seconds=30):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def _find(widget, description):
    if getattr(widget, "description", None) == description:
        return widget
    return next(filter(None, (_find(child, description) for child in getattr(widget, "children", ()))), None)


@pytest.fixture
def live(run):
    live = Live(Panel(run), _Handle(), panels.controls)
    thread = threading.Thread(target=live.follow)
    thread.start()
    _eventually(lambda: "lr" in live._known and sum(event.kind == "log" for event in run.events) > 10)
    yield live
    run.stop()
    thread.join(30)
    assert not thread.is_alive()


def _states(run):
    return [(event.rank, event.data["state"]) for event in run.states]


def test_the_views_that_fit_the_events_are_shown(run):
    _eventually(lambda: sum(event.kind == "log" for event in run.events) > 10)
    names = [part.name for part in Panel(run).parts]
    assert names == ["ranks", "curves", "throughput", "timeline"]


def test_a_run_that_has_told_nothing_yet_shows_its_ranks(cluster):
    run = cluster.start(time.sleep, 0.5)
    assert [part.name for part in Panel(run).parts] == ["ranks"]
    assert "rank 1   running" in Panel(run).bundle()["text/plain"]
    run.wait()


def test_the_delay_slider_slows_the_chosen_rank_down(live, run):
    whom = next(child for child in live.box.children[1].children if isinstance(child, ipywidgets.Dropdown))
    whom.value = 1
    _find(live.box, "delay (s)").value = 0.2
    _eventually(lambda: (1, "delayed") in _states(run))
    before = len(run.events)
    _eventually(lambda: sum(e.kind == "log" and e.rank == 1 for e in run.events[before:]) >= 4)
    times = [event.time for event in run.events[before:] if event.kind == "log" and event.rank == 1]
    assert all(after - earlier >= 0.2 for earlier, after in pairwise(times[1:]))
    whom.value = 0
    assert _find(live.box, "delay (s)").value == 0.0
    assert (0, "delayed") not in _states(run)


def test_pause_resume_and_a_knob(live, run):
    _find(live.box, "pause").value = True
    _eventually(lambda: run.paused)
    _find(live.box, "pause").value = False
    _eventually(lambda: not run.paused)
    slider = _find(live.box, "lr")
    assert slider.value == 0.01
    slider.value = 0.1
    _eventually(lambda: run.knobs.get("lr") == pytest.approx(0.1))


def test_kill_is_shown_and_a_still_stays_when_the_widgets_go(live, run):
    _find(live.box, "kill").click()
    with pytest.raises(dlab.WorkerError, match="rank 0 was killed"):
        run.wait(30)
    _eventually(lambda: live.handle.shown)
    still = live.handle.shown[-1]
    assert still["text/plain"].startswith("train: failed")
    assert "rank 0   dead: was killed by signal 9 (SIGKILL)" in still["text/plain"]
    assert "rank 1   stopped" in still["text/plain"]
    assert still["text/html"].count("<img alt=") == 4 and "<iframe" in still["text/html"]


def test_stop_ends_the_run(live, run):
    _find(live.box, "stop").click()
    _eventually(lambda: run.state == "stopped")


def test_no_widget_and_no_thread_is_left(cluster, monkeypatch):
    from ipywidgets.widgets.widget import _instances

    monkeypatch.setattr(panels, "DisplayHandle", _Handle)
    before = len(_instances)
    for _ in range(4):
        run = cluster.start(train, average_gradients, 3)
        thread = panels.show_live(run)
        run.wait()
        if thread is not None:
            thread.join(30)
    assert len(_instances) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "dlab-panel"]


@pytest.mark.parametrize(
    ("value", "control"),
    [
        (True, ipywidgets.Checkbox),
        (4, ipywidgets.IntSlider),
        (0.01, ipywidgets.FloatLogSlider),
        (0.0, ipywidgets.FloatText),
        ("ring", ipywidgets.Text),
    ],
)
def test_a_knob_gets_a_control_that_suits_its_value(value, control):
    found = knob_control("knob", value)
    assert type(found) is control and found.value == value


def _short():
    train(average_gradients, 5)


def _shorter():
    train(average_gradients, 3)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_race_puts_runs_on_one_chart(at_once):
    race = dlab.race({"five": _short, "three": _shorter}, workers=2, at_once=at_once)
    assert race.wait() == {"five": [None, None], "three": [None, None]}
    assert race.done and race.state == "finished"
    panel = RacePanel(race)
    (curves,) = panel.views
    assert {name: len(curve) for name, curve in curves.lines()} == {"five": 5, "three": 3}
    assert "5 steps" in panel.bundle()["text/plain"]


def _turned():
    for step in range(40):
        dlab.log(step=step, loss=float(dlab.knob("speed", 1)))
        time.sleep(0.02)


def test_what_is_asked_of_a_race_is_for_the_run_that_goes_on_and_for_those_to_come():
    race = dlab.race({"first": _turned, "second": _turned}, workers=2, by="time")
    race.delay(1, 0.05)
    deadline = time.monotonic() + 30
    while not any(event.kind == "knob" for event in race.events.get("first", [])) and time.monotonic() < deadline:
        time.sleep(0.01)
    race.set("speed", 5)
    panel = RacePanel(race)
    assert [type(each) for each in race_controls(race, lambda wish: wish())[1:]] == [
        ipywidgets.Dropdown,
        ipywidgets.FloatSlider,
    ]
    race.wait()
    panel.take_in()
    assert panel.knobs == {"speed": 1}
    losses = {name: [event.data["loss"] for event in race.events[name] if event.kind == "log"] for name in race.runs}
    assert losses["first"][0] == 1.0 and losses["first"][-1] == 5.0
    assert set(losses["second"][40:]) == {5.0}  # of 80: it was turned when it had begun
    for events in race.events.values():  # rank 1 sleeps in each step, so rank 0 is done first
        ended = {event.rank: event.time for event in events if event.kind == "log"}
        assert ended[0] < ended[1]
    (curves,) = panel.views
    assert curves.by == "time"
    with pytest.raises(IndexError, match="there is no rank 2 in this race: the ranks are 0 to 1"):
        race.delay(2, 1.0)
    with pytest.raises(ValueError, match="by 'step' or by 'time'"):
        dlab.race({"x": _turned}, by="epoch")


def test_a_race_takes_runs_that_are_there(cluster):
    run = cluster.start(train, average_gradients, 4)
    run.wait()
    race = dlab.race({"there": run})
    race.wait()
    assert sum(event.kind == "log" for event in race.events["there"]) == 8


def test_what_cannot_race_is_refused():
    with pytest.raises(TypeError, match="'x' is neither a run nor a function"):
        dlab.race({"x": 3})
    with pytest.raises(TypeError, match="dictionary"):
        dlab.race([print])
