"""Who serves: the server processes of a cluster, or, where nobody has started any, the last ranks of a wire.

A server has been sent the same function as the workers, and runs nothing else than what is in it.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dlab.kvstore.couriers import FarLines
from dlab.kvstore.lines import Lines
from dlab.kvstore.server import Server
from dlab.processes.board import Desk
from dlab.processes.errors import Stopped
from dlab.processes.inside import Servers, once, servers, transport
from dlab.transports import Group, Transport, share_memory
from dlab.transports.distributed import for_cpu

T = TypeVar("T")


def serve(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Until all workers have returned; gives the number of updates."""
    here = servers()
    assert here is not None

    def find(name: str, digest: str) -> Callable[..., object]:
        return find_function(name, digest, [function, *args, *kwargs.values()])

    server = Server(lines(here), find)
    with suppress(Stopped):
        server.serve()
    return server.updates


def lines(here: Servers) -> Lines:
    """This process's."""
    return Lines(here.desk.map(), here.rank, here.workers, here.servers)


class Workers(Group):
    """All ranks of a wire but the last ones, which serve them; where nobody has started servers, as under torchrun."""

    def __init__(self, wire: Transport, lines: Lines) -> None:
        super().__init__(wire, range(lines.workers))
        self.lines = lines


_workers: Workers | None = None  # of the process, while `run` runs


def run(function: Callable[..., T], *args: Any, servers: int = 1, **kwargs: Any) -> T | None:
    """Where ranks were started by others, as by torchrun: `function(*args)` on all but the last ones, which serve them.

    Every rank must call it. Stores that the function makes have these servers. A server gets None, when all workers
    have returned. They meet in shared memory, or, if they are on several hosts, by messages of torch.distributed.

    >>> dist.init_process_group("gloo")
    >>> dlab.kvstore.run(train, servers=1)  # torchrun --nproc-per-node 4: three workers
    """

    def work(workers: Workers) -> T:
        global _workers
        _workers = workers
        try:
            return function(*args, **kwargs)
        finally:
            _workers = None

    return share_out(transport(), servers, work, [function, *args, *kwargs.values()])


def workers() -> Workers | None:
    """The wire to the workers and their lines, inside `run`."""
    return _workers


def lines_of(wire: Transport | None) -> Lines:
    """The way to the servers, of workers with this wire, or of a worker of a cluster."""
    return wire.lines if isinstance(wire, Workers) else once(_way_to_servers)


def _way_to_servers() -> Lines:
    here = servers()
    if here is None:
        raise RuntimeError(
            "there are no servers here: make the cluster with some, dlab.Cluster(4, servers=1), and create the store "
            "in a function that its workers run; under torchrun, call that by dlab.kvstore.run(function, servers=1)"
        )
    return lines(here)


def share_out(wire: Transport, servers: int, work: Callable[[Workers], T], given: Sequence[Any] = ()) -> T | None:
    """Of the last ranks of a wire, so many serve the others, to the end, and get None then. `given` is theirs to run.

    Every rank must call it.
    """
    workers = wire.size - servers
    if servers < 1 or workers < 1:
        raise ValueError(f"{wire.size} ranks cannot be {servers} servers and their workers: start more")
    lines = _lay_lines(wire, workers, servers)
    try:
        if wire.rank < workers:
            result = work(here := Workers(wire, lines))
            here.barrier()
            return result
        Server(lines, lambda name, digest: find_function(name, digest, list(given))).serve()
        return None
    finally:
        lines.end()


def _lay_lines(wire: Transport, workers: int, servers: int) -> Lines:
    memory = share_memory(for_cpu(wire), Desk.size(wire.size))  # servers are on the CPU
    if memory is None:
        return FarLines(wire.rank, workers, servers)
    return Lines(memory, wire.rank, workers, servers)


def digest_of(function: Callable[..., Any]) -> str:
    """Of what a function does: the same for copies of it, wherever they were sent."""
    return _digest(function.__code__)


def _digest(code: types.CodeType) -> str:
    constants = [_digest(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    content = repr((code.co_code, constants, code.co_names, code.co_varnames))
    return hashlib.sha256(content.encode()).hexdigest()


def find_function(name: str, digest: str, given: list[Any]) -> Callable[..., object]:
    """The function that is meant, among those that the parent has sent: arguments, or what its function refers to."""
    for function in _reachable(given):
        if function.__name__ == name and digest_of(function) == digest:
            return function
    raise LookupError(
        f"the server knows no function {name!r}: it runs only what the notebook has sent. Define {name!r} where the "
        "workers' function can name it, without variables of that function, or give it as an argument of cluster.run"
    )


def _reachable(given: list[Any]) -> Iterator[types.FunctionType]:
    """Functions among these values, and those that they refer to by name, by closure, or have inside."""
    seen: set[int] = set()
    waiting = list(given)
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        names = {name for code in _codes(value.__code__) for name in code.co_names}
        waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        for code in _codes(value.__code__):
            if code is not value.__code__ and not code.co_freevars:
                waiting.append(types.FunctionType(code, value.__globals__, code.co_name))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
