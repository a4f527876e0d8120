"""Micro-batches: a batch in pieces, which follow each other through the stages. Taught in `08_pipeline.ipynb`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]


class MicroBatch(NamedTuple):
    """A part of a batch, and its share of the samples, which is that of its loss in the mean over the batch."""

    inputs: Tensors
    labels: Any
    share: float


def cut(inputs: Any, labels: Any, count: int, fewer: bool) -> list[MicroBatch]:
    """Cut a batch into `count` micro-batches of equal length, or nearly so: some have one sample more than others."""
    every = _tensors(inputs, "inputs") + (() if labels is None else _tensors(labels, "labels"))
    lengths = [len(each) if each.dim() else 0 for each in every]
    if len(set(lengths)) > 1:
        raise ValueError(f"inputs and labels have {_listed(lengths)} samples: each must have a row for every sample")
    samples = lengths[0]
    if not samples:
        raise ValueError("the batch is empty: give at least one sample for each micro-batch")
    if samples < count and not fewer:
        raise ValueError(
            f"a batch of {samples} samples cannot make {count} micro-batches: use larger batches or fewer micro-batches"
        )
    count = min(count, samples)
    with torch.no_grad():  # nobody asks for gradients of the inputs
        pieces = list(zip(*(each.tensor_split(count) for each in every), strict=True))
    first = len(_tensors(inputs, "inputs"))
    found = []
    for piece in pieces:
        share = len(piece[0]) / samples
        rest: Any = piece[first:] if isinstance(labels, (tuple, list)) else piece[first] if labels is not None else None
        found.append(MicroBatch(piece[:first], rest, share))
    return found


def _tensors(given: Any, what: str) -> Tensors:
    tensors = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise TypeError(f"{what} must be a tensor or a tuple of tensors, with a row per sample, not {given!r:.80}")
    return tensors


def _listed(lengths: Sequence[int]) -> str:
    return f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"
