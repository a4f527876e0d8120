"""Checks for the exercises in the notebooks. Each says "well done …", or "not yet: …" with the first thing to fix."""

from dlab.exercises.averaging import check_one_message
from dlab.exercises.bubbles import check_bubbles, check_microbatches
from dlab.exercises.deadlocks import check_deadlock
from dlab.exercises.gathering import check_sent_bytes
from dlab.exercises.holdings import check_holdings
from dlab.exercises.hybrids import check_mesh, check_order
from dlab.exercises.partitioning import check_equal_shards
from dlab.exercises.pipelining import check_1f1b
from dlab.exercises.quantising import check_quantiser
from dlab.exercises.ring import check_ring
from dlab.exercises.row_parallel import check_row_parallel
from dlab.exercises.serving import check_update
from dlab.exercises.sgd import check_step
from dlab.exercises.sharded_state import check_held_bytes
from dlab.exercises.sharded_step import check_sharded_step
from dlab.exercises.sharding import check_bytes, check_strategy
from dlab.exercises.slicing import check_slices
from dlab.exercises.staleness import check_staleness

__all__ = [
    "check_1f1b",
    "check_bubbles",
    "check_bytes",
    "check_deadlock",
    "check_equal_shards",
    "check_held_bytes",
    "check_holdings",
    "check_mesh",
    "check_microbatches",
    "check_one_message",
    "check_order",
    "check_quantiser",
    "check_ring",
    "check_row_parallel",
    "check_sent_bytes",
    "check_sharded_step",
    "check_slices",
    "check_staleness",
    "check_step",
    "check_strategy",
    "check_update",
]
