"""Layouts: blocks are those that plain loops give, groups and tables those that others have published."""

import os
import pickle
import subprocess
import sys
import time
from fractions import Fraction
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlab.layout import Layout, Placed, replicated
from dlab.sharding.refinement import refine, within

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))

# MindSpore's tutorial prints this for x of 32 × 784 and fc1_weight of 784 × 512, by (dp, sp, mp).
PRINTED = """
| (0,0,0) | x[0:16, 0:196] | [0:196, 0:512] |
| (0,0,1) | x[16:32, 0:196] | [0:196, 0:512] |
| (0,1,0) | x[0:16, 196:392] | [196:392, 0:512] |
| (0,1,1) | x[16:32, 196:392] | [196:392, 0:512] |
| (1,0,0) | x[0:16, 392:588] | [392:588, 0:512] |
| (1,0,1) | x[16:32, 392:588] | [392:588, 0:512] |
| (1,1,0) | x[0:16, 588:784] | [588:784, 0:512] |
| (1,1,1) | x[16:32, 588:784] | [588:784, 0:512] |
""".strip().splitlines()


@st.composite
def placements(draw):
    """A layout of up to 64 ranks, a tensor's placement on it, and a shape that it can cut."""
    matrix = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda shape: prod(shape) <= 64)))
    names = tuple(draw(st.permutations(["dp", "sp", "mp", "vp"]))[: len(matrix)])
    layout = Layout(matrix, names, major=draw(st.sampled_from(["first", "last"])))
    rank = draw(st.integers(0, 4))
    dims = [[] for _ in range(rank)]
    for name in draw(st.permutations(names)):
        place = draw(st.integers(0, rank))
        if place < rank:
            dims[place].append(name)
    placed = layout(*(None if not dim else tuple(dim) for dim in dims))
    shape = tuple(placed.cuts(dim) * draw(st.integers(1, 3)) for dim in range(rank))
    return placed, shape


def by_loops(placed, shape):
    """The slices of each rank, from nested loops over the device matrix and the definition of a major name."""
    layout, found = placed.layout, []
    for place in product(*map(range, layout.device_matrix)):  # the last axis is the fastest, as ranks are counted
        at = dict(zip(layout.names, place, strict=True))
        pieces = []
        for length, entry in zip(shape, placed.entries, strict=True):
            names = [] if entry == "None" else [entry] if isinstance(entry, str) else list(entry)
            whole = range(length)
            for name in names if layout.major == "first" else reversed(names):  # cut, and cut each piece again
                cuts = layout.device_matrix[layout.names.index(name)]
                part = len(whole) // cuts
                whole = whole[at[name] * part : (at[name] + 1) * part]
            pieces.append(slice(whole.start, whole.stop))
        found.append(tuple(pieces))
    return found


# ------------------------------------------------------------------------------------- what a rank holds


@given(placements())
def test_slices_are_those_of_plain_loops(case):
    placed, shape = case
    assert placed.slices(shape) == by_loops(placed, shape)


@given(placements())
def test_blocks_cover_the_tensor_exactly_and_copies_are_equal(case):
    placed, shape = case
    whole = np.arange(prod(shape)).reshape(shape)
    copies = placed.layout.size // prod(map(placed.cuts, range(len(shape))))
    holders = np.zeros(shape, dtype=int)
    for piece in placed.slices(shape):
        assert whole[piece].shape == placed.local_shape(shape)
        holders[piece] += 1
    assert (holders == copies).all()
    free = [name for name in placed.layout.names if name not in placed.used]
    for rank in range(placed.layout.size):
        same = [other for other, piece in enumerate(placed.slices(shape)) if piece == placed.slices_of(rank, shape)]
        assert sorted(placed.layout.group(rank, free)) == same


@given(placements())
def test_a_group_along_the_axes_of_a_dimension_is_in_the_order_of_its_blocks(case):
    placed, _ = case
    for rank in range(placed.layout.size):
        for names in placed.dims:
            members = placed.layout.group(rank, names)
            assert [placed.layout.block(member, names) for member in members] == list(range(len(members)))
            assert rank in members


