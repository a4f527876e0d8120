"""The timeline: shares of time, who is slow and who waits for whom, from made-up events and from a real straggler."""

import random
import time
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import dlab
from dlab.demo import train
from dlab.views import Timeline
from dlab.views.lanes import LOOK


def _run(computes, steps=40, transport=0.002, begin=1000.0, jitter=0.0, seed=0):
    """Ranks that compute so many seconds a step and meet at its end, as after an all-reduce."""
    random.seed(seed)
    events, now = [], begin
    for step in range(steps):
        own = {rank: seconds * (1 + jitter * random.random()) for rank, seconds in computes.items()}
        now += max(own.values()) + transport
        for rank, compute in own.items():
            data = {"step": step, "compute": compute, "wait": max(own.values()) + transport - compute}
            events.append(dlab.Event(now, rank, "log", data))
    return events


def _state(moment, rank, state, why=""):
    return dlab.Event(moment, rank, "state", {"state": state, "why": why})


def _message(source, destination, start, end):
    data = {
        "source": source,
        "destination": destination,
        "bytes": 8,
        "start": start,
        "end": end,
        "phase": "",
        "step": 0,
    }
    return dlab.Event(end, source, "message", data)


def test_shares_are_those_of_the_steps_that_are_shown():
    events = [*_run({0: 0.01, 1: 0.05}, 100), *_run({0: 0.05, 1: 0.02}, 100, begin=1010.0, jitter=0.5)]
    view = Timeline(events, seconds=1.0)
    last = events[-1].time
    for rank in (0, 1):
        shown = [event.data for event in events if event.rank == rank and event.time > last - 1.0]
        compute, wait = sum(data["compute"] for data in shown), sum(data["wait"] for data in shown)
        assert 10 < len(shown) < 30
        assert view.shares()[rank] == pytest.approx((compute / (compute + wait), wait / (compute + wait), 0.0))


def test_everybody_waits_for_the_one_that_computes_longest():
    view = Timeline(_run({0: 0.01, 1: 0.011, 2: 0.2, 3: 0.009}))
    assert view.waiting() == {0: 2, 1: 2, 3: 2}
    assert view.slow() == [2]
    lines = str(view).splitlines()
    assert lines[0] == "rank 0  compute   5 %  wait  95 %  waits for rank 2"
    assert lines[2] == "rank 2  compute  99 %  wait   1 %  slow"


def test_nobody_waits_among_equals_however_long_the_transport_takes():
    view = Timeline(_run({0: 0.01, 1: 0.011, 2: 0.0105}, transport=0.05))
    assert all(share.wait > 0.3 for share in view.shares().values())
    assert view.waiting() == {} and view.slow() == []


def test_a_small_difference_is_nobodys_fault():
    assert Timeline(_run({0: 0.01, 1: 0.012})).waiting() == {}


@pytest.mark.parametrize("seed", range(20))
def test_slow_means_half_as_long_again_as_the_median_of_the_others(seed):
    random.seed(seed)
    computes = {rank: random.uniform(0.01, 0.04) for rank in range(random.randrange(2, 7))}
    events = _run(computes, jitter=0.2, seed=seed)
    recent = {rank: [event.data["compute"] for event in events if event.rank == rank][-5:] for rank in computes}
    plain = []
    for rank in computes:
        others = median(median(recent[other]) for other in computes if other != rank)
        if median(recent[rank]) >= 1.5 * others:
            plain.append(rank)
    assert Timeline(events).slow() == plain


def test_it_forgets_a_straggler_that_has_recovered():
    events = [*_run({0: 0.01, 1: 0.2}, 20), *_run({0: 0.01, 1: 0.01}, 5, begin=1010.0)]
    assert Timeline(events[:40]).waiting() == {0: 1}
    assert Timeline(events).waiting() == {} and Timeline(events).slow() == []


def test_nobody_waits_for_the_dead_and_their_end_is_told():
    events = [*_run({0: 0.01, 1: 0.2, 2: 0.01}), _state(1009.0, 1, "dead", "killed by signal 9")]
    view = Timeline(events)
    assert view.waiting() == {} and view.slow() == []
    assert "dead: killed by signal 9" in str(view) and "dead: killed by signal 9" in view.alt


def test_a_single_rank_waits_for_nobody():
    assert Timeline(_run({0: 0.1}, transport=0.5)).waiting() == {}


def test_shown_are_about_thirty_steps_or_five_seconds():
    assert Timeline(_run({0: 0.004, 1: 0.004}, 100)).seconds == 0.2
    assert Timeline(_run({0: 0.02, 1: 0.02}, 100)).seconds == 1.0
    assert Timeline(_run({0: 0.5, 1: 0.5}, 100)).seconds == 5.0
    assert Timeline(_run({0: 0.5}), seconds=3).seconds == 3
    with pytest.raises(ValueError, match="above 0"):
        Timeline([], seconds=-1)


