"""In a real kernel: a mistake is the cell's own line and a sentence; a fault of dlab's keeps every frame."""

import pytest
from kernels import COLOUR

FIRST_CELL = "import time, torch, dlab\ncluster = dlab.cluster(2)"


def shown(cell) -> str:
    return COLOUR.sub("", cell.traceback)


@pytest.mark.parametrize(
    ("line", "kind", "sentence"),
    [
        ("dlab.Cluster(0)", "ValueError", "a cluster of 0 workers is not possible: give a whole number, 1 or more"),
        (
            "cluster.start(5)",
            "TypeError",
            "cluster.run and cluster.start take a function first, not 5: write run(fn, …)",
        ),
        ("cluster.start(dlab.rank).kill(7)", "IndexError", "there is no rank 7: this run has ranks 0 to 1"),
        ("dlab.clutser(4)", "AttributeError", "dlab has no 'clutser'; it has "),
        ("dlab.rehearse(lambda link: link.recv(torch.zeros(1), 1 - link.rank), 2)", "Deadlock", ""),
        ("stopped()", "Stopped", "<lambda> was stopped after "),
    ],
    ids=["ValueError", "TypeError", "IndexError", "AttributeError", "Deadlock", "Stopped"],
)
def test_a_mistake_is_the_cells_own_line_and_a_sentence(kernel, line, kind, sentence):
    kernel.run(
        "def stopped():\n    run = cluster.start(lambda: time.sleep(1000))\n    run.stop()\n    run.wait()  # here"
    )
    cell = kernel.run(f"# a comment\n{line}  # the line")
    text = shown(cell)
    assert cell.error == kind
    assert f"----> 2 {line}  # the line" in text
    assert "/dlab/" not in text
    assert "threading.py" not in text
    assert f"\n{kind}: {sentence}" in text
    if kind == "Stopped":
        assert "run.wait()  # here" in text, "functions of the reader's own stay"


def test_tb_has_every_frame(kernel):
    assert "dlab/processes/parent/cluster.py" not in shown(kernel.run("dlab.Cluster(0)"))
    again = kernel.run("%tb")
    assert "dlab/processes/parent/cluster.py" in COLOUR.sub("", again.stdout + again.stderr) + shown(again)
    kernel.run("import sys, traceback")
    assert kernel.run("'cluster.py' in str(traceback.extract_tb(sys.last_traceback))").result == "True"


def test_a_function_of_the_readers_own_that_fails_is_shown_without_dlab(kernel):
    kernel.run("def divide(link):\n    return 1 / 0  # culprit")
    text = shown(kernel.run("dlab.rehearse(divide, 2)"))
    assert "----> 1 dlab.rehearse(divide, 2)" in text
    assert "return 1 / 0  # culprit" in text
    assert "/dlab/" not in text


def test_an_error_in_the_middle_of_dlab_keeps_every_frame(kernel):
    cell = kernel.run("cluster._supervisor, kept = None, cluster._supervisor\ncluster.pids")
    assert cell.error == "AttributeError"
    assert "/dlab/processes/parent/cluster.py" in shown(cell)
    assert kernel.run("cluster._supervisor = kept").error is None


def test_errors_that_have_nothing_to_do_with_dlab_are_as_ever(kernel):
    assert "torch/" in shown(kernel.run("torch.nn.Linear(2, 2)(torch.zeros(3))"))
    assert "----> 1 1 / 0" in shown(kernel.run("1 / 0"))


def test_an_interrupt_is_shown_without_dlab(kernel):
    cell = kernel.submit("def wait():\n    print('in')\n    cluster.run(time.sleep, 1000)  # here\nwait()")
    kernel.wait_for(cell, "in")
    kernel.interrupt()
    text = shown(kernel.finish(cell))
    assert text.rstrip().endswith("KeyboardInterrupt:")
    assert "cluster.run(time.sleep, 1000)  # here" in text
    assert "/dlab/" not in text
    assert "threading.py" not in text
