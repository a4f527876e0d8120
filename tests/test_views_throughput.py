"""Throughput: samples per second in a sliding window, counted here again step by step."""

import math
import random

import numpy as np
import pytest
from matplotlib.figure import Figure

import dlab
from dlab.events import save_events
from dlab.views import Throughput


def _steady(ranks=2, steps=60, seconds=0.1, samples=32):
    """Every rank ends a step each `seconds`."""
    return [
        dlab.Event(100.0 + step * seconds, rank, "log", {"step": step, "loss": 1.0, "samples": samples})
        for step in range(steps)
        for rank in range(ranks)
    ]


def _uneven(steps=200, seed=0):
    random.seed(seed)
    time, events = 50.0, []
    for step in range(steps):
        time += random.expovariate(20)
        events.append(dlab.Event(time, 0, "log", {"step": step, "samples": random.randrange(1, 64)}))
    return events


def _plain_rate(events, moment, window):
    """What was done in the window, each step spread over the time since the one before."""
    ends = [event.time - events[0].time for event in events]
    since = max(moment - window, ends[0])
    done = 0.0
    for begin, end, event in zip(ends, ends[1:], events[1:], strict=False):
        inside = max(0.0, min(end, moment) - max(begin, since))
        done += event.data["samples"] * inside / (end - begin)
    return done / (moment - since)


def test_every_point_is_what_was_done_in_the_window_before_it():
    events = _uneven()
    moments, ranks = Throughput(events, window=0.5).rates()
    assert len(moments) > 100
    for moment, rate in zip(moments, ranks[0], strict=True):
        assert rate == pytest.approx(_plain_rate(events, moment, 0.5))


def test_steady_ranks_have_steady_rates_and_all_is_their_sum():
    _, lines = Throughput(_steady()).lines()
    assert [name for name, _ in lines] == ["rank 0", "rank 1", "all"]
    assert np.allclose(lines[0][1], 320) and np.allclose(lines[1][1], 320) and np.allclose(lines[2][1], 640)


def test_without_samples_steps_are_counted():
    events = [event._replace(data={"step": event.data["step"]}) for event in _steady(ranks=1)]
    view = Throughput(events)
    assert view.unit == "steps"
    assert np.allclose(view.rates()[1][0], 10)
    assert "10 steps/s" in str(view) and "steps per second" in view.figure().axes[0].get_ylabel()


def test_a_rank_that_falls_silent_falls_to_nothing_and_one_in_its_step_does_not():
    events = [event for event in _steady(steps=100) if event.rank == 0 or event.time < 105.0]
    _, ranks = Throughput(events).rates()
    assert ranks[1][-1] == 0.0 and ranks[0][-1] == pytest.approx(320)
    late = [event for event in _steady(steps=100) if event.rank == 0 or event.time < 109.5]
    assert Throughput(late).rates()[1][1][-1] == pytest.approx(320)


def test_events_in_pieces_give_the_same_as_all_at_once():
    events = _steady()
    view = Throughput()
    for start in range(0, len(events), 7):
        view.add(events[start : start + 7])
    assert str(view) == str(Throughput(events))


def test_the_text_tells_the_last_and_the_mean():
    assert str(Throughput(_steady())).splitlines()[1].startswith("rank 1  320 samples/s   mean 320   ")
    assert "all 640" in Throughput(_steady()).alt


def test_the_figure_has_a_line_each_and_units_and_dashes_for_those_who_see_no_colours():
    (axes,) = Throughput(_steady(ranks=4, samples=1000)).figure().axes
    assert axes.get_ylabel() == "thousand samples per second" and "seconds" in axes.get_xlabel()
    assert len({line.get_linestyle() for line in axes.lines[:4]}) == 4
    assert np.allclose(axes.lines[4].get_ydata(), 40)


def test_nothing_yet_is_said_and_drawn():
    for events in ([], _steady(steps=1)):
        view = Throughput(events)
        assert view.empty and "two steps" in str(view) and "two steps" in view.alt
        assert isinstance(view.figure(), Figure)
    assert not Throughput(_steady(steps=2)).empty
    with pytest.raises(ValueError, match="above 0"):
        Throughput([], window=0)


def test_a_rank_that_has_only_begun_has_no_rate_yet():
    events = [*_steady(ranks=1), dlab.Event(105.5, 1, "log", {"step": 0, "samples": 32})]
    view = Throughput(events)
    assert math.isnan(view.rates()[1][1][-1]) and "rank 1    – samples/s" in str(view)


def test_what_goes_to_the_browser_is_bounded(tmp_path):
    view = Throughput(_steady(ranks=20, steps=5000, seconds=0.01))
    data = view.data()
    assert len(data["lines"]) == 13 and data["lines"][-1]["name"] == "all"
    assert all(len(line["rates"]) == len(data["time"]) <= 401 for line in data["lines"])
    assert np.allclose(data["lines"][-1]["rates"][-1], 20 * 3200, rtol=1e-3)
    assert "… 8 more ranks" in str(view)
    save_events(_steady(), tmp_path / "run.jsonl")
    assert str(Throughput(dlab.load_events(tmp_path / "run.jsonl"))) == str(Throughput(_steady()))
    view.save_html(tmp_path / "page.html")
    assert "views.throughput" in (tmp_path / "page.html").read_text()
