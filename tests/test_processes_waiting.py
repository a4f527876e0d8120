"""In a real kernel: while a cell waits for a run, buttons are heard; the cells behind it stay behind it."""

import threading

import pytest
from kernels import ok

from dlab.processes.parent import waiting

FIRST_CELL = """
import os, threading, time
import ipywidgets
import dlab

cluster, order = dlab.cluster(2), []

def work(knob="enough"):
    while not dlab.knob(knob):
        time.sleep(0.01)
    print("worker")
    return knob

def button(press):
    made = ipywidgets.Button()
    made.on_click(lambda _: press())
    return made

def press():
    print("pressed")
    order.append("pressed")
    run.set("enough", True)

def open_gate():
    print("pressed")
    order.append("pressed")
    open(gate, "w").close()

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

pressed, opened = button(press), button(open_gate)
"""


def comm(kernel, name="pressed"):
    return ok(kernel.run(f"{name}.comm.comm_id")).result.strip("'")


@pytest.mark.parametrize(
    ("start", "wait"),
    [
        ("run = cluster.start(work)", "run.wait()"),
        ("run = dlab.race({'one': work}, workers=2)", "run.wait()"),
        ("", "cluster.run(wait_for, gate)"),
    ],
    ids=["run.wait", "race.wait", "cluster.run"],
)
def test_a_button_is_heard_while_a_cell_waits_and_every_line_is_in_its_own_cell(kernel, start, wait, tmp_path):
    ok(kernel.run(f"gate = {str(tmp_path / 'gate')!r}; order.clear()"))
    first = kernel.submit(start)
    ok(kernel.finish(first))
    button = comm(kernel, "pressed" if start else "opened")
    waiting = kernel.submit(f"print('waiting'); {wait}; print('after'); order.append('waited')")
    later = [kernel.submit(f"print('cell {number}'); order.append({number})") for number in range(3)]
    kernel.wait_for(waiting, "waiting")
    pressed = kernel.press(button)
    later.append(kernel.submit("print('cell 3'); order.append(3)"))
    assert ok(kernel.finish(pressed)).stdout == "pressed\n"
    for number, cell in enumerate(later):
        assert ok(kernel.finish(cell)).stdout == f"cell {number}\n"
    assert kernel.shown(waiting).stdout == "waiting\nafter\n"
    assert kernel.run("order").result == "['pressed', 'waited', 0, 1, 2, 3]"
    replies = [kernel.reply(cell) for cell in (waiting, *later)]
    assert [reply["status"] for reply in replies] == ["ok"] * 5
    count = replies[0]["execution_count"]
    assert [reply["execution_count"] for reply in replies] == list(range(count, count + 5))
    if start:
        assert sorted(kernel.shown(first).stdout.splitlines()) == ["[rank 0] worker", "[rank 1] worker"]


def test_a_widget_hears_that_it_may_send_the_next_change_while_the_cell_still_waits(kernel):
    ok(kernel.run("run = cluster.start(work); heard = button(lambda: order.append('heard')); order.clear()"))
    other, button = comm(kernel, "heard"), comm(kernel)
    waiting = kernel.submit("print('waiting'); run.wait()")
    kernel.wait_for(waiting, "waiting")
    for _ in range(3):
        kernel.finish(kernel.press(other))  # until the kernel says that it is idle again
        assert kernel.is_running(waiting)
    kernel.press(button)
    ok(kernel.finish(waiting))
    assert kernel.run("order").result == "['heard', 'heard', 'heard', 'pressed']"


def test_a_cell_that_waits_again_and_again_for_a_moment_hears_the_button(kernel):
    ok(kernel.run("heard = button(lambda: order.append('heard')); order.clear()"))
    button = comm(kernel, "heard")
    waiting = kernel.submit("print('waiting')\nwhile not order: print(end='.'); cluster.run(dlab.rank)\nprint('after')")
    behind = kernel.submit("order.append('behind')")
    kernel.wait_for(waiting, "waiting")
    pressed = kernel.press(button)
    assert ok(kernel.finish(waiting, 20)).stdout.replace(".", "") == "waiting\nafter\n"
    assert kernel.shown(pressed).stdout == ""
    ok(kernel.finish(behind))
    assert kernel.run("order").result == "['heard', 'behind']"


