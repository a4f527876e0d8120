"""Buckets: parameters that are exchanged together, as one stretch of numbers that is cut into a part for each rank.

Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from dlab.strategies.zero.shards import Span


class Bucket:
    """Parameters one after another, and `spans`: where each of them begins and ends in the bucket."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.trained = self.parameters[0].requires_grad
        self.spans: list[Span] = []
        self.length = 0
        for shape in self.shapes:
            self.spans.append((self.length, self.length + shape.numel()))
            self.length += shape.numel()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a flat tensor of the bucket's length, in the shapes of the parameters."""
        pairs = zip(self.spans, self.shapes, strict=True)
        return [flat[begin:end].view(shape) for (begin, end), shape in pairs]

    def part(self, rank: int, ranks: int) -> Span:
        """Return where a rank's part begins and ends; parts differ by one number at most."""
        least, more = divmod(self.length, ranks)
        begin = rank * least + min(rank, more)
        return begin, begin + least + (rank < more)

    def pieces(self, part: Span) -> Iterator[tuple[nn.Parameter, Span, Span]]:
        """Return each parameter with its piece of a part, as a span of the parameter and of the part."""
        for parameter, (first, last) in zip(self.parameters, self.spans, strict=True):
            begin, end = max(first, part[0]), min(last, part[1])
            if begin < end:
                yield parameter, (begin - first, end - first), (begin - part[0], end - part[0])


def fill_buckets(groups: Iterable[Sequence[nn.Parameter]], least: float) -> list[Bucket]:
    """Fill buckets of at least so many bytes (the last may be smaller) with groups that stay together, in their order.

    A bucket holds only parameters that are trained, or only frozen ones.
    """
    filled: list[list[nn.Parameter]] = []
    size = 0
    for group in groups:
        if not filled or size >= least or filled[-1][0].requires_grad != group[0].requires_grad:
            filled.append([])
            size = 0
        filled[-1] += group
        size += sum(each.numel() * each.element_size() for each in group)
    return [Bucket(parameters) for parameters in filled]
