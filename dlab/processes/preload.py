"""What the fork server does once, so that no worker has to: promise to go with its parent, and import torch."""

import atexit
import gc
import os
import shutil
import signal
from types import FrameType

from dlab.processes import lifeline

_parent, _, _directory = os.environ.pop("DLAB_SESSION", "").partition(" ")


def _remove_directory() -> None:
    shutil.rmtree(_directory, ignore_errors=True)


def _leave(*_: int | FrameType | None) -> None:
    """The parent is gone: end the workers, remove the directory and go; the system kills who is left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    _remove_directory()
    os._exit(0)


if _directory:
    os.setpgid(0, 0)  # Jupyter kills a kernel with its whole process group: somebody must stay to clear up
    signal.signal(signal.SIGTERM, _leave)
    lifeline.signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != int(_parent):  # it died before we asked
        _leave()
    atexit.register(_remove_directory)  # forked workers leave by os._exit and do not run this

# only now, because it takes seconds, in which the parent may die
import dlab.processes.compiler  # noqa: E402
import dlab.processes.handle  # noqa: E402, F401  (a worker's modules, loaded before any worker is forked)

gc.freeze()  # a worker's garbage collector leaves these objects alone, so that their pages stay shared
