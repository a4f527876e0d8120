"""Work handles, which async_op=True returns, and the thread that does the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist


class Pending(dist.Work):
    """A work handle: `wait()` returns when the work is done, or raises its error."""

    def __init__(self, value: Any, source: int = -1) -> None:
        super().__init__()
        self._value, self._source = value, source
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._guard = threading.Lock()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark the work as done or failed; for a receive from any rank, `source` is the sender."""
        with self._guard:
            self._error, self._source = error, max(source, self._source)
            self._done.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future, for C++ and for callbacks."""
        with self._guard:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            done = self._done.is_set()
        if done:
            self._complete(future)
        return future

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._value)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the work; signals are handled meanwhile, so that a waiting rank can be stopped."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):
            raise TimeoutError(f"the work was not done in {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait for the work, which on the CPU is all there is to do."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the work has ended, with or without an error."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the work, or None."""
        return self._error

    def result(self) -> Any:
        """Return the tensors that the work fills."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """The sender of a completed receive."""
        return self._source

    _source_rank = source_rank


class TaskQueue:
    """Runs tasks in order: at once in the calling thread if there are no others, otherwise in its own thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Pending] | None] = SimpleQueue()
        self._guard, self._turn = threading.Lock(), threading.Lock()
        self._waiting = 0  # submitted and not done
        self._thread: threading.Thread | None = None

    def do(self, task: Callable[[], Any], value: Any, later: bool) -> Pending:
        """Carry out a task: in the background if it may be done `later` or others come first."""
        work = Pending(value)
        with self._guard:
            idle = self._waiting == 0
            self._waiting += 1
            if not later and idle:
                self._turn.acquire()
            else:
                self._tasks.put((task, work))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
        if not later and idle:
            try:
                with torch.no_grad():
                    task()
            finally:
                self._leave()
            work.finish()
        return work

    def _leave(self) -> None:
        self._turn.release()
        with self._guard:
            self._waiting -= 1

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # in this thread
        while (item := self._tasks.get()) is not None:
            task, work = item
            error = None
            self._turn.acquire()
            try:
                task()
            except BaseException as problem:
                error = problem
            finally:
                self._leave()
            work.finish(error)

    def close(self) -> None:
        """Let the thread end when it has finished its tasks."""
        self._tasks.put(None)
