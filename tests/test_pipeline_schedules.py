"""Schedules as data: orders as PyTorch makes them, times, bubbles and peaks as published, text, CSV and pictures."""

import pickle
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from torch.distributed.pipelining import schedules as pytorch

import dlab
from dlab.pipeline import Action
from dlab.views.exploring import explore

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb1p", "zbv")


def made(kind, ranks, microbatches, virtual=1):
    """The rows that a schedule of PyTorch computes, without the stages that it would run."""
    schedule = kind.__new__(kind)
    rounds = max(1, microbatches // ranks)
    vars(schedule).update(
        pp_group_size=ranks,
        n_local_stages=virtual,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
        num_stages=ranks * virtual,
        _num_stages=ranks * virtual,
        _n_microbatches=microbatches,
    )
    if hasattr(schedule, "_calculate_single_rank_operations"):
        rows = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        rows = schedule._get_pipeline_order().values()
    return [[str(action) for action in row if action is not None and action.is_compute_op] for row in rows]


# ------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 4), (4, 8), (4, 10), (8, 16), (3, 5)])
@pytest.mark.parametrize(
    ("name", "kind", "virtual"),
    [
        ("gpipe", pytorch.ScheduleGPipe, 1),
        ("interleaved", pytorch.ScheduleInterleaved1F1B, 2),
        ("interleaved", pytorch.ScheduleInterleaved1F1B, 3),
        ("zb1p", pytorch.ScheduleInterleavedZeroBubble, 1),
        ("zb1p", pytorch.ScheduleInterleavedZeroBubble, 2),
        ("zb1p", pytorch.ScheduleInterleavedZeroBubble, 3),
        ("zbv", pytorch.ScheduleZBVZeroBubble, 2),
    ],
)
def test_the_order_is_that_of_pytorch(name, kind, virtual, ranks, microbatches):
    schedule = dlab.schedule(name, ranks, microbatches, virtual)
    assert [list(row) for row in schedule.rows] == made(kind, ranks, microbatches, virtual)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (3, 5)])
def test_1f1b_is_that_of_pytorch_but_for_its_known_error(ranks, microbatches):
    """PyTorch 2.13 prints the forwards of the last rank with numbers that are one too high."""
    rows = [list(row) for row in dlab.schedule("1f1b", ranks, microbatches).rows]
    *others, last = made(pytorch.Schedule1F1B, ranks, microbatches)
    assert rows[:-1] == others
    wrong = [
        f"{action.stage}F{action.microbatch + 1}" if action.kind == "F" else action for action in map(Action, rows[-1])
    ]
    assert last == wrong and rows[-1][:4] == [f"{ranks - 1}{each}" for each in ("F0", "B0", "F1", "B1")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 10))
def test_pytorch_finds_that_every_schedule_can_run(name, ranks, microbatches):
    """Its own check adds the messages and simulates them; it raises if nobody can go on."""
    for virtual in (1, 2, 3) if name in ("interleaved", "zb1p") else (1,):
        schedule = dlab.schedule(name, ranks, microbatches, virtual)
        rows = {rank: [pytorch._Action.from_str(each) for each in row] for rank, row in enumerate(schedule.rows)}
        with_messages = pytorch._add_send_recv(rows, schedule.rank_of, schedule.stages)
        simulated = pytorch._simulate_comms_compute(with_messages, schedule.rank_of, schedule.stages)
        assert all(len(row) for row in simulated.values())


def test_stages_are_where_the_schedule_says():
    interleaved, v = dlab.schedule("interleaved", 4, 8, virtual=2), dlab.schedule("zbv", 4, 8)
    assert [interleaved.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [v.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert v.rank_of(7) == 0 and (v.ranks, v.stages, v.virtual, v.microbatches) == (4, 8, 2, 8)
    assert dlab.schedule("interleaved", 3, 5) == dlab.schedule("1f1b", 3, 5) != dlab.schedule("gpipe", 3, 5)


def test_naive_has_one_micro_batch_on_its_way():
    assert dlab.schedule("naive", 2, 2).rows == (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


# ------------------------------------------------------------------------------------- times, bubbles, memory

MAKESPANS = {
    (2, 4): (15, 15, 13.5, 12.5, 12.5),
    (4, 4): (21, 21, 16.5, 13.5, 15),
    (4, 8): (33, 33, 28.5, 25.5, 25.5),
    (4, 10): (39, 39, 34.5, 31.5, 31.5),
}


@pytest.mark.parametrize("size", MAKESPANS)
def test_makespans_are_the_published_ones(size):
    kinds = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 2), ("zbv", 1)]
    found = tuple(dlab.schedule(name, *size, virtual).makespan(forward=1, backward=2) for name, virtual in kinds)
    assert found == MAKESPANS[size]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 8, 24])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (2, 3), (1, 0)])
