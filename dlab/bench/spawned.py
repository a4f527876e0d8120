"""The usual way to run a function on four ranks: torch.multiprocessing.spawn, as PyTorch's tutorials do it.

Every process it starts imports this file and `__main__`, and that time is measured, so only torch is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORKERS = 4
TIME_LIMIT = 120  # seconds until all have answered


def rank() -> int:
    """Return the rank: the least that a function can do."""
    return dist.get_rank()


def rank_after_all_reduce() -> int:
    """Return the rank after one all-reduce: the least that ranks can do together."""
    dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def rank_after_collection() -> int:
    """Return the rank after an all-reduce and a garbage collection, which visits every object of the process."""
    answer = rank_after_all_reduce()
    gc.collect()
    return answer


@contextlib.contextmanager
def spawned(function: Callable[[], Any]) -> Iterator[list[int]]:
    """Spawn processes that form a group and call `function`; when all have answered, yield their process ids.

    They live until the block ends, and end with it even after an error.
    """
    context = mp.get_context("spawn")
    answers, finished = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (function, f"{directory}/store", answers, finished)
        group = mp.spawn(_member, arguments, nprocs=WORKERS, join=False)
        try:
            results = [answers.get(timeout=TIME_LIMIT) for _ in range(WORKERS)]
            assert sorted(results) == list(range(WORKERS))
            yield group.pids()
            finished.set()
            while not group.join():
                pass
        except queue.Empty:
            group.join(timeout=0)  # raises what a worker has raised
            raise
        finally:
            for process in group.processes:
                process.kill()
                process.join()


def _member(rank: int, function: Callable[[], Any], store: str, answers: Any, finished: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, WORKERS), rank=rank, world_size=WORKERS)
    answers.put(function())
    finished.wait()
    dist.destroy_process_group()


def seconds_to_spawn(function: Callable[[], Any]) -> float:
    """Return the seconds from the call of mp.spawn to the last rank's answer, without ending the processes."""
    start = time.perf_counter()
    with spawned(function):
        return time.perf_counter() - start
