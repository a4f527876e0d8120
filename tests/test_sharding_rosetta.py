"""The notations of other libraries: DTensor and JAX themselves cut a tensor, and every rank's part is dlab's."""

import json
import os
import subprocess
import sys
from itertools import permutations
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlab.layout import Layout
from dlab.sharding.rosetta import (
    from_dtensor,
    from_partition_spec,
    from_tensor_map,
    rosetta,
    to_dtensor,
    to_partition_spec,
    to_tensor_map,
)

NAMES = ("dp", "sp", "mp")
LAYOUT = Layout((2, 2, 2), NAMES)
LAST = Layout((2, 2, 2), NAMES, major="last")


def every_placement(layout, dims=2):
    """Every placement of a tensor: each axis cuts one of the dimensions or none, in every order of axes."""
    found = set()
    for order in permutations(layout.names):
        for places in range((dims + 1) ** len(order)):
            cut = [[] for _ in range(dims + 1)]
            for number, name in enumerate(order):
                cut[places // (dims + 1) ** number % (dims + 1)].append(name)
            found.add(layout(*(tuple(each) for each in cut[:dims])))
    return sorted(found, key=str)


@st.composite
def placements(draw, least=1):
    """A placement on up to 4 axes, some of them perhaps partial."""
    matrix = tuple(draw(st.lists(st.integers(least, 3), min_size=1, max_size=4)))
    names = tuple(draw(st.permutations(["dp", "sp", "mp", "vp"]))[: len(matrix)])
    layout = Layout(matrix, names, major=draw(st.sampled_from(["first", "last"])))
    dims = draw(st.integers(0, 3))
    cut = [[] for _ in range(dims + 2)]  # the last two: copies, partial sums
    for name in draw(st.permutations(names)):
        cut[draw(st.integers(0, dims + 1))].append(name)
    return layout(*(tuple(each) for each in cut[:dims])).with_partial(*cut[-1])


# ------------------------------------------------------------------------------------------------- DTensor


@pytest.fixture(scope="module")
def on_mesh():
    """A function that runs another on the mesh of each of 8 ranks in turn, in this process: nothing is sent."""
    if dist.is_initialized():
        pytest.skip("torch.distributed is in use in this process")

    def run(layout, function):
        results = []
        for rank in range(layout.size):
            dist.init_process_group("fake", rank=rank, world_size=layout.size, store=FakeStore())
            try:
                ranks = torch.arange(layout.size).reshape(layout.device_matrix)
                results.append(function(DeviceMesh("cpu", ranks, mesh_dim_names=layout.names)))
            finally:
                dist.destroy_process_group()
        return results

    return run


@pytest.mark.parametrize("layout", [LAYOUT, LAST, Layout((2, 1, 3), NAMES)], ids=str)
def test_dtensor_cuts_every_placement_as_the_layout_does(layout, on_mesh):
    shape, cases = (24, 48), every_placement(layout)
    whole = torch.arange(prod(shape)).reshape(shape)

    def cut(mesh):
        return [
            distribute_tensor(whole, mesh, to_dtensor(placed, strided=True), src_data_rank=None).to_local()
            for placed in cases
        ]

    assert len(cases) == 49  # 3 axes on 2 dimensions or none, in every order
    for rank, held in enumerate(on_mesh(layout, cut)):
        for placed, part in zip(cases, held, strict=True):
            assert part.tolist() == whole[placed.slices_of(rank, shape)].tolist(), (placed, rank)


def test_plain_shards_are_enough_in_the_order_of_the_mesh_and_refused_in_another():
    assert to_dtensor(LAYOUT("mp", ("dp", "sp"))) == [Shard(1), Shard(1), Shard(0)]
    assert to_dtensor(LAST("mp", ("sp", "dp"))) == [Shard(1), Shard(1), Shard(0)]
    assert to_dtensor(LAYOUT("mp", None).with_partial("dp")) == [Partial(), Replicate(), Shard(0)]
    assert to_dtensor(LAYOUT("mp", ("sp", "dp")), strided=True) == [
        _StridedShard(1, split_factor=2),
        Shard(1),
        Shard(0),
    ]
    for refused in (LAYOUT("mp", ("sp", "dp")), LAST("mp", ("dp", "sp"))):
        with pytest.raises(
            ValueError, match=r"dimension 1 is cut along sp, then dp, .* axes, dp, then sp: .*strided=True"
        ):
            to_dtensor(refused)
    assert to_dtensor(Layout((1, 2), ("a", "b"))(("b", "a"))) == [Shard(0), Shard(0)], "the order makes no difference"


@given(placements(least=2))
@settings(max_examples=150)
def test_there_and_back_gives_the_same_placement(placed):
    dims = len(placed.dims)
    assert from_dtensor(to_dtensor(placed, strided=True), placed.layout, dims) == placed
    assert from_partition_spec(to_partition_spec(placed), placed.layout, dims) == placed
    if not placed.partial and placed.layout.major == "first":
        assert from_tensor_map(*to_tensor_map(placed), placed.layout.names) == placed


@given(placements(least=1))
@settings(max_examples=100)
def test_with_axes_of_length_one_every_slice_is_the_same(placed):
    again = from_dtensor(to_dtensor(placed, strided=True), placed.layout, len(placed.dims))
    shape = tuple(placed.cuts(dim) for dim in range(len(placed.dims)))
    assert again.slices(shape) == placed.slices(shape) and again.partial == placed.partial


def test_a_mesh_gives_names_and_lengths(on_mesh):
    def read(mesh):
        return from_dtensor([Shard(-1), Replicate(), Shard(0)], mesh, dims=2)

    assert on_mesh(LAYOUT, read) == [LAYOUT("mp", "dp")] * 8

    def read_without_names(mesh):
        return from_dtensor([Shard(0), Partial()], DeviceMesh("cpu", torch.arange(8).reshape(2, 4)), dims=1)

    assert on_mesh(LAYOUT, read_without_names)[0] == Layout((2, 4), ("axis0", "axis1"))("axis0").with_partial("axis1")

    def turned(mesh):
        with pytest.raises(ValueError, match="only a mesh with all ranks in order"):
            from_dtensor([Shard(0), Shard(1)], DeviceMesh("cpu", torch.arange(8).reshape(4, 2).T), dims=2)

    on_mesh(LAYOUT, turned)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([Shard(0)], ["1 placements do not fit Layout(dp 2, sp 2, mp 2), which has 3", "one for each axis"]),
        ([Shard(2), Replicate(), Replicate()], ["Shard(dim=2) on axis 'dp'", "a tensor of 2 dimensions does not have"]),
        ([Replicate(), Replicate(), Partial("avg")], ["on axis 'mp' has no counterpart", "sums"]),
        ([_StridedShard(0, split_factor=4), Shard(0), Shard(1)], ["on axis 'dp'", "split_factor", "of sp"]),
    ],
)
def test_placements_without_counterpart_are_refused(given, words):
    with pytest.raises(ValueError) as caught:
        from_dtensor(given, LAYOUT, dims=2)
    for word in words:
        assert word in str(caught.value)


