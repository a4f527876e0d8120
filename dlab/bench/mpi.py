"""Open MPI's collectives through mpi4py: each round is a job of `mpirun … python -m dlab.bench.mpi`.

MPI ranks never sleep while they wait, so they must have ended when others are measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np

from dlab.bench.measure import moments, span

TIME_LIMIT = 120  # seconds for a job
MISSING = "Open MPI is not installed: pip install 'dlab[bench]' and the system's Open MPI (openmpi-bin) would add it"


def installed() -> bool:
    """Return whether mpirun and mpi4py are available."""
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def seconds_per_call(name: str, ranks: int, repeats: dict[int, int], passes: int) -> dict[int, list[float]]:
    """Measure a collective at each size in bytes, as often as `repeats` says, all of it `passes` times, in one job."""
    command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    command += [sys.executable, "-m", "dlab.bench.mpi", json.dumps([name, ranks, list(repeats.items()), passes])]
    job = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True, timeout=TIME_LIMIT
    )
    return dict(json.loads(job.stdout.splitlines()[-1]))


def main(name: str, size_of_job: int, repeats: list[tuple[int, int]], passes: int) -> None:
    """Measure on each rank of the job; rank 0 prints the results."""
    mpi: Any = importlib.import_module("mpi4py.MPI")  # not installed everywhere, and importing it starts MPI
    ranks = mpi.COMM_WORLD
    assert ranks.size == size_of_job, f"mpi4py sees {ranks.size} of {size_of_job} ranks: is mpirun that of its MPI?"
    answer = []
    for size, count in repeats:
        whole, part = (
            np.full(length, ranks.rank + 1, dtype=np.float32) for length in (size // 4, size // 4 // ranks.size)
        )
        total, output = ranks.size * (ranks.size + 1) / 2, np.empty_like(whole)
        work, result, expected = {
            "all-reduce": (partial(ranks.Allreduce, mpi.IN_PLACE, whole), whole, total),
            "reduce-scatter": (partial(ranks.Reduce_scatter_block, whole, part), part, total),
            "all-gather": (partial(ranks.Allgather, part, output), output[: len(part)], 1),
            "all-to-all": (partial(ranks.Alltoall, whole, output), output[: len(part)], 1),
        }[name]
        work()
        assert (result == expected).all(), f"the result of {size} bytes is wrong"
        whole[:] = 0  # zeros stay zeros however often they are summed
        taken = [ranks.gather(moments(work, count, ranks.Barrier)) for _ in range(passes)]
        if ranks.rank == 0:
            answer.append((size, [span(each) / count for each in taken]))
    if ranks.rank == 0:
        print(json.dumps(answer))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
