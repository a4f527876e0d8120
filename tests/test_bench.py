"""The benchmark tells the truth about what it measured. No test here asks how fast anything is."""

import os
import re
import subprocess
import sys

import psutil
import pytest
import torch

from dlab.bench import __main__ as bench
from dlab.bench import measure, rows, table
from dlab.bench.rows import AtLeast, AtMost, Row


def alive_in_session(session: int) -> list[psutil.Process]:
    """A session is all processes that descend from its leader, unless they left on purpose."""

    def is_member(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    return list(filter(is_member, psutil.process_iter()))


# ------------------------------------------------------------------------------------- the command


def test_a_quick_run_prints_a_ratio_and_leaves_nothing_behind():
    command = [sys.executable, "-m", "dlab.bench", "--quick", "-k", "dlab.log"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    out, progress = run.communicate(timeout=100)
    assert run.returncode == 0, progress
    assert "[1/1] dlab.log" in progress
    assert re.search(r"^dlab\.log.* [\d.]+ ms +[\d.]+ ms +[\d.]+ % +at most 2 % +(not )?met$", out, re.MULTILINE), out
    assert f"torch {torch.__version__}" in out
    _, alive = psutil.wait_procs(alive_in_session(run.pid), timeout=5)
    assert not alive


def test_reading_is_measured_on_the_same_data():
    from dlab.bench.reading import mnist_batches

    row = mnist_batches("reading", quick=True)
    assert row.ratio == row.theirs / row.ours > 0


def test_what_spawned_processes_import_again_is_light():
    heavy = {"torch", "numpy", "cloudpickle", "dlab.processes.parent.cluster"}
    check = f"import sys, dlab.bench.__main__; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.fixture
def three_rows(monkeypatch):
    def good(name, quick):
        return Row(name, 2.0, 8.0 if quick else 9.0, 4.0, AtLeast(5), "ms", "made up")

    def bad(name, quick):
        raise ZeroDivisionError("this one breaks")

    monkeypatch.setattr(bench, "THEMES", ())
    monkeypatch.setattr(rows, "REGISTERED", {"first good": good, "bad": bad, "second good": good})


def test_a_missed_target_is_said_and_is_no_failure(three_rows, capsys):
    assert bench.main(["-k", "FIRST"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^first good +2 ms +9 ms +4x +at least 5x +not met$", out, re.MULTILINE)
    assert "second good" not in out


def test_a_broken_measurement_is_a_failure_and_the_others_are_shown(three_rows, capsys):
    assert bench.main(["--quick"]) == 1
    out, err = capsys.readouterr()
    assert "this one breaks" in err
    assert [line.split("  ")[0] for line in out.splitlines() if "8 ms" in line] == ["first good", "second good"]


def test_only_a_whole_run_writes_the_page(three_rows, monkeypatch, tmp_path, capsys):
    page = tmp_path / "RESULTS.md"
    monkeypatch.setattr(bench, "PAGE", page)
    assert bench.main(["-k", "first"]) == 0 and bench.main([]) == 1  # a part, and one that broke
    assert not page.exists()
    del rows.REGISTERED["bad"]
    assert bench.main(["--quick"]) == 0
    assert not page.exists()
    assert bench.main([]) == 0
    assert "| second good | 2 ms | 9 ms |" in page.read_text() and str(page) in capsys.readouterr().err


def test_an_unknown_word_is_answered_with_the_names(three_rows, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["-k", "nonsense"])
    assert end.value.code == 2
    assert "first good; bad; second good" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ how it measures


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_contenders_take_turns_forwards_and_backwards(names, rounds):
    calls = []

    def contender(name):
        return lambda: calls.append(name) or float(len(calls))

    samples = measure.alternate(*map(contender, names), rounds=rounds)
    order = "".join(names if number % 2 == 0 else names[::-1] for number in range(rounds))
    assert "".join(calls) == order
    assert samples == [[float(place) for place, who in enumerate(order, 1) if who == name] for name in names]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_ratio_is_that_of_the_medians(count):
    numbers = torch.Generator().manual_seed(count)
    ours, theirs = (torch.rand(2, count, generator=numbers, dtype=torch.float64) + 0.1).tolist()

    def middle(values):
        ordered = sorted(values)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

    row = rows.faster("a", ours, theirs, target=1, unit="s")
    assert (row.ours, row.theirs) == (middle(ours), middle(theirs))
    assert row.ratio == middle(theirs) / middle(ours)
    if count > 1:
        each = sorted(slow / quick for quick, slow in zip(ours, theirs, strict=True))
        assert row.note == f"{count} rounds, {rows.number(each[0])}x to {rows.number(each[-1])}x"


def test_seconds_calls_as_often_as_it_says():
    calls = []
    assert measure.seconds(lambda: calls.append(1), repeats=7) >= 0
    assert len(calls) == 7


@pytest.mark.parametrize("repeats", [1, 5])
def test_ranks_meet_and_warm_up_before_they_are_timed(repeats):
    calls = []
    start, end = measure.moments(lambda: calls.append("work"), repeats, lambda: calls.append("barrier"))
    assert calls == ["barrier", "work", *["work"] * repeats]
    assert start <= end


def test_ranks_together_take_from_the_first_begin_to_the_last_end():
    assert measure.span([(3.0, 9.0), (2.0, 4.0), (2.5, 10.0)]) == 8.0


def test_a_fresh_process_is_a_child_of_this_one():
    assert measure.in_fresh_process(eval, "__import__('os').getppid()") == os.getpid()


def test_megabytes_are_what_the_system_says():
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sleeper:
        sleeper.stdout.readline()  # until then it grows
        truth = psutil.Process(sleeper.pid).memory_full_info().pss / 2**20
        assert measure.megabytes(sleeper.pid) == pytest.approx(truth, rel=0.5)


def test_the_machine_is_named():
    words = measure.machine()
    assert f"{len(os.sched_getaffinity(0))} cores" in words
    assert f"torch {torch.__version__}" in words
    assert "GB memory" in words


# ------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    ("target", "ratio", "verdict"),
    [
        (AtLeast(2), 2.0, "met"),
        (AtLeast(2), 1.9, "not met"),
        (AtMost(0.3), 0.3, "met"),
        (AtMost(0.3), 0.31, "not met"),
        (None, 7.0, "-"),
    ],
)
def test_a_verdict_is_the_comparison(target, ratio, verdict):
    assert Row("a", 1, 1, ratio, target, "s").verdict == verdict


ROWS = [
    Row("a warm run", 1.234, 4321.0, 3501.6, AtLeast(300), "ms", "five rounds"),
    Row("memory", 37.0, 159.0, 0.2327, AtMost(0.3), "MB"),
    Row("for information", 0.00123, 2.0, 1626.0, None, "s"),
]


def test_the_page_has_every_row():
    lines = table.as_page(ROWS, "a machine").splitlines()
    assert "Measured on a machine." in lines
    lines = lines[lines.index("Measured on a machine.") + 2 :]
    assert lines[2:5] == [
        "| a warm run | 1.23 ms | 4321 ms | 3502x | at least 300x | met | five rounds |",
        "| memory | 37 MB | 159 MB | 23.3 % | at most 30 % | met |  |",
        "| for information | 0.00123 s | 2 s | 1626x | - | - |  |",
    ]
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_text_has_aligned_columns_and_the_notes():
    text = table.as_text(ROWS, "a machine")
    heading, *lines = text.splitlines()[2:6]
    for cell, line in zip(("3502x", "23.3 %", "1626x"), lines, strict=True):
        assert line.index(cell) == heading.index("ratio")
    assert "five rounds" in text
