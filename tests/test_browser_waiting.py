"""In a real browser: the controls of a panel act while a later cell waits for its run."""

import re

import pytest

pytest.importorskip("playwright", reason="needs playwright: pip install 'dlab[test]'")

from kernels import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETUP = """
import time
import dlab

def work():
    while not dlab.knob("enough", False):
        time.sleep(0.01)
        dlab.log(step=0)
    print("worker")
    return "done"

cluster, order = dlab.cluster(2), []
"""
START = "run = cluster.start(work)\nrun"
WAIT = "print('waiting')\nprint(run.wait())\norder.append('waited')"
NEXT = "print('next')\norder.append('next')"
OTHER = "cluster.run(dlab.rank)"


@pytest.fixture(scope="module")
def opened(server, chromium):
    with chromium.notebook(server.write("waiting.ipynb", SETUP, START, WAIT, NEXT, OTHER)) as notebook:
        notebook.run_cell(0)
        yield notebook


def text(notebook, number):
    """What is printed below a cell."""
    outputs = notebook.cells()[number]["outputs"]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def test_pause_resume_and_a_knob_act_while_the_next_cell_waits(notebook):
    notebook.run_cell(1)
    panel = notebook.output(1)
    panel.get_by_text("work: running").wait_for()
    panel.get_by_role("checkbox").wait_for()
    notebook.page.evaluate(
        """() => {
            const notebook = jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = 2;
            jupyterapp.commands.execute('notebook:run-cell');
            notebook.activeCellIndex = 3;
            jupyterapp.commands.execute('notebook:run-cell');
        }"""
    )
    eventually(lambda: text(notebook, 2) == "waiting\n")
    panel = notebook.output(1)
    notebook.press(panel, "pause")
    panel.get_by_text("work: paused").wait_for()
    notebook.press(panel, "resume")
    panel.get_by_text("work: running").wait_for()
    notebook.press(panel, "pause")
    panel.get_by_text("work: paused").wait_for()
    notebook.press(panel, "resume")
    panel.get_by_text("work: running").wait_for()
    assert text(notebook, 2) == "waiting\n", "it still waits"
    assert text(notebook, 3) == "", "and the next cell waits for it"
    panel.get_by_role("checkbox").click()
    eventually(lambda: text(notebook, 3) == "next\n")
    assert text(notebook, 2) == "waiting\n['done', 'done']\n"
    assert sorted(re.findall(r"\[rank \d\] worker", text(notebook, 1))) == ["[rank 0] worker", "[rank 1] worker"]
    assert notebook.ask("order") == ["waited", "next"]


def test_a_cell_that_is_run_again_shows_the_panel_of_its_new_run_and_no_error(notebook):
    for said in ("", "work was still running from this cell's last execution: it was stopped, and a new run begins\n"):
        notebook.run_cell(1)
        notebook.output(1).get_by_text("work: running").wait_for()
        assert text(notebook, 1) == said
        assert notebook.failures() == []
    notebook.run_cell(4)  # another cell, while it goes on
    (failure,) = notebook.failures()
    assert re.fullmatch(r"RuntimeError: work has been running .* or end it \(run.stop\(\)\) first, .*", failure)
    notebook.output(1).get_by_text("work: running").wait_for()
    assert notebook.ask("run.state") == "running"
    assert notebook.ask("run.stop()") is None
    notebook.run_cell(4)  # and now it can
