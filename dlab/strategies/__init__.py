"""The SGD family; every member has the same interface: begin, a step after every backward pass, end. See `Strategy`."""

from dlab.strategies.asynchronous import AsyncSGD, VirtualClock
from dlab.strategies.averaging import ModelAveraging, nesterov
from dlab.strategies.base import Strategy
from dlab.strategies.ddp import DDP
from dlab.strategies.flat import AllReduceSGD
from dlab.strategies.hybrid import Hybrid, HybridTable, hybrid_table
from dlab.strategies.pipeline import PipelineSGD
from dlab.strategies.server import ParameterServer
from dlab.strategies.sync import SyncSGD
from dlab.strategies.tensor import TensorParallel
from dlab.strategies.zero import MemoryTable, ZeRO

__all__ = [
    "DDP",
    "AllReduceSGD",
    "AsyncSGD",
    "Hybrid",
    "HybridTable",
    "MemoryTable",
    "ModelAveraging",
    "ParameterServer",
    "PipelineSGD",
    "Strategy",
    "SyncSGD",
    "TensorParallel",
    "VirtualClock",
    "ZeRO",
    "hybrid_table",
    "nesterov",
]
