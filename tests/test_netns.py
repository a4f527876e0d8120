"""Over a real network: two hosts with a cable between them, and torch.distributed across both."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import netns
import psutil
import pytest
from kernels import eventually, seconds_until_gone

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=f"no two hosts here: {netns.why_not()}")

SUM = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
line = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: {total.item():g}"
sys.stdout.write(line + os.linesep)  # in one piece, as others write there, too
dist.destroy_process_group()
"""


@pytest.fixture
def hosts():
    with netns.TwoHosts() as both:
        yield both


def family() -> set[psutil.Process]:
    """All that we have started, on whichever host it is."""
    return set(psutil.Process().children(recursive=True))


def links() -> str:
    return subprocess.check_output(["ip", "-brief", "link"], text=True)


# ------------------------------------------------------------------------------------- torch.distributed


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_an_allreduce_across_two_hosts(hosts, tmp_path, rendezvous):
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    first, port = hosts.addresses[0], 29500  # on hosts of our own every port is free
    commands = []
    for host, address in enumerate(hosts.addresses):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        if rendezvous == "c10d":
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{port}", "--rdzv-id=sum"]
            # No name of the host leads to its address here, so it has to be told who it is.
            command += [f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={address}"]
        else:
            command += [f"--master-addr={first}", f"--master-port={port}", f"--node-rank={host}"]
        commands.append([*command, str(script)])
    answers = hosts.run(*commands, seconds=90, environment={"GLOO_SOCKET_IFNAME": hosts.interface})
    assert [answer.code for answer in answers] == [0, 0], answers
    shown = [line for answer in answers for line in answer.output.splitlines() if line.startswith("rank")]
    if rendezvous == "c10d":  # who comes first is rank 0
        assert sorted(line.replace(" on host1", "").replace(" on host0", "") for line in shown) == [
            "rank 0 of 2: 11",
            "rank 1 of 2: 11",
        ]
    else:
        assert shown == ["rank 0 of 2 on host0: 11", "rank 1 of 2 on host1: 11"]


# -------------------------------------------------------------------------------------------- the hosts


def test_each_host_reaches_the_other_and_nobody_else(hosts):
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 7777), timeout=5).close(); print('there')"
    listen = "import socket; s = socket.create_server(('', 7777)); print(s.accept()[1][0])"
    patient = f"import time\nfor _ in range(50):\n  try: {connect}; break\n  except ConnectionError: time.sleep(0.1)"
    other = hosts.addresses[1]
    answers = hosts.run([sys.executable, "-c", patient, other], [sys.executable, "-c", listen])
    assert answers == [(0, "there\n"), (0, f"{hosts.addresses[0]}\n")]
    for answer in hosts.run(*[["ip", "route", "get", "192.0.2.1"]] * 2):
        assert "unreachable" in answer.output


def test_each_host_has_its_own_processes_name_and_memory(hosts):
    assert hosts.run(["uname", "-n"], ["uname", "-n"]) == [(0, "host0\n"), (0, "host1\n")]
    assert hosts.run(["pwd"], ["pwd"]) == [(0, f"{os.getcwd()}\n")] * 2
    look = "touch /dev/shm/$(uname -n) && ls /dev/shm /proc | grep -E '^(host|[0-9])' | sort -n | head -2"
    for host, answer in enumerate(hosts.run(*[["sh", "-c", look]] * 2)):
        assert answer == (0, f"host{host}\n1\n")
    assert not list(Path("/dev/shm").glob("host?"))


def test_what_takes_too_long_is_killed_with_all_it_started(hosts):
    before = family()
    answers = hosts.run(["sh", "-c", "echo begun; setsid sleep 1000 & wait"], ["sh", "-c", "exit 3"], seconds=1)
    assert answers == [(None, "begun\n"), (3, "")]
    assert seconds_until_gone(family() - before) < 3
    assert hosts.run(["true"], ["true"]) == [(0, ""), (0, "")], "they can still be used"


def test_nothing_is_left():
    before, links_before = family(), links()
    with pytest.raises(KeyError), netns.TwoHosts() as hosts:
        sleeper = subprocess.Popen(hosts.command(0, ["setsid", "sleep", "1000"]))
        eventually(lambda: [process for process in family() if process.name() == "sleep"])
        assert links() == links_before
        raise KeyError
    sleeper.wait()
    assert family() == before
    assert links() == links_before


def test_nothing_is_left_of_a_test_that_is_killed():
    code = (
        "import subprocess, time, netns\n"
        "with netns.TwoHosts() as hosts:\n"
        "    subprocess.Popen(hosts.command(1, ['setsid', 'sleep', '1000']))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    test = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert test.stdout.readline() == "ready\n"
    started = psutil.Process(test.pid).children(recursive=True)
    assert len(started) >= 4
    os.kill(test.pid, signal.SIGKILL)
    test.communicate()
    assert seconds_until_gone(started) < 3


def test_the_reason_is_named_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in netns.why_not.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in netns.why_not.__wrapped__()