# ----------------------------------------------------------------------------------------------------- JAX

WITH_JAX = """
import json, sys
import jax, numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
shape, matrix, names, specs = json.load(sys.stdin)
mesh = Mesh(numpy.array(jax.devices()).reshape(matrix), tuple(names))
found = []
for text in specs:
    spec = eval(text)
    held = NamedSharding(mesh, spec).devices_indices_map(tuple(shape))
    by_rank = sorted((device.id, [piece.indices(length)[:2] for piece, length in zip(index, shape)])
                     for device, index in held.items())
    found.append([str(spec), [pieces for _, pieces in by_rank]])
print(json.dumps([found, str(P("mp", None, unreduced={"dp"}))]))
"""


@pytest.fixture(scope="module")
def jax_on_8_devices():
    """A function that asks JAX in a process of its own, on 8 virtual devices, for the slices of specs."""
    pytest.importorskip("jax", reason="needs jax: pip install 'dlab[bench]'")

    def ask(shape, layout, specs):
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        told = json.dumps([shape, layout.device_matrix, layout.names, specs])
        done = subprocess.run(
            [sys.executable, "-c", WITH_JAX], input=told, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def test_jax_cuts_every_placement_as_the_layout_does(jax_on_8_devices):
    shape, cases = (16, 8), every_placement(LAYOUT) + every_placement(LAST)
    found, partial = jax_on_8_devices(shape, LAYOUT, [to_partition_spec(placed) for placed in cases])
    for placed, (text, by_rank) in zip(cases, found, strict=True):
        assert [[[piece.start, piece.stop] for piece in held] for held in placed.slices(shape)] == by_rank, placed
        assert text == to_partition_spec(placed), "as JAX itself prints it"
        assert from_partition_spec(text, placed.layout) == placed
    assert partial == to_partition_spec(LAYOUT("mp", None).with_partial("dp"))


def test_partition_specs_are_read_as_people_write_them():
    x = LAYOUT("mp", ("sp", "dp"))
    assert to_partition_spec(x) == "P('mp', ('sp', 'dp'))" == to_partition_spec(LAST("mp", ("dp", "sp")))
    for text in ("P('mp', ('sp', 'dp'))", ' PartitionSpec("mp",("sp","dp"),) ', "P(('mp',), ['sp', 'dp'])"):
        assert from_partition_spec(text, LAYOUT) == x
    assert from_partition_spec("P('mp')", LAYOUT, dims=3) == LAYOUT("mp", None, None)
    assert from_partition_spec("P()", LAYOUT, dims=1) == LAYOUT(None)
    assert from_partition_spec("P(None, 'mp', unreduced={'sp', 'dp'})", LAYOUT) == LAYOUT(None, "mp").with_partial(
        "dp", "sp"
    )


@pytest.mark.parametrize(
    ("text", "dims", "words"),
    [
        ("P('mp'", None, ["cannot be read", "write it as P('mp', ('sp', 'dp'), None)"]),
        ("P('mp', UNCONSTRAINED)", None, ["cannot be read"]),
        ("P(3)", None, ["cannot be read"]),
        ("P('mp', reduced={'dp'})", None, ["cannot be read"]),
        ("Q('mp')", None, ["cannot be read"]),
        ("print('mp')", None, ["cannot be read"]),
        ("P('tp')", None, ["no axis 'tp'", "'dp', 'sp', 'mp'"]),
        ("P('mp', 'mp')", None, ["'mp' cuts the same tensor twice"]),
        ("P('mp', 'sp')", 1, ["P('mp', 'sp') has 2 entries, but the tensor has 1"]),
        ("P('mp', unreduced={'mp'})", None, ["cannot be a partial sum over 'mp'"]),
    ],
)
def test_texts_that_are_no_partition_spec_are_refused(text, dims, words):
    with pytest.raises(ValueError) as caught:
        from_partition_spec(text, LAYOUT, dims)
    for word in words:
        assert word in str(caught.value)


# ----------------------------------------------------------------------------------------------- MindSpore


def test_tensor_maps_count_axes_from_the_last():
    assert to_tensor_map(LAYOUT("mp", ("sp", "dp"))) == ((2, 2, 2), (0, (1, 2)))
    assert to_tensor_map(LAST("mp", ("dp", "sp"))) == ((2, 2, 2), (0, (1, 2)))
    assert to_tensor_map(LAYOUT("dp", None, "mp")) == ((2, 2, 2), (2, -1, 0))
    assert from_tensor_map((2, 2, 2), (0, (1, 2)), NAMES) == LAYOUT("mp", ("sp", "dp"))
    assert from_tensor_map((2, 4), [-1, 1]) == Layout((2, 4), ("axis0", "axis1"))(None, "axis0")


def test_the_blocks_of_a_tensor_map_lie_where_mindspores_feature_page_has_them():
    columns = from_tensor_map((2, 2, 2), (-1, (1, 2)))
    holders = {held[1].start: rank for rank, held in reversed(list(enumerate(columns.slices((4, 4)))))}
    assert [holders[start] for start in range(4)] == [0, 4, 2, 6]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: from_tensor_map((2, 2), (2,)), ["dimension 0 of the tensor map (2,) has 2", "0 (its last) to 1"]),
        (lambda: from_tensor_map((2, 2), ((0, -1),)), ["has -1", "not cut"]),
        (lambda: from_tensor_map((2, 2), (0, 0)), ["'axis1' cuts the same tensor twice"]),
        (lambda: to_tensor_map(LAYOUT("mp").with_partial("dp")), ["is a partial sum", "reduce it first"]),
    ],
)
def test_tensor_maps_that_say_nothing_are_refused(ask, words):
    with pytest.raises(ValueError) as caught:
        ask()
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------- side by side


