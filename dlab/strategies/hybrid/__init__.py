"""Data, tensor and pipeline parallelism together, on a mesh of ranks; and the table of who holds what."""

from dlab.strategies.hybrid.strategy import Hybrid

__all__ = ["Hybrid"]
