"""The view of messages: every recorded message is an arrow of its step, and the counts are those of the formula."""

import re

import ipywidgets
import pytest
import torch
from matplotlib.patches import Circle, FancyArrowPatch

import dlab
from dlab import collectives, cost
from dlab.views import Messages
from dlab.views.messages import _bend, _size

ALGORITHMS = ["naive", "tree", "ring", "halving_doubling", "hierarchical"]


def record(algorithm, ranks, elements=24, times=1):
    def work(transport):
        for _ in range(times):
            getattr(collectives, f"{algorithm}_allreduce")(torch.ones(elements), transport)

    return Messages(dlab.rehearse(work, ranks).messages)


def arrows(axes):
    return [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_it_counts_what_the_formula_says_and_draws_an_arrow_per_message(algorithm, ranks):
    view, formula = record(algorithm, ranks), cost.allreduce(algorithm, ranks, 4 * 24)
    assert (view.messages, len(view.steps), view.bytes_per_rank) == (
        *(formula.messages, formula.steps),
        formula.bytes_per_rank,
    )
    drawn = [len(arrows(axes)) for axes in view.figure().axes]
    assert sum(drawn) == formula.messages and len(drawn) == formula.steps
    (axes,) = view.figure(0).axes
    assert len(arrows(axes)) == drawn[0]
    assert sum(isinstance(patch, Circle) for patch in axes.patches) == ranks


@pytest.mark.parametrize(
    ("algorithm", "ranks", "phases"),
    [
        ("ring", 4, [("reduce-scatter", 3), ("all-gather", 3)]),
        ("tree", 7, [("reduce", 3), ("broadcast", 3)]),
        ("halving_doubling", 7, [("fold", 1), ("halve", 2), ("double", 2), ("unfold", 1)]),
        ("hierarchical", 7, [("reduce", 1), ("reduce-scatter", 3), ("all-gather", 3), ("broadcast", 1)]),
    ],
)
def test_steps_are_in_the_order_of_the_run_however_the_threads_took_turns(algorithm, ranks, phases):
    expected = [(phase, step) for phase, count in phases for step in range(count)]
    for _ in range(20):
        assert record(algorithm, ranks).steps == expected
    assert record(algorithm, ranks, times=3).steps == 3 * expected


def test_the_picture_of_a_step_names_its_phase_and_its_bytes():
    (axes,) = record("ring", 4).figure(1).axes
    assert axes.get_title() == "reduce-scatter, step 2 of 3"
    words = [text.get_text() for text in axes.texts]
    assert sorted(words) == ["0", "1", "2", "24 B", "24 B", "24 B", "24 B", "3"]
    (axes,) = record("ring", 7, elements=7 * 512).figure(0).axes  # too many to be read at every arrow
    assert [text.get_text() for text in axes.texts][-1] == "2 KiB each"


def test_arrows_go_from_source_to_destination():
    (axes,) = record("tree", 4).figure(1).axes  # 2 → 0: from the bottom to the top
    (arrow,) = arrows(axes)
    start, _, end, *_ = arrow.get_path().vertices
    assert start[1] < -0.7 and end[1] > 0.7
    busy = {patch.get_facecolor() for patch in axes.patches if isinstance(patch, Circle)}
    assert len(busy) == 2, "ranks 1 and 3 rest, and look like it"


def test_two_arrows_between_the_same_ranks_do_not_lie_on_each_other():
    for ranks in range(2, 10):
        for hop in range(1, ranks):
            # the bend is to the right of the way; the way back has its right on the other side
            assert _bend(hop, ranks) != -_bend(-hop, ranks)


def test_the_text_has_a_line_per_step():
    assert str(record("ring", 4, elements=16)).splitlines() == [
        *(f"reduce-scatter {step}   0→1 1→2 2→3 3→0   16 B each" for step in range(3)),
        *(f"all-gather {step}       0→1 1→2 2→3 3→0   16 B each" for step in range(3)),
        "24 messages in 6 steps, each rank sends 96 B",
    ]
    assert str(record("ring", 3, elements=4)).splitlines()[0] == "reduce-scatter 0   0→1 (4 B) 1→2 (8 B) 2→0 (4 B)"
    assert str(record("tree", 4, elements=16)).splitlines()[1] == "reduce 1      2→0   64 B"
    assert str(record("tree", 4, elements=16)).splitlines()[-1] == "6 messages in 4 steps, a rank sends 64 B to 128 B"


def test_a_still_has_alt_text_a_picture_and_text_for_the_terminal():
    bundle = record("tree", 4, elements=16).bundle()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    (alt,) = re.findall(r'alt="([^"]+)"', bundle["text/html"])
    assert alt.startswith("Ranks 0 to 3 on a circle, an arrow per message. Reduce, step 1 of 2: 1→0 3→2, 64 B each. ")
    assert "Broadcast, step 1 of 2: 0→2, 64 B. " in alt and "6 messages in 4 steps" in alt


def test_no_messages_are_said_and_drawn_without_an_error():
    view = Messages([dlab.Event(0.0, 0, "log", {"loss": 1.0})])
    assert (view.steps, view.messages, view.bytes_per_rank) == ([], 0, [])
    assert str(view) == "no messages were recorded" and "none" in view.alt
    assert view.figure().axes == []
    view.replay()


def test_messages_without_labels_are_told_apart_when_they_repeat():
    def work(transport):
        mine, other = torch.ones(1), torch.ones(1)
        for _ in range(3):
            transport.exchange(mine, (transport.rank + 1) % 3, other, (transport.rank - 1) % 3)

    view = Messages(dlab.rehearse(work, ranks=3).messages)
    assert view.steps == [("", 0), ("", 1), ("", 2)]
    assert view.figure(2).axes[0].get_title() == "step 3 of 3"
    assert str(view).splitlines()[1] == "1   0→1 1→2 2→0   4 B each"


def test_a_long_run_is_cut_and_says_so():
    view = record("ring", 4, times=10)
    assert len(view.steps) == 60
    assert view.figure(7).axes[0].get_title() == "round 2, reduce-scatter, step 2 of 3"
    figure = view.figure()
    assert len(figure.axes) == 24 and figure.get_suptitle() == "the first 24 of 60 steps"
    assert str(view).splitlines()[24:] == ["… 36 more steps", "240 messages in 60 steps, each rank sends 1.4 KiB"]


@pytest.mark.parametrize("step", [-1, 6])
def test_a_step_that_is_not_there_gets_a_sentence(step):
    with pytest.raises(IndexError, match="this run has 6, counted from 0"):
        record("ring", 4).figure(step)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (20 << 20, "20 MiB"), (5 << 40, "5120 GiB")],
)
def test_sizes_are_short(count, words):
    assert _size(count) == words


def test_the_slider_and_the_play_button_choose_the_picture(monkeypatch):
    shown = []
    monkeypatch.setattr("ipywidgets.jslink", ipywidgets.link)  # the same link, but one that works without a browser
    monkeypatch.setattr("dlab.views.messages.display", shown.append)
    view = record("ring", 4)
    box = view.replay()
    controls, stack = box.children
    assert "a slider here" in box._repr_mimebundle_()["text/plain"]
    assert shown == [view], "the strip stays where no widget can be shown"
    play, slider = controls.children
    assert (slider.min, slider.max, play.min, play.max) == (0, 5, 0, 5)
    titles = [re.findall(r'alt="([^:]+):', picture.value)[0] for picture in stack.children]
    assert titles == [
        *(f"Reduce-scatter, step {step} of 3" for step in (1, 2, 3)),
        *(f"All-gather, step {step} of 3" for step in (1, 2, 3)),
    ]
    for chosen, control in [(4, slider), (2, play), (0, slider)]:
        control.value = chosen
        assert (slider.value, stack.selected_index) == (chosen, chosen)
