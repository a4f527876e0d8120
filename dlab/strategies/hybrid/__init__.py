"""Data, tensor and pipeline parallelism together, on a mesh of ranks; and the table of who holds what."""

from dlab.strategies.hybrid.strategy import Hybrid
from dlab.strategies.hybrid.table import HybridTable, hybrid_table

__all__ = ["Hybrid", "HybridTable", "hybrid_table"]
