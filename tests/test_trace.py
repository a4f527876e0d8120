"""A trace has the slices, arrows and counters that the events tell of, in a form that viewers open."""

import json
import math
import time
from collections import defaultdict

import pytest
import torch
from test_strategies import data, network

import dlab
from dlab.collectives import ring_allreduce
from dlab.trace import LANES, save_trace, trace

WORKERS, SERVERS = 4, 1
GIVEN = {"batch_size": 8, "lr": 0.05, "epochs": 5, "watch": 1}


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


def test_every_message_is_a_slice_of_its_sender_and_of_its_receiver_with_an_arrow_between_them():
    messages = dlab.rehearse(lambda transport: ring_allreduce(torch.ones(8), transport), ranks=4).messages
    slices, begins, ends = (entries(messages, ph=kind) for kind in "Xsf")
    received = [each for each in slices if each["name"].startswith("receive ")]
    slices = [each for each in slices if each not in received]
    assert len(slices) == len(received) == len(begins) == len(ends) == len(messages) == 24
    assert {each["name"] for each in slices} == {"reduce-scatter", "all-gather"}
    assert {each["name"] for each in received} == {"receive reduce-scatter", "receive all-gather"}
    arrows = defaultdict(list)
    for each in [*begins, *ends]:
        arrows[each["id"]].append(each)
    assert sorted((begin["pid"], end["pid"]) for begin, end in arrows.values()) == sorted(
        (message.data["source"], message.data["destination"]) for message in messages
    )
    assert all(begin["ts"] <= end["ts"] for begin, end in arrows.values())
    assert all(each["args"]["bytes"] == 8 for each in [*slices, *received])


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
    assert counted["X", "compute"] == counted["X", "wait"] == 12
    assert counted["X", "reduce-scatter"] == counted["s", "reduce-scatter"] == counted["f", "reduce-scatter"] == 36
    assert counted["X", "receive reduce-scatter"] == 36
    assert counted["X", "all-reduce"] == 12, "each by itself, since they are far apart"
    assert counted["i", "returned"] == 4 + 1, "the server, too"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def dropped_slices(found):
    """The slices that Perfetto drops: on their track they overlap another one, and neither is within the other."""
    tracks, dropped = defaultdict(list), []
    for each in found:
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append(each)
    for track in tracks.values():
        open_ends = []
        for each in sorted(track, key=lambda each: (nanoseconds(each["ts"]), -each["dur"])):
            start = nanoseconds(each["ts"])
            end = start + nanoseconds(each["dur"])
            open_ends = [other for other in open_ends if other > start]
            if any(other < end for other in open_ends):
                dropped.append(each)
            else:
                open_ends.append(end)
    return dropped


def dropped_arrows(found):
    """The ends of arrows that Perfetto drops: no slice of their track has begun in the file and is not over."""
    last, dropped = defaultdict(list), []
    for each in found:
        if each["ph"] == "X":
            last[each["pid"], each["tid"]].append(nanoseconds(each["ts"]) + nanoseconds(each["dur"]))
        elif each["ph"] in "sf" and max(last[each["pid"], each["tid"]], default=0) <= nanoseconds(each["ts"]):
            dropped.append(each)
    return dropped


def nanoseconds(microseconds):
    """A time as Perfetto reads it: cut off, not rounded."""
    return int(1000 * microseconds)


def names(found, what):
    return {each["args"]["name"] for each in found if each["name"] == what}


def reduce_along_lines():
    mesh = dlab.Mesh((2, 2), ("dp", "tp"))
    for step in range(20):
        ring_allreduce(torch.ones(8), mesh["dp"])
        dlab.allreduce(torch.ones(8), group=mesh["tp"])
        dlab.all_gather(torch.ones(2), group=mesh["dp"])
        dlab.log(step=step, compute=1e-5)


@pytest.mark.parametrize(
    "work",
    [dlab.SyncSGD(), dlab.AllReduceSGD(), dlab.ZeRO(), dlab.ParameterServer(), reduce_along_lines],
    ids=["SyncSGD", "AllReduceSGD", "ZeRO", "ParameterServer", "along the lines of a mesh"],
)
def test_perfetto_drops_nothing_of_a_run(cluster, tmp_path, work):
    run = cluster.start(work) if callable(work) else dlab.train(network, data(), work, on=cluster, **GIVEN)
    run.wait(60)
    run.save_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    messages = sum(event.kind == "message" for event in run.events)
    assert [sum(each["ph"] == end for each in found) for end in "sf"] == [messages, messages] != [0, 0]
    assert [each["ts"] for each in found if "ts" in each] == sorted(each["ts"] for each in found if "ts" in each)
    assert dropped_slices(found) == []
    assert dropped_arrows(found) == []
    assert names(found, "process_name") == {"rank 0", "rank 1", "rank 2", "rank 3", "server 0"}


def test_messages_at_once_are_on_lanes_of_their_own_and_each_arrow_is_on_that_of_its_slice():
    times = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (2.0, 4.0)]
    messages = [
        dlab.Event(end, 0, "message", {"source": 0, "destination": 1, "start": start, "end": end})
        for start, end in times
    ]
    found = trace(messages)
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in found if each["name"] == "thread_name"}
    for kind in "Xs":
        sent = [lanes[0, each["tid"]] for each in found if each["ph"] == kind and each["pid"] == 0]
        assert sent == ["messages", "messages 2", "messages 3", "messages"]
    assert "messages 2" not in {name for (rank, _), name in lanes.items() if rank == 1}
    assert dropped_slices(found) == dropped_arrows(found) == []


@pytest.mark.parametrize(
    ("early", "start", "lane"),
    [(37e-6, 0.0, "steps"), (-37e-6, 37.0, "steps"), (0.05, -5e4, "steps 2")],
    ids=["clock noise", "none", "another thread"],
)
def test_a_step_that_seems_to_begin_before_the_last_one_ended_begins_at_its_end(early, start, lane):
    last = dlab.Event(100.0, 0, "log", {"compute": 1.0})
    found = trace([last, dlab.Event(100.1 - early, 0, "log", {"compute": 0.1})])
    first, second = (each for each in found if each["ph"] == "X")
    lanes = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert second["ts"] - (first["ts"] + first["dur"]) == pytest.approx(start, abs=0.5)
    assert second["ts"] + second["dur"] == pytest.approx(1.1e6 - 1e6 * early, abs=0.5)
    assert lanes[second["tid"]] == lane


def test_parts_shorter_than_the_clock_can_tell_are_one_after_another():
    found = trace([dlab.Event(1.0, 0, "log", {"delay": 1e-9, "compute": 1e-8, "wait": 1e-9})])
    slices = [(each["name"], each["tid"], each["ts"]) for each in found if each["ph"] == "X"]
    assert slices == [("delay", 0, 0.0), ("compute", 0, 0.25), ("wait", 0, 0.5)]


def test_a_part_begins_to_the_nanosecond_where_the_last_one_ends():
    """Even though Perfetto cuts off the binary fractions of a start and of a duration, each by itself."""
    for step in range(1000):
        told = {"compute": 1e-3 + step * 1.37e-7, "wait": 1e-4 + step * 7.1e-8}
        found = trace([dlab.Event(1.8e9, 0, "state", {"state": "running"}), dlab.Event(1.8e9 + 1, 0, "log", told)])
        compute, wait = (each for each in found if each["ph"] == "X")
        assert nanoseconds(compute["ts"]) + nanoseconds(compute["dur"]) == nanoseconds(wait["ts"])
