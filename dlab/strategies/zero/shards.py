"""A rank's shard of the weights: what its optimizer updates, in whichever pieces of parameters the shard consists of.

All stages of ZeRO have it: the optimizer gets views of the rank's own pieces instead of whole parameters, so its state
is 1/n of the whole, and a checkpoint that says which piece each state belongs to fits any number of ranks. With
parameters of 16 bits, the optimizer gets a float32 master copy of each piece. Taught in `09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlab.collectives import ring_allreduce
from dlab.transports import Transport

Span = tuple[int, int]  # begin and end of a piece, in the order of all weights


@dataclass
class Piece:
    """A piece of a parameter that belongs to this rank: views of its weights and of its mean gradient."""

    span: Span
    weights: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor | None = None  # in float32, if the weights have fewer bits

    @property
    def updated(self) -> torch.Tensor:
        """What the optimizer updates."""
        return self.weights if self.master is None else self.master


class Shards:
    """Replaces the parameters in an optimizer by this rank's pieces of them.

    >>> shards = Shards(optimizer, {parameter: [Piece((0, 5), weights[:5], gradients[:5])]}, transport)
    >>> shards.update(unused=[])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: dict[nn.Parameter, list[Piece]],
        group: Transport,
        clip: float | None = None,
    ) -> None:
        self.optimizer, self._of, self._group, self._clip = optimizer, pieces, group, clip
        self.pieces: list[Piece] = []  # in the optimizer's order
        for each in optimizer.param_groups:
            mine = [piece for parameter in each["params"] for piece in pieces.get(parameter, ())]
            each["params"] = [piece.updated for piece in mine]
            self.pieces += mine
        for piece in self.pieces:
            if piece.master is None:
                piece.weights.grad = piece.gradient

    @property
    def nbytes(self) -> int:
        """The bytes of the optimizer's state, master copies included."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [piece.master for piece in self.pieces] + [each for each in states if isinstance(each, torch.Tensor)]
        return sum(each.numel() * each.element_size() for each in kept if each is not None)

    # a step

    def update(self, unused: Iterable[nn.Parameter]) -> float | None:
        """Update this rank's pieces, except those of parameters that no rank has used; return the gradients' norm.

        The norm is that of the whole gradients, which no rank holds, and None where nothing is to be clipped. It costs
        an all-reduce of one number.
        """
        without = [piece for parameter in unused for piece in self._of.get(parameter, ())]
        left_out = set(map(id, without))
        for piece in self.pieces:
            if piece.master is not None:
                piece.master.grad = None if id(piece) in left_out else piece.gradient.to(piece.master.dtype)
        for piece in without:
            piece.weights.grad = None
        norm = None if self._clip is None else self._clip_to(self._clip)
        self.optimizer.step()
        for piece in self.pieces:
            if piece.master is not None:
                piece.weights.copy_(piece.master)
                piece.master.grad = None
        for piece in without:
            if piece.master is None:
                piece.weights.grad = piece.gradient
        return norm

    def _clip_to(self, largest: float) -> float:
        """Scale the gradients so that their norm over all ranks is at most this; return the norm that they had."""
        given = [piece.updated.grad for piece in self.pieces if piece.updated.grad is not None]
        device = self.pieces[0].weights.device if self.pieces else None
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for gradient in given:
            total += gradient.double().square().sum()
        ring_allreduce(total, self._group)
        norm = float(total.sqrt())
        scale = largest / (norm + 1e-6)
        if scale < 1:
            for gradient in given:
                gradient.mul_(scale)
        return norm

    # checkpoints

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state, and the spans of the weights that it belongs to."""
        return {"optimizer": self.optimizer.state_dict(), "spans": [piece.span for piece in self.pieces]}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the optimizer's state from those of all ranks, which may have been more or fewer than now."""
        groups = self.optimizer.state_dict()["param_groups"]
        mine: dict[int, dict[str, Any]] = {number: {} for number in range(len(self.pieces))}
        for state in states:
            for number, span in enumerate(state["spans"]):
                for name, value in state["optimizer"]["state"].get(number, {}).items():
                    self._put(mine, name, value, span)
        hyper = [
            {**theirs, "params": own["params"]}
            for theirs, own in zip(states[0]["optimizer"]["param_groups"], groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": {n: each for n, each in mine.items() if each}, "param_groups": hyper})

    def _put(self, mine: dict[int, dict[str, Any]], name: str, value: Any, span: Span) -> None:
        """Copy the saved state of a piece to the places where it overlaps this rank's pieces."""
        for number, piece in enumerate(self.pieces):
            if not overlap(span, piece.span):
                continue
            if not isinstance(value, torch.Tensor) or value.dim() == 0:  # the number of steps, the same for all
                mine[number][name] = value
            else:
                length = piece.span[1] - piece.span[0]
                copy_overlap(value, span, mine[number].setdefault(name, value.new_empty(length)), piece.span)

    def load(self, values: torch.Tensor, span: Span) -> None:
        """Copy weights to the master copies of this rank's pieces, if there are any."""
        for piece in self.pieces:
            if piece.master is not None and overlap(span, piece.span):
                copy_overlap(values, span, piece.master, piece.span)


def places_of(model: nn.Module) -> dict[nn.Parameter, Span]:
    """Return where each parameter is among all weights: those that are trained come first, in the model's order.

    All stages count in this way, so that each can resume what another has saved.
    """
    places, begin = dict[nn.Parameter, Span](), 0
    for parameter in sorted(model.parameters(), key=lambda each: not each.requires_grad):
        places[parameter] = begin, begin + parameter.numel()
        begin += parameter.numel()
    return places


def restore_weights(
    states: Sequence[dict[str, Any]], stored: Iterable[tuple[Span, torch.Tensor]], mine: Shards
) -> None:
    """Copy weights that were saved in parts to the weights that this rank stores, and to its master copies."""
    targets = list(stored)
    for state in states:
        for there, saved in state.get("weights", ()):
            for here, target in targets:
                if overlap(there, here):
                    copy_overlap(saved, there, target, here)
            mine.load(saved, there)


def overlap(one: Span, other: Span) -> bool:
    """Return whether two spans have weights in common."""
    return max(one[0], other[0]) < min(one[1], other[1])


def copy_overlap(source: torch.Tensor, there: Span, target: torch.Tensor, here: Span) -> None:
    """Copy what two overlapping spans have in common from the values of one to those of the other."""
    low, high = max(there[0], here[0]), min(there[1], here[1])
    target[low - here[0] : high - here[0]].copy_(source[low - there[0] : high - there[0]])
