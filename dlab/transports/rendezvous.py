"""A rendezvous after a failure: the surviving ranks connect again under a name that each of them can compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from dlab.memory.waits import name_ranks, waiting
from dlab.transports.base import Group, Transport
from dlab.transports.shared import connect
from dlab.transports.store import StoreTransport

_NAP, _LONGEST = 0.01, 60.0  # seconds

Rendezvous = tuple[str, list[int]]  # a name that was never used before, and the ranks that meet under it


class _Elsewhere(Exception):
    """The rendezvous has changed, so ranks that have reached it must not wait for those that will not come."""


def meet(where: Callable[[], Rendezvous | None], rank: int) -> tuple[Transport, list[int]]:
    """Connect the ranks of a rendezvous; returns their transport and their old ranks. Each of them must call it.

    `where` returns the rendezvous as this rank knows it now; None if it has to wait. The ranks meet in the process
    group's store. If the rendezvous changes meanwhile, because one more rank was lost, they meet at the new one.
    """
    store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _LONGEST
    while time.monotonic() < until:
        there = where()
        if there is None:
            time.sleep(_NAP)
            continue
        place, members = there

        def check(there: Rendezvous = there) -> None:
            if where() != there or time.monotonic() > until:
                raise _Elsewhere

        store.set(f"{place} {rank}", "here")
        with suppress(_Elsewhere):
            with waiting("to find {} again", [other for other in members if other != rank]):
                while not store.check([f"{place} {other}" for other in members]):
                    check()
                    time.sleep(_NAP)
            here = dist.PrefixStore(place, store)
            return connect(StoreTransport(here, members.index(rank), len(members), check)), members
    raise TimeoutError(f"rank {rank} has waited for {_LONGEST:g} s to find the others again")


class Survivors:
    """A transport between the surviving ranks: the first one while all are alive, a new one after a death.

    The death of any of them ends every wait on it, and its unfinished messages are lost with it, so none of them
    reaches the next transport. If ranks do not know who is alive, as in a rehearsal, it is always the first one.
    """

    def __init__(self, transport: Transport) -> None:
        self.first = self._transport = transport
        self._members = list(range(transport.size))
        if transport.peers is not None:
            transport.peers.together = True

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank of the current transport has died."""
        peers = self.first.peers
        return peers is not None and not set(self._members) <= set(peers.alive())

    def among(self, members: list[int]) -> Transport:
        """Return the transport between these members (ranks of the first one); each must call it with the same list.

        Raises ConnectionError if one of them dies before they are connected; then another transport is needed.
        """
        peers = self.first.peers
        if peers is None:
            return Group(self.first, members)
        if members != self._members:
            self._members = members

            def where() -> Rendezvous:
                if dead := set(members) - set(peers.alive()):
                    raise ConnectionError(f"{name_ranks(sorted(dead))} has died before the others were connected")
                return f"left: {members}", members

            self._transport, _ = meet(where, self.first.rank)
            assert self._transport.peers is not None
            self._transport.peers.together, self._transport.peers.others = True, lambda: peers.others()
        return self._transport
