"""The exercise of `05_parameter_server.ipynb`, "write the server's update": compared with SGD with momentum."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

Key = int | str
State = dict[Any, Any]
Update = Callable[[Key, torch.Tensor, torch.Tensor, State], object]
Pushes = list[tuple[Key, torch.Tensor]]
Values = dict[Key, torch.Tensor]

RATE, MOMENTUM = 0.1, 0.9
SECOND = "on a second server, whose state is empty"


def check_update(my_update: Any) -> str:
    """Push to a server that calls `my_update(key, gradient, stored, state)`: "well done …", or "not yet: …" with the
    first thing to mend.

    Asked for is SGD with a learning rate of 0.1 and a momentum of 0.9: the key's velocity becomes 0.9 of itself plus
    the gradient, and `stored` loses 0.1 of the velocity, in place. `state` is a dictionary, empty at first, that the
    server gives with every push; the memory of the gradient is used again for the next.

    >>> def my_update(key, gradient, stored, state):
    ...     stored -= 0.1 * gradient
    >>> check_update(my_update)
    'not yet: with one key, push 1 is right, but push 2 is a step along its gradient alone: the momentum …'
    """
    if not callable(my_update):
        return f"not yet: {my_update!r} is no function: write def my_update(key, gradient, stored, state)."
    for case, pushes in _cases():
        if problem := _problem(my_update, pushes, again=case == SECOND):
            return f"not yet: {case}, {problem}."
    return (
        "well done: with one key and with several, of all shapes, every push is a step of SGD with momentum, made in "
        "place; the gradient is left alone, and what is remembered is in the state."
    )


def _cases() -> Iterator[tuple[str, Pushes]]:
    """The first one can be followed by hand: it gives 0.8, 0.52 and 0.068."""
    by_hand: Pushes = [("w", torch.full((2,), each)) for each in (2.0, 1.0, 2.0)]
    dice = torch.Generator().manual_seed(5)
    shapes: dict[Key, tuple[int, ...]] = {0: (2, 3), "conv1.weight": (4, 1, 2), 7: (5,)}
    yield "with one key", by_hand
    yield SECOND, by_hand
    yield "with two keys", [(key, torch.rand(3, generator=dice) + 0.5) for key in ("w", "b", "b", "w", "w", "b")]
    yield "with three shapes", [(key, torch.randn(shapes[key], generator=dice)) for _ in range(4) for key in shapes]


def _problem(my_update: Callable[..., Any], pushes: Pushes, again: bool) -> str | None:
    """What is wrong, in words that follow "with one key,"; None if nothing is. `again`: it was right the first time."""
    found, state = _ones(pushes), State()
    room = {key: torch.empty_like(value) for key, value in found.items()}  # gradients lie there, one after another
    kept = False  # is there something in the state that the next gradient will overwrite?
    for number, (key, gradient) in enumerate(pushes, start=1):
        before = found[key].clone()
        room[key].copy_(gradient)
        try:
            returned = my_update(key, room[key], found[key], state)
        except Exception as error:
            return f"push {number} ended in {_tell(error)}"
        kept = kept or any(_shares_memory(each, room[key]) for each in _tensors(state))
        changed = not torch.equal(room[key], gradient)
        right = _play(with_momentum, pushes, number)
        if changed or not _close(found, right):
            if kept:
                return f"push {number} {_SENTENCES['kept']}"
            if changed:
                return f"push {number} {_SENTENCES['changed']}"
            if _same(found[key], before):
                return f"push {number} {_SENTENCES['unchanged' if returned is None else 'returned']}"
            if again:
                return f"push {number} {_SENTENCES['elsewhere']}"
            return _tell_wrong(pushes, number, found, right)
    return None


def _tell_wrong(pushes: Pushes, number: int, found: Values, right: Values) -> str:
    """After so many pushes; before the last of them, all was right."""
    key = pushes[number - 1][0]
    well = {1: "", 2: "push 1 is right, but "}.get(number, f"pushes 1 to {number - 1} are right, but ")
    for name, mistake in _MISTAKES.items():
        if _close(found, _play(mistake, pushes, number)):
            return f"{well}push {number} {_SENTENCES[name]}"
    others = [other for other in found if other != key and not _same(found[other], right[other])]
    if others:
        return f"{well}push {number}, to key {key!r}, has changed the value of key {others[0]!r}: leave it alone"
    element = int((found[key] - right[key]).abs().nan_to_num(nan=torch.inf).argmax())
    was, wanted = (f"{float(value.flatten()[element]):.4g}" for value in (found[key], right[key]))
    return (
        f"{well}after push {number}, to key {key!r}, element {element} is {was}, and {wanted} is right: "
        f"velocity = {MOMENTUM} * velocity + gradient, then stored -= {RATE} * velocity"
    )


def with_momentum(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    """What is asked for."""
    state[key] = MOMENTUM * state.get(key, 0.0) + gradient
    stored -= RATE * state[key]


# ------------------------------------------------------------------------------------ typical mistakes


def _without_momentum(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored -= RATE * gradient


def _replace_by_gradient(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored.copy_(gradient)


def _replace_by_step(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    state[key] = MOMENTUM * state.get(key, 0.0) + gradient
    stored.copy_(-RATE * state[key])


def _uphill(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    state[key] = MOMENTUM * state.get(key, 0.0) + gradient
    stored += RATE * state[key]


def _without_rate(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    state[key] = MOMENTUM * state.get(key, 0.0) + gradient
    stored -= state[key]


def _damped(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    state[key] = MOMENTUM * state.get(key, 0.0) + (1 - MOMENTUM) * gradient
    stored -= RATE * state[key]


def _last_gradient_only(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    stored -= RATE * (MOMENTUM * state.get(key, 0.0) + gradient)
    state[key] = gradient


def _all_that_came(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    state[key] = state.get(key, 0.0) + gradient
    stored -= RATE * state[key]


def _one_for_all_keys(key: Key, gradient: torch.Tensor, stored: torch.Tensor, state: State) -> None:
    with_momentum("all", gradient, stored, state)


_MISTAKES: dict[str, Update] = {
    "no momentum": _without_momentum,
    "replaced": _replace_by_gradient,
    "step": _replace_by_step,
    "uphill": _uphill,
    "no rate": _without_rate,
    "damped": _damped,
    "last": _last_gradient_only,
    "all": _all_that_came,
    "one for all": _one_for_all_keys,
}
_REPLACED = "has replaced the weights: an update changes them a little, so subtract"
_SENTENCES = {
    "no momentum": "is a step along its gradient alone: the momentum is missing. Keep a velocity for the key in state, "
    f"make it {MOMENTUM} of itself plus the gradient, and step along that",
    "replaced": f"{_REPLACED} {RATE} of the velocity from stored",
    "step": f"{_REPLACED} from stored what you have written into it",
    "uphill": "goes uphill: the gradient shows where the loss grows, so subtract from stored",
    "no rate": f"goes too far: multiply the velocity by the learning rate, {RATE}",
    "damped": f"has only {1 - MOMENTUM:.1f} of the gradient in its velocity: take {MOMENTUM} of the old velocity, and "
    "the whole gradient",
    "last": "remembers only the gradient before it: keep the velocity in state, which has a little of all gradients",
    "all": f"adds up all gradients: the velocity must forget, so keep only {MOMENTUM} of it each time",
    "one for all": "uses the velocity of another key: keep one for each, as in state[key]",
    "kept": "goes wrong, since state holds a gradient itself: the server uses its memory again for the next, so keep a "
    "copy, gradient.clone(), or a new tensor",
    "changed": "has changed the gradient, whose memory is not its own: make a new tensor, 0.1 * gradient, in "
    "place of gradient *= 0.1",
    "unchanged": "has not changed stored: write into the tensor that the server holds, as stored -= … does; "
    "stored = stored - … makes another of the same name",
    "returned": "has not changed stored, and what it returns nobody takes: write into the tensor that the server "
    "holds, as stored -= … does",
    "elsewhere": "goes wrong, where the first server was right: something is remembered outside of state, which the "
    "servers do not share",
}


# ------------------------------------------------------------------------------------ a server, and looking at it


def _ones(pushes: Pushes) -> Values:
    return {key: torch.ones_like(gradient) for key, gradient in pushes}


def _play(update: Update, pushes: Pushes, number: int) -> Values:
    """The values of all keys after so many pushes."""
    values, state = _ones(pushes), State()
    for key, gradient in pushes[:number]:
        update(key, gradient.clone(), values[key], state)
    return values


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _close(one: Values, other: Values) -> bool:
    return all(_same(value, other[key]) for key, value in one.items())


def _tensors(kept: Any) -> Iterator[torch.Tensor]:
    """All in a state, also in lists and dictionaries in it."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from (tensor for each in kept.values() for tensor in _tensors(each))
    elif isinstance(kept, list | tuple):
        yield from (tensor for each in kept for tensor in _tensors(each))


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _tell(error: Exception) -> str:
    """With the line of the learner's function."""
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)[1:2]]  # the first is the call above
    where = f", in the line `{lines[0]}`" if lines and lines[0] else ""
    hint = ": state is empty at first" if isinstance(error, KeyError) else ""
    return f"{type(error).__name__}: {error}{where}{hint}"
