"""The exercise of the first lesson: its solution passes, and each mistake is told apart."""

import json
import random
import re
from collections import deque
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from dlab.exercises.partitioning import check_equal_shards

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


def length_of(indices, ranks):
    return len(indices) // ranks


def strided(indices, ranks):
    return [tuple(indices[rank::ranks][: length_of(indices, ranks)]) for rank in range(ranks)]


def one_by_one(indices, ranks):
    shards = [[] for _ in range(ranks)]
    for place in range(length_of(indices, ranks) * ranks):
        shards[place % ranks].append(indices[place])
    return shards


def shuffled(indices, ranks):
    indices = random.sample(indices, len(indices))
    return [indices[rank::ranks][: length_of(indices, ranks)] for rank in range(ranks)]


def generated(indices, ranks):
    rest = iter(indices)
    for _ in range(ranks):
        yield (next(rest) for _ in range(length_of(indices, ranks)))


def zipped(indices, ranks):
    groups = zip(*[iter(indices)] * ranks, strict=False)  # one index for each rank
    return zip(*groups, strict=True) if len(indices) >= ranks else [()] * ranks


def rows_of_a_tensor(indices, ranks):
    return torch.tensor(indices[: length_of(indices, ranks) * ranks], dtype=torch.int32).view(ranks, -1)


def numbers_of_numpy(indices, ranks):
    return np.split(np.array(indices[: length_of(indices, ranks) * ranks], dtype=np.int64), ranks)


def ranges_and_deques(indices, ranks):
    return deque(deque(shard) for shard in strided(indices, ranks))


RIGHT = [strided, one_by_one, shuffled, generated, zipped, rows_of_a_tensor, numbers_of_numpy, ranges_and_deques]


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.__name__)
def test_whatever_gives_indices_in_order_passes(right):
    assert check_equal_shards(right) == (
        "well done: every rank takes the same number of steps, and no image is seen twice."
    )


def one_list_with_many_names(indices, ranks):
    shards = [[]] * ranks
    for place, index in enumerate(indices[: length_of(indices, ranks) * ranks]):
        shards[place % ranks].append(index)
    return shards


def eats_its_input(indices, ranks):
    length = length_of(indices, ranks)
    return [[indices.pop() for _ in range(length)] for _ in range(ranks)]


def shuffles_its_input(indices, ranks):
    random.Random(1).shuffle(indices)
    return strided(indices, ranks)


def pieces(indices, ranks):
    length = max(1, length_of(indices, ranks))
    return [indices[start : start + length] for start in range(0, len(indices), length)]


def padded(indices, ranks):
    length = -(-len(indices) // ranks)
    return [[indices[(rank + step * ranks) % len(indices)] for step in range(length)] for rank in range(ranks)]


def without_end(indices, ranks):
    while True:
        yield indices[:1]


def shards_without_end(indices, ranks):
    return [cycle(indices) for _ in range(ranks)]


def misspelt(indices, ranks):
    return indeces[:ranks]  # noqa: F821


WRONG = [
    (lambda indices, ranks: None, "12 indices for 4 ranks gave None: the function must return the shards"),
    (lambda indices, ranks: 3, "gave 3: give a list of shards, one for each rank"),
    (lambda indices, ranks: "0123", "gave '0123': give a list of shards"),
    (lambda indices, ranks: dict(enumerate(strided(indices, ranks))), "gave a dictionary: give a list of shards, in"),
    (lambda indices, ranks: set(strided(indices, ranks)), "gave a set, which has no order: give a list of shards"),
    (lambda indices, ranks: [set(shard) for shard in strided(indices, ranks)], "gave shard 0 as a set, which has no"),
    (lambda indices, ranks: indices, "gave shard 0 as 0: a shard is a list of indices"),
    (lambda indices, ranks: torch.tensor(indices), "gave shard 0 as tensor(0): a shard is a list of indices"),
    (lambda indices, ranks: ["abc"] * ranks, "gave shard 0 as 'abc': a shard is a list of indices"),
    (lambda indices, ranks: [None] * ranks, "gave shard 0 as None: a shard is a list of indices"),
    (lambda indices, ranks: [[1.5]] * ranks, "dealt 1.5 to rank 0: deal indices, which are whole numbers"),
    (lambda indices, ranks: rows_of_a_tensor(indices, ranks) / 2, "dealt 0.0 to rank 0: deal indices, which are whole"),
    (lambda indices, ranks: [[shard] for shard in strided(indices, ranks)], "dealt (0, 4, 8) to rank 0: deal indices"),
    (lambda indices, ranks: [indices[9]] * ranks, "gave shard 0 as 9: a shard is a list of indices"),
    (lambda indices, ranks: [], "gave 0 shards: there must be one per rank"),
    (lambda indices, ranks: [indices], "gave 1 shard: there must be one per rank"),
    (lambda indices, ranks: pieces(indices, len(indices) // ranks), "gave 3 shards: there must be one per rank. It is"),
    (
        pieces,
        "10 indices for 3 ranks gave 4 shards: there must be one per rank. The last one, of 1, is what is left over",
    ),
    (lambda indices, ranks: [indices[rank::ranks] for rank in range(ranks)], "shards of 4, 3 and 3: all must have"),
    (lambda indices, ranks: [list(indices) for _ in range(ranks)], "dealt an index more than once"),
    (
        lambda indices, ranks: [indices] * ranks,
        "gave one and the same list as shard 1 and as another one, so that two ranks would train on the",
    ),
    (one_list_with_many_names, "([[]] * ranks, too, is one list with many names: write [[] for _ in range(ranks)])"),
    (padded, "10 indices for 3 ranks dealt an index more than once: two ranks would train on the same image"),
    (lambda indices, ranks: [[] for _ in range(ranks)], "left out 12: every rank could have had at least one more"),
    (lambda indices, ranks: strided(indices[:-1], ranks), "left out 4: every rank could have had at least one more"),
    (lambda indices, ranks: strided(list(range(len(indices))), ranks), "deal the indices, not their positions"),
    (eats_its_input, "gave the right shards, but the list of indices was changed on the way, and it is the caller's"),
    (shuffles_its_input, "the list of indices was changed on the way"),
    (without_end, "look for a loop that does not end"),
    (shards_without_end, "look for a loop that does not end"),
    (misspelt, "NameError: name 'indeces' is not defined, in the line `return indeces[:ranks]"),
    (lambda indices: [], "ended in TypeError"),
    (lambda indices, ranks: [indices[0 :: len(indices) // ranks]] and 1 / 0, "ended in ZeroDivisionError"),
    ([], "[] is not a function: write def equal_shards(indices, ranks)"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_equal_shards(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_the_notebook_reads_well_where_nobody_runs_it(cells):
    """Every code cell was run, is short, and every picture has its text."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(len(cell["source"]) <= 15 for cell in code)
    pictures = [output for cell in code for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert all(len(picture["metadata"]["image/png"]["alt"]) > 40 for picture in pictures)
