"""The panel of a run: the views that fit its events, controls that act while it trains, and a still at its end."""

import contextlib
import threading
import time
from itertools import pairwise

import ipywidgets
import pytest

import dlab
from dlab.demo import average_gradients, train
from dlab.views import panel as panels
from dlab.views.panel import LivePanel, Panel, RacePanel


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
    live = LivePanel(Panel(run), _Handle())
    with _following(live, run):
        _eventually(lambda: _find(live.box, "lr") and sum(event.kind == "log" for event in run.events) > 10)
        yield live


@contextlib.contextmanager
def _following(live, run):
    thread = threading.Thread(target=live.follow)
    thread.start()
    yield thread
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
    whom = next(child for child in live.box.children[0].children if isinstance(child, ipywidgets.Dropdown))
    whom.value = 1
    _find(live.box, "delay (s)").value = 4
    _eventually(lambda: (1, "delayed") in _states(run))
    before = len(run.events)
    _eventually(lambda: sum(e.kind == "log" and e.rank == 1 for e in run.events[before:]) >= 4)
    times = [event.time for event in run.events[before:] if event.kind == "log" and event.rank == 1]
    assert all(after - earlier >= 0.2 for earlier, after in pairwise(times[1:]))
    whom.value = 0
    _eventually(lambda: _find(live.box, "delay (s)").value == 0)
    assert run.delays == {1: 0.2} and (0, "delayed") not in _states(run)


def test_pause_resume_and_a_knob(live, run):
    pause, stop = _find(live.box, "pause"), _find(live.box, "stop")
    pause.click()
    _eventually(lambda: run.paused and pause.description == "resume")
    pause.click()
    _eventually(lambda: not run.paused and pause.description == "pause")
    assert not pause.disabled and not stop.disabled
    _find(live.box, "lr").value = 10  # ten tenths to the right: ten times as much
    _eventually(lambda: run.knobs.get("lr") == 0.1)


def test_the_controls_mirror_what_code_does_and_write_nothing(live, run):
    run.delay(0, 0.037)
    run.set("lr", 1 / 30)
    run.pause()
    _eventually(lambda: _find(live.box, "resume") and {"0.037", repr(1 / 30)} <= _texts(live.box))
    assert _find(live.box, "delay (s)").value == 1 and _find(live.box, "lr").value == 5  # the nearest places
    assert run.delays == {0: 0.037} and run.knobs == {"lr": 1 / 30}
    run.resume()
    run.set("lr", 1e9)  # beyond the end of the slider
    _eventually(lambda: _find(live.box, "pause") and "1000000000.0" in _texts(live.box))
    assert _find(live.box, "lr").value == 20 and run.knobs == {"lr": 1e9}


def _texts(widget):
    """What is in the fields of a panel."""
    own = {widget.value} if isinstance(widget, ipywidgets.Text) else set()
    return own.union(*(_texts(child) for child in getattr(widget, "children", ())))


def test_a_button_cannot_be_pressed_again_before_its_wish_is_carried_out(run):
    live = LivePanel(Panel(run), _Handle())  # whom nobody serves yet
    pause = _find(live.box, "pause")
    pause.click()
    assert pause.disabled and not run.paused
    with _following(live, run):
        _eventually(lambda: run.paused and not pause.disabled)


def _rank_1_goes_on():
    for step in range(20):
        dlab.log(step=step, loss=1.0)
    while dlab.rank() == 1 and not dlab.knob("enough", False):
        time.sleep(0.01)


def test_a_wish_that_fails_is_a_sentence_in_the_panel(cluster):
    run = cluster.start(_rank_1_goes_on)
    live = LivePanel(Panel(run), _Handle())
    with _following(live, run) as thread:
        _eventually(lambda: (0, "returned") in _states(run))
        _find(live.box, "kill").click()
        _eventually(lambda: live._sentence.value == "rank 0 is no longer running: there is nothing to kill")
        assert live._sentence.layout.display is None and thread.is_alive() and not run.done
        _find(live.box, "pause").click()  # it is served, and the sentence is gone
        _eventually(lambda: run.paused and live._sentence.value == "" and live._sentence.layout.display == "none")
        _eventually(lambda: live._title.value == "_rank_1_goes_on: paused")


def test_a_rank_that_is_done_says_so_while_another_goes_on(cluster):
    run = cluster.start(_rank_1_goes_on)
    _eventually(lambda: (0, "returned") in _states(run) and sum(event.kind == "log" for event in run.events) == 40)
    run.delay(0, 0.5)  # nothing that is asked of it later makes it run again
    run.delay(0, 0.0)
    panel = Panel(run)
    told = panel.bundle()["text/plain"].splitlines()
    assert told[2:4] == ["rank 0   finished  step 19", "rank 1   running   step 19"]
    assert [row["words"] for row in panel.parts[0].data["ranks"]] == ["finished, step 19", "running, step 19"]
    run.set("enough", True)
    run.wait(30)
    panel.take_in()
    assert "rank 1   finished  step 19" in panel.bundle()["text/plain"]


