"""The exercise of the second lesson: rings pass in either direction, and each mistake is told apart."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from dlab import collectives
from dlab.exercises import check_ring, ring

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "02_allreduce.ipynb"


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


@pytest.mark.parametrize("ring", [collectives.ring_allreduce, to_the_right, to_the_left, without_empty_messages])
def test_rings_in_either_direction_pass(ring):
    assert check_ring(ring).startswith("well done: ")


# ---------------------------------------------------------------------------------- wrong in some way


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


WRONG = [
    (nothing, "with 4 ranks and 12 elements, every rank still holds only its own numbers: add what comes in"),
    (new_name, "every rank still holds only its own numbers"),
    (new_tensor, "the sum is returned as a new tensor: work in place"),
    (
        whole_tensor,
        "with 4 ranks and 12 elements, the sum is right, but each rank sent 3 times the tensor; a ring sends 2(n-1)/n "
        "of it, 1.5 times with 4 ranks: cut it into 4 chunks",
    ),
    (collectives.naive_allreduce, "each rank sent 3 times the tensor"),
    (collectives.tree_allreduce, "rank 0 sent 2 times the tensor"),
    (first_round_only, "every rank holds a part of the sum and none has it all: the second round is missing"),
    (half_of_the_ranks, "ranks 0 and 1 hold the sum, but ranks 2 and 3 hold something else"),
    (mean, "every rank holds the mean: leave the sum as it is"),
    (one_step_too_few, "but the sum is 1111: rank r began with 10**r"),
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
    (collectives.halving_doubling_allreduce, "rank 0 sent to ranks 1 and 2"),
    (element_by_element, "there were 72 messages; a ring has 2n(n-1), that is 24"),
    (uneven_chunks, "the sum is right, but rank"),
    (through_variables(), "the sum is right, but only 0 bytes were sent"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[getattr(wrong, "__name__", "") for wrong, _ in WRONG])
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_ring(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_ring_that_relies_on_timing_fails_when_a_rank_is_slow(monkeypatch):
    monkeypatch.setattr(ring, "PAUSE", 0.3)
    notes = {}

    def hopeful(tensor, transport):
        notes[transport.rank] = tensor.clone()
        to_the_right(tensor, transport)
        notes[transport.rank] = tensor.clone()
        time.sleep(0.1)  # by now the neighbour must have finished
        tensor.copy_(notes[(transport.rank + 1) % transport.size])

    answer = check_ring(hopeful)
    assert answer.startswith(
        "not yet: with 4 ranks and 12 elements, rank 1 slow, ranks 0, 1 and 2 hold the sum, but rank 3"
    )


@pytest.mark.parametrize("looping", [(0, 1, 2, 3), (2,)], ids=["all", "one"])
def test_a_loop_that_does_not_end_is_told_and_its_threads_end(monkeypatch, looping):
    monkeypatch.setattr(ring, "LIMIT", 0.3)

    def spin(tensor, transport):
        while transport.rank in looping:
            pass
        to_the_right(tensor, transport)

    answer = check_ring(spin)
    assert "ranks 0, 1, 2 and 3 had not returned after 0.3 s: look for a loop that does not end" in answer
    deadline = time.monotonic() + 10
    while any(re.fullmatch(r"rank \d", thread.name) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the learner's threads still run"
        time.sleep(0.01)


# -------------------------------------------------------------------------------------- the notebook


@pytest.fixture(scope="module")
def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


def define(source):
    names = {"torch": torch}
    exec(source, names)
    return names["my_ring"]


def test_the_hidden_solution_passes(cells):
    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_ring(define(solution)).startswith("well done")


def test_the_stub_does_not_pass_and_the_notebook_shows_it(cells):
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def my_ring")]
    answer = check_ring(define(stub))
    assert "still holds only its own numbers" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
