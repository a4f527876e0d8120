"""The parent's side of one worker: its process, its socket and its output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from multiprocessing import process

import torch.multiprocessing

from dlab.processes.between import lifeline, messages
from dlab.processes.between.control import ControlBlock
from dlab.processes.between.errors import name_ranks
from dlab.processes.between.roles import SharedFile
from dlab.processes.parent import output
from dlab.processes.parent.forkserver import Popen, run_in_spawner
from dlab.processes.worker.main import Seat, WorkingDirectory, main


class WorkerProcess(torch.multiprocessing.get_context("forkserver").Process):  # type: ignore[misc]
    """A torch.multiprocessing process that is forked from dlab's own server."""

    _start_method = None  # inside a worker, multiprocessing starts processes as in the notebook

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Popen:
        return Popen(process_obj)

    def start(self) -> None:
        """Start the process from the spawner thread, whichever thread asks."""
        run_in_spawner(self._start).result()
        process._children.discard(self)  # type: ignore[attr-defined]  # otherwise the end of any fork would end it

    def _start(self) -> None:
        config = process.current_process()._config  # type: ignore[attr-defined]
        daemon = config.get("daemon", False)
        config["daemon"] = False  # a daemon, like a Pool's processes, could not have children of its own
        try:
            super().start()
        finally:
            config["daemon"] = daemon

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self.pid is not None and self.exitcode is None:
            lifeline.signal_main_thread(self.pid, number)


class WorkerHandle:
    """A worker as seen by the supervisor."""

    def __init__(self, seat: Seat, control: ControlBlock, desk: SharedFile | None) -> None:
        self.rank = seat.rank
        self.ready = 0  # the last group it has joined
        self.busy = False
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.stack = os.memfd_create("dlab-stack")
        self.readers = (output.LineReader(self.rank, out), output.LineReader(self.rank, err))
        name = "dlab-" + name_ranks([seat.rank], seat.ranks).replace(" ", "-")
        self.process = WorkerProcess(target=main, args=(theirs,), name=name, daemon=True)
        self._closed = False
        try:
            self.process.start()
            self.pid: int = self.process.pid  # stays known after the process has ended
            with contextlib.suppress(OSError):  # it has died already, which its sentinel reports
                shared = [control.file] if desk is None else [control.file, desk.file]
                socket.send_fds(self.channel, [b"!"], [out_end, err_end, self.stack, *shared])
                with messages.Message(0, 0, (WorkingDirectory.here(), seat)) as message:
                    message.send(self.channel)
        finally:
            theirs.close()
            os.close(out_end)
            os.close(err_end)

    def close(self) -> None:
        """Kill the process, if it is still there, and release its resources."""
        if self._closed:
            return
        self._closed = True
        self.process.send_signal(signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.channel.close()
        for file in (self.readers[0].file, self.readers[1].file, self.stack):
            os.close(file)
