"""The `dlab` command: `dlab lab` opens the notebooks, the other commands work without a browser.

Heavy modules are imported only by the commands that need them, so that `dlab --help` answers at once. The first
notebook is `notebooks/00_tour.ipynb`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlab import __version__

FIRST_NOTEBOOK = "00_tour.ipynb"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as in `main(["lab", "--port", "8888"])`; an error is printed as one line, with exit code 1."""
    arguments = vars(make_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        return command(**arguments) or 0
    except KeyboardInterrupt:
        return 130  # the exit code that shells expect after Ctrl-C
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"dlab: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Build the command line parser, with a sub-command for each of `lab`, `demo`, `train`, `run` and `data`."""
    parser = argparse.ArgumentParser(prog="dlab", description="Learn distributed deep learning by running it.")
    parser.add_argument("--version", action="version", version=f"dlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)

    lab = commands.add_parser("lab", help=f"open JupyterLab on notebooks/{FIRST_NOTEBOOK}")
    lab.add_argument("--port", type=port_number, help="the port to serve on (default: the first free one from 8888 on)")
    lab.add_argument("--ip", help="the address to serve on (default: this machine only; 0.0.0.0 in a container)")
    lab.add_argument("--no-open", dest="open_browser", action="store_false", help="only print the address")
    lab.set_defaults(command=run_lab)

    demo = commands.add_parser("demo", help="train in the terminal: a progress line per worker")
    demo.add_argument("--workers", type=positive, help="how many worker processes train (default: 4)")
    demo.add_argument("--steps", type=positive, help="how many steps each worker takes")
    demo.set_defaults(command=run_demo)

    train = commands.add_parser("train", help="train on MNIST; also as a rank of torchrun or of `dlab run`")
    known = "sync (default), allreduce, zero, averaging, async, ddp, tensor, server, server_async or server_ssp"
    train.add_argument("--strategy", default="sync", help=known)
    train.add_argument("--stage", type=positive, help="of zero: 1 (default), 2 or 3, which shards more and more")
    train.add_argument(
        "--model", default="simple_cnn", help="simple_cnn (default), small_cnn, mlp, two_layer, row_transformer"
    )
    train.add_argument("--workers", type=positive, default=4, help="how many (default: 4); a launcher sets its own")
    train.add_argument("--epochs", type=positive, default=1, help="passes through the data (default: 1)")
    train.add_argument("--batch-size", type=positive, default=128, help="for all workers together (default: 128)")
    train.add_argument("--lr", type=float, default=0.05, help="the learning rate (default: 0.05)")
    train.add_argument("--momentum", type=float, default=0.9, help="the momentum of SGD (default: 0.9)")
    train.add_argument("--order", default="shards", choices=["shards", "global"], help="how the data is split")
    train.add_argument("--seed", type=int, default=1234, help="the random seed of weights and data (default: 1234)")
    train.add_argument("--accumulate", type=positive, default=1, help="compute each batch in this many pieces")
    train.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    train.add_argument("--elastic", action="store_true", help="continue when a worker dies")
    train.add_argument("--checkpoint", type=Path, metavar="DIR", help="save checkpoints to this folder")
    train.add_argument("--every", type=positive, metavar="STEPS", help="save this often (default: after each epoch)")
    train.add_argument("--resume", type=Path, metavar="DIR", help="continue from the newest checkpoint in this folder")
    train.add_argument("--overwrite", action="store_true", help="remove the checkpoints of another training first")
    train.set_defaults(command=run_training)

    run = commands.add_parser(
        "run",
        help="start a torch.distributed script in several processes",
        usage="dlab run (SCRIPT | -m MODULE) -n N [--logs DIR] [-- ARGUMENT ...]",
        epilog="Arguments after -- are passed to the script.",
    )
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file, which every rank runs")
    what.add_argument("-m", dest="module", metavar="MODULE", help="a module instead, as in python -m")
    run.add_argument("-n", type=positive, required=True, metavar="N", help="how many ranks")
    run.add_argument(
        "--logs", type=Path, metavar="DIR", help="write scheduler.log and worker_<rank>.log into this folder"
    )
    run.set_defaults(command=run_script, arguments=[])

    data = commands.add_parser("data", help="list the data sets that are here, or download them")
    data.add_argument("--download", action="store_true", help="download missing files from the usual mirrors")
    data.add_argument("--to", type=Path, metavar="DIR", help="with --download: the folder for the files")
    data.set_defaults(command=run_data)
    return parser


class CommandParser(argparse.ArgumentParser):
    """The parser of one command; if the command has `arguments`, they are everything after `--`, unchanged."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.get_default("arguments") is None or "--" not in args:
            return super().parse_known_args(args, namespace)
        end = args.index("--")
        namespace, unknown = super().parse_known_args(args[:end], namespace)
        namespace.arguments = args[end + 1 :]
        return namespace, unknown


# ------------------------------------------------------------------------------------------------ lab


def run_lab(port: int | None, ip: str | None, open_browser: bool) -> None:
    """Serve the notebooks until Ctrl-C, and print the address as soon as the server answers.

    The server is this process itself, so that no child process can be left behind however it ends.
    """
    notebook = find_notebooks() / FIRST_NOTEBOOK
    if port is not None:
        refuse_taken(port, ip)

    from jupyterlab.labapp import LabApp

    # Terminals and `!dlab …` cells find the programs of this environment even when it is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # In the environment and not as an argument, because every user of the machine can read a process's arguments.
    token_is_ours = os.environ.setdefault("JUPYTER_TOKEN", token := secrets.token_hex(24)) == token
    server = LabApp.initialize_server(server_arguments(notebook, port, ip, open_browser))
    if token_is_ours:
        del os.environ["JUPYTER_TOKEN"]  # kernels and terminals must not inherit it
    server.web_app.settings["page_config_hook"] = without_announcements
    # A callback runs when the loop does; by then the port is open and requests are answered.
    server.io_loop.add_callback(announce, address(server, notebook.name))
    stop_on_signals(server)
    server.start()


def find_notebooks() -> Path:
    """Return the folder `notebooks/` beside the package, which exists in a checkout of the repository."""
    notebooks = Path(__file__).resolve().parent.parent / "notebooks"
    if not (notebooks / FIRST_NOTEBOOK).is_file():
        raise FileNotFoundError(
            f"there is no {notebooks / FIRST_NOTEBOOK}: clone the repository and run `make lab` in it"
        )
    return notebooks


def server_arguments(notebook: Path, port: int | None, ip: str | None, open_browser: bool) -> list[str]:
    """Return the arguments of `jupyter lab`; the user's own settings stay as they are."""
    arguments = [
        str(notebook),
        f"--ServerApp.root_dir={notebook.parent}",
        "--ServerApp.log_level=WARN",
        "--LabApp.log_level=WARN",
    ]
    if port is not None:
        arguments += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if ip is not None:
        arguments += [f"--ServerApp.ip={ip}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments += ["--allow-root"]  # common in a container
    if not (open_browser and has_display()):
        arguments += ["--no-browser"]
    return arguments


def has_display() -> bool:
    """Return whether a browser can open; without a display Python would start a text browser in the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def refuse_taken(port: int, ip: str | None) -> None:
    """Raise an error of one sentence if another program listens on `port`."""
    for family, kind, protocol, _, where in socket.getaddrinfo(ip or "localhost", port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # accept a port whose server has just ended
            try:
                probe.bind(where)
            except OSError as error:
                reason = f"port {port} is not free ({error.strerror})"
                raise OSError(f"{reason}: choose another one, or leave --port out to get a free one") from None


def stop_on_signals(server: Any) -> None:
    """Make Ctrl-C, `kill` and a closed terminal end the server and its kernels, and remove its files.

    Jupyter itself asks a question at Ctrl-C or, where nobody can answer, ends without cleaning up.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and not (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):  # ignored by nohup
            signal.signal(number, lambda *_: server.stop(from_signal=True))


def without_announcements(_handler: object, page: dict[str, Any]) -> dict[str, Any]:
    """Turn off, for this server only, JupyterLab's question about fetching news, which would cover the tour."""
    announcements = "@jupyterlab/apputils-extension:announcements"
    return {**page, "disabledExtensions": [*page.get("disabledExtensions", []), announcements]}


def address(server: Any, notebook: str) -> str:
    """Return the address of the notebook, including the token that grants access."""
    everywhere = ("", "*", "0.0.0.0", "::", "127.0.0.1", "::1")
    host = "localhost" if server.ip in everywhere else server.ip
    scheme = "https" if server.certfile else "http"
    token = server.identity_provider.token
    return f"{scheme}://{host}:{server.port}{server.base_url}lab/tree/{notebook}" + (f"?token={token}" if token else "")


def announce(url: str) -> None:
    """Print the address of the notebooks on a line that a script can read."""
    print(f"dlab: {url}\ndlab: press Ctrl-C to stop", flush=True)


# -------------------------------------------------------------------------------- demo, run and data


def run_demo(workers: int | None, steps: int | None) -> None:
    """Train in the terminal; options that the user leaves out are chosen by the demo."""
    from dlab import demo

    given = {"workers": workers, "steps": steps}
    demo.main(**{name: value for name, value in given.items() if value is not None})


def run_training(**options: Any) -> None:
    """Train in the terminal, as `dlab train` does."""
    from dlab.training.progress import train_in_terminal

    train_in_terminal(**options)


def run_script(script: str | None, module: str | None, n: int, logs: Path | None, arguments: list[str]) -> int:
    """Run a script as n ranks; returns 0, or the exit code of the rank that failed after printing the reason."""
    from dlab.launching.launcher import launch, python_command

    outcome = launch(python_command(script, module, arguments), n, logs)
    if outcome.sentence:
        print(f"dlab: {outcome.sentence}", file=sys.stderr)
    return outcome.code


def run_data(download: bool, to: Path | None) -> None:
    """List the available data sets; with `download`, fetch them first."""
    if to is not None and not download:
        raise ValueError("--to is the folder for --download: give both options")

    from dlab import data

    if download:
        data.download(to)
    print(data.describe(to))
    if to is not None:
        print(f"To use the files in that folder: export DLAB_DATA={to.resolve()}")


# --------------------------------------------------------------------------------- kinds of arguments


def positive(text: str) -> int:
    """Parse a count, which is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def port_number(text: str) -> int:
    """Parse the number of a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 1 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
