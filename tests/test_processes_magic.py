"""`%%workers` in a real kernel: a cell that runs on every worker, in a namespace that lasts."""

import time

import pytest
from kernels import COLOUR, ok, within

FIRST_CELL = "%load_ext dlab"


def test_the_body_runs_on_every_worker_and_the_last_expression_comes_back_by_rank(kernel):
    cell = kernel.run(
        "%%workers -n 3\n"
        "import torch, dlab\n"
        "import torch.distributed as dist\n"
        "x = torch.ones(2) * dlab.rank()\n"
        "dist.all_reduce(x)\n"
        "x"
    )
    assert ok(cell).result == "\n".join(f"[rank {rank}] tensor([3., 3.])" for rank in range(3))


def test_the_namespace_lasts_and_so_does_the_number_of_workers(kernel):
    ok(kernel.run("%%workers -n 3\nimport dlab\nvalue = 10 * dlab.rank()\ndef double(x):\n    return 2 * x"))
    cell = kernel.run("%%workers\nvalue += 1\ndouble(value)")
    assert ok(cell).result == "[rank 0] 2\n[rank 1] 22\n[rank 2] 42"
    assert ok(kernel.run("value = 'of the notebook'")).result is None
    assert ok(kernel.run("%%workers\nvalue")).result == "[rank 0] 1\n[rank 1] 11\n[rank 2] 21"


def test_a_cell_that_ends_in_no_expression_or_in_none_shows_nothing(kernel):
    assert ok(kernel.run("%%workers -n 3\ny = 3")).result is None
    assert ok(kernel.run("%%workers\nNone")).result is None
    assert ok(kernel.run("%%workers\n\n# only a comment\n")).result is None


def test_results_can_be_used_as_a_list(kernel):
    ok(kernel.run("%%workers -n 3\nimport dlab\ndlab.rank() ** 2"))
    assert kernel.run("list(_), sum(_)").result == "([0, 1, 4], 5)"


def test_prints_appear_in_the_cell(kernel):
    cell = ok(kernel.run("%%workers -n 3\nprint('hello')"))
    assert sorted(cell.stdout.splitlines()) == [f"[rank {rank}] hello" for rank in range(3)]


def test_targets_chooses_the_ranks_that_run_it(kernel):
    ok(kernel.run("%%workers -n 3\nimport dlab\nmark = 'old'"))
    cell = kernel.run("%%workers --targets 0,2\nmark = 'new'\ndlab.rank()")
    assert ok(cell).result == "[rank 0] 0\n[rank 2] 2"
    assert kernel.run("%%workers\nmark").result == "[rank 0] 'new'\n[rank 1] 'old'\n[rank 2] 'new'"


def test_noblock_gives_a_run_at_once(kernel):
    ok(kernel.run("%%workers -n 3\nimport dlab, time"))
    ok(kernel.run("%%workers --noblock\nwhile not dlab.knob('go'): time.sleep(0.01)\n'done'"))
    assert kernel.run("run = _\nrun.state").result == "'running'"
    assert ok(kernel.run("run.set('go', True)\nrun.wait(30)")).result == "['done', 'done', 'done']"


def test_what_is_defined_in_a_cell_comes_back_as_a_result(kernel):
    ok(kernel.run("%%workers -n 3\nclass Box:\n    def __init__(self, value):\n        self.value = value"))
    ok(kernel.run("%%workers --targets 1\nBox(5), lambda x: x + 1"))
    assert kernel.run("box, add = _[0]\nadd(box.value)").result == "6"


def test_an_error_shows_the_line_of_the_cell(kernel):
    start = time.monotonic()
    cell = kernel.run("%%workers -n 3\nimport dlab\ndef divide(y):\n    return 1 / y  # here\ndivide(dlab.rank() - 1)")
    within(start, 1, "an error in a %%workers cell")
    shown = COLOUR.sub("", cell.traceback)
    assert cell.error == "WorkerError"
    assert shown.startswith("WorkerError: rank 1 failed: ZeroDivisionError")
    assert "line 3, in divide\n    return 1 / y  # here" in shown
    assert "divide(dlab.rank() - 1)" in shown
    assert "dlab/processes" not in shown


def test_a_mistake_in_the_syntax_is_shown_with_its_line(kernel):
    cell = kernel.run("%%workers -n 3\nx = 1\ny = = 2")
    assert "SyntaxError" in cell.traceback
    assert "y = = 2" in cell.traceback
    assert ok(kernel.run("%%workers\n'fine'")).result.count("fine") == 3


def test_an_interrupt_stops_the_cell_and_the_namespace_stays(kernel):
    ok(kernel.run("%%workers -n 3\nimport time\nkept = 'kept'"))
    cell = kernel.submit("%%workers\nprint('in')\ntime.sleep(1000)")
    kernel.wait_for(cell, "[rank 2] in")
    start = time.monotonic()
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    within(start, 1, "an interrupt of a %%workers cell")
    assert ok(kernel.run("%%workers\nkept")).result.count("kept") == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--targets 0,7", "--targets 0,7: there is no rank 7, the ranks are 0 to 2"),
        ("--targets all", "--targets all: write ranks with commas between, as in --targets 0,2"),
        ("-n many", "invalid int value: 'many'"),
        ("-n 0", "a cluster of 0 workers is not possible"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence_and_the_next_cell_works(kernel, options, sentence):
    ok(kernel.run("%%workers -n 3\n1"))
    cell = kernel.run(f"%%workers {options}\n1")
    assert sentence in cell.traceback + cell.stderr
    assert ok(kernel.run("%%workers\n'fine'")).result.count("fine") == 3
