"""Gradient compression, in GB of float32 gradient a second on one core; taught in `06_gradient_compression.ipynb`.

Below 1 GB/s, the speed of a good network, compression would cost more time than it saves on the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from dlab.bench.measure import alternate, seconds
from dlab.bench.rows import AtLeast, Grid, Row, number, row
from dlab.kvstore.compression import BFloat16, Compression, OneBit, TopK, TwoBit

KINDS: tuple[Compression, ...] = (TwoBit(), OneBit(), BFloat16(), TopK(0.01))
SIZES = {4 << 20: "4 MiB", 64 << 20: "64 MiB"}
QUICK = {1 << 20: "1 MiB"}
PACKED, UNPACKED, COPY = "packed", "unpacked", "copy"
ROUNDS = 9

Speeds = dict[tuple[str, str, str], list[float]]  # GB/s of each round, by size, compression, and packing or unpacking


def against_network(kind: str, way: str, name: str, quick: bool) -> Row:
    """Make a row for the slowest of the sizes; its note has the others."""
    speeds = {size: rounds for (size, who, what), rounds in measured(quick).items() if (who, what) == (kind, way)}
    slowest = min(speeds, key=lambda size: median(speeds[size]))
    ours, each = median(speeds[slowest]), ", ".join(f"{size} {number(median(speeds[size]))}" for size in speeds)
    copied = number(median(measured(quick)[slowest, COPY, COPY]))
    note = f"{each} GB/s, one thread; against a network of 1 GB/s; a mere copy of the gradient makes {copied} GB/s"
    return Row(f"{name}: {slowest}", ours, 1.0, ours, AtLeast(1), "GB/s", note)


def grid(name: str, quick: bool) -> Grid:
    """Measure every compression in both directions at every size, and a copy of the gradient."""
    speeds = measured(quick)
    cases = list(dict.fromkeys((who, what) for _, who, what in speeds))
    sizes = list(dict.fromkeys(size for size, _, _ in speeds))
    lines = [
        (who if who == what else f"{who} {what}", *(number(median(speeds[size, who, what])) for size in sizes))
        for who, what in cases
    ]
    note = (
        "of the gradient's bytes, one thread, medians; packing adds and keeps the residual; topk sends 1 % of a dense "
        "gradient: its speed falls with the share that it sends, to a tenth for all"
    )
    return Grid(name, ("", *sizes), lines, note)


@cache
def measured(quick: bool) -> Speeds:
    """Measure all of them in turn, after a first call that touches the memory."""
    speeds: Speeds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size, label in (QUICK if quick else SIZES).items():
            works = _works(size // 4)
            for work in works.values():
                work()
            times = alternate(*(partial(seconds, work) for work in works.values()), rounds=3 if quick else ROUNDS)
            for (who, what), taken in zip(works, times, strict=True):
                speeds[label, who, what] = [1e-9 * size / time for time in taken]
    finally:
        torch.set_num_threads(threads)
    return speeds


def _works(count: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the calls by compression and direction, for a gradient of which 2bit sends about a tenth of the values."""
    gradient, out = 0.3 * torch.randn(count), torch.empty(count)
    works: dict[tuple[str, str], Callable[[], Any]] = {}
    for kind in KINDS:
        code, residual = torch.empty(kind.nbytes(count), dtype=torch.uint8), torch.zeros(count)
        works[kind.name, PACKED] = partial(kind.encode, gradient, residual, code)
        works[kind.name, UNPACKED] = partial(kind.decode, code, out)
    return works | {(COPY, COPY): partial(out.copy_, gradient)}


for _kind in (TwoBit.name, OneBit.name):
    for _way in (PACKED, UNPACKED):
        row(f"gradient compression, {_kind} {_way}")(partial(against_network, _kind, _way))
row("gradient compression, GB/s")(grid)
