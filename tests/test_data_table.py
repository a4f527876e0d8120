"""Shard tables: true numbers, aligned text, HTML with a bar per label, and never a thousand lines."""

from collections import Counter
from html.parser import HTMLParser

import pytest
import torch
from torch.utils.data import TensorDataset

from dlab.data import DataPartitioner, ShardTable, mnist
from dlab.data.table import Bars, ShardRow


class Page(HTMLParser):
    """Collects tags, checks that they close in order, and keeps the text of every cell."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells[-1] += data


@pytest.fixture(scope="module")
def digits():
    return mnist(train=True)


def test_the_rows_hold_the_truth(digits):
    parts = DataPartitioner(digits, [0.5, 0.3, 0.2], skew=0.4)
    table = parts.table()
    assert isinstance(table, ShardTable)
    for rank, row in enumerate(table.rows):
        index = parts.partitions[rank]
        labels = Counter(digits[i][1] for i in index[:500])
        assert row.rank == rank and row.count == len(index) and row.first == tuple(index[:5])
        assert list(row.histogram) == list(range(10)) and sum(row.histogram.values()) == len(index)
        whole = Counter(digits.targets[index].tolist())
        assert all(row.histogram[label] == whole[label] for label in range(10)) and labels <= whole
    assert sum((Counter(row.histogram) for row in table.rows), Counter()) == Counter(digits.targets.tolist())


def test_the_text_of_data_without_labels():
    assert str(DataPartitioner(range(1, 11)).table()) == (
        "rank  count  first indices\n"
        "   0      7  2, 8, 3, 5, 6, …\n"
        "   1      2  0, 1\n"
        "   2      1  7"
    )  # fmt: skip


def test_the_text_of_data_with_labels():
    data = TensorDataset(torch.zeros(12), torch.tensor([0, 1, 2] * 4))
    table = ShardTable([ShardRow(0, 9, (3, 4), {0: 0, 1: 8, 2: 1}), ShardRow(1, 3, (1, 2, 0), {0: 2, 1: 1, 2: 0})])
    assert str(table) == (
        "rank  count  first indices  labels 0..2  per label\n"
        "   0      9  3, 4, …        ·█▁          0..8\n"
        "   1      3  1, 2, 0        █▄·          0..2"
    )
    assert repr(table) == str(table)
    assert "labels 0..2" in str(DataPartitioner(data).table())


def test_labels_with_gaps_are_named_one_by_one():
    data = [(0, label) for label in (3, 7, 8, 3)]
    assert "labels 3, 7, 8" in str(DataPartitioner(data, [1]).table())


def test_bars_never_draw_something_as_nothing():
    assert str(Bars({0: 1, 1: 100_000, 2: 0})) == "▁█·"
    assert str(Bars({0: 0, 1: 0})) == "··"
    assert str(Bars({0: 99, 1: 100})) == "▇█"  # only the largest is a full block
    assert str(Bars({label: label + 1 for label in range(8)})) == "▁▂▃▄▅▆▇█"


def test_a_thousand_shards_do_not_print_a_thousand_rows(digits):
    table = DataPartitioner(digits, [1 / 1000] * 1000).table()
    lines = str(table).splitlines()
    assert len(lines) == 18
    assert [int(line.split()[0]) for line in lines[1:9] + lines[10:]] == [*range(8), *range(992, 1000)]
    assert lines[9] == "… 984 more shards, 60 samples each"
    page = Page(table._repr_html_())
    assert sum(tag == "tr" for tag, _ in page.tags) == 18
    assert "… 984 more shards, 60 samples each" in page.cells
    assert len(table.rows) == 1000 and table.rows[500].count == 60


def test_shards_of_different_sizes_are_summed_up_by_their_range():
    table = DataPartitioner(range(100), [1 / 17] * 17).table()
    assert "… 1 more shard, 6 samples each" in str(table)
    assert "… 14 more shards, 3..4 samples each" in str(DataPartitioner(range(100), [1 / 30] * 30).table())


@pytest.mark.parametrize("shards", [1, 16])
def test_sixteen_shards_are_all_shown(shards):
    assert len(str(DataPartitioner(range(100), [1 / shards] * shards).table()).splitlines()) == shards + 1


def test_the_html_has_a_bar_per_label_and_says_it_in_words(digits):
    table = DataPartitioner(digits, [0.25] * 4, skew=0.1).table()
    page = Page(table._repr_html_())
    assert page.cells[:5] == ["rank", "count", "first indices", "labels 0..9", "per label"]
    assert [int(cell) for cell in page.cells[6::5]] == [row.count for row in table.rows]
    pictures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    words = [", ".join(f"{label}: {count}" for label, count in row.histogram.items()) for row in table.rows]
    assert [picture["aria-label"] for picture in pictures] == [f"samples per label: {text}" for text in words]
    bars = [attributes for _, attributes in page.tags if "title" in attributes]
    assert len(bars) == 40
    assert all("background-color:#3d85c6" in bar["style"] for bar in bars)  # JupyterLab keeps plain colours only
    heights = [float(bar["style"].rsplit(":", 1)[1].removesuffix("em")) for bar in bars[:10]]
    counts = list(table.rows[0].histogram.values())
    assert heights == pytest.approx([1.5 * count / max(counts) for count in counts], abs=0.005)


def test_data_without_labels_has_no_bars_in_html():
    page = Page(DataPartitioner(range(1, 11)).table()._repr_html_())
    assert page.cells[:3] == ["rank", "count", "first indices"] and len(page.cells) == 12
    assert not any("role" in attributes for _, attributes in page.tags)


def test_a_great_many_classes_are_left_to_the_rows():
    table = DataPartitioner([(0, label) for label in range(100)], [0.5, 0.5]).table()
    assert "labels" not in str(table)
    assert len(table.rows[0].histogram) == 100


def test_empty_shards_and_empty_data():
    table = DataPartitioner([(0, 1), (0, 2)], [1, 0]).table()
    assert str(table).splitlines()[2] == "   1      0                 ··           0"
    Page(table._repr_html_())
    assert len(str(DataPartitioner([], [1]).table()).splitlines()) == 2
    assert str(ShardTable([])) == "rank  count  first indices"
