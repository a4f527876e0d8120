"""Ask the process that holds PyTorch's suite for one test on one backend, and read how it went."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("suite.py")
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Deadlock|Timeout)(?::.*)?$", re.MULTILINE)
# How torch introduces what a rank raised; the rank's own traceback follows.
INTRODUCTION = re.compile(r"Process \d+ exited with error code \d+ and exception:")


@dataclass(frozen=True)
class Outcome:
    """How a test went: "pass", "skip" or "fail", why if it did not pass, and what its ranks wrote if it failed."""

    verdict: str
    seconds: float
    reason: str = ""
    log: str = ""

    @property
    def why(self) -> str:
        """The reason in one line: of tracebacks, the error at the end of the first rank's."""
        _, *ranks = INTRODUCTION.split(self.reason)
        errors = ERROR.findall(ranks[0] if ranks else self.reason)
        return errors[-1] if errors else self.reason.split("\n")[0]


class Suite:
    """PyTorch's distributed tests in a process of their own; it takes 5 s to be there, and most tests 0.2 s.

    A test that takes longer than `seconds` has failed, and its ranks are killed.

    with Suite() as suite:
        print(suite.run("dlab", "test_all_reduce_sum").verdict)
    """

    def __init__(self, seconds: int = 60) -> None:
        # The tests leave files behind when their ranks are killed.
        self._folder = tempfile.TemporaryDirectory(prefix="dlab-conformance-")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=os.environ | {"TMPDIR": self._folder.name, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(seconds)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.tests: list[str] = self._answer()

    def run(self, backend: str, test: str) -> Outcome:
        try:
            print(backend, test, file=self._process.stdin, flush=True)
            return Outcome(**self._answer())
        except BaseException:  # an answer that nobody waited for would be taken for the next one
            self.close()
            raise

    def close(self) -> None:
        """End the process, and with it the ranks of a test that is still running."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"PyTorch's tests ended by themselves, with exit code {self._process.returncode}.")
        return json.loads(line)

    def __enter__(self) -> "Suite":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
