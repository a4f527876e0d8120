"""Every collective equals the plain computation on every transport, for any ranks, size, type and operation."""

import functools
import operator
import sys

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dlab
from dlab import collectives, cost

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
ALGORITHMS = ["naive", "tree", "ring", "halving_doubling", "hierarchical"]
PLAIN = {
    "sum": functools.partial(functools.reduce, operator.add),
    "mean": lambda tensors: functools.reduce(operator.add, tensors) / len(tensors),
    "product": functools.partial(functools.reduce, operator.mul),
    "max": functools.partial(functools.reduce, torch.maximum),
    "min": functools.partial(functools.reduce, torch.minimum),
}


def _inputs(ranks, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(ranks)]


def _allreduce(name, op="sum"):
    """What each rank does: all-reduce its tensor in place."""

    def work(transport, mine):
        assert getattr(collectives, f"{name}_allreduce")(mine, transport, op=op) is None
        return mine

    return work


def _rehearse(work, inputs):
    return dlab.rehearse(lambda transport: work(transport, inputs[transport.rank].clone()), ranks=len(inputs))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_allreduce_equals_the_plain_sum_and_costs_what_the_formula_says(transport, name):
    for ranks in transport.numbers:
        for elements in (0, 1, 7, 64, 1001):
            inputs = _inputs(ranks, (elements,), torch.float32)
            found = transport(_allreduce(name), inputs)
            for tensor in found:
                assert torch.equal(tensor, sum(inputs))  # whole numbers: exact
            sent = [0] * ranks
            for event in found.messages:
                sent[event.rank] += event.data["bytes"]
            steps = {(event.data["phase"], event.data["step"]) for event in found.messages}
            formula = cost.allreduce(name, ranks, 4 * elements)
            assert (len(found.messages), len(steps), sent) == (formula.messages, formula.steps, formula.bytes_per_rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_allreduce_of_few_and_many_numbers_of_each_type(transport, name, dtype):
    close = {"rtol": 2e-2 if dtype == torch.bfloat16 else 0.0, "atol": 0.0}
    for elements in (0, 1, 10, 200_001):
        inputs = [torch.arange(elements).mul(rank + 1).to(dtype) for rank in transport.numbers[:3]]
        found = transport(_allreduce(name), inputs)
        assert all(torch.equal(tensor, found[0]) for tensor in found)
        assert torch.allclose(found[0], functools.reduce(operator.add, inputs), **close)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 9),
    elements=st.integers(0, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8]),
    op=st.sampled_from(sorted(PLAIN)),
    seed=st.integers(0, 1000),
)
def test_allreduce_for_any_ranks_size_type_and_operation(name, ranks, elements, dtype, op, seed):
    if op == "mean" and not dtype.is_floating_point:
        return
    inputs = _inputs(ranks, (elements,), dtype, seed)
    if op == "product" and dtype == torch.int8:
        inputs = [tensor.clamp(-1, 1) for tensor in inputs]
    found = _rehearse(_allreduce(name, op), inputs)
    expected = PLAIN[op](inputs)
    for tensor in found:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, found[0])
        assert torch.allclose(tensor.double(), expected.double(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_hold_the_same_bits_of_sums_that_depend_on_the_order(transport, name):
    for ranks in transport.numbers[1:]:
        generator = torch.Generator().manual_seed(ranks)
        inputs = [torch.randn(3, 35, generator=generator) * 10.0**rank for rank in range(ranks)]
        found = transport(_allreduce(name), inputs)
        assert all(torch.equal(tensor, found[0]) for tensor in found)
        exact = sum(tensor.double() for tensor in inputs)
        assert torch.allclose(found[0].double(), exact, rtol=1e-4, atol=1e-6 * 10.0**ranks)


def test_a_hand_written_ring_sends_only_to_its_neighbours(transport):
    ranks = transport.numbers[:5][-1]
    found = transport(_allreduce("ring"), _inputs(ranks, (100,), torch.float32))
    assert {(event.data["destination"] - event.rank) % ranks for event in found.messages} == {1}


@pytest.mark.parametrize("group_size", [1, 2, 3, 7])
def test_hierarchical_takes_any_group_size(group_size):
    inputs = _inputs(7, (10,), torch.float64)

    def work(transport, mine):
        collectives.hierarchical_allreduce(mine, transport, op="mean", group_size=group_size)
        return mine

    for tensor in _rehearse(work, inputs):
        assert torch.allclose(tensor, sum(inputs) / 7)


def test_broadcast_and_reduce_for_every_root(transport):
    def work(transport, mine):
        found = []
        for root in range(transport.size):
            copied, reduced = mine.clone(), mine.clone()
            collectives.broadcast(copied, transport, root=root)
            collectives.reduce(reduced, transport, root=root, op="sum")
            found.append((copied, reduced))
        return found

    for ranks in transport.numbers:
        inputs = _inputs(ranks, (5,), torch.float32)
        for rank, found in enumerate(transport(work, inputs)):
            for root, (copied, reduced) in enumerate(found):
                assert torch.equal(copied, inputs[root])
                assert torch.equal(reduced, sum(inputs) if rank == root else inputs[rank])


def test_gather_and_scatter_are_each_others_opposite(transport):
    def work(transport, mine):
        root = transport.size - 1
        gathered = collectives.gather(mine, transport, root=root)
        back = torch.empty_like(mine)
        collectives.scatter(back, transport, gathered, root=root)
        return gathered, back

    for ranks in transport.numbers:
        inputs = _inputs(ranks, (2, 3), torch.float32)
        for rank, (gathered, back) in enumerate(transport(work, inputs)):
            assert torch.equal(back, inputs[rank])
            if rank == ranks - 1:
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(gathered, inputs, strict=True))
            else:
                assert gathered is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("elements", [0, 1, 13, 200_001])
def test_reduce_scatter_all_gather_and_all_to_all(transport, elements, dtype):
    def work(transport, mine):
        part = collectives.reduce_scatter(mine, transport)
        everything = collectives.all_gather(mine, transport)
        swapped = collectives.all_to_all([mine + to for to in range(transport.size)], transport)
        transport.barrier()
        return part, everything, swapped

    for ranks in transport.numbers if elements < 100 else transport.numbers[2:3]:
        inputs = _inputs(ranks, (elements,), dtype)
        parts = sum(inputs).tensor_split(ranks)
        for rank, (part, everything, swapped) in enumerate(transport(work, inputs)):
            assert torch.equal(part, parts[rank])
            assert all(torch.equal(one, other) for one, other in zip(everything, inputs, strict=True))
            assert all(torch.equal(swapped[source], inputs[source] + rank) for source in range(ranks))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: collectives.ring_allreduce(torch.ones(2, 2).t(), t), ValueError, "contiguous"),
        (lambda t: collectives.tree_allreduce(torch.eye(2).to_sparse(), t), ValueError, "dense"),
        (lambda t: collectives.ring_allreduce(torch.ones(2), t, op="median"), ValueError, "no op 'median': use sum"),
        (lambda t: collectives.naive_allreduce(torch.ones(2).int(), t, op="mean"), ValueError, "not whole"),
        (lambda t: collectives.broadcast(torch.ones(2), t, root=2), IndexError, "the ranks are 0 to 1"),
        (lambda t: collectives.ring_allreduce(torch.ones(2 + 2 * t.rank), t), ValueError, "which expected"),
        (lambda t: collectives.all_to_all([torch.ones(1)], t), ValueError, "one for each"),
        (lambda t: collectives.scatter(torch.ones(1), t, None), ValueError, "a part for each"),
        (lambda t: collectives.hierarchical_allreduce(torch.ones(1), t, group_size=3), ValueError, "use 1 to 2"),
    ],
)
def test_bad_input_gets_a_sentence_and_no_rank_is_left_hanging(transport, call, error, words):
    with pytest.raises(error if transport.kind == "threads" else dlab.WorkerError, match=words):
        transport(lambda transport, _: call(transport), _inputs(2, (1,), torch.float32))


def test_the_ring_sends_what_the_published_formula_says():
    for ranks in (2, 4, 8):
        found = cost.allreduce("ring", ranks, 4 * 840)
        assert found.messages == 2 * ranks * (ranks - 1)
        assert found.bytes_per_rank == [2 * (ranks - 1) * 4 * 840 // ranks] * ranks


@pytest.mark.parametrize(
    ("arguments", "words"), [(("star", 4, 8), "no algorithm 'star': use naive"), (("ring", 0, 8), "1 rank or more")]
)
def test_a_cost_that_cannot_be_gets_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        cost.allreduce(*arguments)
