"""Staleness: a histogram per rank of the logged updates, counted here again."""

import random
from collections import Counter

import numpy as np
import pytest
from matplotlib.figure import Figure

import dlab
from dlab.events import save_events
from dlab.views import LossCurves, Staleness
from dlab.views.columns import Arrivals


def _log(rank, staleness, step=0, time=0.0):
    return dlab.Event(time, rank, "log", {"step": step, "loss": 1.0, "staleness": staleness})


def _updates(ranks=3, steps=40, highest=6, seed=0):
    dice = random.Random(seed)
    return [
        _log(rank, [dice.randint(0, highest) for _ in range(dice.randrange(5))], step, 100.0 + step)
        for step in range(steps)
        for rank in range(ranks)
    ]


def test_every_update_is_counted_where_it_was_made():
    events = _updates()
    view = Staleness(events)
    for rank in range(3):
        told = [each for event in events if event.rank == rank for each in event.data["staleness"]]
        assert view.counts[rank] == Counter(told)
    *ranks, every = view.rows()
    assert [row.name for row in ranks] == ["rank 0", "rank 1", "rank 2"] and every.name == "all"
    assert every.updates == sum(row.updates for row in ranks) == sum(len(event.data["staleness"]) for event in events)


def test_the_bars_of_a_row_are_shares_of_its_own_updates():
    view = Staleness([_log(0, [0, 0, 0, 2]), _log(1, [1])])
    width, shares = view.bars()
    assert width == 1
    assert shares.tolist() == [[0.75, 0, 0.25], [0, 1, 0], [0.6, 0.2, 0.2]]


def test_many_values_share_bars():
    view = Staleness([_log(0, list(range(100)))])
    width, shares = view.bars()
    assert width == 3 and shares.shape == (1, 34)
    assert shares[0, 0] == pytest.approx(0.03) and shares[0, -1] == pytest.approx(0.01)
    assert str(view).endswith(" 101")


def test_the_text_has_the_numbers_and_a_dot_where_there_is_nothing():
    view = Staleness([_log(0, [0, 0, 0, 2]), _log(1, [1] * 10)])
    assert str(view).splitlines() == [
        "rank 0   4 updates   mean 0.5   most 2   0 █·▃ 2",
        "rank 1  10 updates   mean 1.0   most 1   0 ·█· 2",
        "all     14 updates   mean 0.9   most 2   0 ▃█▂ 2",
    ]


def test_the_figure_has_a_row_each_on_one_axis_with_labels():
    figure = Staleness(_updates()).figure()
    assert len(figure.axes) == 4
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank 0", "rank 1", "rank 2", "all"]
    assert "updates" in figure.axes[-1].get_xlabel()
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sum(heights) == pytest.approx(1)


def test_the_still_has_alt_text():
    bundle = Staleness([_log(0, [0, 0, 0, 2])]).bundle()
    assert (
        'alt="How stale gradients were when they were applied, a histogram per rank: rank 0 mean 0.5, most 2."'
        in (bundle["text/html"])
    )
    assert bundle["image/png"] and bundle["text/plain"].startswith("rank 0")


def test_nothing_yet_is_said_and_drawn():
    for events in ([], [_log(0, [])], [dlab.Event(0.0, 0, "log", {"step": 0, "loss": 1.0})]):
        view = Staleness(events)
        assert view.empty and "no rank has reported an update yet" in str(view) and "no rank" in view.alt
        assert isinstance(view.figure(), Figure)


def test_events_in_pieces_and_shared_arrivals_give_the_same_as_all_at_once():
    events, view, losses = _updates(), Staleness(), LossCurves()
    for start in range(0, len(events), 7):
        arrived = Arrivals(events[start : start + 7])
        view.add(arrived)
        losses.add(arrived)
    assert str(view) == str(Staleness(events)) and str(losses) == str(LossCurves(events))


def test_ranks_that_tell_no_staleness_have_no_row():
    view = Staleness([_log(0, [1]), dlab.Event(0.0, 1, "log", {"step": 0, "loss": 1.0}), _log(0, [2])])
    assert [row.name for row in view.rows()] == ["rank 0"]


def test_many_ranks_are_told_and_not_drawn(tmp_path):
    events = _updates(ranks=20)
    view = Staleness(events)
    assert len(view.figure().axes) == 13 and "… 8 more ranks" in str(view)
    data = view.data()
    assert len(data["rows"]) == 13 and all(row["shares"].dtype == np.float32 for row in data["rows"])
    assert data["rows"][-1]["updates"] == sum(len(event.data["staleness"]) for event in events)
    save_events(events, tmp_path / "run.jsonl")
    assert str(Staleness(dlab.load_events(tmp_path / "run.jsonl"))) == str(view)
    view.save_html(tmp_path / "page.html")
    assert "views.staleness" in (tmp_path / "page.html").read_text()


def test_what_an_asynchronous_training_tells():
    digits = dlab.Partition(dlab.mnist(), range(64))
    with dlab.Cluster(2) as cluster:
        strategy = dlab.AsyncSGD(dlab.VirtualClock(seed=1))
        run = dlab.train(dlab.TwoLayer, digits, strategy, batch_size=16, lr=0.01, on=cluster)
        run.wait(60)
    view = dlab.Staleness(run.events)
    assert sorted(view.counts) == [0, 1]
    assert all(counts[0] >= 4 for counts in view.counts.values())  # one's own gradients are fresh
