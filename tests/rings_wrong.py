"""Wrong answers to the exercise of the second lesson, each with the words that its sentence must have; for tests."""

import threading
from functools import partial
from types import FunctionType

import torch
from rings import neighbours, ring, to_the_right

import dlab
from dlab import collectives
from dlab.collectives.ring import collect_chunks, pass_chunks


def learners_copy(function):
    """The same lines in a cell of the learner's own."""
    code = function.__code__.replace(co_filename="<cell>")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def nothing(tensor, transport):
    pass


def whole_tensor(tensor, transport):
    """Everybody's tensor goes all the way round."""
    right, left = neighbours(transport)
    travelling = tensor.clone()
    for _ in range(transport.size - 1):
        incoming = torch.empty_like(travelling)
        transport.exchange(travelling, right, incoming, left)
        tensor += incoming
        travelling = incoming


def new_tensor(tensor, transport):
    result = tensor.clone()
    to_the_right(result, transport)
    return result


def new_name(tensor, transport):
    right, left = neighbours(transport)
    for _ in range(transport.size - 1):
        incoming = torch.empty_like(tensor)
        transport.exchange(tensor, right, incoming, left)
        tensor = tensor + incoming


def first_round_only(tensor, transport):
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = tensor.tensor_split(size)
    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(mine)
        transport.exchange(chunks[(rank - step) % size], right, incoming, left)
        mine += incoming


def half_of_the_ranks(tensor, transport):
    own = tensor.clone()
    to_the_right(tensor, transport)
    if transport.rank >= 2:
        tensor.copy_(own)


def mean(tensor, transport):
    to_the_right(tensor, transport)
    tensor /= transport.size


def one_step_too_few(tensor, transport):
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = tensor.tensor_split(size)
    for step in range(size - 2):
        mine = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(mine)
        transport.exchange(chunks[(rank - step) % size], right, incoming, left)
        mine += incoming
    for step in range(size - 1):
        transport.exchange(chunks[(rank - step + 1) % size], right, chunks[(rank - step) % size], left)


def send_first(tensor, transport):
    right, left = neighbours(transport)
    incoming = torch.empty_like(tensor)
    transport.send(tensor, right)
    transport.recv(incoming, left)


def receive_first(tensor, transport):
    right, left = neighbours(transport)
    incoming = torch.empty_like(tensor)
    transport.recv(incoming, left)
    transport.send(tensor, right)


def leaves_early(tensor, transport):
    right, left = neighbours(transport)
    for _ in range(transport.size - 1 - (transport.rank == 0)):
        transport.exchange(tensor, right, torch.empty_like(tensor), left)


def fails_on_two(tensor, transport):
    if transport.rank == 2:
        raise KeyError("lost chunk")
    to_the_right(tensor, transport)


def fails_everywhere(tensor, transport):
    tensor[99]


def only_if_it_divides(tensor, transport):
    """`view` needs chunks of one size."""
    chunks = tensor.view(transport.size, -1)
    to_the_right(chunks, transport)


def chunks_that_are_too_few(tensor, transport):
    """torch.chunk(5) makes 3 chunks of 3 elements, where tensor_split(5) also makes two empty ones."""
    rank, size = transport.rank, transport.size
    right, left = neighbours(transport)
    chunks = tensor.chunk(size)
    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(mine)
        transport.exchange(chunks[(rank - step) % size], right, incoming, left)
        mine += incoming
    for step in range(size - 1):
        transport.exchange(chunks[(rank - step + 1) % size], right, chunks[(rank - step) % size], left)


def to_itself_if_alone(tensor, transport):
    right, left = neighbours(transport)
    if transport.size == 1:
        transport.exchange(tensor, right, tensor, left)
    to_the_right(tensor, transport)


def directly(tensor, transport):
    """The bytes of a ring, but each chunk goes straight to its owner and straight back to everyone."""
    rank, size = transport.rank, transport.size
    chunks = tensor.tensor_split(size)
    total = chunks[rank].clone()
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        incoming = torch.empty_like(total)
        transport.exchange(chunks[to], to, incoming, source)
        total += incoming
    chunks[rank].copy_(total)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        transport.exchange(chunks[rank], to, chunks[source], source)


def element_by_element(tensor, transport):
    class Crumbs:
        rank, size = transport.rank, transport.size

        def exchange(self, outgoing, to, incoming, source):
            for number in range(max(len(outgoing), len(incoming))):
                transport.exchange(outgoing[number : number + 1], to, incoming[number : number + 1], source)

    to_the_right(tensor, Crumbs())


