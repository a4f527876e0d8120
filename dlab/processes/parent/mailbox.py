"""Calls from other threads into one thread: the callers wait while that thread answers one after another."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Mailbox:
    """Functions that other threads want the owner's thread to call."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._requests: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.wakeups, self._waker = socket.socketpair()  # the owner watches the first

    def ask(self, function: Callable[[], T]) -> T:
        """Let the owner call a function, and return its result or raise its error."""
        self.check_process()
        future: Future[T] = Future()
        self._requests.append((future, function))
        try:
            self._waker.send(b"!")
        except OSError:
            raise RuntimeError("this cluster is closed: make a new one with dlab.Cluster(…)") from None
        return future.result()

    def check_process(self) -> None:
        """Refuse to be used in a fork of the process, where the owner's thread does not exist."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this cluster belongs to process {self._process}, of which this one is a fork: "
                "make one for this process with dlab.Cluster(…)"
            )

    def wake(self) -> None:
        """Wake the owner from its wait, so that it looks at the queue."""
        with contextlib.suppress(OSError):  # closed already
            self._waker.send(b"!")

    def clear_wakeups(self) -> None:
        """Discard the wake-up bytes, after the owner has woken up."""
        self.wakeups.recv(1 << 12)

    def answer(self, ready: Callable[[], bool]) -> None:
        """Call the waiting functions, as long as `ready()` is true; for the owner."""
        while self._requests and ready():
            future, function = self._requests.popleft()
            try:
                future.set_result(function())
            except BaseException as problem:
                future.set_exception(problem)

    def close(self) -> None:
        """Answer the calls that are left and refuse new ones."""
        self._waker.close()
        self.answer(lambda: True)
        self.wakeups.close()
