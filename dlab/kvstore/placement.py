"""Decide which server keeps which key: each small key is on one server, each large one divided among all of them.

Taught in `05_parameter_server.ipynb`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import floor
from typing import NamedTuple

Key = int | str
Interval = tuple[int, int]  # of a key's elements: begin, and end
BIG = 1_000_000  # elements: a key with this many or more is divided
_SPREAD = 9973  # MXNet's; it is 1 modulo 2, 3, 4 and 6, so it has no effect with these numbers of servers


class Part(NamedTuple):
    """Elements begin to end of a key, and the server that keeps them."""

    key: Key
    server: int
    begin: int
    end: int


def place(key: Key, count: int, servers: int, big: int = BIG, row: int = 1) -> list[Part]:
    """Return the parts of a key with so many elements, divided between rows of `row` elements.

    >>> place(3, 1000, servers=2)
    [Part(key=3, server=1, begin=0, end=1000)]
    >>> [part.end - part.begin for part in place(0, 1211 * 1211, servers=2)]
    [733261, 733260]
    """
    if count < big or servers == 1:
        return [Part(key, server_of(key, servers), 0, count)]
    cuts = [floor(count // row / servers * number + 0.5) * row for number in range(servers + 1)]  # rounds halves up
    return [Part(key, server, cuts[server], cuts[server + 1]) for server in range(servers)]


def overlap(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals (begin, end), in order.

    >>> overlap([(0, 4), (6, 9)], [(2, 7)])
    [(2, 4), (6, 7)]
    """
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(begin, end) for begin, end in pairs if begin < end]


def server_of(key: Key, servers: int) -> int:
    """Return the server of a key that is not divided; a name counts as its CRC-32, the same in every process."""
    number = key if isinstance(key, int) else zlib.crc32(key.encode())
    return number * _SPREAD % servers
