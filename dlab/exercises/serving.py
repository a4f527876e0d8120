"""The exercise of `05_parameter_server.ipynb`, "write the server's update": compared with SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dlab.exercises.calling import Unfinished, call
from dlab.exercises.updates import MISTAKES, MOMENTUM, RATE, SENTENCES, Key, State, Update, with_momentum
from dlab.kvstore.optimizers import ServerOptimizer

Pushes = list[tuple[Key, torch.Tensor]]
Values = dict[Key, torch.Tensor]

SECOND = "on a second server, whose state is empty"
OWN = (with_momentum, ServerOptimizer.__call__)
INSTEAD = "write the two lines yourself, one for the velocity and one for stored"


def check_update(my_update: Any) -> str:
    """Push to a server that calls `my_update(key, gradient, stored, state)`: "well done …", or "not yet: …" with the
    first thing to fix.

    It must be SGD with a learning rate of 0.1 and a momentum of 0.9: the key's velocity becomes 0.9 of itself plus the
    gradient, and 0.1 of the velocity is subtracted from `stored`, in place. `state` is a dictionary, empty at first,
    that the server passes with every push; the server reuses the memory of the gradient for the next push.

    >>> def my_update(key, gradient, stored, state):
    ...     stored -= 0.1 * gradient
    >>> check_update(my_update)
    'not yet: with one key, push 1 is right, but push 2 is a step along its gradient alone: the momentum …'
    """
    if not callable(my_update):
        return f"not yet: {my_update!r} is not a function: write def my_update(key, gradient, stored, state)."
    for case, pushes in _cases():
        server = _TrialServer(my_update, pushes)
        if problem := server.problem(again=case == SECOND):
            return f"not yet: {case}, {problem}."
    return (
        "well done: with one key and with several, of all shapes, every push is a step of SGD with momentum, made in "
        f"place; the gradient is left alone, and what is remembered is in the state.{server.remark()}"
    )


def _cases() -> Iterator[tuple[str, Pushes]]:
    """Yield the cases. The first can be followed by hand: it gives 0.8, 0.52 and 0.068."""
    by_hand: Pushes = [("w", torch.full((2,), each)) for each in (2.0, 1.0, 2.0)]
    dice = torch.Generator().manual_seed(5)
    shapes: dict[Key, tuple[int, ...]] = {0: (2, 3), "conv1.weight": (4, 1, 2), 7: (5,)}
    yield "with one key", by_hand
    yield SECOND, by_hand
    yield "with two keys", [(key, torch.rand(3, generator=dice) + 0.5) for key in ("w", "b", "b", "w", "w", "b")]
    yield "with three shapes", [(key, torch.randn(shapes[key], generator=dice)) for _ in range(4) for key in shapes]


@dataclass
class _PushOutcome:
    """What the check observes after a push."""

    values: Values  # the values of all keys
    returned: Any
    changed: bool  # the gradient was modified
    kept: bool  # the state holds the gradient's own memory, which the next push overwrites
    moved: bool  # `stored` now has other memory
    aliased: bool  # the state holds the memory of the stored value


class _TrialServer:
    """Plays the pushes, all of them unless one fails, so that a mistake can be recognised by all its effects."""

    def __init__(self, my_update: Callable[..., Any], pushes: Pushes, reuse: bool = True) -> None:
        self.my_update, self.pushes, self.state = my_update, pushes, State()
        self.seen: list[_PushOutcome] = []
        self.failure = ""  # of the push after those in `seen`
        values = _ones(pushes)
        room = {key: torch.empty_like(value) for key, value in values.items()}  # every gradient is passed here
        handed = {key: value.view_as(value) for key, value in values.items()}
        for key, gradient in pushes:
            if reuse:
                room[key].copy_(gradient)
            else:
                room[key] = gradient.clone()
            try:
                returned = call(my_update, key, room[key], handed[key], self.state, own=OWN, instead=INSTEAD)
            except Unfinished as reason:
                self.failure = _describe_failure(reason, len(self.seen) + 1)
                return
            tensors = list(_tensors(self.state))
            self.seen.append(
                _PushOutcome(
                    {name: value.clone() for name, value in values.items()},
                    returned,
                    changed=not torch.equal(room[key], gradient),
                    kept=any(_shares_memory(each, place) for each in tensors for place in room.values()),
                    moved=not _shares_memory(handed[key], values[key]),
                    aliased=any(_shares_memory(each, place) for each in tensors for place in values.values()),
                )
            )

    def problem(self, again: bool) -> str | None:
        """Return what is wrong, in words that follow "with one key,", or None; `again`: the first server was right."""
        number = self._first_wrong()
        return self._explain_wrong(number, again) if number else self.failure or None

    def _first_wrong(self) -> int:
        for number, after in enumerate(self.seen, start=1):
            if after.changed or not _close(after.values, _play(with_momentum, self.pushes, number)):
                return number
        return 0

    def remark(self) -> str:
        """Return a remark on a correct answer whose velocity includes the learning rate."""
        key, state = self.pushes[-1][0], State()
        for name, gradient in self.pushes:
            with_momentum(name, gradient, torch.ones_like(gradient), state)
        velocity = RATE * state[key]
        if any(each.shape == velocity.shape and _same(each.abs(), velocity.abs()) for each in _tensors(self.state)):
            return (
                " (Your velocity has the learning rate in it, as MXNet's has: the same, as long as the rate does not "
                "change.)"
            )
        return ""

    def _explain_wrong(self, number: int, again: bool) -> str:
        """Explain the first wrong push, which has this number."""
        after, key = self.seen[number - 1], self.pushes[number - 1][0]
        right = _play(with_momentum, self.pushes, number)
        well = {1: "", 2: "push 1 is right, but "}.get(number, f"pushes 1 to {number - 1} are right, but ")
        before = self.seen[number - 2].values[key] if number > 1 else torch.ones_like(right[key])
        if any(each.kept for each in self.seen[:number]) and (after.changed or self._is_right_with_new_memory()):
            return f"push {number} {SENTENCES['kept']}"
        for name in ("changed", "moved"):
            if getattr(after, name):
                return f"push {number} {SENTENCES[name]}"
        if again:
            return f"push {number} {SENTENCES['elsewhere']}"
        if name := next((name for name, mistake in MISTAKES.items() if self._is_played_by(mistake)), ""):
            return f"{well}push {number} {SENTENCES[name]}"
        if _same(after.values[key], before):
            return f"push {number} {SENTENCES['unchanged' if after.returned is None else 'returned']}"
        others = [other for other in right if other != key and not _same(after.values[other], right[other])]
        if others:
            return f"{well}push {number}, to key {key!r}, has changed the value of key {others[0]!r}: leave it alone"
        if after.aliased:
            return f"{well}push {number} {SENTENCES['aliased']}"
        element = int((after.values[key] - right[key]).abs().nan_to_num(nan=torch.inf).argmax())
        was, wanted = (f"{float(value.flatten()[element]):.4g}" for value in (after.values[key], right[key]))
        return (
            f"{well}after push {number}, to key {key!r}, element {element} is {was}, and {wanted} is right: "
            f"velocity = {MOMENTUM} * velocity + gradient, then stored -= {RATE} * velocity"
        )

    def _is_right_with_new_memory(self) -> bool:
        return not _TrialServer(self.my_update, self.pushes, reuse=False)._first_wrong()

    def _is_played_by(self, mistake: Update) -> bool:
        try:
            values = [_play(mistake, self.pushes, number) for number in range(1, len(self.seen) + 1)]
        except RuntimeError:  # a velocity of another shape
            return False
        return all(_close(after.values, each) for after, each in zip(self.seen, values, strict=True))


# ------------------------------------------------------------------------------------ inspecting a server


def _ones(pushes: Pushes) -> Values:
    return {key: torch.ones_like(gradient) for key, gradient in pushes}


def _play(update: Update, pushes: Pushes, number: int) -> Values:
    """Return the values of all keys after this number of pushes."""
    values, state = _ones(pushes), State()
    for key, gradient in pushes[:number]:
        update(key, gradient.clone(), values[key], state)
    return values


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _close(one: Values, other: Values) -> bool:
    return all(_same(value, other[key]) for key, value in one.items())


def _tensors(kept: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a state, also those in nested lists and dictionaries."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from (tensor for each in kept.values() for tensor in _tensors(each))
    elif isinstance(kept, list | tuple):
        yield from (tensor for each in kept for tensor in _tensors(each))


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _describe_failure(reason: Unfinished, number: int) -> str:
    """Describe why the call of this push did not return."""
    error = reason.__cause__
    hint = ": state is empty at first" if isinstance(error, KeyError) else ""
    if isinstance(error, TypeError) and "positional argument" in str(error):
        hint = ": it is called with key, gradient, stored and state"
    said = str(reason)
    return f"push {number} {said.removeprefix('it ')}{hint}" if said.startswith("it ") else said
