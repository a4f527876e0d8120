"""Where workers come from: a server process that has imported torch once and forks a warm worker in milliseconds.

The server belongs to this process alone and dies with it, whatever happens: the system signals the server when the
thread that started it is gone, and each worker when the server is gone. So that this thread lives as long as the
process, one thread starts everything (`run_in_spawner`).
"""

from __future__ import annotations

import atexit
import io
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import forkserver, popen_forkserver, process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

SESSION = "DLAB_SESSION"  # tells the server who its parent is, and which directory to remove when it leaves

_server = forkserver.ForkServer()  # not multiprocessing's shared one, which may run already, without torch
_server.set_forkserver_preload(["dlab.processes.preload"])
_tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
_lock = threading.Lock()
_directory: Path | None = None


def run_in_spawner(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in the one thread that starts processes and lives as long as this process."""
    global _directory
    with _lock:
        if _directory is None:
            _directory = _session_directory()
            threading.Thread(target=_spawner, name="dlab-spawner", daemon=True).start()
    future: Future[Any] = Future()
    _tasks.put((future, function))
    return future


def directory() -> Path:
    """The private directory (mode 0700) of this process's clusters: sockets and rendezvous files, gone at the end."""
    warm_up()
    assert _directory is not None
    return _directory


def warm_up() -> None:
    """Start the server in the background, so that the first cluster need not wait for its import of torch."""
    run_in_spawner(_start_server)


def _spawner() -> None:
    while True:
        future, function = _tasks.get()
        try:
            future.set_result(function())
        except BaseException as problem:
            future.set_exception(problem)


def _session_directory() -> Path:
    if sys.platform != "linux":
        raise OSError(f"dlab's workers need Linux (this is {sys.platform}): on Windows use WSL, elsewhere a container")
    path = Path(tempfile.mkdtemp(prefix="dlab-"))
    # multiprocessing puts its own socket into the same place: one directory to remove
    process.current_process()._config.setdefault("tempdir", str(path))  # type: ignore[attr-defined]
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _start_server() -> None:
    os.environ[SESSION] = f"{os.getpid()} {_directory}"
    resource_tracker.ensure_running()  # before the next line, which it would undo
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server inherits it: an interrupt is not for it
    try:
        _server.ensure_running()
    finally:
        os.environ.pop(SESSION, None)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


class Popen(popen_forkserver.Popen):
    """Starts a process from our own server, and does not import the user's script in it.

    Functions travel by value, so the worker has no need of `__main__`; a script without an
    `if __name__ == "__main__"` guard works.
    """

    def _launch(self, process_obj: process.BaseProcess) -> None:
        preparation = spawn.get_preparation_data(process_obj._name)  # type: ignore[attr-defined]
        for key in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(key, None)
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        try:
            self._ask_server(message.getbuffer())
        except (ConnectionError, EOFError):  # it is about to die, but had not yet when we looked
            _server._stop()  # type: ignore[attr-defined]
            self._ask_server(message.getbuffer())

    def _ask_server(self, message: memoryview) -> None:
        _start_server()
        self.sentinel, data = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parent_alive = os.dup(data)  # while this end is open, the worker knows that we live
        self.finalizer = util.Finalize(self, _close, (parent_alive, self.sentinel))
        try:
            with open(data, "wb") as file:
                file.write(message)
            self.pid = forkserver.read_signed(self.sentinel)
        except (ConnectionError, EOFError):
            self.finalizer()
            raise
