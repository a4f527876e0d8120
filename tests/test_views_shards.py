"""Who holds what: shards with their labels and slices of tensors, counted here again element by element."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import dlab
from dlab.views import ShardView, shard_events


def _slice(rank, tensor, shape, piece, time=1.0):
    data = {"tensor": tensor, "shape": list(shape), "slice": [list(span) for span in piece]}
    return dlab.Event(time, rank, "slice", data)


def _quarters():
    """A 4 x 6 tensor on eight ranks: cut into four, each quarter on two of them."""
    pieces = [((row, row + 2), (column, column + 3)) for row in (0, 2) for column in (0, 3)]
    return [_slice(rank, "w", (4, 6), pieces[rank % 4]) for rank in range(8)]


class _Data:
    targets = (0, 0, 1, 1, 1, 1, 3, 3, 3, 3)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, self.targets[index]


def test_events_of_a_partitioner_count_its_labels():
    parts = dlab.DataPartitioner(_Data(), [0.5, 0.3, 0.2])
    events = shard_events(parts, "mine")
    assert [event.rank for event in events] == [0, 1, 2]
    for event in events:
        labels = [_Data.targets[index] for index in parts.partitions[event.rank]]
        assert event.kind == "shard" and event.data["name"] == "mine"
        assert event.data["samples"] == len(labels)
        assert event.data["labels"] == [0, 1, 3]
        assert event.data["histogram"] == [labels.count(label) for label in (0, 1, 3)]


def test_data_without_labels_has_counts_only():
    view = ShardView(shard_events(dlab.DataPartitioner(range(10), [0.5, 0.5])))
    assert str(view).splitlines() == ["train   samples", "rank 0        5", "rank 1        5"]
    assert isinstance(view.figure(), Figure)


def test_the_text_is_a_table_with_one_scale_for_all_bars():
    events = [
        dlab.Event(1.0, 1, "shard", {"name": "train", "samples": 12, "histogram": [4, 8, 0]}),
        dlab.Event(1.0, 0, "shard", {"name": "train", "samples": 3, "histogram": [1, 1, 1]}),
    ]
    assert str(ShardView(events)).splitlines() == [
        "train   samples  labels 0..2  per label",
        "rank 0        3  ▁▁▁          1..1",
        "rank 1       12  ▄█·          0..8",
    ]


def test_bars_are_as_tall_as_the_counts():
    parts = dlab.DataPartitioner(dlab.mnist(), [0.25] * 4, skew=0.5)
    view = ShardView(shard_events(parts))
    (axes,) = [axes for axes in view.figure().subfigs[0].axes if axes.patches]
    heights = np.array([abs(bar.get_height()) for bar in axes.patches]).reshape(4, 10)
    counts = np.array([list(row.histogram.values()) for row in parts.table().rows])
    assert np.allclose(heights / heights.max(), counts / counts.max())
    assert axes.get_xlabel().startswith("label")


def test_replicated_slices_are_one_part_with_all_their_ranks():
    parts = ShardView(_quarters()).tensors["w"].parts()
    assert parts == [
        (((0, 2), (0, 3)), [0, 4]),
        (((0, 2), (3, 6)), [1, 5]),
        (((2, 4), (0, 3)), [2, 6]),
        (((2, 4), (3, 6)), [3, 7]),
    ]


def test_the_rectangles_cover_every_element_with_its_own_ranks():
    view = ShardView(_quarters())
    (axes,) = view.figure().subfigs[0].axes
    words = {(text.get_position()): text.get_text() for text in axes.texts}
    for row in range(4):
        for column in range(6):
            (box,) = [b for b in axes.patches if b.get_bbox().fully_contains(column + 0.5, row + 0.5)]
            middle = (box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2)
            holders = [rank for rank in range(8) if rank % 4 == 2 * (row // 2) + column // 3]
            assert words[middle] == ", ".join(map(str, holders))


def test_slices_as_text():
    lines = str(ShardView(_quarters())).splitlines()
    assert lines[0] == "w (4 × 6)  slice       elements  of the whole"
    assert lines[6] == "rank 5     [0:2, 3:6]         6  0.25"
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("shape", "piece", "sides", "drawable"),
    [
        ((), (), (None, None), True),
        ((8,), ((0, 4),), (None, 0), True),
        ((8, 4), ((0, 8), (0, 2)), (0, 1), True),
        ((8, 4, 6), ((0, 8), (0, 2), (0, 3)), (1, 2), True),
        ((8, 4, 6), ((0, 8), (0, 4), (0, 3)), (0, 2), True),
        ((8, 4, 6), ((0, 4), (0, 2), (0, 3)), (0, 1), False),
    ],
)
def test_a_tensor_is_drawn_along_the_dimensions_that_are_cut(shape, piece, sides, drawable):
    view = ShardView([_slice(0, "t", shape, piece)])
    tensor = view.tensors["t"]
    assert tensor.sides() == sides and tensor.drawable == drawable
    assert len(view.data()["tensors"]) == drawable
    assert isinstance(view.figure(), Figure)
    assert "rank 0" in str(view) and "rank 0" in view.alt


def test_what_a_rank_told_last_counts():
    events = [_slice(0, "w", (4,), [(0, 4)]), _slice(0, "w", (4,), [(0, 2)], time=2.0)]
    assert ShardView(events).tensors["w"].parts() == [(((0, 2),), [0])]
    shards = [dlab.Event(float(n), 0, "shard", {"name": "train", "samples": n}) for n in (5, 6)]
    assert ShardView(shards).shards["train"][0].samples == 6


def test_nothing_yet_is_said_and_drawn():
    view = ShardView([dlab.Event(1.0, 0, "log", {"step": 0})])
    assert view.empty and "no rank has reported" in str(view) and "no rank has reported" in view.alt
    assert isinstance(view.figure(), Figure)


def test_what_goes_to_the_browser_is_bounded(tmp_path):
    many = [
        dlab.Event(1.0, rank, "shard", {"name": "huge", "samples": 9, "histogram": [1] * 5000}) for rank in range(100)
    ]
    view = ShardView([*many, *(_slice(0, f"t{number}", (4,), [(0, 2)]) for number in range(50))])
    data = view.data()
    (huge,) = data["sets"]
    assert len(huge["rows"]) == 32 and all(row["histogram"] == [] for row in huge["rows"])
    assert len(data["tensors"]) == 12
    assert "… 68 more ranks" in str(view)
    assert isinstance(view.figure(), Figure)
    view.save_html(tmp_path / "page.html")
    assert "views.shards" in (tmp_path / "page.html").read_text()


def test_it_does_not_hide_the_table_of_the_partitioner():
    assert "ShardView" not in dir(dlab)
    assert isinstance(dlab.DataPartitioner(range(9), [1.0]).table(), dlab.data.ShardTable)


def test_of_many_tensors_some_are_drawn_from_every_part_of_the_network():
    events = [_slice(0, f"layer {number}", (4, 6), ((0, 4), (0, 6))) for number in range(30)]
    figure = ShardView(events).figure()
    titles = [axes.get_title() for part in figure.subfigs for axes in part.axes]
    assert [title.partition(" (")[0] for title in titles] == [f"layer {place * 30 // 12}" for place in range(12)]
