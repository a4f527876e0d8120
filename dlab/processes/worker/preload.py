"""What the fork server does once, so that no worker has to: promise to go with its parent, import torch and dlab."""

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
    """The parent is gone: remove the directory, end the workers and go; the system kills who is left.

    In this order, because the parent may be alive, if somebody else has sent the signal: when it sees that its workers
    have died, it makes a new directory if the old one is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _remove_directory()
    os.killpg(0, signal.SIGTERM)
    os._exit(0)


if _directory:
    os.setpgid(0, 0)  # Jupyter kills a kernel with its whole process group: somebody must stay to clear up
    signal.signal(signal.SIGTERM, _leave)
    lifeline.signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != int(_parent):  # it died before we asked
        _leave()
    atexit.register(_remove_directory)  # forked workers leave by os._exit and do not run this

# Only now, because it takes seconds, in which the parent may die. By name, because their order counts, and because some
# lie above: the stand-in for torch's compiler before anything that would import the real one, then a worker's modules,
# then what a training needs, because a worker that is stopped must first finish what it imports.
for _name in ("dlab.processes.worker.compiler", "dlab.processes.parent.handle", "dlab.training.loop"):
    importlib.import_module(_name)

gc.freeze()  # a worker's garbage collector leaves these objects alone, so that their pages stay shared
