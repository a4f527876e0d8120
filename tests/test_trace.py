"""A trace has the slices, arrows and counters that the events tell of, in a form that viewers open."""

import json
import math
import time
from collections import defaultdict

import pytest
import torch

import dlab
from dlab.collectives import ring_allreduce
from dlab.trace import LANES, save_trace, trace


def entries(events, *, ph):
    return [entry for entry in trace(events) if entry["ph"] == ph]


def test_a_step_is_its_delay_its_compute_and_its_wait_one_after_another():
    told = dlab.Event(100.0, 2, "log", {"step": 7, "loss": 0.5, "delay": 0.1, "compute": 0.25, "wait": 0.05})
    slices = entries([told], ph="X")
    assert [(each["name"], each["ts"], each["dur"]) for each in slices] == [
        ("delay", 0.0, pytest.approx(1e5)),
        ("compute", pytest.approx(1e5), pytest.approx(2.5e5)),
        ("wait", pytest.approx(3.5e5), pytest.approx(5e4)),
    ]
    assert all(each["pid"] == 2 and each["args"]["step"] == 7 for each in slices)
    (counter,) = entries([told], ph="C")
    assert counter["args"] == {"loss": 0.5} and counter["ts"] == pytest.approx(4e5)


def test_every_message_is_a_slice_of_its_sender_and_an_arrow_to_its_receiver():
    messages = dlab.rehearse(lambda transport: ring_allreduce(torch.ones(8), transport), ranks=4).messages
    slices, begins, ends = (entries(messages, ph=kind) for kind in "Xsf")
    assert len(slices) == len(begins) == len(ends) == len(messages) == 24
    assert {each["name"] for each in slices} == {"reduce-scatter", "all-gather"}
    arrows = defaultdict(list)
    for each in [*begins, *ends]:
        arrows[each["id"]].append(each)
    assert sorted((begin["pid"], end["pid"]) for begin, end in arrows.values()) == sorted(
        (message.data["source"], message.data["destination"]) for message in messages
    )
    assert all(begin["ts"] <= end["ts"] for begin, end in arrows.values())
    assert all(each["args"]["bytes"] == 8 for each in slices)


def test_collectives_of_a_sort_have_a_lane_of_their_own_and_say_how_many_they_are():
    """On one lane viewers want slices that are apart or within each other; sums of two sorts may overlap anyhow."""
    told = {"name": "all-reduce", "algorithm": "shared memory", "count": 1, "bytes": 64, "seconds": 0.5}
    line = told | {"name": "all-gather", "count": 7, "group": [0, 2], "axis": "dp"}
    events = [
        dlab.Event(101.0, 0, "collective", told | {"start": 100.0, "end": 100.5}),
        dlab.Event(102.0, 2, "collective", line | {"start": 100.25, "end": 101.25}),
        dlab.Event(103.0, 2, "collective", line | {"start": 103.0, "end": 103.5, "axis": ""}),
        dlab.Event(104.0, 2, "collective", line | {"start": None, "end": 103.5}),
    ]
    slices = entries(events, ph="X")
    assert [(each["pid"], each["name"], each["ts"], each["dur"]) for each in slices] == [
        (0, "all-reduce", 0.0, 5e5),
        (2, "all-gather × 7", 2.5e5, 1e6),
        (2, "all-gather × 7", 3e6, 5e5),
    ]
    lanes = {each["tid"]: each["args"]["name"] for each in entries(events, ph="M") if "tid" in each}
    assert [lanes[each["tid"]] for each in slices] == ["all-reduce", "all-gather within dp", "all-gather within 0, 2"]
    assert slices[1]["args"]["group"] == "0, 2" and slices[0]["args"]["bytes"] == 64


def test_ranks_and_lanes_have_names_and_times_begin_at_zero():
    found = trace(
        [dlab.Event(5.0, 1, "log", {"compute": 0.1}), dlab.Event(6.0, 0, "state", {"state": "dead", "why": "x"})]
    )
    names = {(each["pid"], each["name"]): each["args"] for each in found if each["ph"] == "M" and "tid" not in each}
    assert names[0, "process_name"] == {"name": "rank 0"} and names[1, "process_name"] == {"name": "rank 1"}
    assert [each["args"]["name"] for each in found if each["name"] == "thread_name"] == [*LANES] * 2
    assert min(each["ts"] for each in found if "ts" in each) == 0
    (state,) = [each for each in found if each["ph"] == "i"]
    assert (state["name"], state["args"]) == ("dead", {"why": "x"})


@pytest.mark.parametrize("value", [math.nan, math.inf, "much", None, [1]])
def test_what_is_no_number_is_left_out(value, tmp_path):
    events = [
        dlab.Event(1.0, 0, "log", {"step": value, "loss": value, "compute": value}),
        dlab.Event(2.0, 0, "message", {"start": value, "end": 2.0, "source": 0, "destination": 1}),
        dlab.Event(3.0, 0, "a kind of one's own", {"x": value}),
    ]
    save_trace(events, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_a_run_writes_what_it_has_told(cluster, tmp_path):
    def fn():
        for step in range(3):
            ring_allreduce(torch.ones(4), dlab.transport())
            dlab.allreduce(torch.ones(4))
            time.sleep(0.02)
            dlab.log(step=step, loss=1.0, compute=0.01, wait=0.001)

    run = cluster.start(fn)
    run.wait(60)
    run.save_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counted = defaultdict(int)
    for each in found:
        counted[each["ph"], each["name"]] += 1
    assert counted["X", "compute"] == counted["X", "wait"] == 6
    assert counted["X", "reduce-scatter"] == counted["s", "reduce-scatter"] == counted["f", "reduce-scatter"] == 6
    assert counted["X", "all-reduce"] == 6, "each by itself, since they are far apart"
    assert counted["i", "returned"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
