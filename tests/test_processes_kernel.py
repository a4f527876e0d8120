"""In a real Jupyter kernel: cells become workers, and what they print and raise comes back to the calling cell."""

import time

import pytest
from kernels import COLOUR, Kernel, alive, eventually, ok, within

FIRST_CELL = """
import os, sys, time, torch, dlab
import torch.distributed as dist
cluster = dlab.Cluster(3)
assert cluster.run(dlab.rank) == [0, 1, 2]
"""


# ------------------------------------------------------------------------------------- cells become workers


def test_functions_lambdas_classes_and_globals_of_cells_work(kernel):
    ok(kernel.run("scale = 10\nclass Net(torch.nn.Linear):\n    def size(self):\n        return self.weight.numel()"))
    ok(kernel.run("def scaled(x):\n    return x * scale"))
    ok(kernel.run("def work(base):\n    return scaled(base) + dist.get_rank()"))
    assert ok(kernel.run("cluster.run(work, 2)")).result == "[20, 21, 22]"
    assert ok(kernel.run("cluster.run(lambda: scale * dlab.rank())")).result == "[0, 10, 20]"
    made = ok(kernel.run("[(type(net) is Net, net.size()) for net in cluster.run(Net, 2, 3)]"))
    assert made.result == "[(True, 6), (True, 6), (True, 6)]"


def test_a_cell_may_use_both_torch_and_the_operators_of_dlab(kernel):
    ok(kernel.run("def product():\n    return dlab.ops.ReLU()(torch.ones(3)).sum().item()"))
    assert ok(kernel.run("cluster.run(product)")).result == "[3.0, 3.0, 3.0]"


def test_a_changed_cell_counts_from_the_next_run_on(kernel):
    ok(kernel.run("def version():\n    return 1"))
    assert kernel.run("cluster.run(version)").result == "[1, 1, 1]"
    ok(kernel.run("def version():\n    return 2"))
    assert kernel.run("cluster.run(version)").result == "[2, 2, 2]"


def test_the_kernel_stays_free_while_workers_run(kernel):
    ok(kernel.run("def train():\n    while not dlab.knob('enough'):\n        dlab.log(step=0); time.sleep(0.01)"))
    ok(kernel.run("run = cluster.start(train)"))
    assert ok(kernel.run("run.state, run.done")).result == "('running', False)"
    ok(kernel.run("run.set('enough', True)"))
    assert ok(kernel.run("run.wait(30)")).result == "[None, None, None]"


# ------------------------------------------------------------------------------------- output


def test_prints_belong_to_the_calling_cell_and_come_while_it_runs(kernel):
    cell = kernel.submit(
        "def speak():\n"
        "    print('before')\n"
        "    while not os.path.exists(gate): time.sleep(0.01)\n"
        "    print('after')\n"
        "gate = os.path.join(os.environ['TMPDIR'], 'gate')\n"
        "print(gate)\n"
        "cluster.run(speak);"
    )
    seen = kernel.wait_for(cell, "[rank 2] before\n")
    assert kernel.is_running(cell)
    assert "after" not in seen.stdout
    open(seen.stdout.splitlines()[0], "w").close()
    lines = ok(kernel.finish(cell)).stdout.splitlines()[1:]
    assert sorted(lines) == sorted(f"[rank {rank}] {word}" for rank in range(3) for word in ("before", "after"))


def test_prints_of_a_background_run_belong_to_the_cell_that_started_it_though_others_have_run_since(kernel):
    ok(kernel.run("def speak():\n    while not dlab.knob('go'): time.sleep(0.01)\n    print('late', file=sys.stdout)"))
    first = kernel.submit("run = cluster.start(speak); print('first cell')")
    ok(kernel.finish(first))
    second = kernel.submit("other = dlab.Cluster(1)\nother.run(lambda: print('from the other')); print('second cell')")
    assert ok(kernel.finish(second, 60)).stdout == "[rank 0] from the other\nsecond cell\n"
    third = kernel.submit("run.set('go', True); run.wait(30); print('third cell'); other.close()")
    ok(kernel.finish(third))
    kernel.wait_for(first, "[rank 2] late")
    assert sorted(kernel.shown(first).stdout.splitlines()) == sorted(
        ["first cell", "[rank 0] late", "[rank 1] late", "[rank 2] late"]
    )
    assert kernel.shown(second).stdout == "[rank 0] from the other\nsecond cell\n"
    assert kernel.shown(third).stdout == "third cell\n"


def test_progress_bars_of_tqdm_auto_in_workers_are_whole_lines(kernel):
    cell = ok(
        kernel.run(
            "def bar():\n"
            "    from tqdm.auto import tqdm\n"
            "    for step in tqdm(range(200), mininterval=0):\n"
            "        if step == 100: print('halfway')\n"
            "cluster.run(bar);"
        )
    )
    assert sorted(cell.stdout.splitlines()) == [f"[rank {rank}] halfway" for rank in range(3)]
    bars = [line for line in cell.stderr.splitlines() if "200/200" in line]
    assert sorted(bar[:14] for bar in bars) == [f"[rank {rank}] 100%|" for rank in range(3)]
    assert all(line.startswith("[rank ") for line in cell.stderr.splitlines())


