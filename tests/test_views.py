"""Views draw events and nothing else: the same figure from a live run and from a file."""

import re

import numpy as np
from matplotlib.figure import Figure

import dlab
from dlab.views import LossCurves
from dlab.views.curves import _running_mean
from dlab.views.live import show_live


def _events(ranks=2, steps=50):
    return [
        dlab.Event(float(step), rank, "log", {"step": step, "loss": 2.0 / (step + 1) + rank})
        for step in range(steps)
        for rank in range(ranks)
    ] + [dlab.Event(0.0, 0, "knob", {"name": "lr", "default": 0.1})]


def test_a_line_per_rank_with_the_logged_losses_and_labels_on_both_axes():
    figure = LossCurves(_events()).figure()
    (axes,) = figure.axes
    raw = [line for line in axes.lines if line.get_alpha() == 0.25]
    assert len(raw) == 2
    for rank, line in enumerate(raw):
        assert np.array_equal(line.get_xdata(), np.arange(50))
        assert np.allclose(line.get_ydata(), 2.0 / (np.arange(50) + 1) + rank)
    assert axes.get_xlabel() == "step" and "loss" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1"]


def test_the_running_mean_is_the_mean_of_the_last_twenty():
    values = tuple(np.random.default_rng(0).normal(size=70))
    plain = [np.mean(values[max(0, end - 20) : end]) for end in range(1, 71)]
    assert np.allclose(_running_mean(values), plain)


def test_a_still_has_alt_text_a_picture_and_text_for_the_terminal():
    bundle = LossCurves(_events()).bundle()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    (alt,) = re.findall(r'alt="([^"]+)"', bundle["text/html"])
    assert "2 ranks" in alt and "rank 1 1.04" in alt
    assert re.search(r"rank 1 +50 steps +3\.000 → 1\.040  █[▁-█]+▁", bundle["text/plain"])


def test_no_loss_yet_is_said_and_drawn_without_an_error():
    view = LossCurves([])
    assert "no rank has logged a loss" in str(view)
    assert isinstance(view.figure(), Figure)


def test_the_same_picture_from_saved_events(tmp_path):
    from dlab.events import save_events

    save_events(_events(), tmp_path / "run.jsonl")
    assert str(LossCurves(dlab.load_events(tmp_path / "run.jsonl"))) == str(LossCurves(_events()))


def test_source_is_shown_as_it_is_in_the_package():
    import inspect

    source = dlab.show_source(LossCurves.figure)
    assert repr(source) == inspect.getsource(LossCurves.figure).rstrip()
    assert source._repr_markdown_().startswith("```python\n")


class _Recorded:
    """A run that gets on by one event whenever it is asked, for a display that is not there."""

    name, ranks = "train", 2

    def __init__(self):
        self.asked = 0

    @property
    def events(self):
        self.asked += 1
        return _events()[: self.asked * 20]

    @property
    def done(self):
        return self.asked >= 5

    @property
    def state(self):
        return "finished" if self.done else "running"


def test_the_live_view_ends_with_its_run_on_the_complete_picture(monkeypatch):
    shown = []
    monkeypatch.setattr("dlab.views.live.PERIOD", 0.01)
    monkeypatch.setattr("dlab.views.live.DisplayHandle.display", lambda self, data, raw: shown.append(data))
    monkeypatch.setattr("dlab.views.live.DisplayHandle.update", lambda self, data, raw: shown.append(data))
    run = _Recorded()
    thread = show_live(run)
    thread.join(10)
    assert not thread.is_alive()
    assert shown[0]["text/plain"].startswith("train: running")
    assert shown[-1]["text/plain"].startswith("train: finished")
    assert len(shown) >= 3
