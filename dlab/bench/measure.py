"""How to measure: contenders in turn, medians, a fresh process for cold starts, and a description of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

Sample = TypeVar("Sample")
Moments = tuple[float, float]  # when a rank began and when it ended


def alternate(*contenders: Callable[[], Sample], rounds: int) -> list[list[Sample]]:
    """Let each contender measure itself once per round, and return the samples of each.

    Every second round is reversed, A B B A, so that a temporary slowdown of the machine affects both.

    >>> alternate(lambda: 1.0, lambda: 2.0, rounds=3)
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    samples: list[list[Sample]] = [[] for _ in contenders]
    turn = list(zip(contenders, samples, strict=True))
    for _ in range(rounds):
        for contender, taken in turn:
            taken.append(contender())
        turn.reverse()
    return samples


def seconds(work: Callable[[], Any], repeats: int = 1) -> float:
    """Return how long a call takes: the median of `repeats`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def moments(work: Callable[[], Any], repeats: int, barrier: Callable[[], Any]) -> Moments:
    """Return when `repeats` calls began and ended on this rank. Every rank must call it."""
    barrier()
    work()  # ranks leave the barrier at different times; a first call brings them together
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return start, time.perf_counter()


def span(ranks: Iterable[Moments]) -> float:
    """Return the seconds from the first rank's start to the last rank's end; all processes share one clock.

    >>> span([(1.0, 4.0), (2.0, 5.0)])
    4.0
    """
    begins, ends = zip(*ranks, strict=True)
    return max(ends) - min(begins)


_FRESH = """
import importlib, json, sys
import torch, torch.distributed, torch.multiprocessing
from dlab import Cluster
module, function, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))
"""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a new Python process and return its result; both are passed as JSON.

    torch and dlab are imported there first, so that the function's time does not include their import.
    """
    command = [sys.executable, "-c", _FRESH, function.__module__, function.__name__, json.dumps(arguments)]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def megabytes(pid: int) -> float:
    """Return the memory of a process as PSS: a page shared by several processes is divided among them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0]) / 1024


def machine() -> str:
    """Describe the machine and its software; the load is that of the last minute before the benchmark."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("torch", "torchvision", "dlab")]
    return (
        f"{_processor()}, {cores} cores, {memory:.1f} GB memory, {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}; {date.today()}, load {os.getloadavg()[0]:.2f}"
    )


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()  # ARM has no such line
