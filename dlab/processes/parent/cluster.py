"""A cluster: N warm workers on this machine, ready for the next function. Taught in `notebooks/00_tour.ipynb`."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from dlab.backend import NAME, using
from dlab.processes.between import messages
from dlab.processes.parent.notebook import Cell
from dlab.processes.parent.run import Run
from dlab.processes.parent.supervisor import Supervisor
from dlab.processes.parent.waiting import interruptible
from dlab.processes.worker import context
from dlab.processes.worker.main import TASK, WorkingDirectory

MANY = 8  # workers to a core, of which more get a word of warning
_numbers = count(1)
_shared: dict[tuple[int, int], Cluster] = {}  # by workers and servers
os.register_at_fork(after_in_child=_shared.clear)  # they are the parent's


class InsideWorker(RuntimeError):
    """A cluster was asked for something by one of its own workers, or by a function on its way there."""

    def __init__(self) -> None:
        super().__init__(
            "a worker cannot have workers of its own: make the cluster, and call its run and start, in the notebook or "
            "script, outside the function that runs on every rank"
        )


class Cluster:
    """`workers` processes that wait for functions, with torch.distributed ready in each.

    >>> with dlab.Cluster(4) as cluster:
    ...     cluster.run(lambda: dlab.rank() ** 2)
    [0, 1, 4, 9]

    The first one takes the time of one `import torch` (1-2 s); a run on a standing cluster takes milliseconds.
    `backend="auto"` is NCCL when there is a GPU for each worker, else gloo; "dlab" is this package's own, and
    `dlab.backend.using(my_ring)` that with your all-reduce in it. `threads` per worker: cores // workers.
    `timeout` is torch.distributed's own, for a single collective, in seconds. `servers` are processes of the same
    kind that serve the workers of each run as parameter servers (`dlab.kvstore`); they are in no process group.
    """

    def __init__(
        self,
        workers: int = 4,
        backend: str | using = "auto",
        threads: int | None = None,
        timeout: float | None = None,
        servers: int = 0,
    ) -> None:
        if context.is_worker():
            raise InsideWorker
        if not isinstance(workers, int) or workers < 1:
            raise ValueError(f"a cluster of {workers!r} workers is not possible: give a whole number, 1 or more")
        if not isinstance(servers, int) or servers < 0:
            raise ValueError(f"a cluster with {servers!r} servers is not possible: give a whole number, 0 or more")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads={threads!r} per worker is not possible: give a whole number, 1 or more")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers > MANY * cores:
            print(
                f"dlab: {workers} workers share {cores} core{'s' * (cores > 1)}: they take turns, so expect each to be "
                f"about {workers // cores} times slower, and to take 50 MB or more of memory",
                file=sys.stderr,
            )
        self.workers, self.servers = workers, servers
        self.backend, plugin = _choose_backend(backend, workers)
        threads = threads or max(1, cores // workers)
        self._supervisor = Supervisor(workers, servers, self.backend, plugin, threads, timeout)
        self._supervisor.start()
        self._close = weakref.finalize(self, self._supervisor.close)  # also when this process ends
        try:
            self._supervisor.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank and give the results by rank.

        Raises `WorkerError` when a rank fails. After `timeout` seconds the run is stopped and `WorkerTimeout` names
        the ranks that did not finish and what they were in.
        """
        run = self._new_run(fn)
        try:
            with interruptible():
                self._launch(run, fn, args, kwargs)
                return run._wait(timeout, then_stop=True)
        except KeyboardInterrupt:  # also one that comes before we wait
            run._on_interrupt()
            raise

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
        """The same in the background: gives a `Run` at once.

        A function with an attribute `survives` that is true goes on without ranks that have died, which give None; one
        with an attribute `servers` needs a cluster with so many, and goes on with a new one when one has died if its
        attribute `revives` is true. `checks` are functions by the name of a knob, which refuse values for it.
        """
        run = self._new_run(fn)
        try:
            with interruptible():
                self._launch(run, fn, args, kwargs)
        except KeyboardInterrupt:  # nobody will hold it
            run.stop()
            raise
        return run

    def _new_run(self, fn: Callable[..., Any]) -> Run:
        if context.is_worker():
            raise InsideWorker
        self._supervisor.check_process()
        if not callable(fn):
            raise TypeError(f"cluster.run and cluster.start take a function first, not {fn!r}: write run(fn, …)")
        if (servers := getattr(fn, "servers", 0)) > self.servers:
            raise ValueError(
                f"this needs {servers} servers and the cluster has {self.servers}: "
                f"make it with dlab.Cluster({self.workers}, servers={servers})"
            )
        name, survives = getattr(fn, "__name__", type(fn).__name__), getattr(fn, "survives", False)
        run = Run(self, next(_numbers), name, survives, getattr(fn, "revives", False))
        run.checks = getattr(fn, "checks", {})
        return run

    def _launch(self, run: Run, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def make() -> messages.Message:
            return messages.Message(TASK, run.number, (WorkingDirectory.here(), fn, args, kwargs))

        try:
            message = make()
        except InsideWorker:
            raise
        except Exception as problem:
            raise TypeError(
                f"{run.name} or its arguments cannot be sent to the workers ({problem}): "
                "open files, locks and the like must be made inside the function"
            ) from None
        with message:
            self.make_room(run.cell)
            self._supervisor.launch(run, message, make)

    def make_room(self, cell: Cell) -> None:
        """For a run that this cell is about to start: stop one that the same cell has started when it ran before.

        Raises RuntimeError if another one goes on.
        """
        other = self._supervisor.going
        if other is None:
            return
        if not other.cell.is_run_again_by(cell):
            raise other.in_the_way()
        whole = other.part_of or other
        whole.stop()
        print(f"{whole.name} was still running since this cell ran before: it is stopped, and a new run begins")

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank, then the servers'."""
        return [worker.pid for worker in self._supervisor.workers]

    @property
    def closed(self) -> bool:
        """Is it of no use any more?"""
        return not self._supervisor.is_alive()

    def close(self) -> None:
        """End the workers. Nothing of them stays."""
        self._close()

    def __reduce__(self) -> tuple[object, ...]:
        raise InsideWorker  # a function that uses it was to be sent to a worker

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        servers = f" and {self.servers} server{'s' * (self.servers > 1)}" if self.servers else ""
        return f"<Cluster of {self.workers} workers{servers} on {self.backend}{', closed' if self.closed else ''}>"


def cluster(workers: int = 4, servers: int = 0) -> Cluster:
    """The shared warm cluster of this kernel: made once for each number of workers, reused by every cell."""
    size = (workers, servers)
    if size not in _shared or _shared[size].closed:
        _shared[size] = Cluster(workers, servers=servers)
    return _shared[size]


def make_room(workers: int, servers: int, cell: Cell) -> None:
    """On the shared cluster of this size, if there is one."""
    if shared := _shared.get((workers, servers)):
        shared.make_room(cell)


def _choose_backend(backend: str | using, workers: int) -> tuple[str, using | None]:
    if isinstance(backend, using) or backend == NAME:
        return NAME, backend if isinstance(backend, using) else using()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = dist.is_nccl_available() and gpus >= workers
    if backend == "auto":
        return "nccl" if nccl else "gloo", None
    if backend == "nccl" and not nccl:
        why = f"this machine has {gpus}" if dist.is_nccl_available() else "this torch is built without NCCL"
        raise ValueError(f"nccl needs a GPU for each of the {workers} workers and {why}: use backend='gloo' or 'auto'")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"there is no backend {backend!r}: use 'auto', 'gloo', 'nccl' or 'dlab'")
    return backend, None
