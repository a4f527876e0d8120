"""What things cost, by formula: collectives in messages and bytes, training in memory on each rank."""

from dlab.cost.collectives import Cost, allreduce
from dlab.cost.memory import ZeroMemory, activation_memory, deepspeed_memory, zero_memory, zero_traffic

__all__ = ["Cost", "ZeroMemory", "activation_memory", "allreduce", "deepspeed_memory", "zero_memory", "zero_traffic"]
