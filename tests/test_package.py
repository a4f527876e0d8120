"""`import dlab` is quick, and offers every name that it promises."""

import subprocess
import sys

import pytest

import dlab


@pytest.mark.parametrize("name", dlab.__all__)
def test_every_promised_name_is_there(name):
    assert name in dir(dlab)
    assert getattr(dlab, name) is not None


def test_names_and_modules_do_not_hide_each_other():
    assert callable(dlab.mnist) and callable(dlab.rehearse) and callable(dlab.cluster) and callable(dlab.allreduce)
    assert dlab.cost.allreduce("ring", 2, 8).messages == 4


def test_a_name_that_is_not_there_gets_a_list_of_those_that_are():
    with pytest.raises(AttributeError, match=r"has no 'Clutser'; it has .*Cluster"):
        dlab.Clutser  # noqa: B018


def test_import_dlab_imports_neither_torch_nor_matplotlib_and_starts_nothing():
    code = (
        "import dlab, sys, threading; "
        "print('torch' in sys.modules, 'matplotlib' in sys.modules, threading.active_count())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False", "1"]


def test_an_interrupt_while_a_name_is_imported_comes_when_the_import_is_over():
    code = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import dlab

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
try:
    dlab.SimpleCNN
except KeyboardInterrupt:
    print("interrupted", end=" ")
print(dlab.SimpleCNN.__name__, end=" ")
thread = threading.Thread(target=lambda: print(dlab.TwoLayer.__name__))  # which no interrupt reaches
thread.start()
thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.split() == ["interrupted", "SimpleCNN", "TwoLayer"], ended.stderr
