"""Slice tables and block pictures: the tutorial's printed table, ranks where plain slices say, and no long text."""

import base64
import re
from collections import defaultdict
from html import unescape
from math import prod
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dlab
from dlab.layout import Layout
from dlab.sharding.blocks import BlockPicture, BlockPictures, block_picture
from dlab.sharding.drawing import INK, colour_of, write_ranks

NAMES = ("dp", "sp", "mp")
LAYOUT = Layout((2, 2, 2), NAMES)
SHAPES = ((32, 784), (784, 512))

# MindSpore's tutorial prints this for its first matmul; the last column leaves out the tensor's name.
PRINTED = """\
| (dp, sp, mp) | x | fc1_weight |
|---|---|---|
| (0,0,0) | x[0:16, 0:196] | [0:196, 0:512] |
| (0,0,1) | x[16:32, 0:196] | [0:196, 0:512] |
| (0,1,0) | x[0:16, 196:392] | [196:392, 0:512] |
| (0,1,1) | x[16:32, 196:392] | [196:392, 0:512] |
| (1,0,0) | x[0:16, 392:588] | [392:588, 0:512] |
| (1,0,1) | x[16:32, 392:588] | [392:588, 0:512] |
| (1,1,0) | x[0:16, 588:784] | [588:784, 0:512] |
| (1,1,1) | x[16:32, 588:784] | [588:784, 0:512] |"""


def tutorial(layout, columns=("sp", "dp")):
    """The table of the tutorial's first matmul."""
    placed = (layout("mp", columns), layout(columns, "None"))
    return dlab.slice_table(placed, shape=SHAPES, name=("x", "fc1_weight"))


# ------------------------------------------------------------------------------------------- the tables


def test_the_printed_table_of_the_tutorial_character_by_character():
    last = tutorial(Layout((2, 2, 2), NAMES, major="last"))
    assert last.markdown() == PRINTED.replace("| [", "| fc1_weight[")
    assert tutorial(LAYOUT, ("dp", "sp")).markdown() == last.markdown()


def test_by_default_the_first_name_is_major_and_four_rows_differ():
    printed, shown = PRINTED.replace("| [", "| fc1_weight[").splitlines(), tutorial(LAYOUT).markdown().splitlines()
    assert [number for number, pair in enumerate(zip(printed, shown, strict=True)) if len(set(pair)) > 1] == [
        4,
        5,
        6,
        7,
    ]
    assert shown[4] == "| (0,1,0) | x[0:16, 392:588] | fc1_weight[392:588, 0:512] |"
    assert shown[6] == "| (1,0,0) | x[0:16, 196:392] | fc1_weight[196:392, 0:512] |"


def test_text_of_one_tensor_and_of_two():
    layout = Layout((2, 2), ("dp", "tp"))
    assert repr(dlab.slice_table(layout("tp", None), shape=(4, 3))) == (
        "(dp, tp)  x\n"
        "(0,0)     x[0:2, 0:3]\n"
        "(0,1)     x[2:4, 0:3]\n"
        "(1,0)     x[0:2, 0:3]\n"
        "(1,1)     x[2:4, 0:3]"
    )  # fmt: skip
    same = dlab.slice_table(
        (layout("dp"), layout("tp").with_partial("dp"), layout()), ((4,), (2,), ()), ["a", "b", "c"]
    )
    assert repr(same).splitlines()[:2] == [
        "(dp, tp)  a       b, partial over dp  c",
        "(0,0)     a[0:2]  b[0:1]              c",
    ]


def test_one_shape_serves_all_and_other_device_matrices_are_shown_by_rank():
    flat = Layout((8,), ("tp",))
    table = dlab.slice_table((LAYOUT("mp", None), flat(None, "tp")), shape=(16, 16), name=("x", "y"))
    assert table.heading() == ["rank", "x", "y"]
    assert table.cells(table.rows[5]) == [5, "x[8:16, 0:16]", "y[0:16, 10:12]"]


