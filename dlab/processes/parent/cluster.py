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

MANY = 8  # workers per core above which a warning is printed
_numbers = count(1)
_shared: dict[tuple[int, int], Cluster] = {}  # by numbers of workers and servers
os.register_at_fork(after_in_child=_shared.clear)  # they belong to the parent


class InsideWorker(RuntimeError):
    """A cluster was used by one of its own workers, or by a function that was about to be sent to one."""

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

    The first cluster takes the time of one `import torch` (1-2 s); a run on an existing cluster takes milliseconds.
    `backend="auto"` is NCCL if there is a GPU for each worker, else gloo; "dlab" is this package's own backend, and
    `dlab.backend.using(my_ring)` is that with your own all-reduce. `threads` per worker: cores // workers by default.
    `timeout` is torch.distributed's own, for a single collective, in seconds. `servers` are additional processes that
    act as parameter servers for the workers of each run (`dlab.kvstore`); they join no process group.
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
        """Run `fn(*args, **kwargs)` on every rank and return the results by rank.

        Raises `WorkerError` when a rank fails. After `timeout` seconds the run is stopped and `WorkerTimeout` names
        the ranks that did not finish and where they were.
        """
        run = self._new_run(fn)
        try:
            with interruptible():
                self._launch(run, fn, args, kwargs)
                return run._wait(timeout, then_stop=True)
        except KeyboardInterrupt:  # also one that comes before the wait
            run._on_interrupt()
            raise

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
        """Start `fn(*args, **kwargs)` on every rank in the background, and return a `Run` at once.

        If the function's attribute `survives` is true, the run continues without ranks that have died, whose result is
        None. An attribute `servers` is the number of servers that it needs; if `revives` is true, a server that dies is
        replaced and the run continues. `checks` are functions by the name of a knob, which raise ValueError for a bad
        value.
        """
        run = self._new_run(fn)
        try:
            with interruptible():
                self._launch(run, fn, args, kwargs)
        except KeyboardInterrupt:  # the caller never gets the run
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
        """Stop a run that this cell started when it was executed before, so that the cell can start a new one.

        Raises RuntimeError if any other run is active.
        """
        other = self._supervisor.going
        if other is None:
            return
        if not other.cell.is_run_again_by(cell):
            raise other.busy_error()
        whole = other.part_of or other
        whole.stop()
        print(f"{whole.name} was still running from this cell's last execution: it was stopped, and a new run begins")

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank, followed by those of the servers."""
        return [worker.pid for worker in self._supervisor.workers]

    @property
    def closed(self) -> bool:
        """Whether the cluster can no longer be used."""
        return not self._supervisor.is_alive()

    def close(self) -> None:
        """End all workers; nothing is left behind."""
        self._close()

    def __reduce__(self) -> tuple[object, ...]:
        raise InsideWorker  # a function that uses it was about to be sent to a worker

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        servers = f" and {self.servers} server{'s' * (self.servers > 1)}" if self.servers else ""
        return f"<Cluster of {self.workers} workers{servers} on {self.backend}{', closed' if self.closed else ''}>"


def cluster(workers: int = 4, servers: int = 0) -> Cluster:
    """Return the shared warm cluster of this kernel: made once for each number of workers, reused by every cell."""
    size = (workers, servers)
    if size not in _shared or _shared[size].closed:
        _shared[size] = Cluster(workers, servers=servers)
    return _shared[size]


def make_room(workers: int, servers: int, cell: Cell) -> None:
    """Do the same on the shared cluster of this size, if there is one."""
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
