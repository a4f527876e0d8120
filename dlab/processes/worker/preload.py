"""What the fork server does once for all workers: tie its life to its parent, and import torch and dlab."""

import atexit
import gc
import importlib
import os
import signal
from pathlib import Path
from types import FrameType

from dlab.processes.between import lifeline

_parent, _, _directory = os.environ.pop("DLAB_SESSION", "").partition(" ")


def _remove_directory() -> None:
    lifeline.remove_directory(Path(_directory))


def _leave(*_: int | FrameType | None) -> None:
    """Remove the directory and end the workers, since the parent is gone; the system kills those that are left.

    The order matters if the parent is alive and another process has sent the signal: when the parent sees that its
    workers have died, it makes a new directory if the old one is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _remove_directory()
    os.killpg(0, signal.SIGTERM)
    os._exit(0)


if _directory:
    os.setpgid(0, 0)  # Jupyter kills a kernel with its process group; this process must live to clean up
    signal.signal(signal.SIGTERM, _leave)
    lifeline.signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != int(_parent):  # the parent died before the request
        _leave()
    atexit.register(_remove_directory)  # forked workers leave by os._exit and do not run this

# Imported late, because it takes seconds in which the parent may die. By name, because the order matters and some are
# in layers above: first the stand-in for torch's compiler, then a worker's modules, then those of training, because a
# worker that is stopped must first finish its imports.
for _name in ("dlab.processes.worker.compiler", "dlab.processes.parent.handle", "dlab.training.loop"):
    importlib.import_module(_name)

gc.freeze()  # the garbage collector of a worker skips these objects, so that their pages stay shared
