"""Events: a ring that never blocks its writer and counts what it cannot hold, and files of JSON lines."""

import gc
import json
import math
import mmap
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dlab
from dlab.events import Event, EventRing, plain, save_events
from dlab.trace import save_trace


def ring_of(size: int) -> EventRing:
    return EventRing(memoryview(bytearray(64 + size)))


# ------------------------------------------------------------------------------------- the ring


def test_what_is_pushed_is_drained_in_order():
    ring = ring_of(4096)
    before = time.time()
    for step in range(10):
        assert ring.push("log", {"step": step, "loss": 0.5, "name": "größe", "done": None})
    events = ring.drain(rank=3)
    assert [event.data["step"] for event in events] == list(range(10))
    assert {(event.rank, event.kind) for event in events} == {(3, "log")}
    assert events[0].data == {"step": 0, "loss": 0.5, "name": "größe", "done": None}
    assert before <= events[0].time <= events[-1].time <= time.time()
    assert ring.drain(3) == []


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.none(), st.integers(0, 300)), max_size=60), st.integers(100, 600))
def test_the_ring_loses_nothing_silently_whatever_is_pushed_and_drained(actions, size):
    """None drains; a number pushes a text of that length. A plain list is the truth."""
    ring = ring_of(size)
    waiting, dropped = [], 0
    for number, action in enumerate(actions):
        if action is None:
            assert [event.data for event in ring.drain(0)] == waiting
            waiting = []
        elif ring.push("log", {"n": number, "text": "x" * action}):
            waiting.append({"n": number, "text": "x" * action})
        else:
            dropped += 1
        assert ring.dropped == dropped
    assert [event.data for event in ring.drain(0)] == waiting


def test_an_empty_ring_takes_whatever_fits_wherever_it_stands():
    ring = ring_of(500)
    for length in range(400):  # the ring wraps at another place each time
        assert ring.push("log", {"text": "x" * length})
        assert ring.drain(0)[0].data == {"text": "x" * length}
    assert ring.dropped == 0


def test_without_a_reader_the_writer_goes_on_and_the_rest_is_counted():
    ring = ring_of(1000)
    results = [ring.push("log", {"step": step}) for step in range(10_000)]
    written = sum(results)
    assert results == [True] * written + [False] * (10_000 - written), "the first ones are kept"
    assert ring.dropped == 10_000 - written
    assert len(ring.drain(0)) == written
    assert ring.push("log", {"step": 0}), "and there is room again"


def test_clear_forgets_everything():
    ring = ring_of(200)
    while ring.push("log", {"step": 1}):
        pass
    ring.clear()
    assert ring.dropped == 0
    assert ring.drain(0) == []


WRITER = """
import mmap, sys, time
from dlab.events import EventRing

ring = EventRing(memoryview(mmap.mmap(int(sys.argv[1]), 64 + 4096)))
for number in range(int(sys.argv[2])):
    while not ring.push("log", {"number": number, "text": "x" * (number % 97)}):
        time.sleep(0.0001)
"""


def test_a_reader_in_another_process_sees_whole_records_only_and_all_of_them():
    count, file = 20_000, os.memfd_create("ring")
    os.truncate(file, 64 + 4096)
    ring = EventRing(memoryview(mmap.mmap(file, 64 + 4096)))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(count)], pass_fds=[file])
    os.close(file)
    seen, ended = [], False
    while not ended:
        ended = writer.poll() is not None
        seen += [(event.data["number"], len(event.data["text"])) for event in ring.drain(0)]
    assert seen == [(number, number % 97) for number in range(count)]


# ------------------------------------------------------------------------------------- plain values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([1, 2], dtype=torch.bfloat16), [1.0, 2.0]),
        (torch.tensor([True, False]), [True, False]),
        (torch.zeros(0), []),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (torch.Size([2, 3]), [2, 3]),
        ((1, "a", None), [1, "a", None]),
        ({1: torch.tensor(2), "b": {"c": np.float32(1)}}, {"1": 2, "b": {"c": 1.0}}),
        (range(3), [0, 1, 2]),
        (torch.float32, "torch.float32"),
        (1 + 2j, "(1+2j)"),
    ],
    ids=repr,
)
def test_tensors_arrays_and_the_like_become_numbers_lists_and_text(value, expected):
    result = plain(value)
    assert result == expected
    assert type(result) is type(expected)
    ring = ring_of(4096)
    ring.push("log", {"value": value})
    assert ring.drain(0)[0].data == {"value": expected}
    assert json.loads(json.dumps(result)) == expected


# ------------------------------------------------------------------------------------- files


def test_saved_events_are_json_lines_and_load_as_they_were(tmp_path):
    events = [Event(1.25, 0, "log", {"loss": 0.5, "name": "größe"}), Event(1.5, 1, "gradients", {"norms": {"fc": 2.0}})]
    save_events(events, tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"time": 1.25, "rank": 0, "kind": "log", "data": {"loss": 0.5, "name": "größe"}}
    assert len(lines) == 2
    assert dlab.load_events(tmp_path / "run.jsonl") == events
    assert dlab.load_events(str(tmp_path / "run.jsonl")) == events


