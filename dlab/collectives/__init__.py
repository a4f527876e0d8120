"""Collectives, each written once on `send`, `recv` and `exchange`, so that they run on every transport."""

from dlab.collectives.allreduce import (
    halving_doubling_allreduce,
    hierarchical_allreduce,
    naive_allreduce,
    tree_allreduce,
)
from dlab.collectives.ring import all_gather, all_to_all, reduce_scatter, ring_allreduce
from dlab.collectives.rooted import broadcast, gather, reduce, scatter

__all__ = [
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "halving_doubling_allreduce",
    "hierarchical_allreduce",
    "naive_allreduce",
    "reduce",
    "reduce_scatter",
    "ring_allreduce",
    "scatter",
    "tree_allreduce",
]
