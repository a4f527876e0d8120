"""Views draw events and nothing else: the same figure from a live run and from a file."""

import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

import dlab
from dlab.views import LossCurves
from dlab.views.curves import _running_mean
from dlab.views.page import pack, write_page


def _events(ranks=2, steps=50):
    return [
        dlab.Event(float(step), rank, "log", {"step": step, "loss": 2.0 / (step + 1) + rank})
        for step in range(steps)
        for rank in range(ranks)
    ] + [dlab.Event(0.0, 0, "knob", {"name": "lr", "default": 0.1})]


def test_a_line_per_rank_with_the_logged_losses_and_labels_on_both_axes():
    figure = LossCurves(_events()).figure()
    (axes,) = figure.axes
    raw = [line for line in axes.lines if line.get_alpha() == 0.4]
    assert len(raw) == 2
    for rank, line in enumerate(raw):
        assert np.array_equal(line.get_xdata(), np.arange(50))
        assert np.allclose(line.get_ydata(), 2.0 / (np.arange(50) + 1) + rank)
    assert axes.get_xlabel() == "step" and "loss" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1", "mean"]


@pytest.mark.parametrize(("length", "most"), [(7, 0), (70, 3), (500, 10)])
def test_the_running_mean_reaches_as_far_to_the_left_as_to_the_right(length, most):
    values = tuple(np.random.default_rng(0).normal(size=length))
    reach = [min(most, place, length - 1 - place) for place in range(length)]
    plain = [np.mean(values[place - far : place + far + 1]) for place, far in enumerate(reach)]
    assert np.allclose(_running_mean(values), plain)
    line = np.linspace(3, 1, length)
    assert np.allclose(_running_mean(line), line)  # a straight line stays where it is


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


def test_the_mean_is_the_mean_over_ranks_of_each_step():
    (*_, (name, mean)) = LossCurves(_events()).lines()
    assert name == "mean"
    assert np.allclose([loss for _, loss, _ in mean], 2.0 / (np.arange(50) + 1) + 0.5)


def test_several_runs_are_compared_by_their_means_and_by_time():
    slow = [event._replace(time=10 * event.time) for event in _events()]
    view = LossCurves({"quick": _events(), "slow": slow}, by="time")
    assert [name for name, _ in view.lines()] == ["quick", "slow"]
    (axes,) = view.figure().axes
    assert "seconds" in axes.get_xlabel()
    ends = [curve[-1][2] for _, curve in view.lines()]
    assert ends == [49.0, 490.0]


def test_by_time_a_slow_rank_does_not_hold_up_the_mean():
    """The truth: sort all losses by time, whoever told them, and take the mean of each two."""
    events = [
        dlab.Event(float(step * (1 + 9 * rank)), rank, "log", {"step": step, "loss": 10.0 - step})
        for rank in range(2)
        for step in range(10)
    ]
    told = sorted(events, key=lambda event: event.time)
    pairs = [told[place : place + 2] for place in range(0, 20, 2)]
    (*_, (_, mean)) = LossCurves(events, by="time").lines()
    assert np.allclose(mean[:, 2], [sum(event.time for event in pair) / 2 for pair in pairs])
    assert np.allclose(mean[:, 1], [sum(event.data["loss"] for event in pair) / 2 for pair in pairs])
    by_step, data = LossCurves(events), LossCurves(events).data()
    assert np.allclose(data["curves"][-1]["timely"]["time"], mean[:, 2])
    assert np.allclose(data["curves"][-1]["time"], by_step.lines()[-1][1][:, 2])


def test_drawn_by_something_else_is_refused():
    with pytest.raises(ValueError, match="by 'step' or by 'time'"):
        LossCurves([], by="epoch")


def test_events_one_by_one_make_the_same_view_as_all_at_once():
    view = LossCurves()
    for event in _events():
        view.add([event])
    assert str(view) == str(LossCurves(_events()))


def test_what_goes_to_the_browser_is_thinned_out_and_keeps_its_values():
    data = LossCurves(_events(ranks=4, steps=25_000)).data()
    assert [curve["name"] for curve in data["curves"]] == ["rank 0", "rank 1", "rank 2", "rank 3", "mean"]
    for rank, curve in enumerate(data["curves"][:4]):
        assert 300 < len(curve["step"]) <= 600
        assert np.allclose(curve["loss"], 2.0 / (curve["step"] + 1) + rank)
    assert np.allclose(data["curves"][4]["loss"], 2.0 / (data["curves"][4]["step"] + 1) + 1.5)


def test_packing_keeps_every_number():
    text, buffers = pack(LossCurves(_events()).parts)
    (part,) = json.loads(text)
    packed = part["data"]["curves"][1]["loss"]
    assert packed["type"] == "float32"
    assert np.allclose(np.frombuffer(buffers[packed["buffer"]], np.float32), 2.0 / (np.arange(50) + 1) + 1)


def test_a_saved_page_is_one_file_that_needs_nothing_else(tmp_path):
    LossCurves(_events()).save_html(tmp_path / "loss.html")
    page = (tmp_path / "loss.html").read_text()
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?://|src=|import\s", page)


def test_nothing_in_the_data_can_end_the_script():
    page = write_page(LossCurves({"</script><b>": _events()[:2], "x": _events()[:2]}).parts, "</title>")
    assert page.count("</script>") == 1 and page.count("</title>") == 1
