"""A barrier at which rank 0 can name the missing ranks: each rank sets a key in the store, and rank 0 checks them."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist


def meet_monitored(
    store: dist.Store, place: str, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Return when all ranks have reached this place; otherwise rank 0 names the first that has not, or all of them."""
    if rank:
        store.set(f"{place}, {rank}", "")
        if not _appears(store, place, timeout):
            raise RuntimeError(f"Rank {rank} timed out in monitoredBarrier: rank 0 has not released it")
        return
    deadline, missing = time.monotonic() + timeout.total_seconds(), []
    for other in range(1, size):
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        if not _appears(store, f"{place}, {other}", left):
            missing.append(str(other))
            if not wait_all_ranks:
                break
    if missing:
        who = f"not reached by rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {timeout.total_seconds():g} s: {who}")
    store.set(place, "")


def _appears(store: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], max(timeout, timedelta(milliseconds=1)))  # the store takes 0 for no limit
    except RuntimeError:  # stores raise different subclasses
        return False
    return True
