"""Simulate rings that are wrong in a known way, to compare a learner's ring with them.

These are the typical mistakes in the exercise of `02_allreduce.ipynb`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mistake:
    """A ring with one mistake: what it does with incoming chunks, how many steps it takes, which chunks it confuses.

    `add` and `keep` change the chunk in place; `new` and `put` replace the chunk in the list of chunks, by the sum or
    by what came in; `forget` stores the result nowhere; `none` leaves the round out.
    """

    sentence: str
    first: str = "add"
    second: str = "keep"
    first_steps: int = 0  # added to the correct n-1
    second_steps: int = 0
    first_into: int = 0  # offset of the chunk that receives what comes in
    second_into: int = 0
    second_begins: int = 0  # offset of the chunk with which the second round begins


MISTAKES = [
    Mistake(
        "every rank holds a part of the sum and none has it all: "
        "the second round is missing, in which the finished chunks go round once more",
        second="none",
    ),
    Mistake(
        "every rank holds a part of the sum and none has it all, although the finished chunks went round: what comes "
        "in during the second round must be written into the tensor. Receive it into the chunk itself",
        second="put",
    ),
    Mistake(
        "every rank holds its own numbers and one finished chunk: chunks[i] = chunks[i] + incoming puts a new tensor "
        "into the list and leaves the old numbers in the tensor itself. Add in place: chunk = chunks[i], then "
        "chunk += incoming",
        first="new",
    ),
    Mistake(
        "in the end each chunk holds the numbers of a single rank: the first round adds to nothing that is sent on. "
        "Write chunk += incoming (chunk = chunk + incoming makes a new tensor, and leaves the chunk as it was), with "
        "the chunk that goes out in the next step",
        first="forget",
    ),
    Mistake(
        "in the end each chunk holds the numbers of a single rank: in the first round what comes in must be added to "
        "the chunk, not take its place. Receive it into torch.empty_like(chunk), then chunk += incoming",
        first="keep",
    ),
    Mistake(
        "in the end each chunk holds the numbers of a single rank: "
        "the first round is missing, in which every rank adds what comes in to its own chunk",
        first="none",
    ),
    Mistake(
        "some parts are in the sum more than once: the second round must keep what comes in, not add it. What goes "
        "round then is finished, so receive it into the chunk itself",
        second="add",
    ),
    Mistake("some parts are missing: the first round takes n-1 steps, and this one takes one less", first_steps=-1),
    Mistake(
        "one chunk of every rank is unfinished: the second round takes n-1 steps, and this one takes one less",
        second_steps=-1,
    ),
    *(
        Mistake(
            "the second round begins with the wrong chunk: send first the one that the rank has finished, which is "
            "the one that it was the last to add to",
            second_begins=places,
        )
        for places in (1, -1)
    ),
    *(
        Mistake(
            "the first round adds what comes in to the wrong chunk: the neighbour sends its chunk i, so add it to "
            "your chunk i, whose elements are the same",
            first_into=places,
        )
        for places in (1, -1)
    ),
    *(
        Mistake(
            "the second round puts what comes in into the wrong chunk: the neighbour sends its chunk i, so receive it "
            "into your chunk i",
            second_into=places,
        )
        for places in (1, -1)
    ),
]


def find_mistake(own: list[Tensor], found: list[Tensor], sent: list[list[Tensor]]) -> Mistake | None:
    """Find the mistake that turns the ranks' own tensors into those found, with exactly the messages that were sent.

    Rings of both directions and with any first chunk are tried.
    """
    for mistake in MISTAKES:
        for direction in (1, -1):
            for start in range(len(own)):
                tensors, messages = _play(own, mistake, direction, start)
                if _same(tensors, found) and all(map(_same, messages, sent)):
                    return mistake
    return None


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _play(own: list[Tensor], mistake: Mistake, direction: int, start: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the final tensors of all ranks and the messages that each rank sends."""
    size = len(own)
    tensors = [tensor.clone() for tensor in own]
    chunks = [list(tensor.tensor_split(size)) for tensor in tensors]
    messages: list[list[Tensor]] = [[] for _ in own]

    def step(begins: int, number: int, what: str, into: int) -> None:
        indices = [(rank + begins - direction * number) % size for rank in range(size)]  # the chunk each rank sends
        for rank, index in enumerate(indices):
            messages[rank].append(chunks[rank][index].clone())
        for rank in range(size):
            source = (rank - direction) % size
            index, incoming = (indices[source] + into) % size, messages[source][-1]
            mine = chunks[rank][index]
            if len(mine) != len(incoming):
                continue  # the real ring would have raised an error
            if what == "add":
                mine += incoming
            elif what == "keep":
                mine.copy_(incoming)
            elif what in ("new", "put"):
                chunks[rank][index] = mine + incoming if what == "new" else incoming

    if mistake.first != "none":
        for number in range(size - 1 + mistake.first_steps):
            step(start, number, mistake.first, mistake.first_into)
    if mistake.second != "none":
        for number in range(size - 1 + mistake.second_steps):
            step(start + direction + mistake.second_begins, number, mistake.second, mistake.second_into)
    return tensors, messages