@given(st.permutations(NAMES), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["first", "last"]))
def test_rows_and_colours_are_those_of_the_blocks(names, rows, columns, major):
    layout = Layout((2, 3, 2), NAMES, major=major)
    cut = [names[:rows], names[rows : rows + columns]]
    placed = layout(*(tuple(each) or None for each in cut))
    table = dlab.slice_table(placed, shape=(24, 36))
    whole = np.arange(24 * 36).reshape(24, 36)
    for row, held in zip(table.rows, placed.slices((24, 36)), strict=True):
        assert row.slices == (held,) and row.coordinates == layout.coordinates(row.rank)
        assert (eval(str(table.cells(row)[1]), {"x": whole}) == whole[held]).all()
    found = re.findall(r"background-color:(#\w+);color:#\w+'>(x[^<]+)<", table._repr_html_())
    assert len(found) == 12
    colours = {text: colour for colour, text in found}
    assert all(colours[text] == colour for colour, text in found), "one block, one colour"
    assert len(set(colours.values())) == len(colours), "two blocks, two colours"
    drawn = re.findall(r'fill="(#\w+)" stroke[^>]+/><text[^>]+>(?:ranks? )?(\d+)', table.picture().svg)
    assert len(drawn) == len(colours)
    for colour, rank in drawn:
        assert found[int(rank)][0] == colour, "the picture has the colours of the table"


def test_a_table_of_512_ranks_is_short_and_says_what_it_leaves_out():
    table = dlab.slice_table(Layout((32, 16), ("dp", "tp"))("dp", "tp"), shape=(4096, 4096), name="w")
    assert len(table.rows) == 512
    for text in (repr(table), table.markdown(), table._repr_html_()):
        assert "… ranks 8 to 503: 496 more" in text
        assert "w[3968:4096, 3840:4096]" in text and "(16,3)" not in text
    assert len(repr(table).splitlines()) == 18
    assert {line.count("|") for line in table.markdown().splitlines()} == {3}


def test_names_are_escaped():
    table = dlab.slice_table(LAYOUT("dp"), shape=(2,), name="<b>|")
    assert "<b>" not in table._repr_html_() and "<b>" not in table.picture()._repr_html_()
    assert "<b>\\|[0:1]" in table.markdown()
    ElementTree.fromstring(table.picture().svg)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: dlab.slice_table(LAYOUT("dp"), shape=3), ["shape=3 is a number", "such as (3,)"]),
        (lambda: dlab.slice_table(LAYOUT("dp"), shape=(3,)), ["dimension 0", "2 equal parts along dp", "2 or 4"]),
        (
            lambda: dlab.slice_table(LAYOUT, shape=(4,)),
            ["Layout((2, 2, 2), ('dp', 'sp', 'mp')) is not the layout of a tensor"],
        ),
        (lambda: dlab.slice_table((), shape=(4,)), ["no tensor"]),
        (lambda: dlab.slice_table(LAYOUT("dp"), shape=torch.ones(4)), ["a shape is a tuple", "not a Tensor"]),
        (lambda: dlab.slice_table(LAYOUT("dp"), shape=None), ["a shape is a tuple", "not None"]),
        (lambda: dlab.slice_table((LAYOUT("dp"),) * 2, ((4,), "4"), ("a", "b")), ["a shape is a tuple", "not '4'"]),
        (lambda: dlab.slice_table(LAYOUT("dp"), shape=(4,), name=3), ["name=3 does not name 1 tensor:"]),
        (lambda: dlab.slice_table((LAYOUT("dp"),) * 2, shape=(4,)), ["name='x' does not name 2 tensors"]),
        (lambda: dlab.slice_table((LAYOUT("dp"),) * 2, ((4,),) * 3, ("a", "b")), ["3 shapes for 2 layouts"]),
        (
            lambda: dlab.slice_table((LAYOUT("dp"), Layout((4,), ("tp",))("tp")), (4,), ("a", "b")),
            ["8 ranks", "4 ranks", "the same ranks"],
        ),
        (lambda: tutorial(LAYOUT).picture("w"), ["no tensor 'w'", "'x', 'fc1_weight'"]),
        (lambda: block_picture(LAYOUT("dp", None, None), (4, 4, 4), "w", at=(1, 2)), ["at=(1, 2)", "give 1 ind"]),
        (lambda: block_picture(LAYOUT("dp", None), (4, 4), "w", at=1), ["at=(1,)", "give 0 ind"]),
    ],
)
def test_errors_are_sentences(ask, words):
    with pytest.raises(ValueError) as caught:
        ask()
    for word in words:
        assert word in str(caught.value)