def test_all_notations_side_by_side():
    table = rosetta(LAYOUT("mp", ("sp", "dp")))
    assert [(row.library, row.placement) for row in table.rows] == [
        ("dlab", "layout('mp', ('sp', 'dp'))"),
        ("DTensor", "[_StridedShard(1, split_factor=2), Shard(1), Shard(0)]"),
        ("JAX", "P('mp', ('sp', 'dp'))"),
        ("MindSpore", "tensor map (0, (1, 2))"),
    ]
    assert all("(2, 2, 2)" in row.ranks for row in table.rows)
    assert "P(&#x27;mp&#x27;" in table._repr_html_()
    partial = {row.library: row.placement for row in rosetta(LAYOUT("mp", None).with_partial("dp")).rows}
    assert partial == {
        "dlab": "layout('mp', 'None').with_partial('dp')",
        "DTensor": "[Partial(), Replicate(), Shard(0)]",
        "JAX": "P('mp', None, unreduced={'dp'})",
        "MindSpore": "none: it has no partial sums",
    }


@given(placements())
def test_what_the_table_says_evaluates_to_the_placement(placed):
    rows = {row.library: row for row in rosetta(placed).rows}
    layout = eval(rows["dlab"].ranks)
    assert eval(rows["dlab"].placement, {"layout": layout}) == placed
    names = {"Shard": Shard, "_StridedShard": _StridedShard, "Replicate": Replicate, "Partial": Partial}
    assert eval(rows["DTensor"].placement, names) == to_dtensor(placed, strided=True)
