"""The view of messages: every recorded message is an arrow of its step, and the counts are those of the formula."""

import json
import re
import sys
from collections import Counter
from html import unescape
from itertools import pairwise

import cloudpickle
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

import dlab
from dlab import collectives, cost, kvstore
from dlab.views import Messages
from dlab.views.messages import _MOST, _SENT, _bend
from dlab.views.page import pack
from dlab.views.panel import Panel
from dlab.views.totals import write_size, write_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

ALGORITHMS = ["naive", "tree", "ring", "halving_doubling", "hierarchical"]


def rehearse(algorithm, ranks, elements=24, times=1):
    def work(transport):
        for _ in range(times):
            getattr(collectives, f"{algorithm}_allreduce")(torch.ones(elements), transport)

    return dlab.rehearse(work, ranks).messages


def record(algorithm, ranks, elements=24, times=1):
    return Messages(rehearse(algorithm, ranks, elements, times))


def made_up_ring(ranks, rounds, phase="reduce-scatter"):
    """Messages as a ring of many rounds would tell them."""
    for moment in range(rounds * (ranks - 1)):
        for rank in range(ranks):
            message = {"source": rank, "destination": (rank + 1) % ranks, "bytes": 8, "phase": phase}
            message |= {"start": 1e9 + moment, "end": 1e9 + moment + 0.5, "step": moment % (ranks - 1) if phase else 0}
            yield dlab.Event(1e9 + moment, rank, "message", message)


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
    assert axes.get_title() == "reduce-scatter 1"
    words = [text.get_text() for text in axes.texts]
    assert sorted(words) == ["0", "1", "2", "3", *(f"chunk {chunk}\n24 B" for chunk in range(4))]
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
    assert alt.startswith("Ranks 0 to 3 on a circle, an arrow per message. Reduce 0: 1→0 3→2, 64 B each. ")
    assert "Broadcast 0: 0→2, 64 B. " in alt and "6 messages in 4 steps" in alt


def test_no_messages_are_said_and_drawn_without_an_error():
    view = Messages([dlab.Event(0.0, 0, "log", {"loss": 1.0})])
    assert (view.steps, view.messages, view.bytes_per_rank) == ([], 0, [])
    assert str(view) == "no messages were recorded" and "none" in view.alt
    assert view.figure().axes == []
    assert view.empty and view.data()["steps"] == [] and "<iframe" not in view.bundle()["text/html"]


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
    assert view.figure(7).axes[0].get_title() == "round 2, reduce-scatter 1"
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
    assert write_size(count) == words


def test_arrows_lie_between_the_rims_of_two_ranks():
    for algorithm in ALGORITHMS:
        for axes in record(algorithm, 7).figure().axes:
            centres = np.array([patch.center for patch in axes.patches if isinstance(patch, Circle)])
            for arrow in arrows(axes):
                start, _, end, *_ = arrow.get_path().vertices
                for point in (start, end):
                    assert 0.19 < np.hypot(*(centres - point).T).min() < 0.3


def test_arrows_go_forward_even_where_ranks_are_so_many_that_they_overlap():
    (axes,) = record("ring", 32).figure(0).axes
    centres = np.array([patch.center for patch in axes.patches if isinstance(patch, Circle)])
    for rank, arrow in enumerate(arrows(axes)):
        start, _, end, *_ = arrow.get_path().vertices
        assert (end - start) @ (centres[(rank + 1) % 32] - centres[rank]) > 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_no_text_is_cut_off_however_long_it_is(ranks):
    messages = [event.data | {"bytes": 1023 * 1024 + 900 - 103 * event.rank} for event in made_up_ring(ranks, 1)]
    view = Messages([dlab.Event(each["end"], each["source"], "message", each) for each in messages])
    for figure in (view.figure(), view.figure(0)):
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes:
            assert max(len(text.get_text()) for text in axes.texts) == len("1023.9 KiB")
            for box in (text.get_window_extent() for text in axes.texts):
                assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
                assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1


# ------------------------------------------------------------------------------------- what is in a message


