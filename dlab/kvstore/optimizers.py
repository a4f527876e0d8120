"""How a server updates a weight with a gradient: with an optimizer, given by name and hyperparameters, or a function.

A server never takes code from a worker: it makes an optimizer from numbers and a name in a fixed list. Taught in
`05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from dlab.kvstore.placement import Interval, Key, overlap

Updater = Callable[[Key, torch.Tensor, torch.Tensor], object]  # key, gradient, and stored value, which it changes
Recipe = dict[str, Any]  # {"name": "sgd", "rescale": 1.0, "lr": 0.1, …}

# by name: the class, and the hyperparameters that may be given
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "adam": (torch.optim.Adam, ("lr", "betas", "eps", "weight_decay")),
    "adagrad": (torch.optim.Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
}

# the state that each of them keeps per weight, besides the number of steps
SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


def recipe(optimizer: str | torch.optim.Optimizer, rescale: float = 1.0, **numbers: Any) -> Recipe:
    """Describe an optimizer by name and hyperparameters, as given or read from one of torch's own optimizers.

    >>> recipe("sgd", lr=0.1, momentum=0.9)
    {'name': 'sgd', 'rescale': 1.0, 'lr': 0.1, 'momentum': 0.9}
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__.lower()
        known = OPTIMIZERS[name][1] if name in OPTIMIZERS else ()
        numbers = {key: value for key, value in optimizer.defaults.items() if key in known} | numbers
    else:
        name = str(optimizer).lower()
    if name not in OPTIMIZERS:
        raise ValueError(
            f"a server has no optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}, or set_updater with a function"
        )
    kind, known = OPTIMIZERS[name]
    if unknown := sorted(set(numbers) - set(known)):
        raise ValueError(f"{name} takes no {unknown[0]!r}: it takes {', '.join(known)}")
    kind([torch.zeros(1)], **numbers)  # raises torch's own error for bad values
    return {"name": name, "rescale": float(rescale), **numbers}


