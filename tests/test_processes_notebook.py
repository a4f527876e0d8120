"""In a real kernel: a cell that is run again replaces its earlier run; other cells are told what is in the way."""

import re

import pytest
from kernels import COLOUR, ok

FIRST_CELL = """
import time, dlab
cluster, runs = dlab.cluster(2), []
def work():
    while not dlab.knob("enough"): time.sleep(0.01)
    return "done"
"""
REPLACED = "was still running from this cell's last execution: it was stopped, and a new run begins"


@pytest.fixture(autouse=True)
def nothing_goes_on(kernel):
    yield
    ok(kernel.run("for each in runs: each.stop()\nruns.clear()"))


@pytest.mark.parametrize("cell_id", ["a", None], ids=["by its id", "by its text"])
@pytest.mark.parametrize(
    "start", ["cluster.start(work)", "dlab.race({'one': work, 'two': work}, workers=2)"], ids=["start", "race"]
)
def test_a_cell_that_is_run_again_replaces_what_it_had_started(kernel, start, cell_id):
    code = f"run = {start}\nruns.append(run)"
    assert ok(kernel.run(code, cell_id=cell_id)).stdout == ""
    ok(kernel.run("while not getattr(run, 'runs', {'one': run}): time.sleep(0.01)"))  # a race begins in its thread
    again = ok(kernel.run(code, cell_id=cell_id))
    name = "race" if "race" in start else "work"
    assert again.stdout == f"{name} {REPLACED}\n"
    assert kernel.run("runs[0].done").result == "True"
    assert kernel.run("runs[1].done").result == "False"
    ok(kernel.run("while not getattr(run, 'runs', {'one': run}): time.sleep(0.01)\nrun.set('enough', True)"))
    waited = ok(kernel.run("getattr(run, 'runs', {'one': run})['one'].wait(30)"))
    assert waited.result == "['done', 'done']"
    assert kernel.run("runs[0].wait()").error == "Stopped"


def test_a_changed_text_in_the_same_cell_is_still_that_cell(kernel):
    ok(kernel.run("runs.append(cluster.start(work))", cell_id="a"))
    assert REPLACED in ok(kernel.run("run = cluster.start(work); runs.append(run)", cell_id="a")).stdout


@pytest.mark.parametrize(
    "line",
    [
        "cluster.start(dlab.rank)",
        "cluster.run(dlab.rank)",
        "dlab.train(dlab.MLP, workers=2)",
        "dlab.race({'one': dlab.rank}, workers=2)",
    ],
)
def test_another_cell_is_told_in_one_sentence_what_goes_on_and_what_to_type(kernel, line):
    ok(kernel.run("mine = cluster.start(work); runs.append(mine)", cell_id="a"))
    cell = kernel.run(line, cell_id="b")
    shown = COLOUR.sub("", cell.traceback)
    assert cell.error == "RuntimeError"
    sentence = (
        r"\nRuntimeError: work has been running on this cluster for \d+ s: "
        r"wait for it \(mine.wait\(\)\) or end it \(mine.stop\(\)\) first, or use another cluster\s*$"
    )
    assert re.search(sentence, shown), shown
    assert f"----> 1 {line}" in shown
    assert "/dlab/" not in shown
    assert kernel.run("mine.state").result == "'running'", "and it is not disturbed"
    assert ok(kernel.run("mine.set('enough', True); mine.wait(30)")).result == "['done', 'done']"


def test_a_second_start_in_the_same_execution_is_a_mistake_and_does_not_stop_the_first(kernel):
    cell = kernel.run("for number in range(2):\n    run = cluster.start(work); runs.append(run)", cell_id="a")
    assert cell.error == "RuntimeError"
    assert kernel.run("run.state").result == "'running'"


def test_a_run_that_has_no_name_is_known_by_its_output(kernel):
    ok(kernel.run("dlab.race({'one': work}, workers=2)", cell_id="a"))
    ok(kernel.run("runs.append(_)\nwhile not runs[0].runs: time.sleep(0.01)"))
    assert re.search(r"end it \(_\d+.stop\(\)\) first", kernel.run("cluster.run(dlab.rank)", cell_id="b").traceback)