def contents(view):
    """By step: (source, chunk, of how many, values) of each message that the browser gets."""
    data = view.data()
    found = {}
    for step, (begin, end) in zip(view.steps, pairwise(data["begin"]), strict=True):
        columns = [data[name][begin:end].tolist() for name in ("source", "chunk", "chunks", "low", "high")]
        found[step] = list(zip(*columns, strict=True))
    return found


def test_a_message_of_a_ring_tells_its_chunk_and_the_range_of_its_values():
    def work(transport):
        tensor = torch.arange(10.0).mul(10.0**transport.rank)  # chunks of 4, 3 and 3 numbers
        collectives.ring_allreduce(tensor, transport)

    told = contents(Messages(dlab.rehearse(work, ranks=3).messages))
    # rank r begins with chunk r - 1; what it has got from the left is in what it passes on
    assert told["reduce-scatter", 0] == [(0, 2, 3, 7.0, 9.0), (1, 0, 3, 0.0, 30.0), (2, 1, 3, 400.0, 600.0)]
    assert told["reduce-scatter", 1] == [(0, 1, 3, 404.0, 606.0), (1, 2, 3, 77.0, 99.0), (2, 0, 3, 0.0, 330.0)]
    assert told["all-gather", 0] == [(0, 0, 3, 0.0, 333.0), (1, 1, 3, 444.0, 666.0), (2, 2, 3, 777.0, 999.0)]


def test_halves_and_quarters_are_told_apart_and_whole_tensors_are_no_chunks():
    told = contents(record("halving_doubling", 4))
    assert [(chunk, of) for _, chunk, of, *_ in told["halve", 0]] == [(1, 2), (1, 2), (0, 2), (0, 2)]
    assert [(chunk, of) for _, chunk, of, *_ in told["halve", 1]] == [(1, 4), (0, 4), (3, 4), (2, 4)]
    assert {(chunk, of) for _, chunk, of, *_ in contents(record("naive", 4))["exchange", 0]} == {(-1, 0)}


def test_a_part_that_is_no_chunk_tells_where_it_begins():
    def work(transport):
        row = torch.arange(9.0)
        transport.exchange(row[2:7], 1 - transport.rank, torch.empty(5), 1 - transport.rank)

    data = Messages(dlab.rehearse(work, ranks=2).messages).data()
    assert [data[name].tolist() for name in ("chunk", "first", "numbers", "of")] == [[-1, -1], [2, 2], [5, 5], [9, 9]]


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.complex64), torch.ones(1 << 20)],
    ids=["empty", "bool", "complex", "long"],
)
def test_where_no_range_can_be_told_none_is(tensor):
    def work(transport):
        transport.exchange(tensor.clone(), 1 - transport.rank, torch.empty_like(tensor), 1 - transport.rank)

    view = Messages(dlab.rehearse(work, ranks=2).messages)
    assert np.isnan(view.data()["low"]).all() and view.data()["numbers"].tolist() == 2 * [tensor.numel()]


def test_gradients_of_asynchronous_sgd_are_messages_too():
    images, labels = dlab.mnist()[:60]
    data = torch.utils.data.TensorDataset(images, labels)
    plan = dlab.Training(model=dlab.TwoLayer, data=data, strategy=dlab.AsyncSGD(), batch_size=12)
    view = Messages(dlab.rehearse(plan, ranks=3).messages)
    assert sum(phase == "gradient" for phase, _ in view.steps) == 5
    gradients = [event.data for event in dlab.rehearse(plan, ranks=3).messages if event.data["phase"] == "gradient"]
    sent = Counter((message["source"], message["destination"]) for message in gradients)
    assert sent == {(source, other): 5 for source in range(3) for other in range(3) if other != source}
    assert {message["bytes"] for message in gradients} == {4 * (79_510 + 3 + 1)}, (
        "weights, who has seen what, and a kind"
    )


# ------------------------------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def served():
    """A run of two workers with a server."""

    def push_and_pull():
        kv = kvstore.create("dist_sync")
        kv.init("w", torch.zeros(100))
        kv.push("w", torch.ones(100))
        return kv.pull("w").sum().item()

    with dlab.Cluster(2, servers=1) as cluster:
        run = cluster.start(push_and_pull)
        assert run.wait(60) == [200.0, 200.0]
        yield run


