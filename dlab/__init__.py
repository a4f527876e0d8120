"""dlab: learn distributed deep learning by running it. Start with `notebooks/00_tour.ipynb`.

Names are imported when they are first used, so that `import dlab` is quick. In a notebook it also starts the fork
server in the background, so that the first cluster is ready sooner.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dlab.processes.between import roles

__version__ = "0.1.0"

_HOME = {
    "DataPartitioner": "data",
    "Partition": "data",
    "mnist": "data",
    "partition_dataset": "data",
    "MLP": "models",
    "RowTransformer": "models",
    "SimpleCNN": "models",
    "SmallCNN": "models",
    "TwoLayer": "models",
    "Event": "events",
    "load_events": "events",
    "Race": "processes.parent.racing",
    "race": "processes.parent.racing",
    "Cluster": "processes.parent.cluster",
    "cluster": "processes.parent.cluster",
    "Run": "processes.parent.run",
    "Stopped": "processes.between.errors",
    "WorkerError": "processes.between.errors",
    "WorkerTimeout": "processes.between.errors",
    "device": "processes.worker.context",
    "knob": "processes.worker.context",
    "log": "processes.worker.context",
    "rank": "processes.worker.context",
    "transport": "processes.worker.context",
    "watch": "processes.worker.tracing",
    "world_size": "processes.worker.context",
    "Deadlock": "transports",
    "rehearse": "rehearsal",
    "AllReduceSGD": "strategies",
    "AsyncSGD": "strategies",
    "DDP": "strategies",
    "Hybrid": "strategies",
    "ModelAveraging": "strategies",
    "ParameterServer": "strategies",
    "PipelineSGD": "strategies",
    "SyncSGD": "strategies",
    "TensorParallel": "strategies",
    "VirtualClock": "strategies",
    "ZeRO": "strategies",
    "hybrid_table": "strategies",
    "Training": "training",
    "evaluate": "training",
    "train": "training",
    "Mesh": "mesh",
    "Layout": "layout",
    "Pipeline": "pipeline",
    "Schedule": "pipeline",
    "schedule": "pipeline",
    "split": "pipeline",
    "AutoParallel": "sharding.parallel",
    "no_init_parameters": "sharding.initial",
    "parameter": "sharding.initial",
    "megatron_layouts": "sharding.megatron",
    "redistribution": "sharding.plan",
    "slice_table": "sharding.slices",
    "shard": "ops",
    "all_gather": "reduction",
    "all_to_all": "reduction",
    "allreduce": "reduction",
    "average_gradients": "reduction",
    "reduce_scatter": "reduction",
    "shared_empty": "reduction",
    "GradientFlow": "views",
    "LossCurves": "views",
    "Messages": "views",
    "PipelineChart": "views",
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
    "ops",
    "strategies",
    "training",
    "transports",
    "views",
)

__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from dlab import (
        backend,
        collectives,
        cost,
        data,
        events,
        kvstore,
        models,
        ops,
        strategies,
        training,
        transports,
        views,
    )
    from dlab.data import DataPartitioner, Partition, mnist, partition_dataset
    from dlab.events import Event, load_events
    from dlab.layout import Layout
    from dlab.mesh import Mesh
    from dlab.models import MLP, RowTransformer, SimpleCNN, SmallCNN, TwoLayer
    from dlab.ops import shard
    from dlab.pipeline import Pipeline, Schedule, schedule, split
    from dlab.processes.between.errors import Stopped, WorkerError, WorkerTimeout
    from dlab.processes.parent.cluster import Cluster, cluster
    from dlab.processes.parent.racing import Race, race
    from dlab.processes.parent.run import Run
    from dlab.processes.worker.context import device, knob, log, rank, transport, world_size
    from dlab.processes.worker.tracing import watch
    from dlab.reduction import all_gather, all_to_all, allreduce, average_gradients, reduce_scatter, shared_empty
    from dlab.rehearsal import rehearse
    from dlab.sharding.initial import no_init_parameters, parameter
    from dlab.sharding.megatron import megatron_layouts
    from dlab.sharding.parallel import AutoParallel
    from dlab.sharding.plan import redistribution
    from dlab.sharding.slices import slice_table
    from dlab.strategies import (
        DDP,
        AllReduceSGD,
        AsyncSGD,
        Hybrid,
        ModelAveraging,
        ParameterServer,
        PipelineSGD,
        SyncSGD,
        TensorParallel,
        VirtualClock,
        ZeRO,
        hybrid_table,
    )
    from dlab.training import Training, evaluate, train
    from dlab.transports import Deadlock
    from dlab.views import (
        GradientFlow,
        LossCurves,
        Messages,
        PipelineChart,
        Staleness,
        Throughput,
        Timeline,
        show_source,
    )


def _import(name: str) -> Any:
    from dlab.processes.parent.waiting import uninterrupted

    with uninterrupted():
        return importlib.import_module(f"dlab.{name}")


roles.offer("server", lambda: _import("kvstore"))


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(_import(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _import(name)
    raise AttributeError(f"dlab has no {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Define the cell magic `%%workers`, for `%load_ext dlab`."""
    from dlab.processes.parent.magic import WorkersMagic

    shell.register_magics(WorkersMagic)


def _settle_in_notebook() -> None:
    from IPython.core.getipython import get_ipython

    from dlab.processes.parent.forkserver import warm_up
    from dlab.processes.parent.tracebacks import shorten_tracebacks
    from dlab.processes.parent.waiting import watch_cells

    shell: Any = get_ipython()
    if not hasattr(shell, "kernel"):
        return
    warm_up()
    shorten_tracebacks(shell)
    watch_cells(shell)

    # a run on the last line of a cell shows its panel; this hook joins runs and views, which do not know of each other
    def show(run: Any) -> None:
        _import("views.panel").show_live(run)

    def show_race(race: Any) -> None:
        _import("views.panel").show_race(race)

    formatter = shell.display_formatter.ipython_display_formatter
    formatter.for_type_by_name("dlab.processes.parent.run", "Run", show)
    formatter.for_type_by_name("dlab.processes.parent.racing", "Race", show_race)


if "ipykernel" in sys.modules:
    _settle_in_notebook()