@given(placements())
def test_coordinates_count_the_last_axis_fastest(case):
    layout = case[0].layout
    every = list(product(*map(range, layout.device_matrix)))
    assert [layout.coordinates(rank) for rank in range(layout.size)] == every


@pytest.mark.parametrize(  # from MindSpore's tests
    ("matrix", "rank", "groups"),
    [
        ((2, 3), 0, [[0, 3], [0, 1, 2]]),
        ((2, 2, 3), 5, [[5, 11], [2, 5], [3, 4, 5]]),
        ((2, 1, 4, 2), 5, [[5, 13], [5], [1, 3, 5, 7], [4, 5]]),
        ((3, 4, 2, 3, 2), 5, [[5, 53, 101], [5, 17, 29, 41], [5, 11], [1, 3, 5], [4, 5]]),
    ],
)
def test_the_published_groups_of_a_rank_along_each_axis(matrix, rank, groups):
    layout = Layout(matrix, tuple("abcde"[: len(matrix)]))
    assert [layout.group(rank, [name]) for name in layout.names] == groups
    assert [layout.group(rank, name) for name in layout.names] == groups


@pytest.mark.parametrize(
    ("matrix", "names", "entries", "shape", "slice_shape"),
    [
        ((2, 2, 2), ("dp", "sp", "mp"), ("sp", "mp"), (1024, 1024), (512, 512)),
        ((2, 2, 2, 2), ("dp", "sp", "mp", "vp"), (("sp", "mp"), "vp"), (1024, 1024), (256, 512)),
        ((2, 2, 2, 2), ("dp", "sp", "mp", "vp"), (("dp", "vp"), None, ("sp", "mp")), (8, 1024, 1024), (2, 1024, 256)),
        ((2, 8, 2), ("x", "y", "z"), (("x", "y"), "None"), (128, 2048), (8, 2048)),  # 16,384 bytes of int8 each
    ],
)
def test_the_published_shapes_of_slices(matrix, names, entries, shape, slice_shape):
    assert Layout(matrix, names)(*entries).local_shape(shape) == slice_shape


def test_the_blocks_of_mindspores_feature_page_lie_on_ranks_0_4_2_6():
    columns = LAYOUT(None, ("sp", "dp"))
    firsts = {piece[1].start: rank for rank, piece in reversed(list(enumerate(columns.slices((4, 4)))))}
    assert [firsts[start] for start in range(4)] == [0, 4, 2, 6]


def table(x, w):
    """The rows of the tutorial's table, for these two placements."""
    rows = []
    for rank, (a, b) in enumerate(zip(x.slices((32, 784)), w.slices((784, 512)), strict=True)):
        place = ",".join(map(str, x.layout.coordinates(rank)))
        pieces = [", ".join(f"{part.start}:{part.stop}" for part in each) for each in (a, b)]
        rows.append(f"| ({place}) | x[{pieces[0]}] | [{pieces[1]}] |")
    return rows


def test_the_printed_table_comes_from_the_last_name_major_or_from_dp_before_sp():
    last = Layout((2, 2, 2), ("dp", "sp", "mp"), major="last")
    assert table(last("mp", ("sp", "dp")), last(("sp", "dp"), "None")) == PRINTED
    assert table(LAYOUT("mp", ("dp", "sp")), LAYOUT(("dp", "sp"), "None")) == PRINTED


