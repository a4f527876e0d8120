"""The two commands: make finds a Python that works, installs once, and says in a sentence what is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Here

import pytest

TOP = Path(__file__).resolve().parent.parent


def make(*words: str, cwd: Path = TOP, **environment: str) -> subprocess.CompletedProcess:
    """Run make by itself, not as part of the make that may be running the tests."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PORT", "IP", "OPEN")}
    command = [shutil.which("make") or "make", *words]
    return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    """A copy of what make reads, with programs that only pretend, so that nothing is installed."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(TOP / name, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()

    def program(path: str, script: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    for name in ("echo", "rm", "sed", "sh", "tail", "touch"):
        (programs / name).symlink_to(shutil.which(name))
    return Here(top=tmp_path, path=str(programs), program=program, python=f'exec "{sys.executable}" "$@"')


def test_make_takes_the_first_python_that_really_runs(checkout):
    checkout.program("programs/python3", "echo 'shim: python3: command not found' >&2; exit 127")
    checkout.program("programs/python3.12", "exit 1")  # runs, and is not in range
    checkout.program("programs/python3.11", checkout.python)
    plan = make("-n", "test", cwd=checkout.top, PATH=checkout.path)
    assert plan.returncode == 0, plan.stderr
    assert "python3.11 -m venv .venv" in plan.stdout


def test_make_says_which_python_it_needs(checkout):
    answer = make("test", cwd=checkout.top, PATH=checkout.path)
    assert answer.returncode != 0
    assert "dlab needs Python 3.10, 3.11 or 3.12" in answer.stderr
    assert not (checkout.top / ".venv").exists()


def test_make_says_what_to_install_where_venv_is_missing(checkout):
    checkout.program("programs/python3", 'case "$*" in *venv*) exit 1;; esac; ' + checkout.python)
    answer = make("test", cwd=checkout.top, PATH=checkout.path)
    assert answer.returncode != 0
    assert "apt install python3-venv" in answer.stderr


def test_make_installs_once(checkout):
    checkout.program("programs/python3", checkout.python)
    checkout.program(".venv/bin/python", f'echo "$@" >> {checkout.top}/calls')
    calls = checkout.top / "calls"
    for _ in range(2):
        assert make("test", cwd=checkout.top, PATH=checkout.path).returncode == 0
    assert calls.read_text().count("pip install") == 1
    assert calls.read_text().count("-m tests.streams") == 2

    os.utime(checkout.top / "pyproject.toml", (2**32, 2**32))  # changed after the installation
    assert make("test", cwd=checkout.top, PATH=checkout.path).returncode == 0
    assert calls.read_text().count("pip install") == 2


def test_an_interrupted_installation_is_not_taken_for_a_finished_one(checkout):
    checkout.program("programs/python3", checkout.python)
    checkout.program(".venv/bin/python", 'case "$*" in *"pip install"*) echo no space left; exit 1;; esac')
    answer = make("test", cwd=checkout.top, PATH=checkout.path)
    assert answer.returncode != 0
    assert "no space left" in answer.stderr
    assert not (checkout.top / ".venv" / ".ready").exists()


def test_make_hands_on_what_it_was_told(checkout):
    checkout.program("programs/python3", checkout.python)
    checkout.program(".venv/bin/python", f'echo "$@" >> {checkout.top}/calls')

    def last_call(*words: str) -> str:
        assert make(*words, cwd=checkout.top, PATH=checkout.path).returncode == 0
        return (checkout.top / "calls").read_text().splitlines()[-1]

    assert last_call("lab") == "-m dlab lab"
    assert last_call("lab", "PORT=8890", "OPEN=0", "IP=0.0.0.0") == "-m dlab lab --port 8890 --ip 0.0.0.0 --no-open"
    assert last_call("test", "ARGS=-k data") == "-m tests.streams -k data"
    assert last_call("bench") == "-m dlab.bench"
    (checkout.top / ".venv" / ".ready").unlink()
    last_call("test", "PIP_ARGS=--extra-index-url https://example.org")
    assert "--extra-index-url https://example.org --editable .[dev]" in (checkout.top / "calls").read_text()


def test_make_check_runs_every_tool_even_after_one_complains(checkout):
    checkout.program("programs/python3", checkout.python)
    checkout.program(".venv/bin/python", f'echo "$@" >> {checkout.top}/calls; case "$*" in *ruff*) exit 1;; esac')
    assert make("check", cwd=checkout.top, PATH=checkout.path).returncode != 0
    assert (checkout.top / "calls").read_text().splitlines()[-3:] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
    ]


def test_make_alone_lists_every_target():
    listed = make().stdout
    targets = re.findall(r"^([a-z]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^  {target}\t", listed, re.MULTILINE), f"{target} is not explained"


def test_ci_runs_the_checks_and_all_tests():
    script = TOP / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert any(line.startswith("make check") for line in lines)
    assert any(line.startswith("make test") for line in lines)
