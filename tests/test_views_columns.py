"""Events in columns: the same numbers as in a plain loop over the events, however they arrive."""

import math
import random
import time

import numpy as np
import pytest

from dlab.events import Event, EventRing
from dlab.views import GradientFlow, LossCurves, Messages, PipelineChart, ShardView, Throughput, Timeline
from dlab.views.columns import NAMES, Arrivals, GrowingTable
from dlab.views.ranks import Ranks

VIEWS = (Ranks, LossCurves, Throughput, Timeline, GradientFlow, Messages, ShardView, PipelineChart)


def some_events(count=300, ranks=3, seed=0):
    """Of all kinds and of all ranks, mixed; not every one tells every number."""
    random.seed(seed)
    events, now = [], 1000.0
    for number in range(count):
        now += random.expovariate(100)
        rank = random.randrange(ranks)
        told = {name: random.randrange(1, 100) / 8 for name in NAMES if random.random() < 0.7}
        kind, data = random.choice(
            [
                *[("log", {**told, "step": number, "unknown": "x"})] * 5,
                ("log", told),
                ("state", {"state": "running", "why": ""}),
                ("message", {"source": rank, "destination": (rank + 1) % ranks, "bytes": 8, "start": now - 0.001}),
                ("gradients", {"step": number, "norms": {"fc": 0.5}}),
                ("shard", {"samples": number, "histogram": [1, 2]}),
                ("knob", {"name": "lr", "default": 0.1}),
                ("schedule", {"name": "", "actions": [f"{rank}F0"], "starts": [1.0], "ends": [2.0]}),
                ("action", {"action": f"{rank}F0", "stage": rank, "microbatch": 0, "start": now - 0.002, "end": now}),
            ]
        )
        if kind == "message":
            data = {**data, "end": now, "phase": "ring", "step": number}
        if kind == "action":
            data = {**data, "step": number}
        events.append(Event(now, rank, kind, data))
    return events


def written(events, piece):
    """The same as records of three ranks, so many in each."""
    records = []
    for start in range(0, len(events), piece):
        for rank in range(3):
            ring = EventRing(memoryview(bytearray(64 + (1 << 20))))
            for event in events[start : start + piece]:
                if event.rank == rank:
                    ring.push(event.kind, event.data)
            if told := ring.take(rank):
                records.append(told)
    return records


def test_a_column_has_every_number_and_the_default_where_there_is_none():
    events = some_events()
    arrived = Arrivals(events)
    for rank, logged in arrived.logged.items():
        own = [event for event in events if event.kind == "log" and event.rank == rank]
        assert np.array_equal(logged.times, [event.time for event in own])
        for name in NAMES:
            assert logged.column(name, -1.0).tolist() == [event.data.get(name, -1.0) for event in own]
            having = [event for event in own if name in event.data]
            assert logged.having(name).times.tolist() == [event.time for event in having]
        either = [event for event in own if "loss" in event.data or "wait" in event.data]
        assert logged.having("loss", "wait").column("loss").tolist() == pytest.approx(
            [event.data.get("loss", math.nan) for event in either], nan_ok=True
        )
        assert logged.step == [event.data["step"] for event in own if "step" in event.data][-1]
    assert arrived.others == [event for event in events if event.kind != "log"]
    assert arrived.first == events[0].time and arrived.last == max(event.time for event in events)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_records_and_events_are_the_same(piece):
    records = written(some_events(), piece)
    from_records, from_events = Arrivals(records=records), Arrivals([e for each in records for e in each.events])
    assert from_records.others == from_events.others
    assert (from_records.first, from_records.last) == (from_events.first, from_events.last)
    assert from_records.logged.keys() == from_events.logged.keys()
    for rank, logged in from_events.logged.items():
        assert np.array_equal(from_records.logged[rank].times, logged.times)
        assert from_records.logged[rank].step == logged.step
        for name in NAMES:
            assert np.array_equal(from_records.logged[rank].column(name), logged.column(name), equal_nan=True)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_the_same_of_events_of_records_and_of_pieces(view):
    records = written(some_events(), 40)
    events = [event for each in records for event in each.events]
    at_once, by_records, in_pieces = view(events), view(), view()
    by_records.add(Arrivals(records=records))
    for start in range(0, len(events), 11):
        in_pieces.add(Arrivals(events[start : start + 11]))
    assert not at_once.empty
    assert str(at_once) == str(by_records) == str(in_pieces)
    assert at_once.alt == by_records.alt == in_pieces.alt


def test_a_loss_that_is_not_a_number_is_one_and_what_is_no_number_at_all_is_not_told():
    losses = [1.0, math.nan, "much", None, [1.0, 2.0], True, 2]
    events = [Event(float(at), 0, "log", {"step": at, "loss": loss}) for at, loss in enumerate(losses)]
    logged = Arrivals(events).logged[0].having("loss")
    assert logged.times.tolist() == [0.0, 1.0, 5.0, 6.0]
    assert logged.column("loss", 9.0).tolist() == pytest.approx([1.0, math.nan, 1.0, 2.0], nan_ok=True)


def test_the_step_is_shown_as_it_was_told():
    for step in (41, 2.5, "warm-up"):
        view = Ranks([Event(0.0, 0, "state", {"state": "running"}), Event(0.0, 0, "log", {"step": step})])
        assert view.rows() == [(0, "running", "running", step)]


def test_nothing_is_nothing():
    assert not Arrivals() and Arrivals([Event(0.0, 0, "knob", {})]) and Arrivals([Event(0.0, 0, "log", {})])
    for view in VIEWS:
        assert view(Arrivals()).empty


def test_a_table_keeps_its_rows_while_it_grows():
    random.seed(1)
    table, plain = GrowingTable(2), []
    for _ in range(200):
        before, seen = table.rows, len(plain)
        fresh = [(random.random(), random.random()) for _ in range(random.randrange(5))]
        table.extend(*np.array(fresh).reshape(-1, 2).T)
        plain += fresh
        assert before.tolist() == [list(row) for row in plain[:seen]], "who read before keeps what was read"
    assert table.rows.tolist() == [list(row) for row in plain] and len(table) == len(plain)


def test_to_take_events_in_costs_less_than_a_loop_over_them_in_each_view():
    ring, records = EventRing(memoryview(bytearray(64 + (4 << 20)))), []
    for start in range(0, 40_000, 500):
        for step in range(start, start + 500):
            ring.push("log", {"step": step, "loss": 0.5, "samples": 64, "compute": 0.001, "wait": 0.0005})
        records.append(ring.take(start // 500 % 4))

    def in_columns(some, views):
        arrived = Arrivals(records=some)
        for view in views:
            view.add(arrived)

    def in_loops(some, views):
        events = [event for each in some for event in each.events]
        for rows in views:
            for event in events:
                if event.kind == "log" and "loss" in event.data:
                    rows.append((event.time, event.data.get("step"), event.data["loss"]))

    def seconds(take_in, views):
        begin = time.thread_time()
        for start in range(0, len(records), 8):
            take_in(records[start : start + 8], views)
        return time.thread_time() - begin

    columns = min(seconds(in_columns, [view() for view in VIEWS]) for _ in range(3))
    loops = min(seconds(in_loops, [[] for _ in VIEWS]) for _ in range(3))
    print(f"{25 * columns:.2f} us for each event, {25 * loops:.2f} us in loops")
    assert columns < loops