def test_servers_have_their_names_wherever_one_reads(served):
    view = Messages([*served.states, *served.events])
    push, pull, totals = str(view).splitlines()
    assert push == "push w 0   0 → server 0, 1 → server 0   400 B each"
    assert sorted(re.findall(r"server 0 → \d", pull)) == ["server 0 → 0", "server 0 → 1"]
    assert totals == "4 messages in 2 steps, each rank sends 400 B, server 0 sends 800 B"
    assert view.alt.startswith("Ranks 0 to 1 and server 0 on a circle, an arrow per message. Push w 0: 0 → ")

    for axes in view.figure().axes:
        assert [text.get_text() for text in axes.texts][:3] == ["0", "1", "server\n0"]
        shapes = [type(patch) for patch in axes.patches if not isinstance(patch, FancyArrowPatch)]
        assert shapes == [Circle, Circle, FancyBboxPatch]

    bundle = view.bundle()
    everything = unescape(bundle["text/html"]) + bundle["text/plain"]
    assert "server 0" in everything and not re.search(r"rank 2|Ranks 0 to 2|2→|→2", everything)
    assert json.loads(sent(view)[0])[0]["data"]["names"] == {"2": "server 0"}


def test_without_states_nobody_knows_that_it_is_a_server(served):
    view = Messages(served.events)
    assert str(view).splitlines()[0] == "push w 0   0→2 1→2   400 B each"
    assert str(view).splitlines()[-1] == "4 messages in 2 steps, a rank sends 400 B to 800 B"
    assert view.alt.startswith("Ranks 0 to 2 on a circle") and view.data()["names"] == {}
    view.add(served.states)
    assert str(view) == str(Messages([*served.states, *served.events])), "names may come later"


def test_a_server_without_messages_is_not_on_the_circle(served):
    view = Messages([*served.states, *rehearse("ring", 2)])
    assert "server" not in view.alt + str(view) and view.alt.startswith("Ranks 0 to 1 on a circle")


def test_what_goes_from_a_server_to_many_or_back_is_said_once(served):
    view = Messages([*served.states, *served.events])
    push, pull = ([text.get_text() for text in axes.texts][3:] for axes in view.figure().axes)
    assert (push, pull) == (["400 B each"], ["400 B each"])


# ------------------------------------------------------------------------------------- the formula


def test_the_formula_stands_beside_what_was_recorded():
    formula = cost.allreduce("tree", 4, 64)
    view = Messages(rehearse("tree", 4, elements=16), cost=formula)
    lines = ["recorded: 6 messages in 4 steps, a rank sends 64 B to 128 B"]
    lines += ["formula: 6 messages in 4 steps, a rank sends 64 B to 128 B: the same"]
    assert str(view).splitlines()[-2:] == lines
    assert view.figure().get_supxlabel() == "\n".join(lines)
    assert view.alt.endswith(f"{lines[0]}; {lines[1]}.")
    assert view.data()["formula"] == {"messages": 6, "steps": 4, "bytes_per_rank": formula.bytes_per_rank}


def test_a_formula_that_is_not_met_is_not_called_the_same():
    view = Messages(rehearse("naive", 3, elements=16), cost=cost.allreduce("ring", 3, 64))
    assert str(view).endswith("formula: 12 messages in 4 steps, a rank sends 84 B to 88 B: not the same")
    right = cost.allreduce("tree", 4, 64)
    mirrored = cost.Cost(right.messages, right.steps, right.bytes_per_rank[::-1])  # the same sum, but of other ranks
    assert str(Messages(rehearse("tree", 4, elements=16), cost=mirrored)).endswith(": not the same")
    assert record("ring", 3).data()["formula"] is None


