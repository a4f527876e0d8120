"""What a rank that waits learns about the processes it waits for."""

import os
import resource
import subprocess
import sys

import pytest

from dlab.memory.backoff import _has_ended


def test_whether_a_process_has_ended_is_known_with_however_many_open_files():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        pytest.skip(f"a process may have only {soft} open files here")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert not _has_ended(sleeper.pid)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert _has_ended(sleeper.pid)
    finally:
        for file in files:
            os.close(file)
        sleeper.kill()
        sleeper.wait()
        sleeper.stdin.close()
    assert _has_ended(sleeper.pid)
