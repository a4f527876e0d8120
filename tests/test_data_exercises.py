"""The exercise of the first lesson: its solution passes, and each mistake is told apart."""

import json
import re
from pathlib import Path

import pytest

from dlab.data.exercises import check_equal_shards

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_data_partitioning.ipynb"


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def define(source):
    names = {}
    exec(source, names)
    return names["equal_shards"]


def test_the_hidden_solution_passes(cells):
    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_equal_shards(define(solution)).startswith("well done")


def test_the_stub_does_not_pass_and_the_notebook_shows_it(cells):
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def equal_shards")]
    answer = check_equal_shards(define(stub))
    assert answer == "not yet: 12 indices for 4 ranks gave 0 shards: there must be one per rank."
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown


def test_another_way_passes_too():
    def strided(indices, ranks):
        length = len(indices) // ranks
        return [tuple(indices[rank::ranks][:length]) for rank in range(ranks)]

    assert check_equal_shards(strided).startswith("well done")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda indices, ranks: None, "ended in TypeError"),
        (lambda indices, ranks: [indices[9]] * ranks, "ended in TypeError"),
        (lambda indices, ranks: [indices], "gave 1 shards: there must be one per rank"),
        (lambda indices, ranks: [indices[rank::ranks] for rank in range(ranks)], "shards of 4, 3 and 3: all must have"),
        (lambda indices, ranks: [indices] * ranks, "dealt an index more than once"),
        (lambda indices, ranks: [[] for _ in range(ranks)], "left out 12: every rank could have had at least one more"),
        (
            lambda indices, ranks: [indices[rank::ranks][: (len(indices) - 1) // ranks] for rank in range(ranks)],
            "left out 4",
        ),
        (
            lambda indices, ranks: [
                list(range(len(indices)))[rank::ranks][: len(indices) // ranks] for rank in range(ranks)
            ],
            "deal the indices, not their positions",
        ),
    ],
)
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_equal_shards(wrong)
    assert answer.startswith("not yet: ") and sentence in answer


def test_the_notebook_reads_well_where_nobody_runs_it(cells):
    """Every code cell was run, is short, and every picture has its text."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(len(cell["source"]) <= 15 for cell in code)
    pictures = [output for cell in code for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert all(len(picture["metadata"]["image/png"]["alt"]) > 40 for picture in pictures)