class ServerOptimizer:
    """An updater made from a recipe; it keeps an optimizer state for each tensor that it is given."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self._numbers = dict(recipe)
        self._name, self._rescale = self._numbers.pop("name"), self._numbers.pop("rescale")
        self._made: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def __call__(
        self, key: Key, gradient: torch.Tensor, stored: torch.Tensor, left_out: Sequence[Interval] = ()
    ) -> None:
        """Update a tensor; weights in the intervals `left_out`, and their optimizer state, do not change."""
        optimizer = self._optimizer(stored)
        gradient = gradient * self._rescale if self._rescale != 1.0 else gradient
        if left_out:
            self._split(stored, [place for interval in left_out for place in interval])
        if self._is_whole(stored):
            stored.grad = gradient
        else:
            for begin, segment in self._segments(stored):
                here = slice(begin, begin + len(segment))
                segment.data = stored.view(-1)[here]  # it may be elsewhere each time
                segment.grad = None if overlap([(begin, here.stop)], left_out) else gradient.reshape(-1)[here]
        optimizer.step()
        optimizer.zero_grad()

    # Some of a tensor's weights may have been updated more often than others: then the optimizer gets segments of the
    # tensor instead, each with its own state.

    def _segments(self, stored: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        begin = 0
        for segment in self._optimizer(stored).param_groups[0]["params"]:
            yield begin, segment
            begin += segment.numel()

    def _is_whole(self, stored: torch.Tensor) -> bool:
        return self._optimizer(stored).param_groups[0]["params"][0] is stored

    def _split(self, stored: torch.Tensor, places: Sequence[int]) -> None:
        """Cut the segments at these places."""
        optimizer, segments = self._optimizer(stored), []
        for begin, segment in list(self._segments(stored)):
            state, end = optimizer.state.pop(segment, {}), begin + segment.numel()
            cuts = sorted({begin, end, *(place for place in places if begin < place < end)})
            for first, last in pairwise(cuts):
                segments.append(stored.view(-1)[first:last])
                optimizer.state[segments[-1]] = {
                    name: value.clone() if name == "step" else value.view(-1)[first - begin : last - begin].clone()
                    for name, value in state.items()
                    if value is not None
                }
        optimizer.param_groups[0]["params"] = segments

    def _optimizer(self, stored: torch.Tensor) -> torch.optim.Optimizer:
        if stored not in self._made:
            self._made[stored] = OPTIMIZERS[self._name][0]([stored], **self._numbers)
        return self._made[stored]

    def slot(self, stored: torch.Tensor, number: int) -> tuple[torch.Tensor, int] | None:
        """Return one of the state tensors of a weight, and the number of steps; None if there is none.

        The last state tensor is followed by one that holds the number of steps of each weight.
        """
        names, parts, steps = SLOTS[self._name], [], 0
        known = False
        for _, segment in self._segments(stored):
            state = self._optimizer(stored).state.get(segment, {})
            first = state.get(names[0])
            here = 0 if first is None else max(1, int(state.get("step", 0)))
            known, steps = known or first is not None, max(steps, here)
            if number < len(names):
                parts.append(torch.zeros(segment.numel()) if first is None else state[names[number]].view(-1))
            else:
                parts.append(torch.full((segment.numel(),), float(here)))
        if not known or number > len(names):
            return None
        return torch.cat([part.to(stored.dtype) for part in parts]), steps

    def set_slot(self, stored: torch.Tensor, number: int, content: torch.Tensor, steps: int) -> None:
        """Load a state tensor that `slot` has returned; call it in the same order."""
        if number == len(SLOTS[self._name]):
            self._set_steps(stored, content.view(-1))
            return
        if not number:
            self._made.pop(stored, None)
        state = self._optimizer(stored).state[stored]
        state[SLOTS[self._name][number]] = content.clone().view_as(stored)
        if self._name != "sgd":
            state["step"] = torch.tensor(float(steps))

    def _set_steps(self, stored: torch.Tensor, steps: torch.Tensor) -> None:
        """Split the tensor into segments of equal numbers of steps; those with none get no state."""
        self._split(stored, [int(place) + 1 for place in steps.diff().nonzero()])
        for begin, segment in self._segments(stored):
            state = self._optimizer(stored).state[segment]
            if not steps[begin]:
                state.clear()
            elif self._name != "sgd":
                state["step"] = torch.tensor(float(steps[begin]))

    @property
    def slots(self) -> int:
        """The number of state tensors per weight."""
        return len(SLOTS[self._name]) if self._name != "sgd" or self._numbers.get("momentum", 0) else 0

    def remember(self, stored: torch.Tensor, slots: Sequence[torch.Tensor], steps: int) -> None:
        """Continue with the state in these tensors, which is updated in place, after so many steps by any worker."""
        if not steps:
            self._made.pop(stored, None)  # a new one starts like torch's
        else:
            state: dict[str, torch.Tensor] = dict(zip(SLOTS[self._name], slots, strict=False))
            self._optimizer(stored).state[stored] = state | {"step": torch.tensor(float(steps))}

    def write_down(self, stored: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """Copy the state into these tensors after an update, where it is not there already."""
        state = self._optimizer(stored).state[stored]
        for name, slot in zip(SLOTS[self._name], slots, strict=False):
            if state[name] is not slot:
                slot.copy_(state[name])

    @property
    def rate(self) -> float | None:
        """The factor of the gradient in plain SGD; None if the update does more than subtract it."""
        more = self._numbers.get("momentum", 0) or self._numbers.get("weight_decay", 0)
        return None if self._name != "sgd" or more else self._numbers["lr"] * self._rescale

    @property
    def takes_rows(self) -> bool:
        """Whether it can apply a sparse gradient to some rows without touching the others."""
        kept = self._numbers.get("momentum", 0) or self._numbers.get("weight_decay", 0)
        return self._name in ("sgd", "adagrad") and not kept

    def turn(self, **numbers: Any) -> None:
        """Change some of the hyperparameters for all later updates."""
        self._numbers |= numbers
        for optimizer in self._made.values():
            for group in optimizer.param_groups:
                group |= numbers
