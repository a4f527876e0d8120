"""The `dlab` command: quick to answer, one line when something is wrong, and a server that leaves nothing behind."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import psutil
import pytest
from kernels import alive

import dlab
from dlab import cli

TOP = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"^dlab: (http://localhost:(\d+)/)lab/tree/00_tour\.ipynb\?token=(\w+)$")


def dlab_command(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dlab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **options)


# ------------------------------------------------------------------------------------- the command


def test_help_names_every_command():
    answer = dlab_command("--help")
    assert answer.returncode == 0
    for command in ("lab", "demo", "train", "run", "data"):
        assert re.search(rf"^    {command} +\w", answer.stdout, re.MULTILINE), answer.stdout


def test_help_does_not_wait_for_torch_or_jupyter():
    heavy = {"torch", "torchvision", "jupyterlab", "jupyter_server", "matplotlib", "IPython", "numpy"}
    check = f"import sys, dlab.cli; dlab.cli.make_parser().format_help(); print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "set()"


def test_version():
    assert dlab_command("--version").stdout == f"dlab {dlab.__version__}\n"


def test_the_installed_script_is_the_same_command():
    script = Path(sys.executable).parent / "dlab"
    assert subprocess.run([script, "--help"], capture_output=True, text=True).stdout == dlab_command("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sing"],
        ["lab", "--port", "0"],
        ["lab", "--port", "65536"],
        ["lab", "--port", "x"],
        ["demo", "--workers", "0"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("sizes must sum to 1"), "dlab: sizes must sum to 1\n"),
        (FileNotFoundError("data/mnist is missing"), "dlab: data/mnist is missing\n"),
        (FileNotFoundError(2, "No such file", "x.gz"), "dlab: [Errno 2] No such file: 'x.gz'\n"),
        (RuntimeError("rank 2 went away"), "dlab: rank 2 went away\n"),
        (ImportError("no module named torch"), "dlab: no module named torch\n"),
        (ValueError(), "dlab: ValueError\n"),
    ],
)
def test_an_error_is_one_line_and_no_traceback(error, line, monkeypatch, capsys):
    def fail(**_):
        raise error

    monkeypatch.setattr(cli, "run_data", fail)
    assert cli.main(["data"]) == 1
    assert capsys.readouterr() == ("", line)


def test_a_mistake_in_the_code_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "run_data", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["data"])


def test_ctrl_c_is_no_error_message(monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_demo", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------ demo and data


def test_demo_gets_what_was_named_and_nothing_else(monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "dlab.demo", types.SimpleNamespace(main=lambda **given: calls.append(given)))
    monkeypatch.setattr(dlab, "demo", sys.modules["dlab.demo"], raising=False)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--workers", "2", "--steps", "7"]) == 0
    assert calls == [{}, {"workers": 2, "steps": 7}]


@pytest.mark.slow
def test_the_demo_shows_a_progress_line_per_rank_and_what_came_out():
    answer = dlab_command("demo", "--workers", "2", "--steps", "3")
    assert answer.returncode == 0, answer.stderr
    for rank in range(2):
        assert re.search(rf"rank {rank} .*3/3", answer.stdout)
    assert "test accuracy" in answer.stdout and "equal to the last bit: True" in answer.stdout


def test_data_says_what_is_here(capsys):
    assert cli.main(["data"]) == 0
    assert capsys.readouterr().out.count("sha256 ok") == 4


def test_data_that_is_missing_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLAB_DATA", str(tmp_path))
    cli.main(["data"])
    assert capsys.readouterr().out.count("missing: get it with `dlab data --download`") == 4


def test_data_downloads_to_the_named_folder(tmp_path, monkeypatch, capsys):
    import dlab.data

    calls = []
    monkeypatch.setattr(dlab.data, "download", lambda to: calls.append(to))
    assert cli.main(["data", "--download"]) == 0
    assert cli.main(["data", "--download", "--to", str(tmp_path)]) == 0
    assert calls == [None, tmp_path]
    assert f"DLAB_DATA={tmp_path}" in capsys.readouterr().out


def test_data_to_alone_downloads_nothing(monkeypatch, capsys):
    import dlab.data

    monkeypatch.setattr(dlab.data, "download", lambda to: pytest.fail("nobody asked for a download"))
    assert cli.main(["data", "--to", "somewhere"]) == 1
    assert "--download" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- lab


class Lab:
    """`dlab lab` in a session of its own, with an empty home; who asks for its address waits until it answers."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        named = {name: str(folder / name) for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
        hidden = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "JUPYTER_TOKEN", "JUPYTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in hidden} | named
        environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlab", "lab", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )

    @functools.cached_property
    def _address(self) -> re.Match:
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if found := ADDRESS.match(line):
                return found
        return pytest.fail("the server printed no address:\n" + "".join(lines))

    @property
    def url(self) -> str:
        return self._address[1]

    @property
    def token(self) -> str:
        return self._address[3]

    def request(self, path: str, token: str | None = None, data: bytes | None = None) -> str:
        """What the server answers; not by way of a proxy, for the server is on this machine."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        headers = {"Authorization": f"token {token or self.token}"}
        with opener.open(urllib.request.Request(self.url + path, data=data, headers=headers), timeout=30) as answer:
            return answer.read().decode()

    def start_kernel(self) -> psutil.Process:
        """Have the server start a Python kernel, and find it among the server's children."""
        self.request("api/kernels", data=b'{"name": "python3"}')
        (kernel,) = filter(is_kernel, psutil.Process(self.process.pid).children())
        return kernel

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def is_kernel(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        return "ipykernel_launcher" in process.cmdline()
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def start_lab(tmp_path_factory):
    """Starts `dlab lab`; afterwards nothing of it may be alive."""
    started = []

    def start(*arguments: str) -> Lab:
        folder = tmp_path_factory.mktemp("lab")
        browser = folder / "bin" / "w3m"
        browser.parent.mkdir()
        browser.write_text(f"#!/bin/sh\ntouch {folder}/opened\n")
        browser.chmod(0o755)
        started.append(Lab(folder, *arguments))
        return started[-1]

    yield start
    for lab in started:
        lab.close()


ENDS = {"Ctrl-C": signal.SIGINT, "kill": signal.SIGTERM, "hang-up": signal.SIGHUP}


@pytest.fixture(scope="module")
def labs(start_lab):
    """One that stays, started by the shortest command line, and one for each end, on a port of its own.

    They start at the same time, for each needs seconds.
    """
    ports = {name: free_port() for name in ENDS}
    return {"stays": (start_lab(), None)} | {
        name: (start_lab("--no-open", "--port", str(port)), port) for name, port in ports.items()
    }


@pytest.fixture
def lab(labs):
    return labs["stays"][0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_lab_serves_the_tour_and_leaves_nothing_behind(labs, end):
    lab, port = labs[end]
    assert lab.url == f"http://localhost:{port}/"

    tour = json.loads(lab.request("api/contents/00_tour.ipynb"))
    assert tour["type"] == "notebook"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        lab.request("api/contents", token="wrong")

    lab.start_kernel()
    family = [psutil.Process(lab.process.pid), *psutil.Process(lab.process.pid).children(recursive=True)]
    os.kill(lab.process.pid, ENDS[end])
    assert lab.process.wait(timeout=20) == 0
    psutil.wait_procs(family, timeout=2)
    assert not alive(family)
    left = {path.name for path in (lab.folder / "JUPYTER_RUNTIME_DIR").iterdir()}
    assert left <= {"jupyter_cookie_secret"}  # kept for the next server, so that browsers stay logged in


def test_lab_outlives_the_terminal_under_nohup():
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    stops = []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cli.stop_on_signals(types.SimpleNamespace(stop=lambda from_signal: stops.append(from_signal)))
        for name in names:
            signal.raise_signal(name)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert stops == [True, True]


def test_lab_is_not_covered_by_a_question_about_news(lab):
    page = lab.request("lab/tree/00_tour.ipynb")
    settings = re.search(r'<script id="jupyter-config-data"[^>]*>(.*?)</script>', page, re.DOTALL)
    disabled = json.loads(settings[1])["disabledExtensions"]
    assert "@jupyterlab/apputils-extension:announcements" in disabled


def test_lab_without_a_port_takes_a_free_one(lab, start_lab):
    assert "started" in json.loads(lab.request("api/status"))  # so that it has its port before the other one looks
    other = start_lab("--no-open")
    assert other.url != lab.url
    assert other.token != lab.token
    assert "started" in json.loads(other.request("api/status"))


def test_lab_opens_no_text_browser_where_there_is_no_display(lab):
    lab.request("lab")  # --no-open was not said
    assert not (lab.folder / "opened").exists()


def test_lab_keeps_its_token_from_kernels_and_process_lists(lab):
    kernel = lab.start_kernel()
    assert lab.token not in " ".join(psutil.Process(lab.process.pid).cmdline())
    assert lab.token not in kernel.environ().values()


def test_lab_says_that_a_named_port_is_taken():
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        port = somebody.getsockname()[1]
        answer = dlab_command("lab", "--no-open", "--port", str(port))
    assert answer.returncode == 1
    assert re.fullmatch(rf"dlab: port {port} is not free .*\n", answer.stderr)


def test_lab_without_the_notebooks_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "dlab" / "cli.py"))
    assert cli.main(["lab"]) == 1
    assert re.fullmatch(r"dlab: there is no .*00_tour\.ipynb: clone the repository .*\n", capsys.readouterr().err)


