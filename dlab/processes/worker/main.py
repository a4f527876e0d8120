"""A worker's main loop: wait for a function, run it with torch.distributed ready, send back its result or error."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlab.backend import using
from dlab.processes.between import lifeline, messages
from dlab.processes.between.control import ControlBlock
from dlab.processes.between.errors import Report
from dlab.processes.between.roles import Role
from dlab.processes.worker import context, observer
from dlab.processes.worker.stopping import Stoppable

# messages from the parent
JOIN, TASK = 1, 2
# messages from a worker
READY, RESULT, FAILURE = 3, 4, 5
LEFT = 6  # instead of a result, or after a failure: this rank has left the process group

STOP, WHERE = signal.SIGUSR1, signal.SIGUSR2

namespace: dict[str, Any] = {"__name__": "__workers__", "__builtins__": __builtins__}  # what %%workers cells define


@dataclass(frozen=True)
class Seat:
    """The position of a worker or server in its cluster; servers come after the workers and join no process group."""

    rank: int
    ranks: int  # number of workers
    servers: int
    backend: str
    plugin: using | None  # makes the backend, if it is not one of torch's own
    threads: int
    role: Role | None  # of the servers, if there are any

    @property
    def serves(self) -> bool:
        """Whether this is the seat of a server."""
        return self.rank >= self.ranks


@dataclass(frozen=True)
class WorkingDirectory:
    """The notebook's working directory and import path. Unpickling it changes to them: it is pickled before a function,
    so that the function's modules are found."""

    directory: str
    path: list[str]

    @classmethod
    def here(cls) -> WorkingDirectory:
        """Return the caller's working directory and import path."""
        return cls(os.getcwd(), list(sys.path))

    def __reduce__(self) -> tuple[Callable[[str, list[str]], None], tuple[str, list[str]]]:
        return _go_to, (self.directory, self.path)


def _go_to(directory: str, path: list[str]) -> None:
    if os.getcwd() != directory:
        os.chdir(directory)
    sys.path[:] = path


def run_cell(source: str, filename: str) -> Any:
    """Run the body of a `%%workers` cell in a namespace that persists, and return the value of its last expression."""
    body = ast.parse(source, filename)
    last = body.body[-1] if body.body else None
    if not isinstance(last, ast.Expr):
        return exec(compile(body, filename, "exec"), namespace)
    body.body.pop()
    exec(compile(body, filename, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace)


def main(channel: socket.socket) -> None:
    """Run a worker: take its seat, then serve until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the whole process group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lifeline.die_with_parent()
    # a worker may start processes of its own, as DataLoader(num_workers=2) does; they end with it, too
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=lambda: lifeline.signal_on_parent_death(signal.SIGKILL))
    _, files, _, _ = socket.recv_fds(channel, 1, 5)
    if len(files) < 4:
        return  # the parent has gone
    _redirect(files[0], files[1])
    faulthandler.register(WHERE, file=files[2], all_threads=False)
    observer.observe()
    greeting = messages.receive(channel)
    if greeting is None:
        return
    _, seat = greeting.load(private=True)
    Worker(seat, channel, ControlBlock(seat.ranks + seat.servers, files[3]), *files[4:]).serve()


def _redirect(out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    _open_streams()


def _open_streams() -> None:
    # they live as long as the process; those inherited from the fork server may be set up for a file
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


class Worker:
    """One rank, which answers the parent's messages one after another."""

    def __init__(self, seat: Seat, channel: socket.socket, control: ControlBlock, desk: int | None = None) -> None:
        self.seat, self.channel, self.control = seat, channel, control
        self.stoppable = Stoppable()
        self.group: dist.ProcessGroup | None = None
        torch.set_num_threads(seat.threads)
        self.device = torch.device("cpu")
        if seat.backend == "nccl" and not seat.serves:
            self.device = torch.device("cuda", seat.rank)
            torch.cuda.set_device(self.device)
        servers = None
        if seat.role is not None:
            shared = seat.role.share(seat.ranks, seat.servers, desk)
            servers = context.Servers(shared, seat.rank, seat.ranks, seat.servers)
        context.enter(control, seat.rank, self.device, servers)
        if seat.plugin is not None:
            seat.plugin.install(context.emit)
        signal.signal(STOP, self.stoppable.on_signal)

    def serve(self) -> None:
        """Answer messages one after another. A running function is interrupted by a signal, not by a message."""
        while (message := messages.receive(self.channel)) is not None:
            if message.tag == JOIN:
                self._answer(message.number, READY, lambda: self._join(*message.load(private=True)))
            else:
                self._answer(message.number, RESULT, lambda: self._perform(message))

    def _answer(self, number: int, tag: int, work: Callable[[], Any]) -> None:
        try:
            value = work()
            if dist.group.WORLD is not self.group:
                tag = LEFT  # the function has destroyed the group, as scripts do at their end
            answer = self._pack(tag, number, value)
        except BaseException as problem:  # also SystemExit: the worker stays alive
            self._flush()
            with messages.Message(FAILURE, number, Report.of(problem)) as answer:
                answer.send(self.channel)
            traceback.clear_frames(problem.__traceback__)  # frames of a collective hold the group
        else:
            self._flush()
            with answer:
                answer.send(self.channel)
            return
        # leave the group, so that a rank that waits for this one in a collective returns at once. This may block if a
        # collective of ours waits for another rank; the supervisor then kills this process
        self._leave()
        with messages.Message(LEFT, number, None) as answer:
            answer.send(self.channel)

    def _perform(self, message: messages.Received) -> Any:
        try:
            with self.stoppable:
                return self._call(*message.load(private=True))
        finally:
            context.end()

    def _call(self, _: None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context.begin()
        _open_streams()  # the previous function may have replaced or closed them
        if self.seat.serves and self.seat.role is not None:
            return self.seat.role.play(function, args, kwargs)
        return function(*args, **kwargs)

    def _pack(self, tag: int, number: int, value: Any) -> messages.Message:
        try:
            return messages.Message(tag, number, value)
        except Exception as problem:
            raise TypeError(
                f"the result, a {type(value).__name__}, cannot be sent back ({problem}): "
                "return tensors, numbers, or objects made of these"
            ) from None

    def _join(self, path: str, timeout: float | None) -> None:
        """Form a new process group. The file is private to this cluster and to this group."""
        if self.seat.serves:
            return
        self._leave()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect to a rank at the first message
        dist.init_process_group(
            self.seat.backend,
            store=dist.FileStore(path, self.seat.ranks),
            rank=self.seat.rank,
            world_size=self.seat.ranks,
            timeout=None if timeout is None else timedelta(seconds=timeout),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.group = dist.group.WORLD

    def _leave(self) -> None:
        self.group = None  # connections close when the group has no references
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # errors of a broken group do not matter
                dist.destroy_process_group()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
