"""The exercise of the second lesson: rings pass in either direction, and each mistake is told apart."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from rings import RIGHT, to_the_right
from rings_wrong import WRONG

from dlab.exercises import check_ring, ring, sandbox
from dlab.rehearsal import rehearse

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "02_allreduce.ipynb"


def name(answer):
    return getattr(getattr(answer, "func", answer), "__name__", "")


@pytest.mark.parametrize("ring", RIGHT, ids=name)
def test_right_rings_pass_in_whatever_style(ring):
    assert check_ring(ring).startswith("well done: ")


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[name(wrong) for wrong, _ in WRONG])
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_ring(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_ring_that_relies_on_timing_fails_when_a_rank_is_slow(monkeypatch):
    monkeypatch.setattr(ring, "PAUSE", 0.3)
    notes = {}

    def hopeful(tensor, transport):
        notes[transport.rank] = tensor.clone()
        to_the_right(tensor, transport)
        notes[transport.rank] = tensor.clone()
        time.sleep(0.1)  # by now the neighbour must have finished
        tensor.copy_(notes[(transport.rank + 1) % transport.size])

    answer = check_ring(hopeful)
    assert answer.startswith(
        "not yet: with 4 ranks and 12 elements, rank 1 slow, ranks 0, 1 and 2 hold the sum, but rank 3"
    )


@pytest.mark.parametrize("looping", [(0, 1, 2, 3), (2,)], ids=["all", "one"])
def test_a_loop_that_does_not_end_is_told_and_its_threads_end(monkeypatch, looping):
    monkeypatch.setattr(ring, "LIMIT", 0.3)

    def spin(tensor, transport):
        while transport.rank in looping:
            pass
        to_the_right(tensor, transport)

    answer = check_ring(spin)
    assert "ranks 0, 1, 2 and 3 had not returned after 0.3 s: look for a loop that does not end" in answer
    deadline = time.monotonic() + 10
    while any(re.fullmatch(r"rank \d", thread.name) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the learner's threads still run"
        time.sleep(0.01)


def test_a_rank_that_comes_to_run_when_time_is_up_is_counted_and_ends(monkeypatch):
    """On a busy machine, those who loop can keep the thread of the last one from starting."""

    def late(work, ranks):
        return rehearse(lambda transport: (time.sleep(0.6 * (transport.rank == 3)), work(transport)), ranks)

    monkeypatch.setattr(sandbox, "rehearse", late)
    test_a_loop_that_does_not_end_is_told_and_its_threads_end(monkeypatch, (0, 1, 2, 3))


# -------------------------------------------------------------------------------------- the notebook


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def define(source):
    names = {"torch": torch}
    exec(source, names)
    return names["my_ring"]


def test_the_hidden_solution_passes(cells):
    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_ring(define(solution)).startswith("well done")


def test_the_stub_does_not_pass_and_the_notebook_shows_it(cells):
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def my_ring")]
    answer = check_ring(define(stub))
    assert "still holds only its own numbers" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
