"""Clip gradients of which each rank holds parts: their norm is that of all parts, which no rank has alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from dlab.layout import Layout
from dlab.sharding.communication import World
from dlab.sharding.home import Home


@torch.no_grad()
def clip_gradients(homes: Iterable[Home], world: World, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm that they had.

    A part that several ranks hold counts once. Costs one all-reduce of one number; every rank must call it.
    """
    if not isinstance(max_norm, (int, float)) or not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r}: give a number above 0")
    given = [home for home in homes if home.parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64)
    for home in given:
        assert home.parameter.grad is not None
        cuts = 1 if home.placed is None else prod(map(home.placed.cuts, range(len(home.shape))))
        total += home.parameter.grad.double().square().sum() * (cuts / world.size)  # held by size / cuts ranks
    layout = Layout((world.size,), ("all",))
    norm = world.line(layout, ("all",)).all_reduce(total, back=True).sqrt() if world.size > 1 else total.sqrt()
    scale = min(1.0, max_norm / (float(norm) + 1e-6))
    for home in given:
        assert home.parameter.grad is not None
        home.parameter.grad.mul_(scale)
    return norm
