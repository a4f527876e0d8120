"""How ranks that have lost each other find together again: at a place that all of them can name."""

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

Rendezvous = tuple[str, list[int]]  # its name, which nobody has used before, and the ranks to meet there


class _Elsewhere(Exception):
    """The place has changed: those who are there already must not wait for those who will not come."""


def meet(where: Callable[[], Rendezvous | None], rank: int) -> tuple[Transport, list[int]]:
    """A transport between the ranks that are to meet, and who they are. Each of them must call it.

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
    """A transport between the ranks that are left: the first one while all are there, a new one after a death.

    The death of any of them ends every wait on it, and all that was under way there is lost with it: nobody finds half
    a message of it on the next transport. Where no rank knows who lives, as in a rehearsal, it is always the first one.
    """

    def __init__(self, transport: Transport) -> None:
        self.first = self._transport = transport
        self._members = list(range(transport.size))
        if transport.peers is not None:
            transport.peers.together = True

    @property
    def has_lost_one(self) -> bool:
        """Has one of those died whom the transport joins now?"""
        peers = self.first.peers
        return peers is not None and not set(self._members) <= set(peers.alive())

    def among(self, members: list[int]) -> Transport:
        """The transport between these members (ranks of the first one). Each must call it with the same members.

        Raises ConnectionError if one of them dies before they are connected: there has to be another transport then.
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