def test_bars_lie_where_the_time_went():
    events = _run({0: 0.01, 1: 0.03}, 10)
    figure = Timeline([*events, _message(0, 1, 1000.015, 1000.025)], seconds=10).figure()
    bars = [
        {(round(box.x0, 4), round(box.x1, 4)) for box in (path.get_extents() for path in bar.get_paths())}
        for bar in figure.axes[0].collections
        if len(bar.get_paths()) in (1, 10) and bar.get_label() not in ("compute", "wait", "send")
    ]
    begun = events[0].time
    for rank in (0, 1):
        own = [event for event in events if event.rank == rank]
        ends = [(event.time - begun, event.data["compute"], event.data["wait"]) for event in own]
        assert {(round(end - wait, 4), round(end, 4)) for end, _, wait in ends} in bars
        assert {(round(end - wait - compute, 4), round(end - wait, 4)) for end, compute, wait in ends} in bars
    assert {(round(1000.015 - begun, 4), round(1000.025 - begun, 4))} in bars
    assert "seconds" in figure.axes[0].get_xlabel()


def test_delays_and_pauses_are_underlined_and_an_end_is_crossed():
    run = _run({0: 0.1, 1: 0.2})
    states = [  # the steps go on for eight seconds
        _state(1001.0, 1, "delayed", "0.1 s a step"),
        _state(1002.0, 1, "paused"),
        _state(1003.0, 1, "running"),
        _state(1007.0, 1, "dead", "killed"),
    ]
    axes = Timeline([*run, *states], seconds=100).figure().axes[0]
    (cross,) = [line for line in axes.lines if line.get_marker() == "X"]
    begun = run[0].time
    assert np.allclose(cross.get_data(), [[1007.0 - begun], [1]])
    under = [path.get_extents() for bar in axes.collections if bar.get_linewidth()[0] == 3 for path in bar.get_paths()]
    assert np.allclose([(b.x0, b.x1) for b in under], [(1001 - begun, 1002 - begun), (1002 - begun, 1003 - begun)])


def _async(fast=20, slow=20):
    """Three ranks are done after a tenth of a second; rank 2 sleeps in each step."""
    events = []
    for rank in (0, 1, 3):
        logged = [(1000.0 + 0.005 * step, {"step": step, "compute": 0.005, "wait": 0.0}) for step in range(fast)]
        events += [dlab.Event(moment, rank, "log", data) for moment, data in logged]
    for step in range(slow):
        delay = {"delay": 0.1} if step else {}
        data = {"step": step, "compute": 0.105 if step else 0.005, "wait": 0.0}
        events.append(dlab.Event(1000.0 + 0.105 * step, 2, "log", data | delay))
    return sorted(events, key=lambda event: event.time)


def test_ranks_that_were_done_long_ago_are_shown_too():
    view = Timeline([*_async(), _state(1060.0, 2, "returned")])
    first, last = view.window
    assert last == pytest.approx(19 * 0.105)  # where the data end, not where the last state was told
    assert all(len(lane.since(first)) == 20 for lane in view.lanes.values())
    low, high = view.figure().axes[0].get_xlim()
    assert (low, high) == (max(0.0, first), last)


def test_a_rank_that_is_dead_does_not_widen_the_window():
    events = [event for event in _run({0: 0.05, 1: 0.05}, 1000) if event.rank == 0 or event.time < 1002]
    alive, dead = Timeline(events), Timeline([*events, _state(1002.0, 1, "dead", "killed")])
    assert dead.window[1] - dead.window[0] == pytest.approx(dead.seconds)
    assert alive.window[1] - alive.window[0] > 40
    late = Timeline([*events[:60], _state(1500.0, 1, "dead", "killed")])
    assert late.figure().axes[0].lines[0].get_xdata()[0] < 10  # at the edge, and not far outside


def test_delay_is_neither_computing_nor_waiting():
    """Both for loops that count it as computing, as dlab's do, and for those that do not."""
    inside = _async()
    outside = [
        event._replace(data=event.data | {"compute": event.data["compute"] - event.data.get("delay", 0.0)})
        for event in inside
    ]
    for events in (inside, outside):
        view = Timeline(events, seconds=100)
        assert view.shares()[2].delay == pytest.approx(19 * 0.1 / (19 * 0.1 + 20 * 0.005))
        assert view.shares()[0].delay == 0 and view.shares()[0].compute == 1
        assert view.slow() == [2]
        assert str(view).splitlines()[2] == "rank 2  compute   5 %  delay  95 %  wait   0 %  slow"
        figure = view.figure()
        assert "delay" in [text.get_text() for text in figure.legends[0].get_texts()]
        colours = {tuple(bar.get_facecolor()[0]) for bar in figure.axes[0].collections if len(bar.get_facecolor())}
        assert len(colours) >= 3
    assert "delay" not in str(Timeline(_run({0: 0.01, 1: 0.2})))


