"""Answers to the exercise of the second lesson, the right ones and a ring that can be made wrong; for tests."""

from functools import partial

import torch


def neighbours(transport):
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def to_the_right(tensor, transport):
    """As in the lesson."""
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = tensor.tensor_split(size)
    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(mine)
        transport.exchange(chunks[(rank - step) % size], right, incoming, left)
        mine += incoming
    for step in range(size - 1):
        transport.exchange(chunks[(rank - step + 1) % size], right, chunks[(rank - step) % size], left)


def to_the_left(tensor, transport):
    """Round the other way, and by send and receive, the odd ranks and the last one receiving first."""
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = tensor.tensor_split(size)

    def swap(outgoing, incoming):
        if rank % 2 or rank == size - 1:
            transport.recv(incoming, right)
            transport.send(outgoing, left)
        else:
            transport.send(outgoing, left)
            transport.recv(incoming, right)

    for step in range(size - 1):
        mine = chunks[(rank + step + 1) % size]
        incoming = torch.empty_like(mine)
        swap(chunks[(rank + step) % size], incoming)
        mine += incoming
    for step in range(size - 1):
        swap(chunks[(rank + step - 1) % size], chunks[(rank + step) % size])


def without_empty_messages(tensor, transport):
    if tensor.numel():
        to_the_right(tensor, transport)


def with_torch_functions(tensor, transport):
    """Slices in place of chunks, and `add_` in place of `+=`."""
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    ends = [len(tensor) * chunk // size for chunk in range(size + 1)]

    def chunk(number):
        return tensor[ends[number % size] : ends[number % size + 1]]

    for step in range(size - 1):
        incoming = torch.empty(len(chunk(rank - step - 1)))
        transport.exchange(chunk(rank - step), right, incoming, left)
        torch.add(chunk(rank - step - 1), incoming, out=chunk(rank - step - 1))
    for step in range(size - 1):
        incoming = torch.empty(len(chunk(rank - step)))
        transport.exchange(chunk(rank - step + 1), right, incoming, left)
        chunk(rank - step)[:] = incoming


def in_a_copy(tensor, transport):
    """With a list of new tensors, put together and copied back at the end."""
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = [chunk.clone() for chunk in tensor.tensor_split(size)]
    for step in range(size - 1):
        place = (rank - step - 1) % size
        incoming = torch.empty_like(chunks[place])
        transport.exchange(chunks[(rank - step) % size], right, incoming, left)
        chunks[place] = chunks[place] + incoming
    for step in range(size - 1):
        incoming = torch.empty_like(chunks[(rank - step) % size])
        transport.exchange(chunks[(rank - step + 1) % size], right, incoming, left)
        chunks[(rank - step) % size] = incoming
    tensor.copy_(torch.cat(chunks))


def another_chunk_first(tensor, transport):
    """As dlab's own begins: rank r ends the first round with chunk r."""
    ring(tensor, transport, start=-1)


def after_a_barrier(tensor, transport):
    transport.barrier()
    to_the_right(tensor, transport)
    return tensor


def ring(
    tensor, transport, first="add", second="keep", steps=(0, 0), into=(0, 0), begins=0, start=0, direction=1, cut=None
):
    """A ring of either direction that may be wrong in several ways."""
    rank, size = transport.rank, transport.size
    to, source = (rank + direction) % size, (rank - direction) % size
    chunks = list(cut(tensor, size) if cut else tensor.tensor_split(size))
    for number, what in enumerate((first, second)):
        for step in range(size - 1 + steps[number] if what else 0):
            place = rank + start + (direction + begins) * number - direction * step
            outgoing, index = chunks[place % size], (place - direction + into[number]) % size
            incoming = torch.empty_like(chunks[(place - direction) % size])
            transport.exchange(outgoing, to, incoming, source)
            if what == "add":
                chunks[index] += incoming
            elif what == "keep":
                chunks[index].copy_(incoming)
            elif what == "new":
                chunks[index] = chunks[index] + incoming
            elif what == "put":
                chunks[index] = incoming


RIGHT = [
    *(to_the_right, to_the_left, without_empty_messages, with_torch_functions, in_a_copy, another_chunk_first),
    *(
        after_a_barrier,
        ring,
        partial(ring, direction=-1),
        partial(ring, start=2),
    ),
]