def test_controls_of_a_run_that_has_ended_do_nothing(live, run, cluster):
    kept = [_find(live.box, name) for name in ("pause", "stop", "kill", "delay (s)", "lr")]
    run.stop()
    _eventually(lambda: live.handle.shown)
    knobs, states = dict(run.knobs), list(run.states)
    for each in kept:
        assert each.disabled
        each.click() if isinstance(each, ipywidgets.Button) else setattr(each, "value", 3)
    assert live._obey(0)  # and if somebody did serve them
    assert (run.knobs, run.states, run.delays, run.state) == (knobs, states, {}, "stopped")
    assert cluster.run(dlab.rank) == [0, 1]


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
    race.wait()
    panel.take_in()
    assert panel.knobs == {"speed": {"first": 1, "second": 1}}
    losses = {name: [event.data["loss"] for event in race.events[name] if event.kind == "log"] for name in race.runs}
    assert losses["first"][0] == 1.0 and losses["first"][-1] == 5.0
    assert set(losses["second"]) == {5.0}  # from its first step
    for events in race.events.values():  # rank 1 sleeps in each step, so rank 0 is done first
        ended = {event.rank: event.time for event in events if event.kind == "log"}
        assert ended[0] < ended[1]
    (curves,) = panel.views
    assert curves.by == "time"
    with pytest.raises(IndexError, match="there is no rank 2 in this race: the ranks are 0 to 1"):
        race.delay(2, 1.0)
    with pytest.raises(ValueError, match="by 'step' or by 'time'"):
        dlab.race({"x": _turned}, by="epoch")


def _fast():
    _log_rate(0.05)


def _slow():
    _log_rate(0.0125)


def _log_rate(rate):
    dlab.knob("method", "ring" if rate == 0.05 else "tree")
    if rate == 0.0125:
        dlab.knob("mode", "plain")
    while not dlab.knob("enough", False):
        dlab.log(rate=dlab.knob("lr", rate), steps=dlab.knob("steps", 4))
        time.sleep(0.01)


def _logged(run, name="rate"):
    return [event.data[name] for event in run.events if event.kind == "log"]


def test_in_a_race_each_run_has_its_own_knobs_and_one_slider_multiplies_them():
    race = dlab.race({"fast": _fast, "slow": _slow}, workers=2)
    live = LivePanel(RacePanel(race), _Handle())
    with _following(live, race):
        _eventually(lambda: _find(live.box, "lr") and len(_logged(race.runs["fast"])) > 10)
        assert _find(live.box, "lr").value == 0 and "×1" in _texts(live.box)
        assert "fast 0.05" in _labels(live.box)
        assert set(_logged(race.runs["fast"])) == {0.05} and race.runs["fast"].knobs == {}
        _find(live.box, "lr").value = 3
        _eventually(lambda: _logged(race.runs["fast"])[-1] == 0.1 and "fast 0.1" in _labels(live.box))
        assert "×2" in _texts(live.box)
        race.runs["fast"].set("enough", True)
        _eventually(lambda: "slow 0.025" in _labels(live.box))  # its own, times two, from its first step
        slow = race.runs["slow"]
        _eventually(lambda: len(_logged(slow)) > 10)
        assert set(_logged(slow)) == {0.025} and set(_logged(slow, "steps")) == {4}
        assert slow.knobs == {} and slow.value("lr", 0.0125) == 0.025
        slow.delay(1, 0.01)  # what code asks of the run that is on, the controls of the race follow
        slow.pause()
        next(each for each in live.box.children[0].children if isinstance(each, ipywidgets.Dropdown)).value = 1
        _eventually(lambda: _find(live.box, "resume") and "0.01" in _texts(live.box))
        _eventually(lambda: live._title.value == "race: paused slow")
        _find(live.box, "resume").click()
        _eventually(lambda: not slow.paused)
        race.set("lr", 0.07)  # by code, for all
        _eventually(lambda: _logged(slow)[-1] == 0.07 and "×1" in _texts(live.box) and "×2" not in _texts(live.box))
        assert slow.knobs == {"lr": 0.07} and slow.delays == {1: 0.01}
        _find(live.box, "steps").value = -3  # whole numbers stay whole
        _eventually(lambda: _logged(slow, "steps")[-1] == 2)
        _find(live.box, "method").value = "naive"
        _eventually(lambda: slow.knobs == {"lr": 0.07, "method": "naive"})


def _labels(widget):
    own = {widget.value} if isinstance(widget, ipywidgets.Label) else set()
    return own.union(*(_labels(child) for child in getattr(widget, "children", ())))


def test_a_knob_that_only_some_runs_have_is_turned_in_those_only():
    race = dlab.race({"fast": _fast, "slow": _slow}, workers=1, at_once=True)
    live = LivePanel(RacePanel(race), _Handle())
    with _following(live, race):
        _eventually(lambda: _find(live.box, "mode") and "fast 0.05, slow 0.0125" in _labels(live.box))
        _find(live.box, "mode").value = "odd"
        _eventually(lambda: race.runs["slow"].knobs == {"mode": "odd"})
        _find(live.box, "enough").value = True
        race.wait()
    assert race.runs["fast"].knobs == {"enough": True}
    assert set(_logged(race.runs["fast"])) == {0.05} and set(_logged(race.runs["slow"])) == {0.0125}


def test_a_factor_that_cannot_be_is_refused(run):
    for factor in (0, -1, float("inf"), "2"):
        with pytest.raises(ValueError, match=r"lr cannot be multiplied by .*: give a number above 0"):
            run.scale("lr", factor)


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
