"""The table of a hybrid says what the ranks of a real run hold."""

import re
from functools import partial

import pytest
import torch
from kernels import is_one_sentence
from torch import nn
from torch.utils.data import TensorDataset

import dlab
from dlab.data.sampler import EpochSampler
from dlab.views.shards import ShardView


def images(samples=24):
    make = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 1, 28, 28, generator=make), torch.arange(samples) % 10)


@pytest.fixture(scope="module")
def eight():
    with dlab.Cluster(8) as cluster:
        yield cluster


transformer = partial(dlab.RowTransformer, width=16, depth=3)


@pytest.mark.parametrize(
    ("model", "axes", "given"),
    [
        (dlab.MLP, {"dp": 2, "pp": 2, "tp": 2}, {}),
        (transformer, {"tp": 2, "dp": 2, "pp": 2}, {"schedule": "interleaved", "virtual": 2, "zero": 1}),
        (transformer, {"pp": 4, "dp": 2}, {}),
        (dlab.TwoLayer, {"dp": 8}, {}),
    ],
)
def test_it_says_what_a_run_tells_of_itself(eight, model, axes, given):
    table = dlab.hybrid_table(model, axes, **given)
    run = dlab.train(model, images(), dlab.Hybrid(axes, **given), on=eight, batch_size=24)
    run.wait(60)
    told = [event for event in run.events if event.kind == "slice"]
    held = {rank: {} for rank in range(8)}
    for event in told:
        held[event.rank][event.data["tensor"]] = tuple(slice(*each) for each in event.data["slice"])
    assert held == {row.rank: row.slices for row in table.rows}
    assert len(told) == sum(len(row.slices) for row in table.rows)  # each of them once
    shapes = {name: tuple(each.shape) for name, each in model().named_parameters()}
    assert {event.data["tensor"]: tuple(event.data["shape"]) for event in told} == shapes
    drawn = ShardView(run.events).tensors  # as the panel draws it
    assert drawn.keys() == shapes.keys()
    for name, tensor in drawn.items():
        assert tensor.slices.keys() == {row.rank for row in table.rows if name in row.slices}
    if axes.get("pp", 1) > 1:
        actions = {(event.rank, event.data["stage"]) for event in run.events if event.kind == "action"}
        assert actions == {(row.rank, stage) for row in table.rows for stage in row.stages}


@pytest.mark.parametrize("axes", [{"dp": 3, "pp": 2}, {"pp": 2, "dp": 3}])
def test_samples_are_those_that_a_global_batch_gives(axes):
    sampler = EpochSampler(range(50), 3, 50, "global", seed=1)
    order = torch.cat([sampler.positions(0, 0, rank) for rank in range(3)])  # the batch, in its order
    for row in dlab.hybrid_table(dlab.MLP, axes, samples=50).rows:
        mine = sampler.positions(0, 0, row.coordinates["dp"])
        assert torch.equal(mine, order[row.samples.start : row.samples.stop])


def test_every_number_is_on_some_rank_and_only_copies_are_on_several():
    table = dlab.hybrid_table(transformer, {"dp": 2, "tp": 2, "pp": 2})
    for name, parameter in transformer().named_parameters():
        count = torch.zeros(parameter.shape)
        for row in table.rows:
            if name in row.slices:
                count[row.slices[name]] += 1
        assert count.unique().tolist() in ([2], [4])  # cut along tp, or whole on both
    held = [sum(torch.zeros(shape_of(each)).numel() for each in row.slices.values()) for row in table.rows]
    assert [row.numbers for row in table.rows] == held


def shape_of(slices):
    return [each.stop - each.start for each in slices]


def test_text_markdown_and_html():
    table = dlab.hybrid_table(dlab.TwoLayer, {"dp": 2, "tp": 2}, samples=128)
    held = ["1.weight[0:50, 0:784], 1.bias[0:50], 3.weight[0:10, 0:50]", "1.weight[50:100, 0:784], 1.bias[50:100]"]
    rows = repr(table).splitlines()
    assert rows[0] == "rank  dp  tp  samples of 128  layers  weights  slices"
    assert rows[1] == f"   0   0   0  0:64            1, 3      39760  {held[0]}; whole: 3.bias"
    assert rows[4] == f"   3   1   1  64:128          1, 3      39760  {held[1]} and 1 more; whole: 3.bias"
    assert table.markdown().splitlines()[2] == f"| 0 | 0 | 0 | 0:64 | 1, 3 | 39760 | {held[0]}; whole: 3.bias |"
    html = table._repr_html_()
    assert html.count("<tr>") == 5 and held[1] in html
    alt = re.search(r'<img alt="([^"]*)"', html)[1]
    assert alt.startswith(
        "TwoLayer on dp 2 × tp 2 ranks, drawn as rows of layers (inside layers: tp 2): 1 to 3 on ranks"
    )
    assert "part 0 of 2" in repr(dlab.hybrid_table(dlab.TwoLayer, {"dp": 2, "tp": 2}))
    assert " all " in repr(dlab.hybrid_table(dlab.TwoLayer, {"tp": 2}))


