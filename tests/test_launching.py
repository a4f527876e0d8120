"""`dlab run`: any script as several ranks, their output by rank, and all of them end together, however it ends."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from kernels import alive, eventually, seconds_until_gone

from dlab import cli
from dlab.launching.launcher import launch

WAIT = "import time; time.sleep(1000)"
RANK = "import os, sys, time; rank = int(os.environ['RANK'])"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is the current one; the logs go to `logs` in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def start(folder):
    """Starts `dlab run` on a script of these lines, and does not wait; afterwards nothing of it may be alive."""
    started = []

    def go(*lines: str, n: int = 3, arguments=(), stdout=subprocess.PIPE) -> subprocess.Popen:
        (folder / "script.py").write_text("\n".join(map(textwrap.dedent, lines)))
        command = [sys.executable, "-m", "dlab", "run", "script.py", "-n", str(n), "--logs", "logs", *arguments]
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
        started.append(launcher)
        return launcher

    yield go
    for launcher in started:
        launcher.kill()
        launcher.communicate()
    assert seconds_until_gone(pids(folder)) < 3


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dlab", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **options)


def run_lines(*lines: str, n: int = 3, arguments=(), **options) -> subprocess.CompletedProcess:
    """Run a script of these lines, with logs."""
    Path("script.py").write_text("\n".join(map(textwrap.dedent, lines)))
    return run("script.py", "-n", str(n), "--logs", "logs", *arguments, **options)


def scheduler_log(folder: Path = Path()) -> str:
    path = folder / "logs" / "scheduler.log"
    return path.read_text() if path.exists() else ""


def log_of(rank: int) -> str:
    return Path(f"logs/worker_{rank}.log").read_text()


def pids(folder: Path = Path()) -> list[int]:
    """The launcher, its keeper and the ranks, as the scheduler_log names them."""
    return [int(pid) for pid in re.findall(r"\bpid (\d+)", scheduler_log(folder))]


def ready(n: int) -> None:
    """Wait until each rank has printed something."""
    eventually(lambda: all(Path(f"logs/worker_{rank}.log").exists() and log_of(rank) for rank in range(n)))


# --------------------------------------------------------------------------------------- all is well


def test_three_ranks_sum_up_and_each_has_its_log(folder):
    answer = run_lines(
        RANK,
        """
        import psutil, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([10.0 ** rank])
        dist.all_reduce(total)
        ours = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        print(f"rank {rank} has {total.item():g}:", *(os.environ[name] for name in ours))
        print(f"rank {rank} to stderr", file=sys.stderr)
        listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
        store = [ip for ip, port in listening if port == int(os.environ["MASTER_PORT"])]
        own = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
        print("the store is on", *store, "and the ranks on", *own)
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    for rank in range(3):
        lines = [
            f"rank {rank} has 111: {rank} 3 3 127.0.0.1",
            f"rank {rank} to stderr",
            "the store is on 127.0.0.1 and the ranks on 127.0.0.1",
        ]
        assert log_of(rank).splitlines() == lines
        shown = [line for line in answer.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert shown == [f"[{rank}] {line}" for line in lines]
    assert len(answer.stdout.splitlines()) == 9


def test_the_journal_says_what_was_started_and_how_it_ended(folder):
    assert run_lines(RANK, "print(os.getpid())", n=2, arguments=["--", "--lr", "0.1"]).returncode == 0
    lines = scheduler_log().splitlines()
    times = [re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  ", line) for line in lines]
    assert all(times), lines
    text = "\n".join(line[found.end() :] for line, found in zip(lines, times, strict=True))
    assert re.match(
        rf"2 ranks in {folder}: the launcher has pid \d+, the store on 127\.0\.0\.1:\d+ has pid \d+\n", text
    )
    for rank in range(2):
        command = f"{sys.executable} script.py --lr 0.1"
        assert f"rank {rank} started with pid {log_of(rank).strip()}: {command}\n" in text
        assert f"rank {rank} ended with exit code 0\n" in text
    assert re.search(r"all ended after \d+\.\d\d s, exit code 0$", text)


def test_arguments_after_two_dashes_are_the_scripts(folder):
    lines = (RANK, "print(sys.argv[1:])")
    wanted = ["--logs", "elsewhere", "-n", "7", "--", "a b", ""]
    assert run_lines(*lines, n=1, arguments=["--", *wanted]).returncode == 0
    assert log_of(0) == f"{wanted}\n"
    assert run_lines(*lines, n=1, arguments=["extra"]).returncode == 2


def test_a_module_of_the_current_folder(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text("import sys; print(__name__, *sys.argv[1:])")
    answer = run("-m", "package.train", "-n", "2", "--", "-m", "x")
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["[0] __main__ -m x", "[1] __main__ -m x"]
    assert not (folder / "logs").exists()


def test_logs_can_be_followed(start, folder):
    start(RANK, "print('hello', end='')", WAIT, n=1)  # not even a whole line
    eventually(lambda: (folder / "logs" / "worker_0.log").exists() and log_of(0) == "hello")


def test_cores_are_shared_unless_somebody_says_otherwise(folder, monkeypatch):
    lines = (RANK, "print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])")
    cores = len(os.sched_getaffinity(0))
    assert run_lines(*lines, n=1).stdout == f"[0] {cores} lo\n"
    assert run_lines(*lines, n=cores + 1).stdout.splitlines()[0].endswith(" 1 lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert run_lines(*lines, n=1).stdout == "[0] 7 eth7\n"


def test_a_progress_bar_is_one_line_on_the_terminal_and_whole_in_the_log(folder):
    bar = r"""sys.stderr.write("".join(f"\r{i}%" for i in range(101)) + "\nend, with \xff and no newline")"""
    answer = run_lines(RANK, bar, n=1)
    assert answer.stdout == "[0] 100%\n[0] end, with ÿ and no newline\n"
    assert log_of(0).endswith("%\nend, with ÿ and no newline")
    assert Path("logs/worker_0.log").read_bytes().count(b"\r") == 101


def test_logs_of_an_earlier_run_are_not_taken_for_ours(folder):
    (folder / "logs").mkdir()
    for name in ("worker_0.log", "worker_7.log", "scheduler.log", "worker_best.log", "notes"):
        (folder / "logs" / name).write_text("old")
    assert run_lines("print(1)", n=2).returncode == 0
    there = {path.name for path in (folder / "logs").iterdir()}
    assert there == {"worker_0.log", "worker_1.log", "scheduler.log", "worker_best.log", "notes"}
    assert log_of(0) == "1\n"
    assert "old" not in scheduler_log()


@pytest.mark.parametrize(("setting", "expected"), [({}, r"\x1b\[31m\[0\]\x1b\[0m 5"), ({"NO_COLOR": "1"}, r"\[0\] 5")])
def test_each_rank_has_its_colour_on_a_terminal(folder, setting, expected):
    (folder / "script.py").write_text("print(5)")
    ours, theirs = pty.openpty()
    environment = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **setting}
    command = [sys.executable, "-m", "dlab", "run", "script.py", "-n", "2"]
    assert subprocess.run(command, stdout=theirs, env=environment, timeout=60).returncode == 0
    os.close(theirs)
    shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert re.search(rf"^{expected}\r?$", shown, re.MULTILINE), repr(shown)


# ---------------------------------------------------------------------------------------- one fails


def test_one_failure_ends_all_at_once_and_is_named(folder):
    began = time.monotonic()
    answer = run_lines(RANK, "if rank == 1: print('oh'); sys.exit(3)", WAIT)
    assert time.monotonic() - began < 10
    assert answer.returncode == 3
    assert answer.stderr == "dlab: rank 1 ended with exit code 3; its output is in logs/worker_1.log\n"
    assert answer.stdout == "[1] oh\n"
    assert "SIGTERM to all: rank 1 ended with exit code 3\n" in scheduler_log()
    for rank in (0, 2):
        assert f"rank {rank} ended by signal 15 (SIGTERM)\n" in scheduler_log()
    assert "exit code 3" in scheduler_log().splitlines()[-1]
    assert not alive(pids())


def test_a_traceback_is_in_the_log_of_its_rank(folder):
    assert run_lines(RANK, "1 / (1 - rank)", n=2).returncode == 1
    assert "ZeroDivisionError" in log_of(1)
    assert log_of(0) == ""


def test_without_logs_the_sentence_points_to_the_terminal(folder):
    (folder / "script.py").write_text("print('oh'); raise SystemExit(4)")
    answer = run("script.py", "-n", "1")
    assert answer.returncode == 4
    assert answer.stderr == "dlab: rank 0 ended with exit code 4; its output is above, behind [0]\n"


def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(folder):
    answer = run_lines(
        RANK,
        """
        import signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(10_000):
            if (rank, step) == (2, 20):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
        """,
    )
    assert answer.returncode == 128 + signal.SIGKILL
    assert answer.stderr == "dlab: rank 2 ended by signal 9 (SIGKILL); its output is in logs/worker_2.log\n"


def test_a_rank_that_left_early_is_mentioned(folder):
    wait = "while open('logs/scheduler.log').read().count('ended') < 2: time.sleep(0.01)"
    answer = run_lines(RANK, "if rank < 2: sys.exit()", wait, "sys.exit(1)")
    assert answer.stderr.startswith(
        "dlab: rank 2 ended with exit code 1 (ranks 0 and 1 had ended before with exit code 0); "
    )


def test_who_does_not_end_is_killed(folder):
    """Also a rank that is stopped, and one that has closed its output."""
    (folder / "script.py").write_text(
        f"{RANK}\n"
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready')\n"
        "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if rank == 1: os.close(1), os.close(2)\n"
        "if rank == 3:\n"
        "    while not all(os.path.getsize(f'logs/worker_{other}.log') for other in range(3)): time.sleep(0.01)\n"
        "    sys.exit(5)\n"
        f"{WAIT}\n"
    )
    hurry = (
        "import sys; from dlab import cli; from dlab.launching import launcher; launcher.GRACE_SECONDS = 0.5\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", hurry, "run", "script.py", "-n", "4", "--logs", "logs"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 5
    assert "SIGKILL to ranks 0, 1 and 2: still running after SIGTERM\n" in scheduler_log()
    assert scheduler_log().count("ended by signal 9 (SIGKILL)") == 3
    assert not alive(pids())


def test_what_a_rank_has_started_ends_with_it(folder):
    answer = run_lines("import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)", n=2)
    assert answer.returncode == 0
    assert seconds_until_gone([int(log_of(rank)) for rank in range(2)]) < 3


def test_without_the_store_all_end(start):
    launcher = start("print(1)", WAIT)
    ready(3)
    os.kill(pids()[1], signal.SIGKILL)
    _, complaint = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert complaint == "dlab: the process that hosts the ranks' store ended by signal 9 (SIGKILL)\n"


# ------------------------------------------------------------------------------ the launcher is ended

SLEEPER = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"  # a grandchild, and its number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "kill", "hang-up"])
def test_a_signal_ends_all(start, number):
    launcher = start(SLEEPER, WAIT)
    ready(3)
    family = [*pids(), *(int(log_of(rank)) for rank in range(3))]
    os.killpg(launcher.pid, number)  # as a terminal does it
    _, complaint = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    assert complaint == ("" if number == signal.SIGINT else f"dlab: {number.name} ended all ranks\n")
    assert f"SIGTERM to all: {number.name} came\n" in scheduler_log()
    assert seconds_until_gone(family) < 3


def test_a_second_ctrl_c_waits_for_nobody(start):
    launcher = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1)", WAIT)
    ready(3)
    os.kill(launcher.pid, signal.SIGINT)
    eventually(lambda: "SIGINT came" in scheduler_log())
    began = time.monotonic()
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=20) == 130
    assert time.monotonic() - began < 3
    assert not alive(pids())


@pytest.mark.parametrize("moment", ["while they work", "while they start"])
def test_a_killed_launcher_leaves_nothing(start, folder, moment):
    launcher = start(SLEEPER, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", WAIT)
    if moment == "while they work":
        ready(3)
        family = [*pids(), *(int(log_of(rank)) for rank in range(3))]
    else:
        family = eventually(lambda: psutil.Process(launcher.pid).children(recursive=True))
    launcher.kill()
    seconds = seconds_until_gone([*family, launcher.pid])
    print(f"all gone after {seconds:.2f} s")
    assert seconds < 3
    if moment == "while they work":
        assert "the launcher was killed, and all ranks with it\n" in scheduler_log()


def test_when_nobody_reads_any_more_all_end(start):
    reading, writing = os.pipe()
    launcher = start("while True: print('x' * 1000)", stdout=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert launcher.wait(timeout=20) == 128 + signal.SIGPIPE
    assert launcher.stderr.read() == ""
    assert "the output has no reader any more" in scheduler_log()


def is_full(pipe: int) -> bool:
    """Nothing more has come for a while, though somebody writes all the time."""

    def waiting() -> int:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

    before = waiting()
    time.sleep(0.2)
    return waiting() == before > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) / 2


def test_a_reader_that_sleeps_does_not_stop_anybody_from_ending_it(start):
    launcher = start("while True: print('x' * 1000)")
    eventually(lambda: is_full(launcher.stdout.fileno()))
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(timeout=20) == 143
    assert not alive(pids())


# ------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py", "-n", "2"], "there is no script nowhere.py"),
        ([".", "-n", "2"], "there is no script ."),
        (["-m", "no_such_package.train", "-n", "2"], "there is no module no_such_package.train"),
        (["script.py", "-n", "2", "--logs", "script.py"], "script.py is a file: the logs need a folder"),
        (["script.py", "-n", "2", "--logs", "script.py/x"], r"the logs cannot be .* script.py/x \(Not a directory\)"),
        (["script.py", "-n", "2", "--logs", "/proc/x"], r"the logs cannot be .* /proc/x \(.*\)"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(folder, arguments, sentence, capsys):
    (folder / "script.py").write_text("open('it ran', 'w')")
    assert cli.main(["run", *arguments]) == 1
    assert re.fullmatch(rf"dlab: {sentence}\n", capsys.readouterr().err)
    assert not (folder / "it ran").exists()


@pytest.mark.parametrize("n", ["0", "-1", "x", "1.5"])
def test_the_number_of_ranks_counts_something(folder, n, capsys):
    (folder / "script.py").touch()
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "script.py", "-n", n])
    assert end.value.code == 2
    assert "-n" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one"):
        launch(["true"], 0)


@pytest.mark.parametrize("words", [["-n", "2"], ["a.py", "-m", "b", "-n", "2"], ["a.py"], ["a.py", "b.py", "-n", "2"]])
def test_a_wrong_command_line_is_refused(words):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", *words])
    assert end.value.code == 2


def test_launching_does_not_wait_for_torch():
    check = "import sys, dlab.launching.launcher; print({'torch', 'numpy', 'IPython'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "set()\n"