def uneven_chunks(tensor, transport):
    class Cut:
        def tensor_split(self, size):
            return tensor.split([1] * (size - 1) + [len(tensor) - size + 1])

    to_the_right(Cut(), transport)


def through_variables():
    """No message at all: threads see each other's tensors."""
    given, ready = {}, threading.Condition()

    def ring(tensor, transport):
        with ready:
            given[transport.rank] = tensor.clone()
            ready.notify_all()
            ready.wait_for(lambda: len(given) == transport.size, timeout=5)
        tensor.copy_(sum(given.values()))

    return ring


def overwrites_what_it_sends(tensor, transport):
    right, left = neighbours(transport)
    chunks = tensor.tensor_split(transport.size)
    transport.exchange(chunks[transport.rank], right, chunks[transport.rank], left)


def receives_from_where_it_sends(tensor, transport):
    right, _ = neighbours(transport)
    transport.exchange(tensor, right, torch.empty_like(tensor), right)


def in_different_directions(tensor, transport):
    right, left = neighbours(transport)
    to, source = (right, left) if transport.rank == 0 else (left, right)
    transport.exchange(tensor, to, torch.empty_like(tensor), source)


def no_modulo(tensor, transport):
    transport.exchange(tensor, transport.rank + 1, torch.empty_like(tensor), transport.rank - 1)


def into_a_tuple(tensor, transport):
    chunks = tensor.tensor_split(transport.size)
    chunks[0] += 1


def other_sizes(tensor, transport):
    right, left = neighbours(transport)
    transport.exchange(tensor[: transport.rank], right, torch.empty(3), left)


