"""Drive a real Jupyter kernel as a notebook does, and watch processes; for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import psutil
from jupyter_client import KernelManager

PATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # for `import trouble`


COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in a traceback


class Cell(NamedTuple):
    """What a cell shows: its two streams, the text of its last expression, its error if it has one."""

    stdout: str
    stderr: str
    result: str | None
    error: str | None
    traceback: str


class Kernel:
    """An IPython kernel in a process of its own. `run(code)` is Shift-Enter; `submit` does not wait for the end."""

    def __init__(self, **environment: str) -> None:
        # under pytest ipykernel would behave in a way of its own
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._manager = KernelManager()
        self._manager.start_kernel(env={**inherited, **environment})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._messages: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by the cell they belong to
        self._replies: dict[str, dict[str, Any]] = {}
        try:
            self._client.wait_for_ready(timeout=60)
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)

    def run(self, code: str, timeout: float = 60, cell_id: str | None = None) -> Cell:
        return self.finish(self.submit(code, cell_id), timeout)

    def submit(self, code: str, cell_id: str | None = None) -> str:
        """Start a cell, with the id that JupyterLab sends along; gives the id by which this execution is known."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        metadata = {} if cell_id is None else {"cellId": cell_id}
        return self._send("execute_request", content, metadata)

    def press(self, comm: str) -> str:
        """Click a button of ipywidgets, known by its comm; gives the id of the message."""
        data = {"method": "custom", "content": {"event": "click"}}
        return self._send("comm_msg", {"comm_id": comm, "data": data})

    def reply(self, cell: str, timeout: float = 60) -> dict[str, Any]:
        """What the kernel answers to the one who has sent a cell."""
        while cell not in self._replies:
            message = self._client.get_shell_msg(timeout=timeout)
            self._replies[message["parent_header"]["msg_id"]] = message["content"]
        return self._replies[cell]

    def _send(self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None) -> str:
        message = self._client.session.msg(kind, content, metadata=metadata)
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def finish(self, cell: str, timeout: float = 60) -> Cell:
        """Wait until a cell has ended."""
        self._read(lambda: self._is_idle(cell), timeout, f"cell {cell} did not end")
        return self.shown(cell)

    def shown(self, cell: str) -> Cell:
        """What a cell shows so far; what comes after its end, from a background run, counts too."""
        streams = {"stdout": "", "stderr": ""}
        result, error, trace = None, None, ""
        for message in self._messages[cell]:
            content = message["content"]
            if message["msg_type"] == "stream":
                streams[content["name"]] += content["text"]
            elif message["msg_type"] == "execute_result":
                result = content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                error, trace = content["ename"], "\n".join(content["traceback"])
        return Cell(streams["stdout"], streams["stderr"], result, error, trace)

    def wait_for(self, cell: str, text: str, timeout: float = 60) -> Cell:
        """Wait until a cell shows this text on its standard output."""
        missing = f"{text!r} did not appear in cell {cell}"
        self._read(lambda: text in self.shown(cell).stdout, timeout, missing)
        return self.shown(cell)

    def is_running(self, cell: str) -> bool:
        return not self._is_idle(cell)

    def interrupt(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """The kernel's process dies, and only that, as when memory runs out."""
        os.kill(self._manager.provisioner.pid, signal.SIGKILL)

    def shut_down(self) -> None:
        """Kernel > Shut Down: asked for politely."""
        self._manager.shutdown_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, enough: Callable[[], bool], timeout: float, complaint: str) -> None:
        deadline = time.monotonic() + timeout
        while not enough():
            try:
                message = self._client.get_iopub_msg(timeout=max(0.01, min(1.0, deadline - time.monotonic())))
            except Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{complaint} within {timeout} s; seen: {self._messages}") from None
            else:
                self._messages[message["parent_header"].get("msg_id", "")].append(message)

    def _is_idle(self, cell: str) -> bool:
        return any(
            message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            for message in self._messages[cell]
        )


def ok(cell: Cell) -> Cell:
    """The same cell, which must have had no error."""
    assert cell.error is None, cell.traceback
    return cell


def is_one_sentence(text: str) -> bool:
    """As an error should be: short, on one line, and without a second sentence."""
    return "\n" not in text and len(text) < 300 and not re.search(r"[.!?] [A-Z]", text)


def eventually(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until the condition holds and give its value; on a busy machine that may take a while."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"this did not become true within {seconds} s"
        time.sleep(0.01)
    return value


def open_handles(pid: int | str = "self") -> Counter[str]:
    """What a process holds open, by what it is; numbers that differ from one pipe to the next are left out."""
    if pid == "self":
        gc.collect()
    handles = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the handle of this very listing
            handles.append(os.readlink(file))
    return Counter(re.sub(r"\d+", "…", handle) for handle in handles)


def alive(processes: Iterable[psutil.Process | int]) -> list[psutil.Process]:
    """Those of the processes that still live; a zombie does not."""
    living = []
    for process in processes:
        try:
            process = psutil.Process(process) if isinstance(process, int) else process
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            pass
    return living


def within(start: float, limit: float, what: str) -> None:
    """Hold one of the promised limits, with room for a machine that is busy with other things."""
    seconds = time.monotonic() - start
    print(f"{what}: {seconds:.2f} s (promised: {limit:g} s)")
    assert seconds < limit + 2, what


def seconds_until_gone(processes: Iterable[psutil.Process | int], limit: float = 20) -> float:
    """How long it takes until none of the processes is left."""
    start, processes = time.monotonic(), list(processes)
    while left := alive(processes):
        assert time.monotonic() - start < limit, f"still there after {limit} s: {left}"
        time.sleep(0.01)
    return time.monotonic() - start


def left_in(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir() if entry.name.startswith(("dlab-", "pymp-", "torch_"))]


def expect_nothing_left(family: Iterable[psutil.Process | int], directory: Path, what: str) -> None:
    seconds = seconds_until_gone(family)
    print(f"{what}: all gone after {seconds:.2f} s (promised: 1 s)")
    assert seconds < 3
    eventually(lambda: not left_in(directory), seconds=3)


class Script:
    """A script that runs as `python script.py`."""

    def __init__(self, folder: Path, text: str) -> None:
        script, self._home = folder / "script.py", folder / "tmp"
        script.write_text(textwrap.dedent(text))
        self._home.mkdir()
        environment = {**os.environ, "TMPDIR": str(self._home), "PYTHONPATH": PATH}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self, end: signal.Signals | None = None) -> subprocess.CompletedProcess:
        """Wait for its end, or end it as soon as it is ready; afterwards nothing of it is left."""
        process, family = self._process, []
        if end is not None:
            line = process.stdout.readline()
            assert line == "ready\n", line or process.communicate()[1]
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3
            process.send_signal(end)
        out, err = process.communicate(timeout=100)
        family += [int(line.split()[1]) for line in out.splitlines() if line.startswith("pid ")]
        expect_nothing_left(family, self._home, "a script")
        assert os.listdir(self._home) == []
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
