"""Two machines in one, for tests: namespaces of the kernel, joined by a virtual cable. Needs root and the program `ip`.

    with TwoHosts() as hosts:
        first, second = hosts.run(["ping", "-c1", hosts.addresses[1]], ["hostname"])

Each host has its own network, processes, host name and /dev/shm; files are the same. Its first process reads from a
pipe of ours and ends when we do, however we end. With it the kernel ends all others on the host, and then takes the
network away. Outside nothing is made, so that there is nothing to remove.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

NAMESPACES = ("--net", "--pid", "--uts", "--mount")
FIRST_PROCESS = "echo {name} >/proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"


class Answer(NamedTuple):
    """How a command ended: its exit code, or None if it took too long and was killed; and what it printed."""

    code: int | None
    output: str


@functools.cache
def why_not() -> str | None:
    """Why there can be no two hosts here, or None if there can: it is tried."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no program {program}: it is in the package {package}"
    try:
        with TwoHosts():
            return None
    except OSError as error:
        return str(error)


class TwoHosts:
    """Two hosts, `host0` and `host1`, with an address each on the same cable."""

    addresses = ("10.77.0.1", "10.77.0.2")
    interface = "wire0"  # on both, so that one GLOO_SOCKET_IFNAME serves both

    def __init__(self) -> None:
        self._hosts: list[subprocess.Popen[str]] = []
        self._first: list[int] = []  # the first process of each host, by the number that it has outside

    def __enter__(self) -> TwoHosts:
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for host in range(len(self.addresses)):
                self._boot(f"host{host}")
            peer = f"peer name {self.interface} netns {self._first[1]}"
            self._ip(0, f"link add {self.interface} type veth {peer}")
            for host, address in enumerate(self.addresses):
                self._ip(host, f"address add {address}/24 dev {self.interface}")
                self._ip(host, f"link set {self.interface} up")
                self._ip(host, "link set lo up")
            stack.pop_all()  # all went well: it stays open
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts and everything on them."""
        for host in self._hosts:
            host.communicate()  # closes the pipe, and waits

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a host, where we were when we made it; for a `Popen` of your own."""
        return ["nsenter", f"--target={self._first[host]}", *NAMESPACES, "--wd", "--", *command]

    def run(
        self, *commands: Sequence[str], seconds: float = 60, environment: Mapping[str, str] | None = None
    ) -> list[Answer]:
        """Run a command on each host, at the same time. When the time is up, everything on the hosts is killed."""
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            running = []
            for host, command in enumerate(commands):
                # No pipe: somebody would have to read it meanwhile.
                output = stack.enter_context(tempfile.TemporaryFile("w+"))
                process = subprocess.Popen(
                    self.command(host, command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                )
                running.append((process, output))
            late = [process for process, _ in running if not _ends_before(process, deadline)]
            if late:
                for host in range(len(self.addresses)):
                    everybody = ["sh", "-c", "kill -KILL -1"]  # but not the first process
                    subprocess.run(self.command(host, everybody), stderr=subprocess.DEVNULL)
            answers = []
            for process, output in running:
                code = process.wait()
                output.seek(0)
                answers.append(Answer(None if process in late else code, output.read()))
            return answers

    def _boot(self, name: str) -> None:
        host = subprocess.Popen(
            ["unshare", *NAMESPACES, "--mount-proc", "--kill-child", "sh", "-c", FIRST_PROCESS.format(name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._hosts.append(host)
        assert host.stdout is not None
        if (line := host.stdout.readline()) != "ready\n":
            raise OSError(line.strip())
        (first,) = psutil.Process(host.pid).children()
        self._first.append(first.pid)

    def _ip(self, host: int, words: str) -> None:
        # Only in the host's network: the numbers of processes are those from outside.
        command = ["nsenter", f"--target={self._first[host]}", "--net", "ip", *words.split()]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise OSError(f"ip {words}: {result.stderr.strip()}")


def _ends_before(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True