def test_makespans_follow_the_formulas(p, m, forward, backward):
    both = forward + backward
    times = {"forward": forward, "backward": backward}
    for name in ("gpipe", "1f1b"):
        assert dlab.schedule(name, p, m).makespan(**times) == both * (m + p - 1)
    assert dlab.schedule("naive", p, m).makespan(**times) == both * m * p
    if m % p == 0:
        for v in (1, 2, 4):
            assert dlab.schedule("interleaved", p, m, v).makespan(**times) == both * m + both * (p - 1) / v


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 10), (8, 32)])
@pytest.mark.parametrize("weight", [0.5, 0.75, 1.0])
def test_the_bubble_of_zb1p_is_that_of_its_paper(p, m, weight):
    """(p-1)(F+B-2W), where B is the whole backward."""
    makespan = dlab.schedule("zb1p", p, m).makespan(forward=1, backward=2, weight=weight)
    assert makespan - 3 * m == pytest.approx((p - 1) * (1 + 2 - 2 * weight))


def test_a_1f1b_pipeline_takes_2_m_p_1_steps_and_half_of_that_for_inference():
    schedule = dlab.schedule("1f1b", 4, 8)
    assert schedule.makespan(forward=1, backward=1) == 2 * (8 + 4 - 1)
    assert schedule.makespan(forward=1, backward=0) == 8 + 4 - 1


def test_bubbles_are_the_published_ones_in_both_conventions():
    assert dlab.schedule("1f1b", 8, 1).bubble == 7.0
    assert dlab.schedule("1f1b", 8, 32).bubble == 0.21875
    interleaved = dlab.schedule("interleaved", 8, 32, virtual=8)
    assert interleaved.bubble == pytest.approx(0.02734, abs=5e-6)
    assert interleaved.idle_share == pytest.approx(interleaved.bubble / (1 + interleaved.bubble))
    assert dlab.schedule("naive", 4, 8).idle_share == 0.75


def test_peaks_are_the_published_ones():
    peaks = {name: dlab.schedule(name, 4, 8, 2 if name == "interleaved" else 1).peak_activations for name in NAMES}
    assert peaks["gpipe"] == [8, 8, 8, 8] and peaks["1f1b"] == [4, 3, 2, 1]
    assert peaks["interleaved"] == [11, 9, 7, 5] and peaks["zbv"] == [8, 8, 8, 8]
    assert peaks["naive"] == [1, 1, 1, 1] and peaks["zb1p"] == [4, 4, 4, 4]
    forwards_first = [
        [f"{s}{kind}{m}" for kind in "FB" for s in (rank, rank + 4) for m in range(8)] for rank in range(4)
    ]
    breadth_first = [row[:16] + row[24:] + row[16:24] for row in forwards_first]
    assert dlab.Schedule(breadth_first).peak_activations == [16] * 4


def test_slots_are_in_time_and_nobody_does_two_things_at_once():
    schedule = dlab.schedule("zbv", 3, 7)
    slots = schedule.slots(forward=1.5, backward=2.5)
    assert [slot.start for slot in slots] == sorted(slot.start for slot in slots)
    for rank in range(3):
        own = [slot for slot in slots if slot.rank == rank]
        assert tuple(slot.action for slot in own) == schedule.rows[rank]
        assert all(one.end <= other.start for one, other in pairwise(own))
    ends = {slot.action: slot.end for slot in slots}
    for slot in slots:
        if slot.action.kind == "F" and slot.action.stage:
            assert ends[f"{slot.action.stage - 1}F{slot.action.microbatch}"] <= slot.start
    with pytest.raises(ValueError, match="forward=-1: an action takes a time from 0 on"):
        schedule.makespan(forward=-1)


