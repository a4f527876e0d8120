"""How ranks that have lost each other find together again: at a place that all of them can name."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from dlab.transports.base import Transport
from dlab.transports.shared import connect
from dlab.transports.store import StoreTransport
from dlab.transports.waiting import waiting

_NAP, _PATIENCE, _LONGEST = 0.01, 20.0, 60.0  # seconds

Venue = tuple[str, list[int]]  # its name, which nobody has used before, and the ranks to meet there


def meet(where: Callable[[], Venue | None], rank: int) -> tuple[Transport, list[int]]:
    """A wire between the ranks that are to meet, and who they are. Each of them must call it.

    `where` gives the place as a rank knows it now; None if it has to wait. They meet in the process group's store.
    When the place changes meanwhile, because one more was lost, they meet at the new one.
    """
    store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _LONGEST
    while time.monotonic() < until:
        there = where()
        if there is None:
            time.sleep(_NAP)
            continue
        place, members = there
        store.set(f"{place} {rank}", "here")
        with waiting("to find {} again", [other for other in members if other != rank]):
            while not (met := store.check([f"{place} {other}" for other in members])):
                time.sleep(_NAP)
                if where() != there or time.monotonic() > until:
                    break
        if met:
            here = dist.PrefixStore(place, store)
            here.set_timeout(timedelta(seconds=_PATIENCE))
            try:
                return connect(StoreTransport(here, members.index(rank), len(members))), members
            except RuntimeError:
                if where() == there:  # nobody else was lost: something else is wrong
                    raise
    raise TimeoutError(f"rank {rank} has waited for {_LONGEST:g} s to find the others again")
