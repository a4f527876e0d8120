"""The chart of a pipeline: the plan above what was measured, in one unit, with the bubble measured and by formula."""

import pytest
from drawn import pipelined
from matplotlib.backends.backend_agg import FigureCanvasAgg

import dlab
from dlab.views import PipelineChart
from dlab.views.panel import Panel
from dlab.views.usable import usable


def spans(axes):
    """From when to when each lane of a part has boxes, by lane."""
    found = {}
    for path in axes.collections[1].get_paths():
        box = path.get_extents()
        lane = round((box.y0 + box.y1) / 2)
        found.setdefault(lane, []).append((box.x0, box.x1))
    return found


def busy(axes):
    return sum(end - start for boxes in spans(axes).values() for start, end in boxes)


def test_plan_and_measurement_share_one_axis_and_the_same_work():
    view = PipelineChart(pipelined(dlab.schedule("1f1b", 4, 8), late=0.5))
    figure = view.figure()
    FigureCanvasAgg(figure).draw()
    planned, measured = figure.axes
    assert planned.get_shared_x_axes().joined(planned, measured) and planned.get_xlim() == measured.get_xlim()
    assert busy(planned) == pytest.approx(busy(measured))
    assert min(start for boxes in spans(measured).values() for start, _ in boxes) == 0
    assert measured.get_xlabel() == "time, ms" and [axes.get_ylabel() for axes in figure.axes] == ["rank", "rank"]
    last = [max(end for boxes in spans(axes).values() for _, end in boxes) for axes in figure.axes]
    assert last[0] < last[1]  # messages take time
    assert last[0] == pytest.approx(busy(planned) / 4 * (1 + 3 / 8))


def test_without_delays_the_measured_bubble_is_that_of_the_formula():
    schedule = dlab.schedule("interleaved", 4, 8, 2)
    exact = [
        dlab.Event(
            1.0, slot.rank, "action", {**parts(slot.action), "start": 5 + slot.start, "end": 5 + slot.end, "step": 0}
        )
        for slot in schedule.slots()
    ]
    view = PipelineChart([*pipelined(schedule, steps=0), *exact])
    assert view.remark == (
        "interleaved on 4 ranks, 8 micro-batches, step 0: 28 s; "
        "bubble 0.188 measured, 0.1875 by the formula (p-1)/(v m)"
    )
    assert str(view).splitlines()[1:] == [f"rank {rank}  computes 24 s  waits 4.5 s" for rank in range(4)]
    assert view.alt == f"Chart of a pipeline, the plan above what was measured: {view.remark}."
    assert [axes.get_title(loc="left") for axes in view.figure().axes] == [
        "planned: bubble 0.1875 by the formula (p-1)/(v m)",
        "measured in step 0: bubble 0.188",
    ]


def parts(action):
    return {"action": str(action), "stage": action.stage, "microbatch": action.microbatch}


@pytest.mark.parametrize(
    ("name", "virtual", "formula"),
    [
        ("naive", 1, "3 by the formula p-1"),
        ("gpipe", 1, "0.375 by the formula (p-1)/m"),
        ("1f1b", 1, "0.375 by the formula (p-1)/m"),
        ("interleaved", 2, "0.1875 by the formula (p-1)/(v m)"),
        ("zb1p", 1, "0.125 by the formula (p-1)/(3 v m)"),
        ("zb1p", 2, "0.0625 by the formula (p-1)/(3 v m)"),
        ("zbv", 1, "0.0625 by the formula (p-1)/(6 m)"),
    ],
)
def test_each_schedule_has_its_formula(name, virtual, formula):
    view = PipelineChart(pipelined(dlab.schedule(name, 4, 8, virtual), steps=0))
    assert view.remark.endswith(f"; bubble {formula}")
    assert (
        "ms" not in str(view) and view.figure().axes[0].get_xlabel() == "time: 1 is a forward of all stages of a rank"
    )


def test_no_formula_is_told_that_gives_another_number():
    few = PipelineChart(pipelined(dlab.schedule("zbv", 4, 4), steps=0))
    assert few.remark.endswith("bubble 0.25 by the schedule")
    own = dlab.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert PipelineChart(pipelined(own, steps=0)).remark == (
        "a schedule on 2 ranks, 2 micro-batches; bubble 0.5 by the schedule"
    )


def test_the_latest_complete_step_is_shown():
    events = pipelined(dlab.schedule("1f1b", 2, 4), steps=3)
    view = PipelineChart(events[:-1])
    assert ", step 1:" in view.remark
    view.add(events[-1:])
    assert ", step 2:" in view.remark
    for step in range(3, 50):
        view.add([event._replace(data=event.data | {"step": step}) for event in events if event.data.get("step") == 2])
    assert ", step 49:" in view.remark and len(view._steps) < 10


def test_actions_without_a_plan_and_with_messages_are_drawn_too():
    events = [event for event in pipelined(dlab.schedule("gpipe", 2, 2)) if event.kind == "action"]
    send = {"action": "0SEND_F0", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1e9, "step": 2}
    view = PipelineChart([*events, dlab.Event(1.0, 0, "action", send)])
    assert view.remark.startswith("a schedule on 2 ranks, 2 micro-batches, step 2: ") and "formula" not in str(view)
    (axes,) = view.figure().axes
    assert sum(map(len, spans(axes).values())) == 8


def test_a_slow_rank_is_seen():
    figure = PipelineChart(pipelined(dlab.schedule("1f1b", 2, 4), slow=1)).figure()
    FigureCanvasAgg(figure).draw()
    planned, measured = (
        {lane: sum(end - start for start, end in boxes) for lane, boxes in spans(axes).items()} for axes in figure.axes
    )
    assert planned[0] == pytest.approx(planned[1]) and measured[1] > 2.5 * measured[0]


def test_a_crowd_is_cut_and_told():
    view = PipelineChart(pipelined(dlab.schedule("gpipe", 80, 2), steps=1))
    assert view.remark.endswith("; 64 of 80 ranks") and len(view.data()["lanes"]) == 64
    assert len(view.text().splitlines()) == 65


def test_events_that_cannot_be_drawn_are_counted():
    plan = dlab.schedule("1f1b", 1, 1).planned(0)
    told = [
        dlab.Event(1.0, 0, "schedule", plan | changed) for changed in ({"ends": [1.0]}, {"actions": ["0F0", "0Q0"]})
    ]
    told.append(
        dlab.Event(1.0, 0, "action", {"action": "later", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0})
    )
    view = PipelineChart(told)
    assert view.empty and view.missing == (
        "1 event left out: its ends are not as many as its actions; "
        "1 event left out: its actions are not a list of actions; "
        "1 event left out: its action is not an action"
    )
    assert view.text() == "no rank has told of its schedule or of an action yet"


def test_the_panel_shows_it_as_soon_as_a_run_tells_of_a_pipeline():
    class Run:
        name, ranks, servers, states, paused, done = "train", 2, 0, [], False, True

        def since(self, place):
            return [], 0

    panel = Panel(Run())
    (view,) = [each for each in panel.views if isinstance(each, PipelineChart)]
    assert view not in panel.shown
    view.add(pipelined(dlab.schedule("1f1b", 2, 2)))
    assert view in panel.shown and panel.parts[0].name == "pipeline"


def test_a_view_can_use_all_that_a_schedule_tells():
    for event in pipelined(dlab.schedule("zbv", 2, 4)):
        assert usable(event) == event
