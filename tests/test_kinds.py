"""The kinds of events: every event of real runs is as described, and all that is described is told by somebody."""

import ast
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from kernels import eventually
from runs import steps
from torch import nn
from torch.utils.data import TensorDataset

import dlab
from dlab import kvstore
from dlab.collectives import ring_allreduce
from dlab.data import DataPartitioner
from dlab.kinds import COLLECTIVE, HANG, KINDS, LOG, MESSAGE, STAGES, STATE
from dlab.pipeline import Pipeline
from dlab.processes.parent import hangs
from dlab.views import event_kinds, gradients, shard_events
from dlab.views.base import View
from dlab.views.columns import NAMES
from dlab.views.usable import usable

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

STRATEGIES = {
    "model averaging": dlab.ModelAveraging(every=2),
    "synchronous": dlab.SyncSGD(),
    "all-reduce": dlab.AllReduceSGD(),
    "ZeRO": dlab.ZeRO(stage=1, clip=1.0),
    "tensor parallel": dlab.TensorParallel(ranks=2),
    "asynchronous": dlab.AsyncSGD(),
    "parameter server": dlab.ParameterServer(mode="sync"),
    "asynchronous server": dlab.ParameterServer(mode="async"),
    "stale synchronous server": dlab.ParameterServer(mode="ssp", staleness=1),
    "no server": dlab.ParameterServer(mode="async", servers=0),
    "DDP": dlab.DDP(),
}
PYTHON = {"number": (int, float), "number of seconds": (int, float), "count": int, "whole number": int}


def samples():
    make = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(40, 6, generator=make), torch.randint(0, 3, (40,), generator=make))


def network():
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def push_and_pull():
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(8))
    kv.push("w", torch.ones(8))
    kv.pull("w", out=torch.empty(8))


def reduce_along_lines():
    mesh = dlab.Mesh((1, 2), ("dp", "tp"))
    dlab.allreduce(torch.ones(6), group=mesh["tp"])
    ring_allreduce(torch.ones(6), mesh["tp"])


def run_pipeline():
    pipe = Pipeline([nn.Linear(6, 4), nn.Linear(4, 3)], microbatches=2)
    pipe.step(torch.randn(4, 6), torch.randint(0, 3, (4,)))


def wait_for_nobody():
    if dlab.rank() == 0:
        dlab.transport().recv(torch.zeros(1), 1)
    else:
        dlab.knob("gain", 1.0)
        dlab.transport().recv(torch.zeros(1), 0)


FUNCTIONS = {each.__name__: each for each in (push_and_pull, reduce_along_lines, run_pipeline)}


def rehearsed(transport):
    mesh = dlab.Mesh((2, 2), ("dp", "tp"), transport)
    ring_allreduce(torch.arange(8.0), mesh["dp"])


@pytest.fixture(scope="module")
def told():
    """The events of runs of all sorts, by what ran."""
    found = {}
    with dlab.Cluster(2, servers=1) as cluster:
        for name, strategy in STRATEGIES.items():
            run = dlab.train(network, samples(), strategy, on=cluster, batch_size=10, watch=2)
            run.wait(60)
            found[name] = [*run.states, *run.events]
        for function in FUNCTIONS.values():
            run = cluster.start(function)
            run.wait(60)
            found[function.__name__] = [*run.states, *run.events]
        run = cluster.start(steps)
        run.delay(1, 0.01)
        eventually(lambda: any("delay" in event.data for event in run.events))
        run.set("enough", True)
        run.wait(60)
        found["a delay"] = [*run.states, *run.events]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hangs, "SECONDS", 0.5)
            run = cluster.start(wait_for_nobody)
            eventually(lambda: any(event.kind == "hang" for event in run.states))
            run.stop()
        found["a hang"] = [*run.states, *run.events]
    found["a rehearsal"] = dlab.rehearse(rehearsed, ranks=4).messages
    found["shards"] = shard_events(DataPartitioner(samples(), (0.5, 0.5)))
    return found


def misfits(event):
    """What of an event is not as described."""
    kind = KINDS.get(event.kind)
    if kind is None:
        return [f"{event.kind} is no kind"]
    fields = {field.name: field for field in kind.fields}
    found = [
        f"{event.kind} without {name}" for name, field in fields.items() if field.needed and name not in event.data
    ]
    for name, value in event.data.items():
        if name not in fields:
            found += [] if kind.is_open else [f"{event.kind} with {name}"]
        elif not isinstance(value, PYTHON.get(fields[name].noun, object)):
            found.append(f"{event.kind} with {name}={value!r}")
    usable(event)  # raises, if a view could not use it
    return found


