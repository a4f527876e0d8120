"""Two processes share the tests: each file is run once, as a whole, and what fails in either is told and counts."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
FILES = "abcdef"
# The first file ends only when the last one has begun, and the other way round: so two processes must be there.
TESTS = """
import os, pathlib, time

def tell(name):
    with (pathlib.Path(__file__).parent / "log").open("a") as log:
        log.write(f"{{os.getpid()}} {letter} {{name}}\\n")

def test_one():
    tell("one")
    other = {{"a": " f ", "f": " a "}}.get("{letter}", "")
    deadline = time.monotonic() + 60
    while other not in (pathlib.Path(__file__).parent / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def test_two():
    tell("two")
    assert "{letter}" not in os.environ.get("WRONG", "")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    for letter in FILES:
        (folder / f"test_{letter}.py").write_text(TESTS.format(letter=letter))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests.streams", "-c", str(folder / "pytest.ini"), str(folder), *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer than these tests
    return subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, timeout=100)


def test_every_test_runs_once_and_the_tests_of_a_file_stay_together(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(line[1:] for line in lines) == [[letter, name] for letter in FILES for name in ("one", "two")]
    of = defaultdict(list)
    for process, letter, name in lines:
        of[process].append((letter, name))
    first, second = sorted(of.values())
    assert first == [(letter, name) for letter in FILES[: len(first) // 2] for name in ("one", "two")]
    assert second == [(letter, name) for letter in reversed(FILES[len(first) // 2 :]) for name in ("one", "two")]
    assert f"{len(first)} passed" in done.stdout and f"{len(second)} passed" in done.stdout


@pytest.mark.parametrize("wrong", ["a", "f"])
def test_a_failure_in_either_is_told_and_counts(tmp_path, monkeypatch, wrong):
    monkeypatch.setenv("WRONG", wrong)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout and f"test_{wrong}.py::test_two" in done.stdout


def test_arguments_are_handed_on_and_no_test_at_all_is_told(tmp_path):
    assert run(tmp_path, "-k", "nothing").returncode == 5