def arguments(**changes) -> list[str]:
    given = {"notebook": Path("/somewhere/00_tour.ipynb"), "port": None, "ip": None, "open_browser": True} | changes
    return cli.server_arguments(**given)


def test_lab_allows_root_only_to_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-root" in arguments()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-root" not in arguments()


def test_lab_opens_a_browser_where_there_is_a_display(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    assert "--no-browser" not in arguments()
    assert "--no-browser" in arguments(open_browser=False)


def test_lab_listens_elsewhere_only_when_told():
    assert not any("ServerApp.ip" in argument for argument in arguments())
    assert "--ServerApp.ip=0.0.0.0" in arguments(ip="0.0.0.0")


@pytest.mark.parametrize(
    ("ip", "host"), [("localhost", "localhost"), ("0.0.0.0", "localhost"), ("10.0.0.7", "10.0.0.7"), ("", "localhost")]
)
def test_the_address_is_one_that_a_browser_can_use(ip, host):
    server = types.SimpleNamespace(
        ip=ip, port=8889, base_url="/", certfile="", identity_provider=types.SimpleNamespace(token="abc")
    )
    assert cli.address(server, "00_tour.ipynb") == f"http://{host}:8889/lab/tree/00_tour.ipynb?token=abc"
    server.identity_provider.token = ""  # the user has set a password instead
    assert cli.address(server, "00_tour.ipynb") == f"http://{host}:8889/lab/tree/00_tour.ipynb"
