"""The exercise of `09_sharded_optimizers.ipynb`, "write the step of stage 1": numbers, bytes, messages and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlab.exercises.calling import describe_error, describe_unreturned
from dlab.exercises.groups import process_groups
from dlab.exercises.own import explain_own, noticing
from dlab.exercises.sandbox import attempt, count, join, name_ranks
from dlab.exercises.stepped import explain_first_step, explain_later_step, one_process
from dlab.kinds import MESSAGE
from dlab.strategies import ZeRO
from dlab.strategies.zero.optimizer import ShardedOptimizer
from dlab.transports import Recorder, Transport

Step = Callable[[Tensor, Tensor, dict[Any, Any], Transport], object]

STEPS = 4
LIMIT = 20.0  # seconds for one case; a right step takes a thousandth of one
CASES = [(2, 8), (4, 12), (1, 5), (3, 10), (4, 11), (4, 3)]  # ranks and weights
OWN: tuple[Callable[..., Any], ...] = (ShardedOptimizer.begin, ShardedOptimizer.step, ZeRO.begin, ZeRO.step)
INSTEAD = "write the reduce-scatter, the update of this rank's part and the all-gather yourself"


def check_sharded_step(my_step: Any) -> str:
    """Try `my_step(weights, gradient, state, transport)`: "well done …", or "not yet: …" with the first thing to fix.

    Each rank gets the same weights, its own gradient of all of them, and a dictionary that it may keep things in. The
    function makes a step of SGD with momentum along the mean gradient, in place. Tried on 1 to 4 ranks, also where they
    cannot share the weights equally; counts the bytes and messages, and what is kept from step to step.

    >>> check_sharded_step(lambda weights, gradient, state, transport: None)
    'not yet: with 2 ranks and 8 weights, the weights have not changed: …'
    """
    if not callable(my_step):
        return f"not yet: {my_step!r} is not a function: write def my_step(weights, gradient, state, transport)."
    with process_groups() as enter:
        for ranks, weights in CASES:
            if problem := _ShardedTrial(my_step, ranks, weights, enter).problem():
                return f"not yet: with {count(ranks, 'rank')} and {count(weights, 'weight')}, {problem}."
    return (
        "well done: on 1 to 4 ranks, also where the parts are of unequal size, all weights are those of one process, a "
        "rank keeps the momentum of its own part only, and the bytes are those of one all-reduce."
    )


@dataclass
class _Stepped:
    """What a rank has after a step."""

    weights: Tensor
    returned: object
    sent: list[int]  # the bytes of each message
    kept: list[int]  # how many numbers each tensor in the state keeps in memory


class _ResizedWeights(Exception):
    """The weights that were given cannot be compared any more. The message says why."""


class _ShardedTrial:
    """Runs a learner's step on the threads of a rehearsal, some times in a row, and compares it with one process."""

    def __init__(self, my_step: Step, ranks: int, length: int, enter: Callable[[Transport], None]) -> None:
        self.my_step, self.ranks, self.length, self.enter = my_step, ranks, length, enter
        make = torch.Generator().manual_seed(7)
        self.start = torch.randn(length, generator=make, dtype=torch.float64)
        self.gradients = torch.randn(STEPS, ranks, length, generator=make, dtype=torch.float64)  # step, rank, weight
        self.most = -(-length // ranks)  # weights in the largest part
        self.own: list[str] = []
        self._lock = threading.Lock()

    def problem(self) -> str | None:
        """Return what is wrong, in words that follow "with 2 ranks and 8 weights,", or None."""
        made = attempt(self._work, self.ranks, LIMIT)
        if self.own:
            return explain_own(self.own, INSTEAD)
        if made.deadlock:
            return f"there is a {made.deadlock}: every rank must take part in every exchange, in the same order"
        if made.failed:
            error = made.failed[min(made.failed)]
            if isinstance(error, _ResizedWeights):
                return str(error)
            return f"{name_ranks(sorted(made.failed))} ended in {describe_error(error)}{self._hint(error)}"
        if made.rehearsal is None:
            return describe_unreturned(name_ranks(made.stuck or list(range(self.ranks))), bool(made.stuck), LIMIT)
        found: list[list[_Stepped]] = [list(by_rank) for by_rank in zip(*made.rehearsal, strict=True)]  # by step
        return self._wrong_numbers(found) or self._wrong_traffic(found) or self._wrong_state(found)

    def _hint(self, error: Exception) -> str:
        if "'tuple' object does not support item assignment" in str(error):
            return ": give the part a name, part = parts[transport.rank], then part -= …"
        if self.length % self.ranks == 0:
            return ""
        sizes = [str(len(part)) for part in self.start.tensor_split(self.ranks)]
        return (
            f": the parts have {join(sizes)} weights here, so a collective that wants equal ones will not do. "
            "weights.tensor_split(n) cuts them, and dlab.collectives.ring.pass_chunks(parts, transport) gathers such "
            "parts in place"
        )

    # running

    def _work(self, transport: Transport) -> list[_Stepped]:
        with noticing(*OWN) as called:
            try:
                return list(self._steps(transport))
            finally:
                with self._lock:
                    self.own += called

    def _steps(self, transport: Transport) -> Iterator[_Stepped]:
        sent: list[int] = []
        recorded = Recorder(transport, lambda kind, data: sent.append(data["bytes"]) if kind == MESSAGE else None)
        self.enter(recorded)
        weights, gradient = self.start.clone(), torch.empty_like(self.start)
        state: dict[Any, Any] = {}
        for gradients in self.gradients:
            gradient.resize_(self.length).copy_(gradients[transport.rank])
            sent.clear()
            with torch.no_grad():
                returned = self.my_step(weights, gradient, state, recorded)
            if weights.shape != self.start.shape:
                raise _ResizedWeights(
                    f"the weights have the shape {tuple(weights.shape)} after a step, and had {tuple(self.start.shape)}"
                )
            yield _Stepped(weights.clone(), returned, list(sent), _kept(state, weights))

    # explaining what is wrong

    def _wrong_numbers(self, found: list[list[_Stepped]]) -> str | None:
        wanted = one_process(self.start, self.gradients.mean(1))
        for step, by_rank in enumerate(found):
            weights = [each.weights for each in by_rank]
            if not all(torch.allclose(each, wanted[step], rtol=1e-9, atol=1e-9) for each in weights):
                if step:
                    return explain_later_step(step, [[e.weights for e in by] for by in found], self.start, self.means)
                talked = any(each.sent for each in by_rank)
                returned = any(isinstance(each.returned, Tensor) for each in by_rank)
                return explain_first_step(weights, self.start, self.gradients[0], talked, returned)
            unlike = [rank for rank, each in enumerate(weights) if not torch.equal(each, weights[0])]
            if unlike:
                return (
                    f"the weights of rank 0 and {name_ranks(unlike)} differ in their last bits: let each part be "
                    "updated by one rank only, and copied by the others"
                )
        return None

    @property
    def means(self) -> Tensor:
        """The mean gradients, by step."""
        return self.gradients.mean(1)

    def _wrong_traffic(self, found: list[list[_Stepped]]) -> str | None:
        """Compare with a reduce-scatter and an all-gather; parts that are padded to the largest may be sent."""
        real, n = self.start.element_size(), self.ranks
        busiest = max(sum(each.sent) for each in found[-1])
        bytes_, messages = sum(sum(each.sent) for each in found[-1]), sum(len(each.sent) for each in found[-1])
        least = 2 * (n - 1) * self.length * real
        if bytes_ > 2 * (n - 1) * n * self.most * real:
            return (
                f"the weights are right, but the ranks send {bytes_:,} bytes in a step, and a reduce-scatter and an "
                f"all-gather take {least:,}: {self._why_more(bytes_ / least, found)}"
            )
        if busiest > 2 * (n - 1) * self.most * real:
            return (
                f"the weights are right, but one rank sends {busiest:,} of the {bytes_:,} bytes, and "
                f"{2 * (n - 1) * self.most * real:,} would do: let every rank reduce and send a part, not one for all"
            )
        if messages > 2 * n * (n - 1):
            return (
                f"the weights and bytes are right, but there are {messages} messages in a step, and {2 * n * (n - 1)} "
                "would do: send each part whole"
            )
        return None

    def _why_more(self, times: float, found: list[list[_Stepped]]) -> str:
        whole = any(max(each.kept, default=0) > self.most for each in found[-1])
        if abs(times - 1.5) < 0.2:
            return (
                "an all-reduce is both already, and all-gathering the parts after it makes three. Take only the first "
                "half of it, the reduce-scatter"
            )
        if whole:
            return "reduce-scatter the gradient, and let a rank update and send its own part only"
        if abs(times - self.ranks) < 0.2 or abs(times - self.ranks / 2) < 0.2:
            return "send to each rank only the part that it needs, not the whole tensor"
        return "each rank needs the gradients of its own part only, and sends its updated part"

    def _wrong_state(self, found: list[list[_Stepped]]) -> str | None:
        for by_rank in found:
            if not any(each.kept for each in by_rank):
                return (
                    "the weights are right, but state has no tensor in it: keep the momentum there, since a second "
                    "network that is trained with the same function has another"
                )
            for rank, (each, part) in enumerate(zip(by_rank, self.start.tensor_split(self.ranks), strict=True)):
                begin = f"weights and bytes are right, but rank {rank} keeps"
                if self.ranks > 1 and max(each.kept, default=0) > self.most:
                    return (
                        f"{begin} a tensor of {max(each.kept)} numbers in memory, and its part of the weights has "
                        f"{len(part)}: keep the momentum of that part only, as a tensor of its own (.clone() if it is "
                        "a view of a larger one)"
                    )
                if self.ranks > 2 and sum(each.kept) > 2 * self.most + 2:
                    return (
                        f"{begin} {sum(each.kept)} numbers in memory, and its part of the weights has {len(part)}: "
                        "keep the momentum of that part only"
                    )
        return None


def _kept(state: object, weights: Tensor) -> list[int]:
    """Return how many numbers each tensor in the state keeps in memory, apart from the weights themselves."""
    known = {weights.untyped_storage().data_ptr()}
    sizes = []
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        if tensor.dim() and storage.data_ptr() not in known:  # a number of steps does not count
            known.add(storage.data_ptr())
            sizes.append(storage.nbytes() // tensor.element_size())
    return [size for size in sizes if size]


def _tensors(thing: object) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _tensors([list(thing.state.values()), thing.param_groups])
    elif isinstance(thing, Mapping):
        for each in thing.values():
            yield from _tensors(each)
    elif isinstance(thing, list | tuple | set):
        for each in thing:
            yield from _tensors(each)