def test_an_index_that_is_not_there_is_an_error():
    with pytest.raises(IndexError, match="dimension 0 of w has no index 4: its indices are 0 to 3"):
        block_picture(LAYOUT("dp", None, None), (4, 4, 4), "w", at=4)


# ----------------------------------------------------------------------------------------- the pictures


def holders(placed, shape):
    """The ranks that hold each element, from a whole array of lists: nothing of the picture's own arithmetic."""
    found = np.empty(shape, dtype=object)
    for place in np.ndindex(*shape):
        found[place] = []
    for rank, held in enumerate(placed.slices(shape)):
        for place in np.ndindex(*shape):
            if all(index in range(piece.start, piece.stop) for index, piece in zip(place, held, strict=True)):
                found[place].append(rank)
    return found


@given(st.data())
@settings(max_examples=60)
def test_every_block_shows_the_ranks_that_hold_its_elements(data):
    layout = Layout((2, 3, 2), NAMES)
    dims = data.draw(st.integers(0, 4))
    cut = defaultdict(list)
    for name in data.draw(st.permutations(NAMES)):
        cut[data.draw(st.integers(0, dims))].append(name)
    placed = layout(*(tuple(cut[dim]) or None for dim in range(dims)))
    shape = tuple(placed.cuts(dim) for dim in range(dims))
    at = tuple(data.draw(st.integers(0, length - 1)) for length in shape[:-2])
    picture = block_picture(placed, shape, at=at)
    truth = holders(placed, shape)[at] if at else holders(placed, shape)
    rows, columns = picture.grid
    assert rows * columns == prod(shape[-2:])
    for row in range(rows):
        for column in range(columns):
            assert picture.ranks_of(row, column)[1] == truth[(row, column)[2 - min(dims, 2) :]]


def test_the_picture_as_text():
    assert repr(tutorial(LAYOUT).picture("x")) == (
        "x[32, 784] is cut into 2 × 4 = 8 blocks of 16 × 196, each on 1 of 8 ranks.\n"
        "       0:196  196:392  392:588  588:784\n"
        "0:16   0      4        2        6\n"
        "16:32  1      5        3        7"
    )
    assert repr(block_picture(LAYOUT(("sp", "dp")).with_partial("mp"), (512,), "bias")) == (
        "bias[512] is cut into 4 blocks of 128 numbers, each on 2 of 8 ranks, and is the sum over mp of what they hold."
        "\n"
        "  0:128  128:256  256:384  384:512\n"
        "  0, 1   4, 5     2, 3     6, 7"
    )
    assert repr(block_picture(LAYOUT(), (), "loss")) == "loss is not cut: it is on 8 of 8 ranks.\n  0-7"


def test_a_slice_of_a_tensor_of_three_dimensions():
    placed = Layout((2, 2, 2, 2), ("dp", "vp", "sp", "mp"))(("dp", "vp"), None, ("sp", "mp"))
    assert repr(block_picture(placed, (8, 1024, 1024), "experts", at=3)).splitlines() == [
        "experts[3, :, :] of 8 × 1024 × 1024 is cut into 4 blocks of 1024 × 256, each on 1 of 16 ranks.",
        "        0:256  256:512  512:768  768:1024",
        "0:1024  4      5        6        7",
    ]
    assert block_picture(placed, (8, 1024, 1024), at=6).ranks_of(0, 0)[1] == [12]
    table = dlab.slice_table((placed, placed.layout("dp")), ((8, 1024, 1024), (4,)), ("w", "b"))
    drawn = table.picture(at=7)
    assert [picture.title for picture in drawn] == ["w[7, :, :] of 8 × 1024 × 1024", "b[4]"]


def shown_svg(picture):
    """The image of a picture's HTML as XML, and its alt text."""
    (found,) = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', picture._repr_html_())
    return ElementTree.fromstring(base64.b64decode(found[1])), unescape(found[0])


def texts(svg):
    return [element.text for element in svg.iter() if element.tag.endswith("text")]