def test_losses_that_are_not_numbers_survive(tmp_path):
    save_events([Event(1.0, 0, "log", {"loss": math.nan, "norm": math.inf})], tmp_path / "run.jsonl")
    (event,) = dlab.load_events(tmp_path / "run.jsonl")
    assert math.isnan(event.data["loss"])
    assert event.data["norm"] == math.inf


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "run.jsonl"
    save_events([Event(1.0, 0, "log", {})], path)
    with pytest.raises(TypeError):
        save_events([Event(2.0, 0, "log", {}), Event(3.0, 0, "log", {"bad": object()})], path)
    assert [event.time for event in dlab.load_events(path)] == [1.0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("save", [save_events, save_trace])
def test_where_nothing_can_be_saved_one_sentence_says_why(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path, why in {
        "nodir/x.json": "nodir/x.json cannot be written, as nodir is not a folder: make it, or give another",
        "file/x.json": "file/x.json cannot be written, as file is not a folder: make it, or give another",
        ".": ". is a folder: give the path of a file",
        tmp_path: f"{tmp_path} is a folder: give the path of a file",
        254 * "x": f"{254 * 'x'} cannot be written (File name too long): make room, or give another path",
    }.items():
        with pytest.raises(OSError) as error:
            save([Event(1.0, 0, "log", {})], path)
        assert str(error.value) == why
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("end", ["", "\n"])
def test_another_json_document_is_no_file_of_events(tmp_path, indent, end):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [], "displayTimeUnit": "ms"}, indent=indent) + end)
    with pytest.raises(
        ValueError, match=r"trace\.json is not a file of events but another JSON document: give the"
    ) as error:
        dlab.load_events(path)
    assert "copied" not in str(error.value)


def test_a_last_line_that_is_json_is_not_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(GOOD + b'{"time": 1.0}')
    with pytest.raises(ValueError, match=r"line 2, is not an event") as error:
        dlab.load_events(path)
    assert "copied" not in str(error.value)


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"time": 1.0, "rank": 0, "kind": "log"}', "3"])
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    path = tmp_path / "run.jsonl"
    save_events([Event(1.0, 0, "log", {})], path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"run\.jsonl, line 2, is not an event .*: each line must be") as error:
        dlab.load_events(path)
    assert "\n" not in str(error.value)


GOOD = b'{"time": 1.0, "rank": 0, "kind": "log", "data": {}}\n'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"time": 1.0, "rank": 0, "kind": "log", "data": {"name": "\xff\xfe"}}\n', "it is not UTF-8 text"),
        (b"[" * 200_000 + b"\n", "it is nested too deeply"),
        (b'{"time": 1.0, "rank": 0, "kind": "lo', "The file ends in the middle of it"),
        (b"\x7fELF\x02\x01\x00\xff\n", "it is not UTF-8 text"),
        (b"\n", "not JSON"),
        (b'{"time": "now", "rank": 0, "kind": "log", "data": {}}\n', "time must be a number"),
        (b'{"time": 1.0, "rank": 0.5, "kind": "log", "data": {}}\n', "rank a whole number"),
        (b'{"time": 1.0, "rank": 0, "kind": "log", "data": []}\n', "data an object"),
        (b'{"time": 1.0, "rank": 0, "kind": 3, "data": {}}\n', "there must be time, rank, kind and data"),
        (GOOD.strip() + b", " + GOOD, "not JSON: Extra data"),
        (b'{"a": [1\n2]}\n', "not JSON"),
    ],
)
def test_whatever_a_file_holds_one_sentence_names_the_line(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    path.write_bytes(GOOD * 1500 + line)
    with pytest.raises(ValueError, match=r"run\.jsonl, line 1501, is not an event \(.*\): each line") as error:
        dlab.load_events(path)
    assert why in str(error.value) and len(str(error.value)) < len(str(path)) + 300 and "\n" not in str(error.value)
    assert gc.isenabled()


def test_a_folder_is_no_file_of_events_and_an_empty_file_has_none(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder: give the file that run\.save\(\) wrote"):
        dlab.load_events(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert dlab.load_events(tmp_path / "empty.jsonl") == []


def test_many_events_take_little_more_than_themselves(tmp_path):
    """The names of what was logged are held once, not once for each line."""
    events = [Event(float(step), 0, "log", {"a name of some length": step / 7}) for step in range(20_000)]
    save_events(events, tmp_path / "run.jsonl")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        loaded = dlab.load_events(tmp_path / "run.jsonl")
        held, most = (each - before for each in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert loaded == events
    alone = sys.getsizeof(events[0]) + sys.getsizeof(events[0].data) + 2 * sys.getsizeof(1.0) + 2 * 16 + 8
    assert held / len(events) < 1.2 * alone
    assert most < held + 4e6


# ------------------------------------------------------------------------------------- outside a worker


def test_a_function_can_be_tried_outside_a_worker(capsys):
    def step(model):
        dlab.watch(model)
        model(torch.ones(1, 2)).sum().backward()
        dlab.log(step=3, lr=dlab.knob("lr", 0.01))
        return dlab.rank(), dlab.world_size()

    assert step(nn.Linear(2, 1)) == (0, 1)
    assert capsys.readouterr().out == "step=3  lr=0.01\n"
    assert dlab.device().type in ("cpu", "cuda")