def test_the_first_name_is_major_unless_told_otherwise():
    rows = table(LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None"))
    assert rows != PRINTED
    assert [row for row in rows if row in PRINTED] == [PRINTED[0], PRINTED[1], PRINTED[6], PRINTED[7]]
    assert rows[2] == "| (0,1,0) | x[0:16, 392:588] | [392:588, 0:512] |"
    assert rows[4] == "| (1,0,0) | x[0:16, 196:392] | [196:392, 0:512] |"


def test_a_replicated_tensor_is_whole_everywhere():
    assert replicated(LAYOUT, 2).slices((3, 5)) == 8 * [(slice(0, 3), slice(0, 5))]
    assert replicated(LAYOUT, 2) == LAYOUT(None, "None")


def test_a_tensor_without_elements_or_dimensions_has_blocks_too():
    assert LAYOUT("dp").slices((0,)) == 8 * [(slice(0, 0),)]
    assert LAYOUT().slices(()) == 8 * [()]


# ------------------------------------------------------------------------------------ equality and text


@given(placements())
def test_repr_evaluates_back(case):
    placed, _ = case
    free = [name for name in placed.layout.names if name not in placed.used]
    for each in (placed.layout, placed, placed.with_partial(*free)):
        again = eval(repr(each))
        assert again == each and hash(again) == hash(each) and repr(again) == repr(each)


def test_layouts_are_written_as_on_a_whiteboard():
    assert str(LAYOUT) == "Layout(dp 2, sp 2, mp 2)"
    assert str(LAYOUT("mp", ("sp", "dp"))) == "(mp, (sp, dp))"
    assert str(LAYOUT("mp", None).with_partial("sp", "dp")) == "(mp, None) partial over dp, sp"


def test_what_differs_is_not_equal():
    x = LAYOUT("mp", ("sp", "dp"))
    last = Layout((2, 2, 2), ("dp", "sp", "mp"), major="last")
    assert len({x, LAYOUT("mp", ("dp", "sp")), LAYOUT("mp"), LAYOUT("mp", None), LAYOUT("mp", None)}) == 4
    assert x != last("mp", ("dp", "sp")) and last != LAYOUT
    assert LAYOUT("mp") != LAYOUT("mp").with_partial("dp")
    assert LAYOUT("mp").with_partial("sp", "dp") == LAYOUT("mp").with_partial("dp", "sp")


def test_another_process_finds_the_same_layout_in_a_set():
    x = LAYOUT("mp", ("sp", "dp"))
    hash(x)
    code = (
        "import pickle, sys; from dlab.layout import Layout; x = pickle.load(sys.stdin.buffer); "
        "layout = Layout((2, 2, 2), ('dp', 'sp', 'mp')); "
        "print(x in {layout('mp', ('sp', 'dp'))}, x.layout in {layout})"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    shown = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(x), capture_output=True, env=environment)
    assert shown.stdout.decode().split() == ["True", "True"], shown.stderr.decode()


def test_whole_numbers_of_numpy_are_whole_numbers():
    two, shape = np.int64(2), tuple(np.array([32, 784]))
    layout = Layout([two, 2, 2], ["dp", "sp", "mp"])
    assert layout == LAYOUT and repr(layout) == repr(LAYOUT)
    assert repr(layout("mp", "sp").slices(shape)) == repr(LAYOUT("mp", "sp").slices((32, 784)))


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(8, "tp"), ["Layout(8, 'tp')", "a tuple of lengths and a tuple of names"]),
        (lambda: Layout((2, 2), iter(("dp", "tp"))), ["a tuple of lengths and a tuple of names"]),
        (lambda: Layout(None, ("dp",)), ["Layout(None, ('dp',))", "a tuple of lengths and a tuple of names"]),
        (lambda: Layout((), ()), ["()", "1 or more"]),
        (lambda: Layout((True, 2), ("a", "b")), ["(True, 2)", "whole numbers"]),
        (lambda: Layout((2, 0), ("a", "b")), ["(2, 0)", "whole numbers, 1 or more"]),
        (lambda: Layout((2, 2.0), ("a", "b")), ["(2, 2.0)", "whole numbers"]),
        (lambda: Layout((2, 2), ("dp",)), ["(2, 2) has 2 axes but 1 name", "one name for each axis"]),
        (lambda: Layout((2, 2), ("dp", "dp")), ["two axes are called 'dp'", "its own name"]),
        (lambda: Layout((2,), ("None",)), ["cannot be called 'None'", "such as 'dp'"]),
        (lambda: Layout((2,), ("",)), ["cannot be called ''"]),
        (lambda: Layout((2,), ("dp",), major="middle"), ["major='middle'", "'first' or its 'last'"]),
        (lambda: LAYOUT("tp"), ["no axis 'tp'", "'dp', 'sp', 'mp'"]),
        (lambda: LAYOUT(("sp", None)), ["no axis None", "'dp', 'sp', 'mp'"]),
        (lambda: LAYOUT("mp", 3), ["entry 1", "3", "a tuple of names, or None"]),
        (lambda: LAYOUT("sp", ("dp", "sp")), ["'sp' cuts the same tensor twice in (sp, (dp, sp))", "only one"]),
        (lambda: LAYOUT(("sp", "sp")), ["'sp' cuts the same tensor twice in ((sp, sp))"]),
        (lambda: LAYOUT("sp").local_shape((4, 4)), ["(sp) is for a tensor with 1 dimension,", "(4, 4) has 2"]),
        (
            lambda: LAYOUT(None, ("sp", "dp")).slices((2, 30)),
            ["dimension 1 of the shape (2, 30)", "4 equal parts along sp and dp", "28 or 32 would work"],
        ),
        (lambda: LAYOUT("sp").slices((1,)), ["dimension 0", "2 equal parts along sp", ": 2 would work"]),
        (lambda: LAYOUT.check_ranks(6), ["2 × 2 × 2 = 8 places", "are 6 ranks", "product must be"]),
        (lambda: LAYOUT.check_ranks(6), ["the nearest device matrix that fits is (1, 2, 3) or (1, 3, 2)"]),
        (lambda: LAYOUT.check_ranks(1), ["but there is 1 rank:", "that fits is (1, 1, 1)"]),
        (lambda: Layout((2, 4), ("a", "b")).check_ranks(16), ["that fits is (2, 8) or (4, 4)"]),
        (lambda: Layout((2, 4), ("a", "b")).check_ranks(7), ["2 × 4 = 8 places", "that fits is (1, 7)"]),
        (lambda: LAYOUT("sp").with_partial("sp"), ["(sp) cannot be a partial sum over 'sp'", "cuts no dimension"]),
        (lambda: LAYOUT("sp").with_partial("tp"), ["partial sum over 'tp'", "cuts no dimension"]),
        (lambda: LAYOUT.group(0, ["tp"]), ["no axis 'tp'", "'dp', 'sp', 'mp'"]),
        (lambda: LAYOUT.group(0, ["sp", "sp"]), ["along sp, sp names an axis twice"]),
        (lambda: refine(LAYOUT, Layout((4,), ("tp",))), ["Layout(tp 4) has 4 places", "are 8 ranks", "fits is (8,)"]),
        (lambda: within(LAYOUT("sp"), Layout((4,), ("tp",))), ["Layout(tp 4)", "8 ranks"]),
        (lambda: within(LAYOUT("sp"), Layout((2, 4), ("a", "b"))), ["together are 'sp' of Layout(dp 2", "refine("]),
    ],
)
def test_errors_say_what_is_wrong_and_what_would_be_right(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("ask", [lambda: LAYOUT("sp").slices_of(8, (2,)), lambda: LAYOUT.coordinates(8)])
def test_a_rank_that_is_not_there_is_an_error(ask):
    with pytest.raises(IndexError, match=r"no rank 8 in Layout\(dp 2, sp 2, mp 2\): its ranks are 0 to 7"):
        ask()


# ------------------------------------------------------------------------------- two matrices, one finer


@st.composite
def two_matrices(draw):
    """Two layouts of the same number of ranks, and a placement on each."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=4))
    found = []
    for names in ("abcdef", draw(st.sampled_from(["abcdef", "uvwxyz", "badcfe"]))):
        matrix = [1]
        for factor in draw(st.permutations(factors)):
            if draw(st.booleans()):
                matrix[-1] *= factor
            else:
                matrix.append(factor)
        layout = Layout(tuple(matrix), tuple(names[: len(matrix)]), major=draw(st.sampled_from(["first", "last"])))
        kept = draw(st.permutations(layout.names))[: draw(st.integers(0, len(matrix)))]
        half = draw(st.integers(0, len(kept)))
        found.append(layout(tuple(kept[:half]), tuple(kept[half:])))
    return found


@given(two_matrices())
@settings(max_examples=300)
def test_a_finer_matrix_keeps_every_slice_and_every_group(pair):
    total = pair[0].layout.size
    fine = refine(*(placed.layout for placed in pair))
    bounds = sorted({1, total, *pair[0].layout.strides.values(), *pair[1].layout.strides.values()})
    nested = all(high % low == 0 for low, high in pairwise(bounds))
    assert (fine is not None) == nested
    if fine is None:
        return
    assert fine.size == total and len(fine.names) == max(1, len(bounds) - 1), "no finer than it need be"
    for placed in pair:
        free = [name for name in placed.layout.names if name not in placed.used]
        same = within(placed.with_partial(*free), fine)
        assert same.slices((total, total)) == placed.slices((total, total))
        for rank in range(total):
            assert fine.group(rank, same.partial) == placed.layout.group(rank, free)


def test_the_matrices_2_4_and_4_2_have_2_2_2_in_common():
    fine = refine(Layout((2, 4), ("dp", "tp")), Layout((4, 2), ("x", "y")))
    assert fine == Layout((2, 2, 2), ("dp", "tp.0", "y"))
    assert within(Layout((2, 4), ("dp", "tp"))("tp", "dp"), fine) == fine(("tp.0", "y"), "dp")
    assert refine(Layout((2, 3), ("a", "b")), Layout((3, 2), ("c", "d"))) is None
    assert refine(LAYOUT, Layout((8,), ("tp",))) == LAYOUT
    assert refine(Layout((1, 1), ("a", "b"))) == Layout((1,), ("a",))


def test_a_placement_within_its_own_matrix_is_itself():
    x = LAYOUT("mp", ("sp", "dp"))
    assert within(x, LAYOUT) is x
    assert within(x, Layout((2, 2, 2), ("dp", "sp", "mp"))) == x
    assert isinstance(within(x, LAYOUT), Placed)


def test_axes_that_are_as_long_but_lie_elsewhere_are_not_taken_for_the_same():
    placed = Layout((3, 2, 2), ("a", "b", "c"))("b")
    with pytest.raises(ValueError, match="together are 'b'"):
        within(placed, Layout((2, 2, 3), ("x", "y", "z")))


@pytest.mark.parametrize(("matrix", "ranks"), [((2, 4), 12), ((2, 2, 2), 6), ((3, 1, 2), 16), ((4, 4), 9), ((5,), 7)])
def test_the_nearest_device_matrices_are_those_of_trying_all(matrix, ranks):
    def change(other):
        ratios = [Fraction(max(old, new), min(old, new)) for old, new in zip(matrix, other, strict=True)]
        return sum(ratio > 1 for ratio in ratios), prod(ratios)

    every = [each for each in product(range(1, ranks + 1), repeat=len(matrix)) if prod(each) == ranks]
    least = min(map(change, every))
    nearest = [each for each in every if change(each) == least][:2]
    with pytest.raises(ValueError) as caught:
        Layout(matrix, tuple("abc"[: len(matrix)])).check_ranks(ranks)
    assert str(caught.value).endswith("that fits is " + " or ".join(map(str, nearest)))


def test_many_axes_and_many_ranks_are_refused_at_once():
    """Trying all device matrices of eight axes took 18 s."""
    start = time.perf_counter()
    with pytest.raises(ValueError, match="that fits is"):
        Layout((2,) * 8, tuple("abcdefgh")).check_ranks(5040)
    with pytest.raises(ValueError, match="that fits is"):
        Layout((2, 2, 2), tuple("abc")).check_ranks(99_999_989)
    assert time.perf_counter() - start < 2