def test_the_image_tells_ranks_bounds_and_axes_and_has_alt_text():
    svg, alt = shown_svg(tutorial(LAYOUT).picture("fc1_weight"))
    assert svg.get("role") == "img" and svg.get("aria-label") == alt
    assert alt.startswith("fc1_weight[784, 512] is cut into 4 blocks of 196 × 512, each on 2 of 8 ranks. ")
    assert alt.endswith(
        "[196:392, 0:512] on ranks 4, 5; [392:588, 0:512] on ranks 2, 3; [588:784, 0:512] on ranks 6, 7."
    )
    assert texts(svg) == [
        *("fc1_weight[784, 512]", "cut along sp, then dp", "0", "512", "0", "196", "392", "588", "784"),
        *("ranks 0, 1", "ranks 4, 5", "ranks 2, 3", "ranks 6, 7", "each block is on 2 of 8 ranks: copies along mp"),
    ]


def test_two_tensors_are_drawn_side_by_side():
    pictures = tutorial(LAYOUT).picture()
    assert isinstance(pictures, BlockPictures) and isinstance(pictures[0], BlockPicture)
    assert pictures._repr_html_().count("<img alt=") == 2
    assert repr(pictures).count("is cut into") == 2


@pytest.mark.parametrize(
    "entries", [("dp", "tp"), ("tp", "dp"), (None, None), ("tp", None), (None, ("dp", "tp")), (("tp", "dp"), None)]
)
@pytest.mark.parametrize("matrix", [(32, 16), (64, 64)])
def test_hundreds_of_ranks_are_no_wall_of_text(matrix, entries):
    placed = Layout(matrix, ("dp", "tp"))(*entries)
    picture = block_picture(placed, (4096, 4096), "w")
    svg, alt = shown_svg(picture)
    shown = [element for element in svg.iter() if element.tag.endswith("rect")]
    assert len(shown) <= 16 * 16 + 1 and len(alt) < 300 and len(picture.svg) < 80_000
    lines = repr(picture).splitlines()
    assert len(lines) <= 2 + 17 and max(map(len, lines)) <= 120
    assert all(len(text) < 60 for text in texts(svg))
    last = write_ranks(picture.ranks_of(*(length - 1 for length in picture.grid))[1], 20)
    assert lines[-1].split("  ")[-1].strip() == last


def test_labels_stay_inside_their_blocks():
    layout = Layout((64, 64), ("dp", "tp"))
    for entries in [("dp", "tp"), (None, "tp"), ("tp", None), (None, ("dp", "tp")), ("dp", None)]:
        svg, _ = shown_svg(block_picture(layout(*entries), (4096, 4096)))
        boxes = [element for element in svg.iter() if element.tag.endswith("rect") and element.get("x")]
        labels = {(e.get("x"), e.get("y")): e for e in svg.iter() if e.tag.endswith("text")}
        inside = 0
        for box in boxes:
            x, y, wide, high = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            for (across, down), label in labels.items():
                if x < float(across) < x + wide and y < float(down) < y + high:
                    inside += 1
                    assert 0.6 * float(label.get("font-size")) * len(label.text) <= wide
                    assert float(label.get("font-size")) <= high
        assert inside == len(boxes)


@pytest.mark.parametrize(
    ("ranks", "room", "text"),
    [
        ([0], 99, "0"),
        ([0, 1], 99, "0, 1"),
        ([0, 1, 2, 3, 8], 99, "0-3, 8"),
        (range(256), 99, "0-255"),
        ([*range(16), *range(32, 512, 2)], 16, "0-15, +240 more"),
        (range(0, 512, 16), 20, "0, 16, 32, +29 more"),
        (range(0, 512, 16), 6, "0 +31"),
        (range(0, 512, 16), 3, "×32"),
        ([4095], 2, "4095"),
    ],
)
def test_ranks_are_written_as_ranges_and_counts(ranks, room, text):
    assert write_ranks(list(ranks), room) == text


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (8,), (16, 16), (3, 40), (512,), (2, 3, 4)])
def test_the_ink_is_readable_on_every_colour(cuts):
    for block in np.ndindex(*cuts):
        contrast = (luminance(colour_of(block, cuts)) + 0.05) / (luminance(INK) + 0.05)
        assert contrast >= 4.5, f"{colour_of(block, cuts)}: WCAG asks for a contrast of 4.5"