def pieces_of_one_length(tensor, size):
    """Where the size does not divide, the last elements belong to no chunk."""
    return tensor.split(max(1, len(tensor) // size))[:size]


def tree(tensor, transport):
    """Up to rank 0 and down again, each time the whole tensor."""
    rank, size, incoming = transport.rank, transport.size, torch.empty_like(tensor)
    distance = 1
    while distance < size:
        if rank % (2 * distance) == distance:
            transport.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            transport.recv(incoming, rank + distance)
            tensor += incoming
        distance *= 2
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == distance:
            transport.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            transport.send(tensor, rank + distance)


def random_chunks(tensor, transport):
    """Element 0 gets what belongs to the others, too."""
    to_the_right(tensor, transport)
    tensor[0] += tensor[1]


def dlabs_two_rounds(tensor, transport):
    chunks = tensor.tensor_split(transport.size)
    collect_chunks(chunks, transport, lambda mine, incoming: mine.add_(incoming))
    pass_chunks(chunks, transport)


def dlabs_scatter_and_gather(tensor, transport):
    mine = collectives.reduce_scatter(tensor, transport)
    tensor.copy_(torch.cat(collectives.all_gather(mine, transport)))


WRONG = [
    (nothing, "with 4 ranks and 12 elements, every rank still holds only its own numbers: add what comes in"),
    (new_name, "every rank still holds only its own numbers"),
    (new_tensor, "the sum is returned as a new tensor: work in place"),
    (
        whole_tensor,
        "with 4 ranks and 12 elements, the sum is right, but each rank sent 3 times the tensor; a ring sends 2(n-1)/n "
        "of it, 1.5 times with 4 ranks: cut it into 4 chunks",
    ),
    (learners_copy(collectives.naive_allreduce), "each rank sent 3 times the tensor"),
    (tree, "rank 0 sent 2 times the tensor"),
    (first_round_only, "every rank holds a part of the sum and none has it all: the second round is missing"),
    (half_of_the_ranks, "ranks 0 and 1 hold the sum, but ranks 2 and 3 hold something else"),
    (mean, "every rank holds the mean: leave the sum as it is"),
    (one_step_too_few, "some parts are missing: the first round takes n-1 steps, and this one takes one less"),
    (random_chunks, "but the sum is 1111: rank r began with 10**r"),
    (
        send_first,
        "there is a deadlock: rank 0 waits to send to 1, rank 1 waits to send to 2, rank 2 waits to send to 3, "
        "rank 3 waits to send to 0: everyone sends first and nobody receives; transport.exchange does both",
    ),
    (receive_first, "rank 1 waits to receive from 0: everyone waits to receive and nobody sends"),
    (leaves_early, "0, which has returned: every rank must take the same number of steps"),
    (fails_on_two, "rank 2 ended in KeyError: 'lost chunk', in the line `raise KeyError(\"lost chunk\")`"),
    (fails_everywhere, "ranks 0, 1, 2 and 3 ended in IndexError: index 99 is out of bounds"),
    (lambda tensor: None, "ended in TypeError"),
    (
        only_if_it_divides,
        "with 4 ranks and 10 elements, ranks 0, 1, 2 and 3 ended in RuntimeError: shape '[4, -1]' is invalid",
    ),
    (chunks_that_are_too_few, "ended in IndexError: tuple index out of range, in the line `"),
    (to_itself_if_alone, "with 1 rank and 5 elements, rank 0 ended in ValueError: rank 0 sends to itself"),
    (directly, "the sum and the bytes are right, but rank 0 sent to ranks 1, 2 and 3: in a ring"),
    (learners_copy(collectives.halving_doubling_allreduce), "rank 0 sent to ranks 1 and 2"),
    (element_by_element, "there were 72 messages; a ring has 2n(n-1), that is 24"),
    (uneven_chunks, "the sum is right, but rank"),
    (through_variables(), "the sum is right, but only 0 bytes were sent"),
    (partial(ring, first="new"), "every rank holds its own numbers and one finished chunk: chunks[i] = chunks[i] +"),
    (partial(ring, first="new", direction=-1), "puts a new tensor into the list and leaves the old numbers"),
    (partial(ring, first="forget"), "a single rank: the first round adds to nothing that is sent on. Write chunk +="),
    (partial(ring, first="keep"), "in the first round what comes in must be added to the chunk, not take its place"),
    (partial(ring, first=None), "each chunk holds the numbers of a single rank: the first round is missing"),
    (partial(ring, second="add"), "in the sum more than once: the second round must keep what comes in, not add it"),
    (partial(ring, second="add", direction=-1, start=2), "the second round must keep what comes in, not add it"),
    (partial(ring, second=None, direction=-1), "the second round is missing, in which the finished chunks go round"),
    (
        partial(ring, second="put"),
        "although the finished chunks went round: what comes in during the second round must",
    ),
    (partial(ring, first="new", second="put"), "every rank still holds only its own numbers: add what comes in"),
    (partial(ring, steps=(1, 0)), "there were 28 messages; a ring has 2n(n-1), that is 24: each of the two rounds"),
    (partial(ring, steps=(0, -1)), "one chunk of every rank is unfinished: the second round takes n-1 steps"),
    (
        partial(ring, steps=(0, 1)),
        "there were 28 messages; a ring has 2n(n-1), that is 24: each of the two rounds",
    ),
    (partial(ring, begins=1), "the second round begins with the wrong chunk"),
    (partial(ring, begins=-1, direction=-1), "the second round begins with the wrong chunk"),
    (partial(ring, into=(1, 0)), "the first round adds to nothing that is sent on"),
    (partial(ring, into=(-1, 0)), "the first round adds what comes in to the wrong chunk"),
    (partial(ring, into=(1, 0), direction=-1), "the first round adds what comes in to the wrong chunk"),
    (partial(ring, into=(0, -1)), "the second round puts what comes in into the wrong chunk"),
    (
        partial(ring, cut=pieces_of_one_length),
        "with 4 ranks and 10 elements, 2 elements are left as before: the chunks",
    ),
    (overwrites_what_it_sends, "an exchange receives into the memory from which it sends: what comes in may overwrite"),
    (receives_from_where_it_sends, "every rank receives from the neighbour to which it sends; receive from the one on"),
    (in_different_directions, "let every rank send to the neighbour on one side, the same for all"),
    (no_modulo, "IndexError: rank 0 names rank -1, but the ranks are 0 to 3, in the line `transport.exchange("),
    (
        into_a_tuple,
        "'tuple' object does not support item assignment, in the line `chunks[0] += 1`; give the chunk a name",
    ),
    (other_sizes, "float32 to rank"),
    (collectives.ring_allreduce, "this calls dlab's own ring_allreduce, which is the answer: write the two rounds"),
    (lambda tensor, transport: collectives.ring_allreduce(tensor, transport), "this calls dlab's own ring_allreduce"),
    (partial(collectives.ring_allreduce, op="mean"), "this calls dlab's own ring_allreduce"),
    (collectives.naive_allreduce, "this calls dlab's own naive_allreduce: do without it, and write the two rounds"),
    (collectives.halving_doubling_allreduce, "this calls dlab's own halving_doubling_allreduce"),
    (dlabs_two_rounds, "this calls dlab's own collect_chunks, which is the answer"),
    (dlabs_scatter_and_gather, "this calls dlab's own reduce_scatter: do without it"),
    (lambda tensor, transport: dlab.allreduce(tensor), "this calls dlab's own allreduce: do without it"),
]
