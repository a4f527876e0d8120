"""Questions to a thread from other threads: they wait, the thread wakes up and answers in its own time."""

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
    """Functions that other threads want to have called in the owner's thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._requests: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.semaphore, self._button = (
            socket.socketpair()
        )  # the owner watches the semaphore together with its other files

    def ask(self, function: Callable[[], T]) -> T:
        """Have the owner call a function; gives what it returns or raises."""
        self.check_process()
        future: Future[T] = Future()
        self._requests.append((future, function))
        try:
            self._button.send(b"!")
        except OSError:
            raise RuntimeError("this cluster is closed: make a new one with dlab.Cluster(…)") from None
        return future.result()

    def check_process(self) -> None:
        """Refuse a fork, which has no such thread: nobody would answer."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this cluster belongs to process {self._process}, of which this one is a fork: "
                "make one for this process with dlab.Cluster(…)"
            )

    def ring(self) -> None:
        """Wake the owner."""
        with contextlib.suppress(OSError):  # gone already
            self._button.send(b"!")

    def hush(self) -> None:
        """The owner has woken up."""
        self.semaphore.recv(1 << 12)

    def answer(self, ready: Callable[[], bool]) -> None:
        """For the owner: call what was asked for, as long as it is ready for the next one."""
        while self._requests and ready():
            future, function = self._requests.popleft()
            try:
                future.set_result(function())
            except BaseException as problem:
                future.set_exception(problem)

    def close(self) -> None:
        """Answer what is left and refuse what comes."""
        self._button.close()
        self.answer(lambda: True)
        self.semaphore.close()
