"""The exercise of `02_allreduce.ipynb`, "write a ring": a check that counts messages and bytes as well as the sum."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch

from dlab import collectives, cost
from dlab.collectives.ring import collect_chunks, pass_chunks, ring_allreduce
from dlab.exercises.mistakes import find_mistake
from dlab.exercises.own import each_call, explain_own
from dlab.exercises.sandbox import attempt, count, name_ranks
from dlab.reduction import allreduce
from dlab.rehearsal import Rehearsal
from dlab.transports import Transport
from dlab.transports.base import TensorAndRank

Ring = Callable[[torch.Tensor, Transport], object]

# ranks, elements, and whether one rank is slow; four ranks come first, because their numbers are easy to follow
CASES = [
    *((4, 12, False), (4, 10, False), (4, 12, True)),
    *((1, 5, False), (2, 6, False), (3, 7, False), (5, 3, False), (6, 12, False), (7, 10, False), (3, 0, False)),
]
SLOW_RANK, PAUSE = 1, 0.01  # seconds of delay before each of its messages
LIMIT = 10.0  # seconds for one case; a correct ring takes a few milliseconds
OWN = (*(getattr(collectives, name) for name in collectives.__all__), collect_chunks, pass_chunks, allreduce)


def check_ring(my_ring: Ring) -> str:
    """Try `my_ring(tensor, transport)` in rehearsals: "well done …", or "not yet: …" with the first thing to fix.

    It must leave the sum in the tensor of every rank, with no more messages and bytes than a ring needs.

    >>> check_ring(lambda tensor, transport: None)
    'not yet: with 4 ranks and 12 elements, every rank still holds only its own numbers: add what comes in …'
    """
    for ranks, elements, slow in CASES:
        case = f"with {count(ranks, 'rank')} and {count(elements, 'element')}" + slow * f", rank {SLOW_RANK} slow"
        if problem := _RingTrial(my_ring, ranks, elements, slow).problem():
            return f"not yet: {case}, {problem}."
    return (
        "well done: the sum is right for 1 to 7 ranks, for sizes that do not divide and with a slow rank, "
        "and each rank sends 2(n-1)/n of the tensor to its neighbour, as the formula says."
    )


class _ObservedTransport(Transport):
    """Notes what a rank sends while it receives; a slow rank pauses before every message."""

    def __init__(self, transport: Transport, pause: float) -> None:
        self._transport, self._pause, self.rank, self.size = transport, pause, transport.rank, transport.size
        self.sent: list[torch.Tensor] = []
        self.overwrites = False  # has an incoming message arrived in memory that is being sent?
        self.partners: tuple[int, int] | None = None  # destination and source of the exchange in progress

    def move(self, outgoing: TensorAndRank | None, incoming: TensorAndRank | None) -> None:
        time.sleep(self._pause)
        if outgoing:
            self.sent.append(outgoing[0].clone())
        if outgoing and incoming:
            self.overwrites = self.overwrites or _overlap(outgoing[0], incoming[0])
            self.partners = outgoing[1], incoming[1]
        self._transport.move(outgoing, incoming)
        self.partners = None

    def barrier(self) -> None:
        self._transport.barrier()  # barriers are not recorded

    def label(self, phase: str, step: int) -> None:
        self._transport.label(phase, step)


class _RingTrial:
    """A rehearsal of a learner's ring. Rank r begins with 10**r times 1, 2, 3, …: whole numbers, so sums are exact."""

    def __init__(self, my_ring: Ring, ranks: int, elements: int, slow: bool) -> None:
        self.my_ring, self.ranks, self.elements, self.slow = my_ring, ranks, elements, slow
        self.own = [10.0**rank * torch.arange(1.0, elements + 1) for rank in range(ranks)]
        self.sum = torch.stack(self.own).sum(0)
        self.tensors = [tensor.clone() for tensor in self.own]
        self.transports: list[_ObservedTransport] = []
        self.called: list[str] = []  # dlab's own solutions that the learner called

    def problem(self) -> str | None:
        """Return what is wrong, in words that follow "with 4 ranks and 12 elements,", or None."""
        made = attempt(self._work, self.ranks, LIMIT)
        if self.called:
            return _explain_own(self.called)
        if any(each.overwrites for each in self.transports):
            return (
                "an exchange receives into the memory from which it sends: what comes in may overwrite what has not "
                "gone out yet. Receive into another chunk, or into torch.empty_like(chunk)"
            )
        if made.deadlock:
            return self._explain_deadlock(made.deadlock)
        if made.failed:
            hint = "; give the chunk a name: chunk = chunks[i], then chunk += incoming"
            told = made.describe_failure(getattr(self.my_ring, "__name__", ""))
            return told + hint * ("'tuple' object does not support item assignment" in told)
        if made.rehearsal is None:
            return (
                f"{name_ranks(made.stuck)} had not returned after {LIMIT:g} s: look for a loop that does not end; "
                "a ring takes 2(n-1) steps"
            )
        return self._wrong_values(made.rehearsal) or self._wrong_messages(made.rehearsal)

    def _work(self, transport: Transport) -> object:
        rank = transport.rank
        watched = _ObservedTransport(transport, PAUSE if self.slow and rank == SLOW_RANK else 0.0)
        self.transports.append(watched)
        with each_call(self.called.append, *OWN):
            return self.my_ring(self.tensors[rank], watched)

    def _explain_deadlock(self, chain: str) -> str:
        waiting = {int(rank) for rank in re.findall(r"rank (\d+) waits", chain)}  # others may not have begun
        partners = [each.partners for each in self.transports if each.rank in waiting]
        if self.ranks > 2 and all(pair and pair[0] == pair[1] for pair in partners):
            hint = "every rank receives from the neighbour to which it sends; receive from the one on the other side"
        elif "has returned" in chain:
            hint = "every rank must take the same number of steps, 2(n-1), and receive whatever is sent to it"
        elif None not in partners:
            hint = "let every rank send to the neighbour on one side, the same for all, and receive from the other side"
        elif "receive from" not in chain:
            hint = "everyone sends first and nobody receives; transport.exchange does both at once"
        elif "send to" not in chain:
            hint = "everyone waits to receive and nobody sends; transport.exchange does both at once"
        else:
            hint = "each waits for another one; transport.exchange sends and receives at once"
        return f"there is a {chain}: {hint}"

    def _wrong_values(self, played: Rehearsal) -> str | None:
        right = [torch.equal(tensor, self.sum) for tensor in self.tensors]
        if all(right):
            return None
        done = [rank for rank in range(self.ranks) if right[rank]]
        parts = torch.stack([tensor == self.sum for tensor in self.tensors])
        if all(isinstance(tensor, torch.Tensor) and torch.equal(tensor, self.sum) for tensor in played):
            return "the sum is returned as a new tensor: work in place, as with tensor.copy_(result)"
        if all(torch.equal(tensor, own) for tensor, own in zip(self.tensors, self.own, strict=True)):
            return (
                "every rank still holds only its own numbers: add what comes in to the tensor itself, "
                "as with chunk += incoming (tensor = … would only give a name to something new)"
            )
        if done:
            missing = [rank for rank in range(self.ranks) if not right[rank]]
            return (
                f"{name_ranks(done)} {_hold(done)} the sum, but {name_ranks(missing)} {_hold(missing)} something else: "
                "every rank must take every step, and end with every chunk"
            )
        if all(torch.allclose(tensor, self.sum / self.ranks) for tensor in self.tensors):
            return "every rank holds the mean: leave the sum as it is, dividing is for the caller"
        sent = [each.sent for each in sorted(self.transports, key=lambda each: each.rank)]
        if mistake := find_mistake(self.own, self.tensors, sent):
            return mistake.sentence
        if untouched := self._untouched():
            return (
                f"{count(untouched, 'element')} {'is' if untouched == 1 else 'are'} left as before: the chunks do not "
                "cover the tensor. tensor.tensor_split(n) cuts it so that nothing is left over"
            )
        rank, element = (int(index) for index in (~parts).nonzero()[0])
        found, wanted = self.tensors[rank][element].item(), self.sum[element].item()
        return (
            f"element {element} of rank {rank} is {found:g}, but the sum is {wanted:g}: rank r began with "
            f"10**r times 1, 2, 3, …, so the digits say whose part is missing, and whose came more than once"
        )

    def _untouched(self) -> int:
        """Return how many elements every rank left unchanged, if all other elements are right."""
        own = torch.stack([tensor == own for tensor, own in zip(self.tensors, self.own, strict=True)]).all(0)
        right = torch.stack([tensor == self.sum for tensor in self.tensors]).all(0)
        return int(own.sum()) if (own | right).all() else 0

    def _wrong_messages(self, played: Rehearsal) -> str | None:
        size = self.elements * self.sum.element_size()
        formula = cost.allreduce("ring", self.ranks, size)
        sent, destinations = [0] * self.ranks, [set[int]() for _ in range(self.ranks)]
        for event in played.messages:
            sent[event.rank] += event.data["bytes"]
            destinations[event.rank].add(event.data["destination"])
        # where the chunks differ in size, the learner may choose which rank sends the larger ones
        even = self.elements % self.ranks == 0
        most = max(range(self.ranks), key=lambda rank: abs(sent[rank] - formula.bytes_per_rank[rank]))
        if sum(sent) < sum(formula.bytes_per_rank):
            return (
                f"the sum is right, but only {sum(sent)} bytes were sent, and no ring can do with fewer than "
                f"{sum(formula.bytes_per_rank)}: the ranks of a cluster share no variables, so send it all"
            )
        sizes = {event.data["bytes"] for event in played.messages}
        if even and sizes == {size // self.ranks} and len(played.messages) > formula.messages:
            return (
                f"the sum is right, but there were {len(played.messages)} messages; a ring has 2n(n-1), that is "
                f"{formula.messages}: each of the two rounds takes n-1 steps"
            )
        if sum(sent) > sum(formula.bytes_per_rank) or (even and sent != formula.bytes_per_rank):
            who = "each rank" if len(set(sent)) == 1 else f"rank {most}"
            return (
                f"the sum is right, but {who} sent {_times(sent[most], size)} the tensor; a ring sends 2(n-1)/n of it, "
                f"{_times(formula.bytes_per_rank[most], size)} with {count(self.ranks, 'rank')}: cut it into "
                f"{self.ranks} chunks of one size, and send one chunk per step"
            )
        if len(played.messages) > formula.messages:
            return (
                f"the sum and the bytes are right, but there were {len(played.messages)} messages; a ring has 2n(n-1), "
                f"that is {formula.messages}: send each chunk as one message"
            )
        for step in (1, -1):
            if all(to <= {(rank + step) % self.ranks} for rank, to in enumerate(destinations)):
                return None
        strays = [rank for rank, to in enumerate(destinations) if to - {(rank + 1) % self.ranks}]
        rank = next((rank for rank in strays if len(destinations[rank]) > 1), strays[0])
        return (
            f"the sum and the bytes are right, but rank {rank} sent to {name_ranks(sorted(destinations[rank]))}: "
            f"in a ring every rank sends to the same neighbour in every step, and receives from the other one"
        )


def _explain_own(called: list[str]) -> str:
    if called[0] in (ring_allreduce.__name__, collect_chunks.__name__, pass_chunks.__name__):
        return explain_own(called, "write the two rounds yourself, with send, recv or exchange")
    return f"this calls dlab's own {called[0]}: do without it, and write the two rounds with send, recv or exchange"


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    starts, ends = zip(*((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, other)), strict=True)
    return max(starts) < min(ends)


def _times(part: int, size: int) -> str:
    return f"{round(part / size, 2):g} times" if size else f"{part} bytes of"


def _hold(ranks: list[int]) -> str:
    return "holds" if len(ranks) == 1 else "hold"