def test_stages_of_different_sizes_share_the_time_of_their_rank():
    """Three stages on two ranks: each takes two thirds of what a stage per rank would take."""
    schedule = dlab.Schedule([["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]])
    assert schedule.virtual == 2 and schedule.makespan() == pytest.approx(6.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb1p", 2), ("zbv", 1)])
def test_large_schedules_are_planned_in_about_a_second(name, virtual):
    begun = time.process_time()
    schedule = dlab.schedule(name, 64, 512, virtual)
    planned = time.process_time() - begun
    assert planned < 6, f"{planned:.1f} s"  # 0.3 to 1.5 s on an idle core
    assert schedule.makespan() >= 3 * 512


# ------------------------------------------------------------------------------------- what one asks for


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "2f2b"}, "there is no schedule '2f2b': use 'naive', 'gpipe', '1f1b', 'interleaved', 'zb1p', 'zbv'"),
        ({"name": "1f1b", "stages": 0}, "stages=0: a schedule has a whole number of stages from 1 on"),
        ({"name": "1f1b", "microbatches": 2.5}, "microbatches=2.5: a schedule has a whole number"),
        ({"name": "1f1b", "virtual": 2}, "virtual=2: 1f1b has one stage per rank; 'interleaved' and 'zb1p' can have"),
        ({"name": "zbv", "virtual": 3}, "virtual=3: zbv has two stages per rank"),
    ],
)
def test_what_is_not_there_is_refused(arguments, words):
    with pytest.raises(ValueError) as problem:
        dlab.schedule(**arguments)
    assert words in str(problem.value)


# ------------------------------------------------------------------------------------- actions


def test_an_action_is_its_text_and_knows_its_parts():
    action = Action(" 12SEND_B03 ")
    assert action == "12SEND_B3" and (action.stage, action.kind, action.microbatch) == (12, "SEND_B", 3)
    assert action.partner == "11RECV_B3" and Action("1SEND_F0").partner == "2RECV_F0"
    assert all(
        Action(Action(text).partner).partner == text for text in ("1SEND_F0", "1RECV_F0", "1SEND_B0", "1RECV_B0")
    )
    copy = pickle.loads(pickle.dumps(action))
    assert copy == action and copy.microbatch == 3
    for wrong in ("F0", "2F", "2f0", "2X0", "-1F0", "", "2F0 2B0", "٢F0", None, 7):
        with pytest.raises(ValueError, match="is no action: write the number of the stage, what it does"):
            Action(wrong)


# ------------------------------------------------------------------------------------- text and CSV


def test_the_grid_shows_time_from_left_to_right():
    assert str(dlab.schedule("1f1b", 2, 3)).splitlines() == [
        "rank 0  0F0 0F1 ·   ·   0B0     0F2 0B1     ·   0B2",
        "rank 1  ·   1F0 1B0     1F1 1B1     1F2 1B2     ·   ·",
    ]
    words = repr(dlab.schedule("zb1p", 2, 3)).splitlines()
    assert words[0] == (
        "zb1p: 2 ranks, 2 stages, 3 micro-batches: makespan 10 (F=1, B=2), bubble 0.1111, peak activations 2, 2"
    )
    assert "1 rank, 1 stage, 1 micro-batch:" in repr(dlab.schedule("gpipe", 1, 1))


def test_a_long_grid_is_cut_where_a_notebook_shows_it():
    schedule = dlab.schedule("1f1b", 64, 100)
    lines = repr(schedule).splitlines()
    assert len(lines) <= 19 and max(map(len, lines)) < 140 and "… 48 more ranks" in lines
    assert len(str(schedule).splitlines()) == 64


def test_csv_is_read_as_it_is_written(tmp_path):
    schedule = dlab.schedule("zbv", 3, 5)
    assert dlab.Schedule.from_csv(schedule.csv()) == schedule
    assert schedule.csv().splitlines()[0] == ",".join(schedule.rows[0])
    path = tmp_path / "schedule.csv"
    path.write_text("\ufeff0F0, 0F1,,,0B0 ,,0B1\r\n,1F0,1B0,,1F1,1B1,\r\n\r\n", encoding="utf-8")
    read = dlab.Schedule.from_csv(path)
    assert read.rows == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
    assert dlab.Schedule.from_csv(str(path)) == read
    with pytest.raises(ValueError, match="row 1, column 2: 1B0 comes before 1F0"):
        dlab.Schedule.from_csv("0F0,0B0\n,,1B0,1F0\n")


