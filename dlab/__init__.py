"""dlab: learn distributed deep learning by running it. Start with `notebooks/00_tour.ipynb`.

Names are imported when they are first used, so that `import dlab` is quick. In a notebook it also begins to warm up
the server that workers come from, so that the first cluster is there when the first cell asks for it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DataPartitioner": "data",
    "Partition": "data",
    "mnist": "data",
    "partition_dataset": "data",
    "MLP": "models",
    "SimpleCNN": "models",
    "TwoLayer": "models",
    "Event": "events",
    "load_events": "events",
    "Race": "processes.racing",
    "race": "processes.racing",
    "Cluster": "processes.cluster",
    "cluster": "processes.cluster",
    "Run": "processes.run",
    "Stopped": "processes.errors",
    "WorkerError": "processes.errors",
    "WorkerTimeout": "processes.errors",
    "device": "processes.inside",
    "knob": "processes.inside",
    "log": "processes.inside",
    "rank": "processes.inside",
    "transport": "processes.inside",
    "watch": "processes.watching",
    "world_size": "processes.inside",
    "Deadlock": "transports",
    "rehearse": "rehearsal",
    "AllReduceSGD": "strategies",
    "AsyncSGD": "strategies",
    "DDP": "strategies",
    "ModelAveraging": "strategies",
    "ParameterServer": "strategies",
    "SyncSGD": "strategies",
    "VirtualClock": "strategies",
    "Training": "training",
    "evaluate": "training",
    "train": "training",
    "allreduce": "reduction",
    "average_gradients": "reduction",
    "shared_empty": "reduction",
    "GradientFlow": "views",
    "LossCurves": "views",
    "Messages": "views",
    "Staleness": "views",
    "Throughput": "views",
    "Timeline": "views",
    "show_source": "views",
}

_MODULES = (
    "backend",
    "collectives",
    "cost",
    "data",
    "events",
    "kvstore",
    "models",
    "strategies",
    "training",
    "transports",
    "views",
)

__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from dlab import backend, collectives, cost, data, events, kvstore, models, strategies, training, transports, views
    from dlab.data import DataPartitioner, Partition, mnist, partition_dataset
    from dlab.events import Event, load_events
    from dlab.models import MLP, SimpleCNN, TwoLayer
    from dlab.processes.cluster import Cluster, cluster
    from dlab.processes.errors import Stopped, WorkerError, WorkerTimeout
    from dlab.processes.inside import device, knob, log, rank, transport, world_size
    from dlab.processes.racing import Race, race
    from dlab.processes.run import Run
    from dlab.processes.watching import watch
    from dlab.reduction import allreduce, average_gradients, shared_empty
    from dlab.rehearsal import rehearse
    from dlab.strategies import DDP, AllReduceSGD, AsyncSGD, ModelAveraging, ParameterServer, SyncSGD, VirtualClock
    from dlab.training import Training, evaluate, train
    from dlab.transports import Deadlock
    from dlab.views import GradientFlow, LossCurves, Messages, Staleness, Throughput, Timeline, show_source


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"dlab.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"dlab.{name}")
    raise AttributeError(f"dlab has no {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext dlab` gives the cell magic `%%workers`."""
    from dlab.processes.magic import WorkersMagic

    shell.register_magics(WorkersMagic)


def _settle_in_notebook() -> None:
    from IPython.core.getipython import get_ipython

    from dlab.processes.forkserver import warm_up
    from dlab.processes.tracebacks import shorten_tracebacks
    from dlab.processes.waiting import watch_cells

    shell: Any = get_ipython()
    if not hasattr(shell, "kernel"):
        return
    warm_up()
    shorten_tracebacks(shell)
    watch_cells(shell)

    # a run that is the last line of a cell shows itself; neither runs nor views know of each other
    def show(run: Any) -> None:
        from dlab.views.panel import show_live

        show_live(run)

    def show_race(race: Any) -> None:
        from dlab.views.panel import show_race

        show_race(race)

    formatter = shell.display_formatter.ipython_display_formatter
    formatter.for_type_by_name("dlab.processes.run", "Run", show)
    formatter.for_type_by_name("dlab.processes.racing", "Race", show_race)


if "ipykernel" in sys.modules:
    _settle_in_notebook()
