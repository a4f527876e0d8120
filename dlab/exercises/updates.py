"""SGD with momentum as a server's update, and the same with typical mistakes, for the check of lesson 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Key = int | str
State = dict[Any, Any]
Update = Callable[[Key, torch.Tensor, torch.Tensor, State], object]

RATE, MOMENTUM = 0.1, 0.9


def with_momentum(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    """Update with momentum, as the exercise asks."""
    state[key] = MOMENTUM * state.get(key, 0.0) + gradient
    stored -= RATE * state[key]


def _stepping(velocity: Callable[[Any, torch.Tensor], Any], along: Callable[[Any, Any, torch.Tensor], Any]) -> Update:
    """Make an update with another rule for the velocity (from the old one and the gradient) or for the step."""

    def update(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
        old = state.get(key, torch.zeros_like(gradient))
        state[key] = velocity(old, gradient)
        stored -= RATE * along(old, state[key], gradient)

    return update


def _right(old: Any, gradient: torch.Tensor) -> Any:
    return MOMENTUM * old + gradient


def _new(old: Any, new: Any, gradient: torch.Tensor) -> Any:
    return new


def _replace_by_gradient(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored.copy_(gradient)


def _replace_by_step(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored.zero_()
    with_momentum(key, gradient, stored, state)


def _damp_later(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    """Damp all gradients but the first."""
    state[key] = MOMENTUM * state[key] + (1 - MOMENTUM) * gradient if key in state else gradient.clone()
    stored -= RATE * state[key]


def _one_for_all_keys(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    with_momentum("all", gradient, stored, state)


def _shrink_weights(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored *= MOMENTUM
    stored -= RATE * gradient


MISTAKES: dict[str, Update] = {
    "no momentum": _stepping(_right, lambda old, new, gradient: gradient),
    "replaced": _replace_by_gradient,
    "step": _replace_by_step,
    "uphill": _stepping(_right, lambda old, new, gradient: -new),
    "no rate": _stepping(_right, lambda old, new, gradient: new / RATE),
    "damped": _stepping(lambda old, gradient: MOMENTUM * old + (1 - MOMENTUM) * gradient, _new),
    "damped later": _damp_later,
    "last": _stepping(lambda old, gradient: gradient.clone(), lambda old, new, gradient: MOMENTUM * old + gradient),
    "all": _stepping(lambda old, gradient: old + gradient, _new),
    "old": _stepping(_right, lambda old, new, gradient: old),
    "old and gradient": _stepping(_right, lambda old, new, gradient: old + gradient),
    "both": _stepping(lambda old, gradient: MOMENTUM * (old + gradient), _new),
    "ahead": _stepping(_right, lambda old, new, gradient: gradient + MOMENTUM * new),
    "twice": _stepping(_right, lambda old, new, gradient: gradient + new),
    "brakes": _stepping(lambda old, gradient: gradient - MOMENTUM * old, _new),
    "exchanged": _stepping(
        lambda old, gradient: RATE * old + gradient, lambda old, new, gradient: MOMENTUM / RATE * new
    ),
    "shrunk": _shrink_weights,
    "one for all": _one_for_all_keys,
}
_REPLACED = "has replaced the weights: an update changes them a little, so subtract"
SENTENCES = {
    "no momentum": "is a step along its gradient alone: the momentum is missing. Keep a velocity for the key in state, "
    f"make it {MOMENTUM} of itself plus the gradient, and step along that",
    "replaced": f"{_REPLACED} {RATE} of the velocity from stored",
    "step": f"{_REPLACED} from stored what you have written into it",
    "uphill": "goes uphill: the gradient shows where the loss grows, so add it to the velocity, and subtract the "
    "velocity from stored",
    "no rate": f"goes too far: multiply the velocity by the learning rate, {RATE}",
    "damped": f"has only {1 - MOMENTUM:.1f} of the gradient in its velocity: take {MOMENTUM} of the old velocity, and "
    "the whole gradient",
    "damped later": f"has only {1 - MOMENTUM:.1f} of its gradient in its velocity: take the whole gradient each time, "
    "not only the first time",
    "last": "remembers only the gradient before it: keep the velocity in state, which has a little of all gradients",
    "all": f"adds up all gradients: the velocity must forget, so keep only {MOMENTUM} of it each time",
    "old": "is a step along the old velocity: make the new one first, with this gradient in it, and step along that",
    "old and gradient": f"is a step along the whole old velocity and the gradient: take {MOMENTUM} of the old velocity "
    "before you step, and step along what you keep",
    "both": f"has only {MOMENTUM} of the gradient in its velocity: multiply the old velocity by {MOMENTUM} first, and "
    "then add the whole gradient",
    "ahead": "looks ahead, as Nesterov's momentum does: step along the velocity itself",
    "twice": "has the gradient in it twice: it is in the velocity already, so step along that alone",
    "brakes": "has subtracted the old velocity from the gradient: add them, so that steps in the same direction get "
    "faster",
    "exchanged": f"has exchanged the two numbers: {MOMENTUM} of the velocity is kept, and {RATE} of it is subtracted "
    "from stored",
    "shrunk": f"has multiplied stored by {MOMENTUM}: that is for the velocity, which is kept in state",
    "one for all": "uses the velocity of another key: keep one for each, as in state[key]",
    "kept": "goes wrong, since state holds a gradient itself: the server reuses that memory for the next, so keep a "
    "copy, gradient.clone(), or a new tensor",
    "aliased": "goes wrong, and state holds stored itself: the velocity needs a tensor of its own, such as "
    "torch.zeros_like(stored)",
    "changed": "has changed the gradient, whose memory is not its own: make a new tensor, 0.1 * gradient, in "
    "place of gradient *= 0.1",
    "moved": "has given stored new memory, which the server does not see: write into the one that it has, as "
    "stored -= … does; stored.data = … does not",
    "unchanged": "has not changed stored: write into the tensor that the server holds, as stored -= … does; "
    "stored = stored - … makes another of the same name",
    "returned": "has not changed stored, and its return value is not used: write into the tensor that the server "
    "holds, as stored -= … does",
    "elsewhere": "goes wrong although the first server was right: something is kept outside state, which the "
    "servers do not share",
}