# ------------------------------------------------------------------------------------- errors


def test_an_error_shows_the_line_of_the_cell_and_nothing_of_dlab(kernel):
    ok(kernel.run("def divide(x):\n    y = x - 1\n    return 10 / y  # here\n"))
    start = time.monotonic()
    cell = kernel.run("def work():\n    return divide(dlab.rank())\ncluster.run(work)")
    within(start, 1, "an error in a cell")
    shown = COLOUR.sub("", cell.traceback)
    assert cell.error == "WorkerError"
    assert shown.startswith("WorkerError: rank 1 failed: ZeroDivisionError: division by zero")
    assert "line 3, in divide\n    return 10 / y  # here" in shown
    assert "line 2, in work\n    return divide(dlab.rank())" in shown
    assert "supervisor" not in shown
    assert "dlab/processes" not in shown
    assert ok(kernel.run("cluster.run(dlab.rank)")).result == "[0, 1, 2]"


def test_a_timeout_tells_which_line_of_the_cell_each_rank_was_in(kernel):
    cell = kernel.run(
        "def slow():\n    if dlab.rank() == 2:\n        time.sleep(1000)\n    dist.barrier()\n"
        "cluster.run(slow, timeout=0.5)"
    )
    assert cell.error == "WorkerTimeout"
    assert "rank 2: at line 3 of slow: time.sleep(1000)" in cell.traceback
    assert "rank 0: waiting in barrier, line 4 of slow: dist.barrier()" in cell.traceback


def test_a_killed_worker_is_named_in_the_cell(kernel):
    cell = kernel.run("cluster.run(lambda: os.kill(os.getpid(), 9) if dlab.rank() == 1 else dist.barrier())")
    assert "rank 1 was killed by signal 9 (SIGKILL)" in cell.traceback
    assert ok(kernel.run("cluster.run(dlab.rank)")).result == "[0, 1, 2]"


# ------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize(
    "work",
    [
        "dist.recv(torch.zeros(1), src=(dlab.rank() + 1) % 3)",
        "time.sleep(1000)",
        "swallow()",
    ],
    ids=["blocked in C", "in Python", "swallowing"],
)
def test_interrupting_the_kernel_stops_the_function_within_a_second(kernel, work):
    ok(kernel.run("def swallow():\n  while True:\n    try: time.sleep(1000)\n    except BaseException: pass"))
    cell = kernel.submit(f"cluster.run(lambda: (print('in'), {work}))")
    kernel.wait_for(cell, "[rank 2] in")
    start = time.monotonic()
    kernel.interrupt()
    shown = kernel.finish(cell)
    within(start, 1, "an interrupt in a kernel")
    assert shown.error == "KeyboardInterrupt"
    assert "was stopped:\nrank 0: " in shown.stdout
    assert ok(kernel.run("cluster.run(dlab.rank)")).result == "[0, 1, 2]"


def test_interrupting_while_a_background_run_goes_on_does_not_disturb_it(kernel):
    ok(kernel.run("def train():\n    while not dlab.knob('enough'): time.sleep(0.01)\n    return 'done'"))
    ok(kernel.run("run = cluster.start(train)"))
    cell = kernel.submit("print('busy')\ntime.sleep(1000)")
    kernel.wait_for(cell, "busy")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert kernel.run("run.state").result == "'running'"
    assert ok(kernel.run("run.set('enough', True); run.wait(30)")).result == "['done', 'done', 'done']"


def test_interrupting_the_wait_for_a_background_run_stops_it(kernel):
    ok(kernel.run("run = cluster.start(lambda: time.sleep(1000))"))
    cell = kernel.submit("print('waiting')\nrun.wait()")
    kernel.wait_for(cell, "waiting")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert kernel.run("run.state").result == "'stopped'"
    assert ok(kernel.run("cluster.run(dlab.rank)")).result == "[0, 1, 2]"


def test_interrupting_the_start_of_the_first_cluster_leaves_a_kernel_that_can_make_one(tmp_path):
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        # an interrupt in the kernel's own import of torch would be a story of its own
        cell = kernel.submit("import torch, dlab\nprint('making')\ncluster = dlab.Cluster(2)")
        kernel.wait_for(cell, "making")
        start = time.monotonic()
        kernel.interrupt()
        shown = kernel.finish(cell)
        assert shown.error == "KeyboardInterrupt"
        within(start, 5, "an interrupt while the fork server imports torch")
        assert "Traceback" not in shown.stderr
        assert ok(kernel.run("dlab.Cluster(2).run(dlab.rank)")).result == "[0, 1]"


# ------------------------------------------------------------------------------------- the polite end


def test_after_a_polite_shutdown_nothing_is_left(tmp_path):
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        ok(kernel.run("import dlab, time\nrun = dlab.cluster(2).start(lambda: time.sleep(1000))"))
        family = kernel.process.children(recursive=True)
        assert len(family) >= 3, "the fork server and two workers"
        assert [entry.name[:5] for entry in tmp_path.iterdir()].count("dlab-") == 1
        kernel.shut_down()
        eventually(lambda: not alive(family))
        left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(("dlab-", "pymp-"))]
        assert left == []
