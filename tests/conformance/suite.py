"""PyTorch's own distributed tests, one at a time, on the backend that is asked for; its ranks are forked, not spawned.

A script, run as a process of its own: it imports torch (5 s) once and then runs nothing itself, so that it stays safe
to fork. Each test gets fresh ranks in some 20 ms, where torch's own runner spawns them anew in 5 s. It prints the names
of all tests, then answers each line `backend test` on its input with one line of JSON (see `client.py`).
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import dlab.backend  # noqa: F401  registers the backend "dlab"
from dlab.processes.between.lifeline import signal_on_parent_death

WORLD_SIZE = 4  # some tests ask for exactly four ranks
LOG_TAIL = 20_000  # bytes of what the ranks of a failed test wrote
POLL = 0.1  # seconds; how long torch sleeps wherever it waits for a file of another rank or for the end of one

# Reasons for which torch skips a test on gloo and need not: gloo has had all_to_all for CPU tensors for a long time.
OUTDATED = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")


class AlsoGloo(str):
    """The name of a backend, equal to "gloo" besides: some tests do what they should on CPU only for that name."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


def import_torchs_suite() -> Any:
    """Torch's module, which decides while it is imported what a backend can do: every backend is taken for gloo."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD="file://",  # a place for each test is made later; here it says that groups may be made again
        CUDA_VISIBLE_DEVICES="",  # with fewer GPUs than ranks torch would skip everything
        OMP_NUM_THREADS="1",  # there are more ranks than cores
    )
    utils = importlib.import_module("torch.testing._internal.common_utils")
    skip_if = utils.skip_but_pass_in_sandcastle_if
    utils.skip_but_pass_in_sandcastle_if = lambda fact, reason: skip_if(fact and reason not in OUTDATED, reason)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_OVERRIDE.clear()
    # It skips tests of a group of two below eight ranks; they need three.
    common.skip_if_small_worldsize = lambda test: test
    suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    for module in (common, suite):
        look_more_often(module)
    return suite


def look_more_often(module: ModuleType) -> None:
    """Each test waits three times in steps of `POLL`, which is longer than most tests take: look ten times as often."""

    def sleep(seconds: float) -> None:
        time.sleep(seconds / 10 if seconds == POLL else seconds)

    module.time = SimpleNamespace(**{**vars(time), "sleep": sleep})  # type: ignore[attr-defined]


torchs = import_torchs_suite()


class Conformance(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
    """Torch's test case with forked ranks, of which none is left behind."""

    def setUp(self) -> None:
        super().setUp()
        torchs.INIT_METHOD = os.environ["INIT_METHOD"]  # a spawned rank would read it while importing
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        for rank in self.processes:
            rank.kill()
            rank.join()
        super().tearDown()

    @classmethod
    def _run(cls, *arguments: Any, **keywords: Any) -> None:
        signal_on_parent_death(signal.SIGKILL)
        super()._run(*arguments, **keywords)


def all_tests() -> dict[str, type[unittest.TestCase]]:
    """The test cases of the suite by the names of their tests, those that need no processes included."""
    plain = [c for c in vars(torchs).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    cases = [Conformance, *(case for case in plain if not issubclass(case, torchs.MultiProcessTestCase))]
    return {name: case for case in cases for name in unittest.TestLoader().getTestCaseNames(case)}


def run(test: unittest.TestCase, backend: str, log: TextIO) -> dict[str, Any]:
    """Run one test on one backend; say how it went."""
    os.environ["BACKEND"] = backend
    torchs.BACKEND = AlsoGloo(backend)
    log.seek(0)
    log.truncate()
    result = unittest.TestResult()
    begin = time.monotonic()
    test.run(result)
    seconds = time.monotonic() - begin
    problems = [text for _, text in result.failures + result.errors]
    if problems:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL))
        return {"verdict": "fail", "reason": "\n".join(problems), "log": log.read(), "seconds": seconds}
    if result.skipped:
        return {"verdict": "skip", "reason": result.skipped[0][1], "seconds": seconds}
    return {"verdict": "pass", "seconds": seconds}


def serve(answer: Callable[[Any], None], log: TextIO) -> None:
    tests = all_tests()
    answer(list(tests))
    for line in sys.stdin:
        backend, name = line.split()
        answer(run(tests[name](name), backend, log))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # What the ranks print, and torch about them, belongs to a failure and to nothing else.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

        def answer(content: Any) -> None:
            print(json.dumps(content), file=answers, flush=True)

        serve(answer, log)


if __name__ == "__main__":
    main()
