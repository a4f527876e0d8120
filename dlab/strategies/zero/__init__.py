"""ZeRO in three stages: each rank keeps a shard of the optimizer's state, of the gradients, and of the weights."""

from dlab.strategies.zero.memory import MemoryTable
from dlab.strategies.zero.strategy import ZeRO

__all__ = ["MemoryTable", "ZeRO"]