def test_the_picture_has_both_cuts_side_by_side():
    table = dlab.hybrid_table(dlab.MLP, {"dp": 2, "pp": 2, "tp": 2})
    inside, between, both = table.picture().panels
    assert [[cell.text for cell in row] for row in inside.cells] == [["tp 0", "tp 1"]] * 2 + [["whole on all"]]
    assert [[cell.text for cell in row] for row in between.cells] == [["pp 0"], ["pp 1"], ["pp 1"]]
    told = [[cell.text for cell in row] for row in both.cells]
    assert told == [["ranks 0, 4", "ranks 1, 5"], ["ranks 2, 6", "ranks 3, 7"], ["ranks 2, 3, 6, 7"]]
    colours = {cell.colours for row in both.cells[:2] for cell in row}
    assert len(colours) == 4  # one for each part
    assert both.cells[2][0].colours == tuple(cell.colours[0] for cell in both.cells[1])  # whole on both of them
    assert [row.note for row in table.picture().rows] == [
        "784 → 512, cut by outputs",
        "512 → 512, cut by inputs",
        "512 → 10",
    ]
    svg = table.picture().svg
    assert svg.count("stroke-dasharray") == 2  # the cut between layers, in two of the panels
    assert "both, with ranks" in svg and 'aria-label="MLP on' in svg


@pytest.mark.parametrize(
    ("model", "axes", "rows"),
    [
        (partial(dlab.RowTransformer, depth=8), {"dp": 4, "tp": 4, "pp": 4}, 12),
        (partial(dlab.RowTransformer, depth=40, heads=8), {"pp": 8, "tp": 8}, 15),
    ],
)
def test_of_64_ranks_too(model, axes, rows):
    table = dlab.hybrid_table(model, axes, samples=256)
    assert len(table.rows) == 64 and len(repr(table).splitlines()) == 18
    picture = table.picture()
    assert len(picture.rows) == rows
    width, height = map(int, re.search(r'width="(\d+)" height="(\d+)"', picture.svg).groups())
    assert width < 1500 and height < 750
    assert len(picture.alt) < 900


def test_no_weights_are_made_and_a_network_stays_as_it_is():
    made = []

    def remembered():
        made.append(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        return made[-1]

    first = dlab.hybrid_table(remembered, {"tp": 2})
    assert made[0][0].weight.is_meta
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [each.clone() for each in network.parameters()]
    layouts = partial(lambda model, layout: {"0.weight": layout("tp", None), "1": layout(None, "tp")})
    table = dlab.hybrid_table(network, dlab.Hybrid({"tp": 2}, layouts=layouts))
    assert table.rows[1].slices["0.weight"] == (slice(2, 4), slice(0, 4))
    assert first.rows[1].slices["1.weight"] == (slice(0, 4), slice(2, 4))
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    assert not network[1]._forward_hooks and not network[1]._forward_pre_hooks


@pytest.mark.parametrize(
    ("model", "axes", "given", "sentence"),
    [
        (dlab.MLP, {"dp": 2, "ep": 2}, {}, "a hybrid has no axis 'ep'"),
        (dlab.MLP, {"tp": 3}, {}, "nothing in MLP can be cut over 3 ranks"),
        (dlab.TwoLayer, {"pp": 4}, {}, "rank 0 of a pipeline would hold no parameters of TwoLayer"),
        (dlab.MLP, {"pp": 7}, {}, "MLP has 6 blocks, too few for 7 stages"),
        (dlab.MLP, {"dp": 4}, {"samples": 3}, "samples=3: give the number of samples of a batch, 4 or more"),
        (dlab.MLP, {"dp": 4}, {"samples": 8.0}, "samples=8.0"),
        (dlab.MLP, {"dp": 4}, {"zero": 3}, "zero=3"),
        (dlab.MLP, dlab.Hybrid({"dp": 4}), {"zero": 1}, "axes is a strategy already: give it zero when it is made"),
        ("mlp", {"dp": 4}, {}, "model='mlp': give a torch.nn.Module, or a function that makes one"),
        (dict, {"dp": 4}, {}, "give a torch.nn.Module, or a function that makes one"),
    ],
)
def test_what_it_refuses(model, axes, given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as error:
        dlab.hybrid_table(model, axes, **given)
    assert is_one_sentence(str(error.value))
