"""`make test`: all tests in two processes at once, because most of their time tests wait for others or for a deadline.

One process takes the files from the first on, the other from the last on, until they meet. The tests of a file stay
together and in order, since they share clusters, kernels and browsers. `pytest` alone runs everything in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

STREAM = "DLAB_TEST_STREAM"  # in the environment of a stream: its number, and the folder that tells which file is taken


def take(folder: Path, file: str) -> bool:
    """Is the file still to be had? Whoever asks first has it."""
    try:
        (folder / quote(file, safe="")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def taken(items: list[pytest.Item], folder: Path, backwards: bool) -> Iterator[pytest.Item]:
    """The tests of one file after the other that nobody else has taken."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    for file in reversed(files) if backwards else files:
        if take(folder, file):
            yield from files[file]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own loop, but over the files that this stream takes."""
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own does what there is to do
    number, _, folder = os.environ[STREAM].partition(":")
    items = taken(session.items, Path(folder), backwards=number == "2")
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def start(number: int, folder: Path, arguments: list[str], output: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.streams", *arguments]
    environment = {**os.environ, STREAM: f"{number}:{folder}"}
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def main(arguments: list[str]) -> int:
    """Show what the first stream tells while it runs, and what the second has told afterwards; the worse end counts."""
    with tempfile.TemporaryDirectory(prefix="streams-") as name, tempfile.TemporaryFile() as told:
        first = start(1, Path(name), arguments, None)
        second = start(2, Path(name), arguments, told.fileno())
        try:
            codes = [first.wait(), second.wait()]
        except KeyboardInterrupt:  # of the terminal, which has told both
            codes = [first.wait(), second.wait()]
        finally:
            for stream in (first, second):
                stream.kill()  # if somebody else has ended this process
                stream.wait()
        told.seek(0)
        sys.stdout.write(told.read().decode(errors="replace"))
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
