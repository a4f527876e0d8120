"""Shuffled MNIST batches, ready to train on: whole batches by one gather, against one image at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from dlab.bench.measure import alternate
from dlab.bench.rows import Row, faster, row
from dlab.data import Batches, mnist

BATCH = 128


@row("MNIST batches, against torchvision's DataLoader")
def mnist_batches(name: str, quick: bool) -> Row:
    """Measure an epoch of each, including the shuffling; both normalise, and neither uses worker processes."""
    ours = Batches(mnist(train=True), BATCH)
    theirs: Iterable[Any] = DataLoader(mnist(train=True, as_torchvision=True), BATCH, shuffle=True)  # type: ignore[arg-type]
    count = 50 if quick else len(ours)
    for batches in (ours, theirs):
        _per_batch(batches, 5)  # touch the pages once before measuring
    quicker, slower = alternate(
        lambda: _per_batch(ours, count), lambda: _per_batch(theirs, count), rounds=1 if quick else 3
    )
    return faster(name, quicker, slower, 20, "ms", f"per batch of {BATCH}, over {count} batches, no worker processes")


def _per_batch(batches: Iterable[Any], count: int) -> float:
    start = time.perf_counter()
    read = sum(1 for _ in islice(batches, count))
    return 1e3 * (time.perf_counter() - start) / read