def test_pytorch_reads_the_csv():
    runner = SimpleNamespace(pipeline_order={}, pp_group_size=4)
    schedule = dlab.schedule("zb1p", 4, 8)
    for rank, line in enumerate(schedule.csv().splitlines()):
        runner.pipeline_order[rank] = [pytorch._Action.from_str(cell) for cell in line.split(",")]
    pytorch._validate_schedule(runner.pipeline_order, runner.pp_group_size, 4, 8)


# ------------------------------------------------------------------------------------- pictures


def words_in(figure):
    FigureCanvasAgg(figure).draw()
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def test_the_figure_has_labels_a_legend_and_axes_with_names():
    found = words_in(dlab.schedule("interleaved", 4, 4, virtual=2).figure())
    assert {"F: forward", "B: backward", "bubble: the rank waits", "lighter: a later stage of the rank"} <= {*found}
    assert (
        "rank (its stages)" in found and "0 (0, 4)" in found and "time: 1 is a forward of all stages of a rank" in found
    )
    assert sum(each == "3F2" for each in found) == 1
    assert "I: backward, inputs" not in found and "I: backward, inputs" in words_in(dlab.schedule("zb1p").figure())


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 2, 3), ("zbv", 4, 16), ("1f1b", 16, 16), ("zb1p", 16, 64), ("gpipe", 64, 64)],
)
def test_labels_lie_in_their_boxes(name, ranks, microbatches):
    figure = dlab.schedule(name, ranks, microbatches).figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    boxes = [path.get_extents() for path in axes.collections[1].get_paths()]
    assert len(boxes) == 2 * ranks * microbatches * (
        1 if name in ("1f1b", "gpipe") else 1.5 * (2 if name == "zbv" else 1)
    )
    places = axes.transData
    for label in axes.texts:
        extent, middle = label.get_window_extent(canvas.get_renderer()), label.get_position()
        (box,) = [each for each in boxes if each.contains(*middle)]
        (left, bottom), (right, top) = sorted([tuple(places.transform(each)) for each in (box.min, box.max)])
        assert left - 1 <= extent.x0 and extent.x1 <= right + 1, label.get_text()
        assert min(bottom, top) - 1 <= extent.y0 and extent.y1 <= max(bottom, top) + 1, label.get_text()
    assert figure.get_figwidth() <= 13 and figure.get_figheight() < 11


def test_a_notebook_shows_chart_and_table():
    html = dlab.schedule("1f1b", 4, 8)._repr_html_()
    assert '<img alt="Chart of the schedule 1f1b: 4 ranks, 4 stages, 8 micro-batches: makespan 33 (F=1, B=2)' in html
    cells = [cell.split(">", 1)[1] for cell in html.split("<td ")[1:]]
    assert [cell.split("<")[0] for cell in cells[:5]] == ["0", "0", "24", "9", "4"]
    assert "<b>" not in dlab.Schedule([["0F0", "0B0"]], name="<b>")._repr_html_()


def test_an_explorer_changes_chart_bubble_and_memory_at_once():
    def show(schedule, stages, microbatches, virtual):
        return dlab.schedule(schedule, stages, microbatches, virtual)

    explorer = explore(show, schedule=NAMES[1:], stages=[2, 4, 8], microbatches=[4, 8], virtual=[1, 2])
    assert "bubble 0.25, peak activations 4, 4" in explorer.text
    before = explorer._bundle()["text/html"]
    explorer.choose(schedule="1f1b", stages=4, microbatches=8)
    assert "bubble 0.375, peak activations 4, 3, 2, 1" in explorer.text
    after = explorer._bundle()["text/html"]
    assert before.count("<img") == after.count("<img") == 1 and before != after
    explorer.choose(virtual=2)
    assert explorer.text.endswith("virtual=2: 1f1b has one stage per rank; 'interleaved' and 'zb1p' can have more")
    explorer.choose(schedule="interleaved")
    assert "bubble 0.1875, peak activations 11, 9, 7, 5" in explorer.text
