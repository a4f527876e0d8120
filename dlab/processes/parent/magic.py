"""`%%workers`: a cell that runs on every worker, in a namespace that persists, like ipyparallel's `%%px`.

%load_ext dlab

%%workers -n 4
import torch, torch.distributed as dist, dlab

x = torch.ones(3) * dlab.rank()
dist.all_reduce(x)
x
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from dlab.processes.parent.cluster import cluster
from dlab.processes.parent.run import Run
from dlab.processes.worker import context, main

_numbers = count(1)


class ByRank(list[Any]):
    """Results by rank, shown with one rank per line."""

    def __init__(self, values: Sequence[Any], ranks: Sequence[int]) -> None:
        super().__init__(values)
        self.ranks = list(ranks)

    def __repr__(self) -> str:
        return "\n".join(f"[rank {rank}] {value!r}" for rank, value in zip(self.ranks, self, strict=True))


@magics_class
class WorkersMagic(Magics):
    """The cell magic; it remembers how many workers the last cell used."""

    workers = 4

    @magic_arguments()
    @argument("-n", "--workers", type=int, help="how many workers (default: as in the previous cell, or 4)")
    @argument("-t", "--targets", help="only these ranks, as in 0,2; the others do nothing")
    @argument("--noblock", action="store_true", help="return at once with a Run")
    @cell_magic("workers")  # type: ignore[arg-type]
    def run_on_workers(self, line: str, cell: str) -> ByRank | Run | None:
        """Run this cell on every worker, and return the value of its last line by rank."""
        options = parse_argstring(self.run_on_workers, line)
        workers = self.workers if options.workers is None else options.workers
        targets = _ranks(options.targets, workers)
        filename = f"<workers cell {next(_numbers)}>"
        # tracebacks are assembled in this process, so the cell's lines must be known here
        linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
        run = cluster(workers).start(_only_on(targets), cell, filename)
        self.workers = workers
        if options.noblock:
            return run
        results = run.wait()
        values = [results[rank] for rank in targets]
        return ByRank(values, targets) if any(value is not None for value in values) else None


def _only_on(targets: list[int]) -> Callable[[str, str], Any]:
    def workers_cell(source: str, filename: str) -> Any:
        return main.run_cell(source, filename) if context.rank() in targets else None

    return workers_cell


def _ranks(text: str | None, workers: int) -> list[int]:
    if text is None:
        return list(range(workers))
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--targets {text}: write ranks with commas between, as in --targets 0,2") from None
    if wrong := [rank for rank in ranks if not 0 <= rank < workers]:
        raise UsageError(f"--targets {text}: there is no rank {wrong[0]}, the ranks are 0 to {workers - 1}")
    return ranks
