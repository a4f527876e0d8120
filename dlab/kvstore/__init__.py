"""KVStore and parameter servers: servers keep the weights; workers push gradients to them and pull weights.

Taught in `05_parameter_server.ipynb` and `06_gradient_compression.ipynb`.
"""

from dlab.kvstore.compression import BFloat16, Compression, OneBit, TopK, TwoBit, parse_compression
from dlab.kvstore.distributed import DistStore
from dlab.kvstore.optimizers import OPTIMIZERS, recipe
from dlab.kvstore.placement import BIG, Part, place
from dlab.kvstore.serving import run
from dlab.kvstore.store import DeviceSyncStore, KVStore, LocalStore

__all__ = [
    "BIG",
    "OPTIMIZERS",
    "TYPES",
    "BFloat16",
    "Compression",
    "KVStore",
    "OneBit",
    "Part",
    "TopK",
    "TwoBit",
    "create",
    "parse_compression",
    "place",
    "recipe",
    "run",
]

TYPES: dict[str, type[LocalStore] | type[DistStore]] = {
    "local": LocalStore,
    "device": LocalStore,
    "dist_sync": DistStore,
    "dist_device_sync": DeviceSyncStore,
    "dist_async": DistStore,
}


def create(type: str = "local") -> KVStore:
    """Create a store of one of five types; every worker must call it.

    `local` and `device`: in this process. `dist_sync`: on servers that wait for the gradients of all workers, so n
    workers with batches of b learn like one with a batch of n * b. `dist_async`: on servers that apply each gradient
    as soon as it arrives, one after another. `dist_device_sync`: like `dist_sync`, but without servers: gradients are
    summed by all-reduce, and each worker updates its own copy. Make a cluster with servers by
    `dlab.Cluster(4, servers=2)`; under torchrun, `dlab.kvstore.run` makes servers of some of the ranks.

    >>> kv = dlab.kvstore.create("dist_sync")
    >>> kv.init("w", torch.ones(3))
    >>> kv.push("w", gradient)
    >>> kv.pull("w", out=weight)
    """
    if type not in TYPES:
        raise ValueError(f"there is no store of type {type!r}: use {', '.join(map(repr, TYPES))}")
    return TYPES[type](type)