# ------------------------------------------------------------------------------------- the browser


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_browser_gets_every_message_of_a_short_run(algorithm, ranks):
    view, formula = record(algorithm, ranks), cost.allreduce(algorithm, ranks, 4 * 24)
    data = view.data()
    assert (data["messages"], data["count"], len(data["source"])) == (formula.messages, formula.steps, formula.messages)
    assert data["bytes_per_rank"] == formula.bytes_per_rank
    assert np.bincount(data["source"], data["bytes"], ranks).tolist() == formula.bytes_per_rank
    links = data["links"]
    assert np.bincount(links["source"].astype(int), links["bytes"], ranks).tolist() == formula.bytes_per_rank
    assert [(step["phase"], step["step"]) for step in data["steps"]] == view.steps
    assert data["begin"][0] == 0 and data["begin"][-1] == formula.messages and (np.diff(data["begin"]) > 0).all()
    assert data["complete"] == formula.steps - 1
    assert data["start"].min() == 0 and (data["end"] >= data["start"]).all()


def test_titles_and_colours_go_by_phase():
    steps = record("ring", 3, times=2).data()["steps"]
    assert [step["title"] for step in steps][3:5] == ["round 1, all-gather 1", "round 2, reduce-scatter 0"]
    assert [step["colour"] for step in steps] == 2 * [0, 0, 1, 1]
    assert [step["round"] for step in steps] == 4 * [0] + 4 * [1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_events_one_by_one_make_the_same_view_as_all_at_once(algorithm):
    events = rehearse(algorithm, 5, times=3)
    together, one_by_one = Messages(events), Messages()
    for event in events:
        one_by_one.add([event])
        one_by_one.data()  # what it keeps between two calls must not grow old
    by_rank = sorted(events, key=lambda event: event.rank)  # as the rings of the ranks are read
    for view in (one_by_one, Messages(by_rank)):
        assert (str(view), view.alt, view.steps) == (str(together), together.alt, together.steps)
    assert sent(one_by_one) == sent(together)


def sent(view):
    return pack(view.parts)


@pytest.mark.parametrize(("ranks", "phase"), [(4, "reduce-scatter"), (4, ""), (32, "reduce-scatter")])
def test_of_a_long_run_the_browser_gets_the_last_steps_and_the_totals(ranks, phase):
    view = Messages(made_up_ring(ranks, 100_000 // (ranks * (ranks - 1)), phase))
    data = view.data()
    assert view.messages == data["messages"] > 99_000
    assert data["count"] == view.messages // ranks
    assert len(data["steps"]) == _SENT if ranks == 4 else 1 < len(data["steps"]) < _SENT
    assert len(data["source"]) == ranks * len(data["steps"]) <= _MOST
    last = f", {phase} {ranks - 2}" if phase else f"step {data['count']} of {data['count']}"
    assert data["steps"][-1]["title"].endswith(last)
    assert sum(data["bytes_per_rank"]) == data["links"]["bytes"].sum() == 8 * view.messages
    assert data["end"].max() == len(data["steps"]) - 0.5, "seconds since the first message that is sent along"
    text, buffers = sent(view)
    assert len(text) + sum(map(len, buffers)) < 200_000


def test_a_live_picture_shows_the_last_step_of_which_all_have_told():
    events = list(made_up_ring(4, rounds=3))
    ahead = [event for event in events if event.time < 1e9 + 6 or event.rank == 0]  # rank 0 is a whole round ahead
    data = Messages(ahead).data()
    assert len(data["steps"]) == 9 and data["complete"] == 5
    assert Messages(events).data()["complete"] == 8


def test_a_page_is_one_file_that_needs_no_network(tmp_path):
    record("ring", 4).save_html(tmp_path / "ring.html")
    page = (tmp_path / "ring.html").read_text(encoding="utf-8")
    assert "views.messages" in page and "reduce-scatter 0" in page
    assert not re.search(r"https?://", page)
    assert [file.name for file in tmp_path.iterdir()] == ["ring.html"]


def test_in_a_notebook_the_replay_stands_behind_the_still():
    still, replay = record("ring", 4).bundle()["text/html"].split("<iframe")
    assert '<img alt="Ranks 0 to 3 on a circle' in still
    (page,) = re.findall(r'srcdoc="([^"]*)"', replay)
    assert "views.messages" in page and "all-gather 2" in page


# ------------------------------------------------------------------------------------- groups, and what sends nothing


def test_a_step_names_the_groups_in_which_its_messages_went():
    def work(transport):
        mesh = dlab.Mesh((2, 2), ("dp", "tp"), transport)
        collectives.ring_allreduce(torch.ones(2), mesh["tp"])
        collectives.ring_allreduce(torch.ones(2), mesh["dp"])

    view = Messages(dlab.rehearse(work, 4).messages)
    assert str(view).splitlines()[:4] == [
        "reduce-scatter 0   0→1 1→0 2→3 3→2   4 B each   within tp [0, 1] [2, 3]",
        "all-gather 0       0→1 1→0 2→3 3→2   4 B each   within tp [0, 1] [2, 3]",
        "reduce-scatter 0   0→2 1→3 2→0 3→1   4 B each   within dp [0, 2] [1, 3]",
        "all-gather 0       0→2 1→3 2→0 3→1   4 B each   within dp [0, 2] [1, 3]",
    ]
    titles = ["round 1, reduce-scatter 0 within tp", "round 1, all-gather 0 within tp"]
    titles += ["round 2, reduce-scatter 0 within dp", "round 2, all-gather 0 within dp"]
    assert [step["title"] for step in view.data()["steps"]] == titles
    assert [axes.get_title() for axes in view.figure().axes] == titles
    assert "Round 1, reduce-scatter 0 within tp: 0→1 1→0 2→3 3→2, 4 B each, within tp [0, 1] [2, 3]." in view.sentence()


def test_of_many_groups_the_first_are_listed():
    def work(transport):
        collectives.ring_allreduce(torch.ones(2), dlab.Mesh((8, 2), ("dp", "tp"), transport)["tp"])

    assert "within tp [0, 1] [2, 3] [4, 5] [6, 7] …\n" in str(Messages(dlab.rehearse(work, 16).messages))


def collective(rank, name="all-reduce", **more):
    told = {"name": name, "algorithm": "shared memory", "count": 25, "bytes": 25 << 20, "seconds": 0.006}
    return dlab.Event(1.0, rank, "collective", told | {"start": 0.5, "end": 0.9} | more)


TOTALS = "all-reduce (shared memory): 50 times, 50 MiB, 12 ms on each rank"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 ms"), (2.36e-5, "0.024 ms"), (0.123, "120 ms"), (1.87, "1.9 s"), (123.4, "120 s")]
)
def test_times_are_short(seconds, words):
    assert write_time(seconds) == words


def test_a_run_without_messages_says_what_went_without_them():
    view = Messages([collective(rank) for rank in (0, 1) for _ in range(2)])
    assert str(view) == f"no messages were recorded\nwithout messages: {TOTALS}"
    assert view.empty and view.alt == f"Messages: none were recorded. {TOTALS}."
    assert TOTALS in view.figure().texts[0].get_text()
    assert [part.title for part in view.parts] == [f"Messages: {TOTALS}"]


def test_a_run_with_messages_says_it_too():
    gathered = [collective(rank, "all-gather", axis="tp", group=[0, 1], count=1, bytes=2048) for rank in (0, 1)]
    view = Messages([*rehearse("ring", 2), *[collective(rank) for rank in (0, 1) for _ in range(2)], *gathered])
    assert str(view).splitlines()[-2:] == [
        f"without messages: {TOTALS}",
        "without messages: all-gather within tp (shared memory): once, 2 KiB, 6 ms on each rank",
    ]
    assert f"Without messages, {TOTALS}; all-gather within tp" in view.sentence()


def test_a_collective_that_cannot_be_read_is_counted():
    view = Messages([collective(0, bytes="many"), collective(0)])
    assert view.missing == "1 event left out: its bytes are not a count"
    assert "25 times" in str(view)


def test_the_panel_of_a_run_of_collectives_alone_shows_them():
    def fn():
        for _ in range(50):
            dlab.allreduce(torch.ones(1 << 10))

    with dlab.Cluster(2) as cluster:
        run = cluster.start(fn)
        run.wait(60)
        shown = {view.title: str(view) for view in Panel(run).shown}
    assert shown["Messages"].startswith(
        "no messages were recorded\nwithout messages: all-reduce (shared memory): 50 times, 200 KiB, "
    )