def test_a_callback_may_wait_itself_and_the_cells_behind_stay_in_order(kernel):
    ok(
        kernel.run(
            "run, other, more = cluster.start(work), dlab.Cluster(1), []\n"
            "def nested():\n"
            "    more.append(other.start(work, 'more'))\n"
            "    order.append('nested'); more[0].wait(); order.append('ended')\n"
            "nested = button(nested); end = button(lambda: more[0].set('more', True)); order.clear()"
        )
    )
    buttons = [comm(kernel, name) for name in ("nested", "end", "pressed")]
    waiting = kernel.submit("print('waiting'); run.wait(); order.append('waited')")
    first = kernel.submit("order.append('first')")
    kernel.wait_for(waiting, "waiting")
    nested = kernel.press(buttons[0])
    second = kernel.submit("order.append('second')")
    kernel.finish(kernel.press(buttons[1]))
    third = kernel.submit("order.append('third')")
    kernel.finish(nested)
    kernel.press(buttons[2])
    for cell in (waiting, first, second, third):
        ok(kernel.finish(cell))
    found = ok(kernel.run("other.close(); order")).result
    assert found == "['nested', 'ended', 'pressed', 'waited', 'first', 'second', 'third']"


def test_an_interrupt_stops_the_run_and_the_cells_behind_are_cancelled_as_ever(kernel):
    ok(kernel.run("run = cluster.start(work); heard = button(lambda: order.append('heard')); order.clear()"))
    button = comm(kernel, "heard")
    waiting = kernel.submit("print('waiting'); run.wait()")
    behind = kernel.submit("order.append('behind')")
    kernel.wait_for(waiting, "waiting")
    kernel.finish(kernel.press(button))  # so that the cell behind has been read
    kernel.interrupt()
    assert kernel.finish(waiting).error == "KeyboardInterrupt"
    assert kernel.reply(behind)["status"] == "aborted"
    assert ok(kernel.run("run.state, order")).result == "('stopped', ['heard'])"
    assert ok(kernel.run("cluster.run(dlab.rank)")).result == "[0, 1]"


def test_a_wait_with_a_timeout_ends_in_time_and_serves_meanwhile(kernel):
    ok(kernel.run("run = cluster.start(work)"))
    button = comm(kernel)
    waiting = kernel.submit("run.wait(0.3)")
    assert kernel.finish(waiting).error == "WorkerTimeout"
    waiting = kernel.submit("print('waiting'); run.wait(60)")
    kernel.wait_for(waiting, "waiting")
    kernel.press(button)
    assert ok(kernel.finish(waiting)).result == "['enough', 'enough']"


@pytest.mark.parametrize(
    ("version", "wait"),
    [("(99, 0)", "run.wait()"), ("known", "while not run.done: time.sleep(0.01)")],
    ids=["a kernel that we do not know", "a cell that does not wait by dlab"],
)
def test_where_nobody_can_hear_the_controls_the_panel_says_so_and_they_act_afterwards(kernel, version, wait):
    ok(kernel.run(f"import ipykernel\nknown = ipykernel.version_info\nipykernel.version_info = {version}"))
    ok(kernel.run("from dlab.views.panel import Panel\nrun = cluster.start(work); panel = Panel(run); order.clear()"))
    ok(kernel.run("def look():\n    while 'controls' not in panel.title: time.sleep(0.01)\n    saw(panel.title)"))
    ok(kernel.run("def saw(title):\n    order.append(title); run.set('enough', True)"))
    button = comm(kernel)
    ok(kernel.run("before = panel.title; looking = threading.Thread(target=look); looking.start()"))
    waiting = kernel.submit(f"print('waiting')\n{wait}\norder.append('waited')")
    kernel.wait_for(waiting, "waiting")
    kernel.press(button)
    ok(kernel.finish(waiting))
    ok(kernel.run("ipykernel.version_info = known; looking.join()"))
    title = "work: running; its controls wait for the cell that runs"
    assert ok(kernel.run(f"order == ['{title}', 'waited', 'pressed'] or order")).result == "True"
    assert kernel.run("before, panel.title").result == "('work: running', 'work: finished')"


def test_a_panel_whose_controls_are_heard_says_nothing_of_waiting(kernel):
    ok(kernel.run("from dlab.views.panel import Panel\nrun = cluster.start(work); panel = Panel(run); seen = []"))
    look = "for _ in range(150):\n        seen.append(panel.title); time.sleep(0.01)\n    run.set('enough', True)"
    ok(kernel.run(f"def look():\n    {look}\nlooking = threading.Thread(target=look)"))
    ok(kernel.run("looking.start(); run.wait()"))
    assert kernel.run("'work: running' in seen[-50:] or seen").result == "True"  # long after it would have said so


def test_an_interrupt_that_meets_the_end_of_a_wait_is_an_interrupt():
    def woken():
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()  # as Condition.wait does when it is cut off between two of its lines

    with pytest.raises(KeyboardInterrupt), waiting.interruptible():
        woken()
    with pytest.raises(RuntimeError, match="of its own"), waiting.interruptible():
        raise RuntimeError("an error of its own")
