"""What a server does to a weight when a gradient has come: an optimizer by its name and numbers, or a function.

Nothing that can run code is taken from a worker: numbers and a name from a list make an optimizer. Taught in
`05_parameter_server.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlab.kvstore.placement import Key

Updater = Callable[[Key, torch.Tensor, torch.Tensor], object]  # key, gradient, stored value, which it changes
Recipe = dict[str, Any]  # {"name": "sgd", "rescale": 1.0, "lr": 0.1, …}

# by name: the class, and the numbers that may be given
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "adam": (torch.optim.Adam, ("lr", "betas", "eps", "weight_decay")),
    "adagrad": (torch.optim.Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
}

# what each of them remembers of a weight, besides a number of steps
SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


def recipe(optimizer: str | torch.optim.Optimizer, rescale: float = 1.0, **numbers: Any) -> Recipe:
    """A name and numbers, from these, or from one of torch's own optimizers: its class and its defaults.

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
    kind([torch.zeros(1)], **numbers)  # refuses what makes no sense, in words of its own
    return {"name": name, "rescale": float(rescale), **numbers}


class Optimizing:
    """An updater after a recipe; it keeps a state for each tensor that it is given."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self._numbers = dict(recipe)
        self._name, self._rescale = self._numbers.pop("name"), self._numbers.pop("rescale")
        self._made: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def __call__(self, key: Key, gradient: torch.Tensor, stored: torch.Tensor) -> None:
        optimizer = self._optimizer(stored)
        stored.grad = gradient * self._rescale if self._rescale != 1.0 else gradient
        optimizer.step()
        stored.grad = None

    def _optimizer(self, stored: torch.Tensor) -> torch.optim.Optimizer:
        if stored not in self._made:
            self._made[stored] = OPTIMIZERS[self._name][0]([stored], **self._numbers)
        return self._made[stored]

    def slot(self, stored: torch.Tensor, number: int) -> tuple[torch.Tensor, int] | None:
        """One of the tensors that it remembers of a weight, and after how many steps; None if there is none."""
        state, names = self._optimizer(stored).state.get(stored, {}), SLOTS[self._name]
        found = state.get(names[number]) if number < len(names) else None
        return None if found is None else (found, int(state.get("step", 0)))

    def set_slot(self, stored: torch.Tensor, number: int, content: torch.Tensor, steps: int) -> None:
        """The opposite."""
        state = self._optimizer(stored).state[stored]
        state[SLOTS[self._name][number]] = content.clone().view_as(stored)
        if self._name != "sgd":
            state["step"] = torch.tensor(float(steps))

    @property
    def slots(self) -> int:
        """How many tensors it remembers of a weight."""
        return len(SLOTS[self._name]) if self._name != "sgd" or self._numbers.get("momentum", 0) else 0

    def remember(self, stored: torch.Tensor, slots: Sequence[torch.Tensor], steps: int) -> None:
        """Go on with what is in these tensors, themselves, after so many steps by anybody."""
        if not steps:
            self._made.pop(stored, None)  # a new one, which begins as torch does
        else:
            state: dict[str, torch.Tensor] = dict(zip(SLOTS[self._name], slots, strict=False))
            self._optimizer(stored).state[stored] = state | {"step": torch.tensor(float(steps))}

    def write_down(self, stored: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """After an update: have all that it remembers in these tensors."""
        state = self._optimizer(stored).state[stored]
        for name, slot in zip(SLOTS[self._name], slots, strict=False):
            if state[name] is not slot:
                slot.copy_(state[name])

    @property
    def rate(self) -> float | None:
        """What a gradient is multiplied with, to be taken from the weights; None if there is more to do."""
        more = self._numbers.get("momentum", 0) or self._numbers.get("weight_decay", 0)
        return None if self._name != "sgd" or more else self._numbers["lr"] * self._rescale

    @property
    def takes_rows(self) -> bool:
        """Can it use a gradient of some rows as it is, and leave the others alone?"""
        kept = self._numbers.get("momentum", 0) or self._numbers.get("weight_decay", 0)
        return self._name in ("sgd", "adagrad") and not kept

    def turn(self, **numbers: Any) -> None:
        """Change some of the numbers, from now on."""
        self._numbers |= numbers
        for optimizer in self._made.values():
            for group in optimizer.param_groups:
                group |= numbers
