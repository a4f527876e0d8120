"""Whatever is logged, no view fails: what cannot be drawn is left out and counted, and a broken loss is reported."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from drawn import logged, named
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlab
from dlab.events import Event, EventRing, save_events
from dlab.kinds import KINDS
from dlab.views import GradientFlow, LossCurves, Messages, PipelineChart, ShardView, Staleness, Throughput, Timeline
from dlab.views.columns import Arrivals
from dlab.views.page import frame, pack, write_page
from dlab.views.ranks import Ranks

VIEWS = (Ranks, LossCurves, Throughput, Timeline, Staleness, GradientFlow, Messages, ShardView, PipelineChart)
NAN, INF = math.nan, math.inf


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON, and a browser would not read it")


def show(view):
    """Everything that a view can show: text, words, still, live data, and the page that is saved."""
    text, _ = pack(view.parts)
    bundle = view.bundle()
    return json.loads(text, parse_constant=refuse), bundle, write_page(view.parts, view.title), str(view), view.alt


# --------------------------------------------------------------------------------------- anything at all

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from([10**400, -(10**400), 1e308, -1e308, 1e39, NAN, INF, -INF, 2**53, 2**63, -1, 0]),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["x" * 100_000, "$\\frac{1}{$", "\ud800", "a\nb\0c", "<!--<script>", "\u2028", "running", "dead", "computed"]
    ),
)
values = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ranks = st.integers(0, 5)
small = st.integers(0, 40)
moments = st.floats(90, 110)
norms = st.dictionaries(st.sampled_from(["fc", "conv", "$x$", ""]), st.floats() | st.none(), max_size=3)
actions = st.sampled_from(["0F0", "1B0", "0I0", "0W0", "1SEND_F0", "0RECV_B12", "3F999999999"])
# of each kind, what dlab itself tells; any of it may be replaced
FIELDS = {
    "log": dict.fromkeys(("step", "loss", "samples", "compute", "wait", "delay"), numbers)
    | {"staleness": st.lists(small)},
    "state": {"state": st.sampled_from(["running", "dead", "paused", "returned"]), "why": texts, "name": texts},
    "hang": {"ranks": st.lists(st.fixed_dictionaries({"rank": ranks, "words": texts}), max_size=2), "why": texts},
    "message": {
        "source": ranks,
        "destination": ranks,
        "bytes": small,
        "start": moments,
        "end": moments,
        "phase": texts,
        "step": small,
        "round": small,
        "begin": small,
        "count": small,
        "of": small,
        "low": numbers,
        "high": numbers,
        "group": st.lists(ranks, max_size=3),
        "axis": texts,
    },
    "collective": {
        "name": texts,
        "algorithm": texts,
        "count": small,
        "bytes": small,
        "seconds": moments,
        "start": moments,
        "end": moments,
        "group": st.lists(ranks, max_size=3),
        "axis": texts,
        "buckets": small,
    },
    "gradients": {"step": small, "norms": norms},
    "gradient": {
        "step": small,
        "layer": st.sampled_from(["fc", "conv", "$x$"]),
        "stage": st.sampled_from(["computed", "sent", "reduced"]),
    },
    "shard": {"name": texts, "samples": small, "histogram": st.lists(small), "labels": st.lists(small | texts)},
    "slice": {
        "tensor": texts,
        "shape": st.lists(small, max_size=3),
        "slice": st.lists(st.tuples(small, small), max_size=3),
    },
    "knob": {"name": texts, "default": values},
    "action": {"action": actions, "stage": small, "microbatch": small, "start": moments, "end": moments, "step": small},
    "schedule": {
        "name": texts | st.sampled_from(["1f1b", "naive", "zbv"]),
        "actions": st.lists(actions, min_size=2, max_size=2),
        "starts": st.lists(moments, min_size=2, max_size=2),
        "ends": st.lists(moments, min_size=2, max_size=2),
    },
}
assert FIELDS.keys() == KINDS.keys()


@st.composite
def events(draw):
    kind = draw(st.sampled_from([*FIELDS, "log", "log"]))
    told = {name: draw(values if draw(st.integers(0, 7)) == 0 else of) for name, of in FIELDS[kind].items()}
    for name in draw(st.sets(st.sampled_from(sorted(told)), max_size=2)):
        del told[name]
    odd = draw(st.integers(0, 15)) == 0
    return Event(
        draw(numbers if odd else moments),
        draw(st.sampled_from([-1, 10**9, None, "a", 1.5, True]) if odd else ranks),
        draw(texts) if odd and draw(st.booleans()) else kind,
        draw(values) if odd and draw(st.booleans()) else told,
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("view", VIEWS)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(events(), max_size=12))
def test_no_view_fails_whatever_the_events_are(view, told):
    """All but its picture, for which it has the same data, see below."""
    at_once, in_pieces = view(told), view()
    for event in told:
        in_pieces.add([event])
    for made in (at_once, in_pieces):
        (part,) = json.loads(pack(made.parts)[0], parse_constant=refuse)
        assert part["alt"] == made.alt
        for text in (write_page(made.parts, made.title), frame(made.parts, made.title), str(made), made.alt):
            text.encode()
    assert at_once.left_out == in_pieces.left_out


@pytest.mark.filterwarnings("ignore:Glyph", "error::RuntimeWarning")
@pytest.mark.parametrize("view", VIEWS)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(events(), min_size=4, max_size=30))
def test_every_view_has_a_still_whatever_the_events_are(view, told):
    made = view(told)
    assert made.still().png and made.missing in made.alt


# --------------------------------------------------------------------------------------- what must be shown


def test_a_loss_that_is_not_a_number_is_told_with_its_rank_and_step():
    told = [*logged(0, step=range(20), loss=[1.0] * 20), *logged(2, step=range(20), loss=[2.0] * 12 + [NAN] * 8)]
    view = LossCurves(told)
    said = "✕ the loss of rank 2 has not been a number since step 12: is the learning rate too large?"
    data, bundle, page, text, alt = show(view)
    assert text.splitlines()[-1] == said and said in alt and said in bundle["text/plain"]
    assert data[0]["data"]["note"] == said and json.dumps(said)[1:-1] in page.replace("\\\\", "\\")
    lost = {curve["name"]: curve["lost"] for curve in data[0]["data"]["curves"]}
    assert lost == {"rank 0": [], "rank 2": [{"sign": "✕", "step": 12.0, "loss": 2.0, "time": 12.0}], "mean": []}
    figure = view.figure()
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (12, 2.0)


@pytest.mark.parametrize("loss", [INF, 10**400, float("1e400"), 1e39])
def test_a_loss_beyond_what_a_weight_can_hold_is_infinite(loss):
    view = LossCurves(logged(step=range(3), loss=[1.0, 2.0, loss]))
    assert "the loss of rank 0 has been infinite since step 2" in str(view)
    assert "minus infinity since step 1" in str(LossCurves(logged(step=range(2), loss=[1.0, -loss])))
    show(view)


def test_many_losses_that_break_are_told_in_few_words():
    told = [event for rank in range(6) for event in logged(rank, step=range(9), loss=[1.0] * (rank + 2) + [NAN] * 7)]
    note = LossCurves(told).note()
    assert note == (
        "✕ the loss of rank 0 has not been a number since step 2, "
        "the loss of rank 1 has not been a number since step 3, and 4 more: is the learning rate too large?"
    )
    together = [event for rank in range(6) for event in logged(rank, step=[0, 1], loss=[1.0, NAN])]
    assert LossCurves(together).note().startswith("✕ the loss of all 6 has not been a number since step 1:")
    runs = {"sync": logged(step=[0, 1], loss=[1.0, 0.9]), "async": logged(step=[0, 1], loss=[1.0, INF])}
    said = "✕ the loss of async has been infinite since step 1: is the learning rate too large?"
    assert LossCurves(runs).note() == said


def test_events_that_cannot_be_drawn_are_counted_with_their_reason():
    told = logged(step=range(6), loss=[1.0, "much", None, [1.0, 2.0], 0.5, 0.4])
    view = LossCurves(told)
    said = "3 events left out: their loss is not a number"
    data, bundle, _, text, alt = show(view)
    assert view.losses[0][:, 1].tolist() == [1.0, 0.5, 0.4]
    assert text.endswith(f"\n{said}") and alt.endswith(f" {said}.") and data[0]["title"] == f"Loss: {said}"
    assert f"<div>{said}</div>" in bundle["text/html"]
    assert LossCurves(logged(loss=["1.0"])).missing == "1 event left out: its loss is not a number"  # a text is none
    assert Timeline(told).missing == "" and Ranks(told).missing == ""  # they do not read losses


def test_of_an_event_all_that_is_fine_is_drawn():
    told = logged(step=range(4), loss=["x"] * 4, samples=[8] * 4, compute=[0.1] * 4, wait=[0.1, "long", 0.1, INF])
    assert not Throughput(told).empty and Throughput(told).missing == ""
    assert len(Timeline(told).lanes[0].steps) == 4
    assert Timeline(told).missing == "2 events left out: their wait is not a number"


def test_staleness_is_a_list_or_one_number():
    view = Staleness(logged(staleness=[1, [0, 2], 2.0, NAN, [1.5], "old", -1, [10**30], [], None]))
    assert view.counts == {0: {0: 1, 1: 1, 2: 2}}
    assert view.missing == "6 events left out: their staleness is not a whole number from 0 on"


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        ([-2, -1, 0], [-2, -1, 0]),
        ([5, 3, 3], [5, 3, 3]),
        ([0.5, 1.0, 1.5], [0.5, 1.0, 1.5]),
        (["warm-up", None, [1]], [0, 1, 2]),  # counted, if none is told
        ([NAN, INF, 10**400], [0, 1, 2]),
    ],
)
def test_a_loss_is_drawn_at_any_step(steps, drawn):
    view = LossCurves(logged(step=steps, loss=[3.0, 2.0, 1.0]))
    assert view.losses[0][:, 0].tolist() == drawn and view.missing == ""
    show(view)


def test_other_events_are_left_out_with_their_reason():
    norms = [{"a": 1.0}, {"a": "x"}, 3, {"a": NAN}]
    watched = [Event(1.0, 0, "gradients", {"step": step, "norms": each}) for step, each in enumerate(norms)]
    assert GradientFlow(watched).missing == "2 events left out: their norms are not numbers by layer"
    message = {"source": 0, "destination": 1, "bytes": 4, "start": 1.0, "end": 2.0, "phase": "", "step": 0}
    odd = [message, message | {"source": 10**9}, message | {"round": 10**12}, message | {"destination": 0}, {}]
    view = Messages([Event(1.0, 0, "message", data) for data in odd])
    assert view.messages == 1 and view.missing == (
        "2 events left out: their source is not a rank; 1 event left out: its round is not a whole number from 0 on; "
        "1 event left out: its destination is not another rank"
    )
    cut = [{"tensor": "w", "shape": [4], "slice": each} for each in ([[0, 2]], [[0, 5]], [[2, 0]], [])]
    table = ShardView([Event(1.0, rank, "slice", data) for rank, data in enumerate(cut)])
    assert len(table.tensors["w"].slices) == 1 and table.left_out.total() == 3
    states = [Event(1.0, 0, "state", {"state": "tired"}), Event(1.0, 1, "state", {"state": 3})]
    ranks = Ranks(states)
    assert str(ranks).splitlines() == ["rank 0   tired", "1 event left out: its state is not text"]
    show(ranks)
    for event in (Event(NAN, 0, "log", {}), Event(1.0, "a", "log", {}), Event(1.0, -1, "log", {})):
        assert all(view([event]).left_out.total() == 1 for view in VIEWS)


def test_a_long_or_unprintable_name_is_written_as_far_as_it_can_be():
    long = "x" * 100_000
    view = GradientFlow(
        [Event(1.0, 0, "gradients", {"step": 0, "norms": {long: 1.0, "a\0b\n": 2.0, "$\\frac{$": 1.0}})]
    )
    assert [len(layer) for layer in view.layers] == [80, 4, 8] and view.layers[1] == "a\ufffdb "
    show(view)


def test_a_worker_tells_whatever_it_is_given():
    ring = EventRing(memoryview(bytearray(64 + (1 << 20))))
    told = [NAN, INF, -INF, 10**400, torch.tensor(NAN), torch.tensor([1.0, INF]), np.float32("nan"), "x" * 1000, None]
    for step, loss in enumerate(told):
        assert ring.push("log", {"step": step, "loss": loss, "staleness": 1})
    view = LossCurves(Arrivals(records=[ring.take(0)]))
    assert view.losses[0][:, 1].tolist() == pytest.approx([NAN, INF, -INF, INF, NAN, NAN], nan_ok=True)
    assert view.missing == "3 events left out: their loss is not a number"


def test_what_is_not_finite_is_the_same_after_saving(tmp_path):
    told = logged(step=range(4), loss=[NAN, INF, -INF, 10**400])
    save_events(told, tmp_path / "run.jsonl")
    again = dlab.load_events(tmp_path / "run.jsonl")
    assert str(again) == str(told) and str(LossCurves(again)) == str(LossCurves(told))


# ------------------------------------------------------------------------------------ names that are HTML

EVIL = ["<!--<script>", "</script><b>", "]]>", "&lt;", "'\"", "\u2028", "-->"]


class Elements(HTMLParser):
    """The elements of a page, and the text in its scripts."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.comments = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_comment(self, comment):
        self.comments.append(comment)


@pytest.mark.parametrize("name", EVIL)
def test_no_name_can_leave_the_script_it_is_in(name):
    plain = Elements(write_page(LossCurves(named("x")).parts, "x")).tags
    views = [*(view(named(name)) for view in VIEWS), LossCurves({name: named(name), "other": named(name)})]
    for view in views:
        page = write_page(view.parts, name)
        elements = Elements(page)
        assert elements.tags == plain and not elements.comments
        script = re.fullmatch(r".*<script type=\"module\">(.*)</script></body></html>", page, re.DOTALL).group(1)
        written = script[script.rindex("openPage(") :]
        assert not set("<>&\u2028") & set(written)
        first, _ = json.JSONDecoder().raw_decode(written, written.index('"[{') if '"[{' in written else 0)
        assert json.loads(first)[0]["alt"] == view.alt  # and it is the same when it is read
        assert Elements(frame(view.parts, name)).tags == ["iframe"]


def test_no_name_is_an_element_of_the_still():
    for view in VIEWS:
        assert set(Elements(view(named(EVIL[0])).bundle()["text/html"]).tags) <= {"div", "img", "iframe"}
