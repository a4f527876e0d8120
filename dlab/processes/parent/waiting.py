"""Wait in a cell without blocking the panel: a kernel reads no messages while a cell runs, so the wait reads them.

Messages of widgets are handled at once. All others, such as the next cell's code, are kept and given back to the kernel
in order; they are handled after the waiting cell has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from dlab.processes.parent.notebook import find_shell

PERIOD = 0.05  # seconds between two looks at the arrived messages
WIDGETS = ("comm_open", "comm_msg", "comm_close")  # kinds of messages

MOMENT = 0.5  # seconds after the last look during which the kernel counts as listening

_process = os.getpid()  # a fork of the kernel must not read its messages
_server: MessageLoop | None = None  # while the main thread waits
_cell_runs = False
_heard = 0.0  # when the kernel last read messages while a cell was running


def wait_until(ends: Callable[[float | None], bool], timeout: float | None = None) -> bool:
    """Wait for `ends(seconds)`, which waits that long and returns whether the end has come, as `Event.wait` does.

    Returns False after `timeout`. In the main thread of a kernel, messages of widgets are handled meanwhile.
    """
    with _serving() as serve:
        if serve is None:
            return ends(timeout)
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not ends(min(PERIOD, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            serve()
        serve()  # a cell may wait repeatedly, each time only for a moment
        return True


def end_of(thread: threading.Thread) -> Callable[[float | None], bool]:
    """Return the end of a thread as a function that `wait_until` can wait for."""

    def ends(timeout: float | None) -> bool:
        thread.join(timeout)
        return not thread.is_alive()

    return ends


def watch_cells(shell: Any) -> None:
    """Note when a cell runs, during which the kernel reads no messages unless the cell waits for a run."""

    def note(begins: bool) -> None:
        global _cell_runs, _heard
        if threading.current_thread() is threading.main_thread():  # a cell in a subshell blocks nothing
            _cell_runs, _heard = begins, time.monotonic()

    shell.events.register("pre_run_cell", lambda _: note(True))
    shell.events.register("post_run_cell", lambda _: note(False))


def controls_wait() -> bool:
    """Return whether a panel's controls must wait until the current cell has ended."""
    return _cell_runs and time.monotonic() - _heard > MOMENT


@contextlib.contextmanager
def _serving() -> Iterator[Callable[[], None] | None]:
    """Yield a function that handles messages once, in the main thread of a known kind of kernel; otherwise None."""
    global _server
    shell = find_shell()
    if shell is None or os.getpid() != _process or threading.current_thread() is not threading.main_thread():
        yield None
    elif _server is not None:  # a widget's callback waits: the kept messages stay in one queue
        yield _server.serve
    elif (stream := _find_stream(shell.kernel)) is None:
        yield None
    else:
        server = MessageLoop(shell.kernel, stream)
        try:
            _server = server
            yield server.serve
        finally:
            _server = None
            server.give_back()


def _find_stream(kernel: Any) -> Any:
    """Return the stream of the main thread's messages; None if the kernel differs from the versions tested."""
    try:
        import ipykernel

        if not (6, 29) <= ipykernel.version_info[:2] < (8, 0):
            return None
        thread = getattr(kernel, "shell_channel_thread", None)  # with subshells, it passes messages on
        pair = thread and thread.manager.get_shell_channel_to_subshell_pair(None)
        stream = pair.to_stream if pair else kernel.shell_stream
        needed = [stream._recv_callback, stream._run_callback, kernel.set_parent, kernel._publish_status]
        needed += [kernel.shell_handlers[kind] for kind in WIDGETS]
        ours = stream.io_loop.asyncio_loop is asyncio.get_running_loop()  # it reads the stream when no cell runs
        known = ours and all(map(callable, needed)) and "shell" in kernel._parent_ident
        return stream if known else None
    except (AttributeError, ImportError, KeyError, RuntimeError):
        return None


class MessageLoop:
    """Reads the kernel's messages in place of its event loop."""

    def __init__(self, kernel: Any, stream: Any) -> None:
        self._kernel, self._stream = kernel, stream
        self._arrived: deque[list[Any]] = deque()  # not read yet
        self._kept: list[list[Any]] = []
        self._has_read = False

    def serve(self) -> None:
        """Handle the messages of widgets."""
        global _heard
        _heard = time.monotonic()
        self._read()
        while self._arrived:
            if self._is_widgets(self._arrived[0]):
                self._handle(self._arrived.popleft())
            else:
                with uninterrupted():
                    self._kept.append(self._arrived.popleft())

    def _read(self) -> None:
        import zmq

        if not self._stream.socket.poll(0):
            return
        self._has_read = True
        with uninterrupted(), contextlib.suppress(zmq.Again):
            while True:
                self._arrived.append(self._stream.socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def _is_widgets(self, frames: list[Any]) -> bool:
        # only the header is unpacked: the session refuses to unpack a message twice, and the kernel still has to do it
        try:
            _, rest = self._kernel.session.feed_identities(frames, copy=False)
            return self._kernel.session.unpack(rest[1].bytes)["msg_type"] in WIDGETS
        except Exception:  # not a message at all: the kernel deals with that
            return False

    def _handle(self, frames: list[Any]) -> None:
        """Handle a message as the kernel does, then direct output to the waiting cell again."""
        kernel = self._kernel
        cell = kernel._parent_ident["shell"], kernel.get_parent("shell")
        try:
            identity, rest = kernel.session.feed_identities(frames, copy=False)
            message = kernel.session.deserialize(rest, content=True, copy=False)
            _flush()  # what the cell has printed so far belongs to the cell
            kernel.set_parent(identity, message, channel="shell")
            kernel._publish_status("busy", "shell")
            kernel.shell_handlers[message["header"]["msg_type"]](self._stream, identity, message)
        except Exception:
            kernel.log.error("a widget's message could not be handled:", exc_info=True)
        finally:
            _flush()
            kernel._publish_status("idle", "shell")  # widgets send the next change only then
            kernel.set_parent(*cell, channel="shell")
            kernel._publish_status("busy", "shell")  # which it is

    def give_back(self) -> None:
        """Return the kept messages to the kernel, before any new ones."""
        if not self._has_read:
            return
        stream = self._stream
        with uninterrupted():
            for frames in (*self._kept, *self._arrived):
                stream._run_callback(stream._recv_callback, frames)
            stream.on_recv(stream._recv_callback, copy=False)  # look at once: a message may have arrived meanwhile


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the error of an interrupt at the very end of a wait, an unlocked lock, back into KeyboardInterrupt."""
    try:
        yield
    except RuntimeError as problem:
        if "unlocked lock" in str(problem) and isinstance(problem.__context__, KeyboardInterrupt):
            raise problem.__context__ from None
        raise


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the block ends: between reading a message and keeping it, it would lose a cell, and a
    half import of torch would end the process at the next attempt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # interrupts do not reach this thread, or are ignored, as in workers
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)
