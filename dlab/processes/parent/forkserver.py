"""Start workers from a server process that has imported torch once and forks a warm worker in milliseconds.

The server belongs to this process alone and always dies with it: the system signals the server when the thread that
started it ends, and each worker when the server ends. For that thread to live as long as the process, a single thread
starts everything (`run_in_spawner`). A fork of this process has none of these threads: it makes a server and a
directory of its own, and leaves those of its parent alone.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import (
    connection,
    forkserver,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

from dlab.processes.between import lifeline
from dlab.processes.parent import output

SESSION = "DLAB_SESSION"  # passes the server its parent's process id, and the directory to remove at the end
SERVER_DIED = 256  # stands for the exit code of a worker that died with its server; no process has this one
LONGEST = 75  # bytes of a directory's path: the path of a socket inside it is limited to 107
SHORT = ("/tmp", "/dev/shm", os.environ.get("XDG_RUNTIME_DIR", ""))  # used if TMPDIR is too long or missing
LOOK = 0.5  # seconds between two checks of a server that does not answer
SLOW = 20.0  # seconds after which a message says so


class ServerDied(RuntimeError):
    """No worker can be started, because the fork server died twice."""

    def __init__(self) -> None:
        super().__init__(
            "the process that starts workers died twice before it had started one: "
            "what it wrote to standard error, in the terminal, tells why; memory may have run out"
        )


class _ForkServer(forkserver.ForkServer):
    """A fork server and the private directory of its socket; if one is lost, both are made again.

    multiprocessing's own shared server is not used, because it may already run without torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(["dlab.processes.worker.preload"])
        self.directory = _make_directory()

    def ensure_running(self) -> None:
        """Start the server unless it is running."""
        # multiprocessing puts its own socket into the same directory, so that there is only one to remove
        process.current_process()._config["tempdir"] = str(self.directory)  # type: ignore[attr-defined]
        os.environ[SESSION] = f"{os.getpid()} {self.directory}"
        resource_tracker.ensure_running()  # before the next line, which it would undo
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the server, which ignores interrupts
        try:
            super().ensure_running()
        finally:
            os.environ.pop(SESSION, None)

    @property
    def pid(self) -> int:
        """The process id of the server, after it has been started."""
        pid: int = self._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def retire(self) -> None:
        """Let the server end with its last worker, and remove what is left of its directory."""
        os.close(self._forkserver_alive_fd)  # type: ignore[attr-defined]  # its workers hold the same pipe
        lifeline.remove_directory(self.directory)


class _Session:
    """What this process needs to start workers. All of it except `run` is used only by the spawner thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._begun = False
        self._server: _ForkServer | None = None
        self._retired: list[int] = []  # process ids of retired servers

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            if not self._begun:
                threading.Thread(target=self._serve, name="dlab-spawner", daemon=True).start()
                atexit.register(self._remove_directory)
                self._begun = True
        future: Future[Any] = Future()
        self._tasks.put((future, function))
        return future

    def _serve(self) -> None:
        while True:
            future, function = self._tasks.get()
            try:
                future.set_result(function())
            except BaseException as problem:
                future.set_exception(problem)
            del future, function  # so that nothing is kept alive while this waits

    def server(self) -> _ForkServer:
        """Return a running server; a new one if the last has died or lost its directory."""
        self._retired = [pid for pid in self._retired if not _has_ended(pid)]
        if self._server is not None and (not self._server.directory.is_dir() or _has_ended(self._server.pid)):
            self.retire_server()
        if self._server is None:
            server = _ForkServer()
            try:
                server.ensure_running()
            except BaseException:
                lifeline.remove_directory(server.directory)
                raise
            self._server = server
        return self._server

    def retire_server(self) -> None:
        if self._server is not None:
            self._retired.append(self._server.pid)
            self._server.retire()
            self._server = None

    def _remove_directory(self) -> None:
        if self._server is not None and os.getpid() == self._process:  # a fork also runs the exit handlers
            lifeline.remove_directory(self._server.directory)


_session = _Session()


def _start_afresh() -> None:
    global _session
    _session = _Session()


os.register_at_fork(after_in_child=_start_afresh)


def run_in_spawner(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in the one thread that starts processes and lives as long as this process."""
    return _session.run(function)


def directory() -> Path:
    """Return the private directory (mode 0700) of this process's clusters, for sockets and rendezvous files.

    It is removed at the end of the process, and made again if it was removed before. It is in TMPDIR, or where paths
    are shorter.
    """
    path: Path = run_in_spawner(lambda: _session.server().directory).result()
    return path


def warm_up() -> None:
    """Start the server in the background, so that the first cluster need not wait for the import of torch."""
    run_in_spawner(lambda: _session.server())


def _make_directory() -> Path:
    if sys.platform != "linux":
        raise OSError(f"dlab's workers need Linux (this is {sys.platform}): on Windows use WSL, elsewhere a container")
    places = list(SHORT)
    with contextlib.suppress(OSError):  # none of the places is writable
        places.insert(0, tempfile.gettempdir())
    for place in places:
        if place and len(os.fsencode(place)) <= LONGEST:
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="dlab-", dir=place))
    raise OSError(
        f"there is no place for the sockets of workers in {' or '.join(filter(None, places))}: "
        f"set TMPDIR to a directory that can be written to and has a path of at most {LONGEST} bytes"
    )


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # its end was collected elsewhere
        return True


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


class Popen(popen_forkserver.Popen):
    """Starts a process from dlab's own server, and does not import the user's script in it.

    Functions are pickled by value, so a worker does not need `__main__`, and a script works without an
    `if __name__ == "__main__"` guard.
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
        for _ in range(2):
            try:
                return self._ask_server(message.getbuffer())
            except (ConnectionError, EOFError, FileNotFoundError, ChildProcessError):
                _session.retire_server()  # it is about to die, or its socket was removed
        raise ServerDied

    def _ask_server(self, message: memoryview) -> None:
        server = _session.server()
        self.sentinel, data = server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        parent_alive = os.dup(data)  # while this end is open, the worker knows that the parent lives
        self.finalizer = util.Finalize(self, _close, (parent_alive, self.sentinel))
        try:
            with open(data, "wb") as file:
                file.write(message)
            self._wait_for(server)
            self.pid = forkserver.read_signed(self.sentinel)
        except (ConnectionError, EOFError):
            self.finalizer()
            raise

    def _wait_for(self, server: _ForkServer) -> None:
        slow = time.monotonic() + SLOW
        while not connection.wait([self.sentinel], LOOK):
            if lifeline.wake(server.pid):
                output.say("the process that starts workers was stopped by a signal: it is told to go on")
            elif time.monotonic() > slow:
                slow = float("inf")
                output.say("the process that starts workers is not ready yet: it imports torch …")

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, if there is one; only the server learns it, and passes it on."""
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = SERVER_DIED
        return self.returncode