def test_messages_do_not_hide_what_a_rank_does():
    figure = Timeline([*_run({0: 0.01, 1: 0.03}, 10), _message(0, 1, 1000.0, 1000.3)], seconds=10).figure()
    boxes = {"bars": [], "sent": []}
    for bar in figure.axes[0].collections:
        heights = [path.get_extents() for path in bar.get_paths()]
        green = [np.allclose(colour[:3], to_rgb(LOOK["send"])) for colour in bar.get_facecolor()[:1]]
        kind = "sent" if any(green) else "bars"
        boxes[kind] += [(box.y0, box.y1) for box in heights if box.height > 0.01]
    assert boxes["sent"]
    for top, bottom in boxes["sent"]:
        assert not any(a < bottom and top < b for a, b in boxes["bars"] if a < 0.5)


@pytest.mark.parametrize("ranks", [1, 64, 100])
def test_the_names_of_many_ranks_do_not_lie_on_each_other(ranks):
    figure = Timeline(_run(dict.fromkeys(range(ranks), 0.01), 5)).figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    assert len(boxes) == min(ranks, 64)
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1 - 1
    assert ("of 100 ranks" in figure.axes[0].get_title()) == (ranks == 100)
    assert figure.get_size_inches()[1] < 15


def test_waiting_is_hatched_so_that_it_needs_no_colour():
    figure = Timeline(_run({0: 0.01, 1: 0.03})).figure()
    assert any(bar.get_hatch() for bar in figure.axes[0].collections)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["compute", "wait"]


def test_nothing_yet_is_said_and_drawn():
    for events in ([], [_state(1.0, 0, "running")], [dlab.Event(1.0, 0, "log", {"step": 0, "loss": 2.0})]):
        view = Timeline(events)
        assert view.empty and "dlab.log" in str(view) and "yet" in view.alt
        assert view.waiting() == {} and view.slow() == []
        assert isinstance(view.figure(), Figure)


def test_events_in_pieces_give_the_same_as_all_at_once():
    events = [_state(999.0, 0, "running"), *_run({0: 0.01, 1: 0.2})]
    view = Timeline()
    for start in range(0, len(events), 7):
        view.add(events[start : start + 7])
    assert str(view) == str(Timeline(events))


def test_messages_alone_make_lanes_too():
    view = Timeline([_message(0, 1, 5.0, 5.1), _message(1, 0, 5.1, 5.2)])
    assert str(view).splitlines() == ["rank 0  1 message", "rank 1  1 message"]
    assert isinstance(view.figure(), Figure)


def test_what_goes_to_the_browser_is_the_latest_and_bounded(tmp_path):
    events = _run(dict.fromkeys(range(4), 0.001), 5000)
    events += [_message(0, 1, 1000.0 + at, 1000.0 + at + 0.1) for at in range(9000)]
    view = Timeline(events)
    data = view.data()
    assert [lane["name"] for lane in data["lanes"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert all(len(lane["steps"]) == 4 * 1500 and lane["steps"].dtype == np.float32 for lane in data["lanes"])
    assert len(data["lanes"][0]["messages"]) == 3 * 1500
    steps = data["lanes"][2]["steps"].reshape(-1, 4)
    own = [event for event in events if event.kind == "log" and event.rank == 2][-1500:]
    plain = [(event.time - events[0].time, event.data["compute"], event.data["wait"], 0.0) for event in own]
    assert np.allclose(steps, plain, atol=1e-5)
    view.save_html(tmp_path / "page.html")
    assert "views.timeline" in (tmp_path / "page.html").read_text()


def test_a_hundred_thousand_events_are_taken_in_quickly():
    events = _run({0: 0.001, 1: 0.001}, 50_000)
    start = time.perf_counter()
    Timeline(events)
    assert time.perf_counter() - start < 5


def test_a_delayed_worker_keeps_the_other_waiting():
    with dlab.Cluster(2) as cluster:
        run = cluster.start(train, dlab.average_gradients, 100_000)
        try:
            run.delay(1, 0.5)  # far more than a step takes, also on a machine that is busy
            _until(lambda: min(len([e for e in run.events if e.kind == "log" and e.rank == r]) for r in (0, 1)) >= 6)
            events = run.events
        finally:
            run.stop()
    view = Timeline(events)
    assert view.waiting() == {0: 1}
    assert view.slow() == [1]
    assert view.shares()[1].delay > 0.5 > view.shares()[1].compute and view.shares()[0].delay == 0
    assert "delay" in str(view) and "delay" in [text.get_text() for text in view.figure().legends[0].get_texts()]
    slept = [event.data["delay"] for event in events if "delay" in event.data]
    assert slept and all(seconds >= 0.5 for seconds in slept) and {e.rank for e in events if "delay" in e.data} == {1}
    logs = [event.data for event in events if event.kind == "log"]
    assert all({"step", "loss", "samples", "compute", "wait"} <= set(data) for data in logs)
    assert all(data["samples"] == 64 for data in logs)
    assert "rank 0" in str(view) and "waits for rank 1" in str(view)


def _until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)