@pytest.mark.parametrize("name", [*STRATEGIES, *FUNCTIONS, "a delay", "a hang", "a rehearsal", "shards"])
def test_every_event_of_a_run_is_as_described(told, name):
    assert told[name]
    assert {problem for event in told[name] for problem in misfits(event)} == set()


def test_every_kind_and_every_field_is_told_by_something(told):
    events = [event for run in told.values() for event in run]
    assert {event.kind for event in events} == KINDS.keys()
    fields = {(kind.name, field.name) for kind in KINDS.values() for field in kind.fields}
    missing = fields - {(event.kind, name) for event in events for name in event.data}
    assert missing == set()


def test_kinds_that_the_cluster_tells_say_where_they_are():
    with dlab.Cluster(1) as cluster:
        run = cluster.start(lambda: dlab.log(step=0))
        run.wait(60)
    assert ({event.kind for event in run.states}, {event.kind for event in run.events}) == ({STATE}, {LOG})
    assert {kind.name for kind in KINDS.values() if "in `run.states`" in kind.sentence} == {STATE, HANG}
    assert "not in `run.events`" in str(event_kinds())


def test_a_misfit_is_found():
    message = dlab.rehearse(rehearsed, ranks=4).messages[0]
    assert misfits(message) == []
    assert misfits(message._replace(kind="massage")) == ["massage is no kind"]
    assert misfits(message._replace(data=message.data | {"colour": "red"})) == ["message with colour"]
    assert misfits(dlab.Event(1.0, 0, LOG, {"loss": "low", "mine": "anything"})) == ["log with loss='low'"]


def test_no_communication_of_a_strategy_is_invisible(told):
    """But for DDP, whose all-reduce torch does by itself."""
    for name in STRATEGIES.keys() - {"DDP"}:
        steps = sum(event.kind == LOG for event in told[name])
        sent = sum(event.kind == MESSAGE and event.data["bytes"] > 0 for event in told[name])
        together = sum(event.data["count"] for event in told[name] if event.kind == COLLECTIVE)
        assert sent + together >= steps / (2 if name == "model averaging" else 1), name


# ------------------------------------------------------------------------------------- one description


def test_nobody_spells_a_kind_out():
    """Who emits and who draws takes the names from the description, so that a slip is found before a program runs."""
    spelled = []
    for path in Path(dlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            told, compared = [], []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                told = node.args if name in ("emit", "_emit", "Event", "push", "_push") else []
            elif isinstance(node, ast.Compare) and getattr(node.left, "id", getattr(node.left, "attr", "")) == "kind":
                compared = node.comparators
            for each in [*told, *compared]:
                if isinstance(each, ast.Constant) and each.value in KINDS:
                    spelled.append(f"{path.name}, line {each.lineno}: {each.value!r}")
    assert spelled == []


def views(kind=View):
    for each in kind.__subclasses__():
        yield each
        yield from views(each)


def test_views_read_what_is_described():
    logged = {field.name for field in KINDS[LOG].fields}
    assert set(NAMES) <= logged
    assert list(gradients.STAGES) == list(STAGES)
    for view in views():
        assert set(view.reads) <= KINDS.keys() | logged, view


def test_a_file_with_unknown_kinds_and_fields_is_loaded_and_drawn_as_far_as_it_can_be(tmp_path):
    known = dlab.rehearse(lambda transport: ring_allreduce(torch.ones(4), transport), ranks=2).messages
    strange = [dlab.Event(1.0, 0, "a kind to come", {"x": 1}), known[0]._replace(data={"source": 0})]
    events = [*(each._replace(data=each.data | {"colour": "red"}) for each in known), *strange]
    dlab.events.save_events(events, tmp_path / "events.jsonl")
    loaded = dlab.load_events(tmp_path / "events.jsonl")
    assert loaded == events
    view = dlab.Messages(loaded)
    assert view.messages == len(known) and view.missing == "1 event left out: its destination is not a rank"


# ------------------------------------------------------------------------------------- for readers


def test_each_kind_and_field_has_a_sentence():
    for kind in KINDS.values():
        for sentence in [kind.sentence, *(field.sentence for field in kind.fields)]:
            assert sentence[0].isupper() and sentence.endswith((".", "…")), sentence


def test_the_kinds_show_themselves_as_a_table():
    lines = str(event_kinds()).splitlines()
    assert [line.split()[0] for line in lines] == ["kind", *KINDS]
    fields = event_kinds("message")
    assert len(str(fields).splitlines()) == 1 + len(KINDS[MESSAGE].fields)
    assert "source       rank                    yes     Who sent it; servers count on after the ranks." in str(fields)
    assert "<td style='text-align:left'>Who received it.</td>" in fields._repr_html_()
    with pytest.raises(KeyError, match="there is no kind of event 'massage': use 'log', 'message', "):
        event_kinds("massage")
