"""dlab.allreduce: through shared memory, in place, equal to the plain computation, with the same bits on every rank."""

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

import dlab
from dlab.collectives import ring_allreduce

WORKERS = 3  # of the cluster
OPS = {"sum": torch.sum, "mean": torch.mean, "product": torch.prod, "max": torch.amax, "min": torch.amin}


def _input(rank, elements, dtype):
    return torch.randint(-4, 5, (elements,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _reduce(shared, elements, dtype, op, algorithm="auto"):
    mine = _input(dlab.rank(), elements, dtype)
    tensor = dlab.shared_empty(elements, dtype=dtype) if shared else torch.empty(elements, dtype=dtype)
    tensor.copy_(mine)
    assert dlab.allreduce(tensor, algorithm=algorithm, op=op) is None
    return tensor.clone()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("elements", [0, 1, 5, 1001, 300_000])
def test_equals_the_plain_computation(cluster, shared, op, elements):
    inputs = torch.stack([_input(rank, elements, torch.float64) for rank in range(3)])
    for found in cluster.run(_reduce, shared, elements, torch.float64, op, timeout=60):
        assert torch.allclose(found, OPS[op](inputs, dim=0), rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_any_type(cluster, dtype):
    inputs = [_input(rank, 77, dtype) for rank in range(3)]
    for found in cluster.run(_reduce, True, 77, dtype, "sum", timeout=60):
        assert found.dtype == dtype and torch.equal(found, inputs[0] + inputs[1] + inputs[2])


@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring", "halving_doubling", "hierarchical"])
def test_an_algorithm_can_be_chosen(cluster, algorithm):
    inputs = [_input(rank, 50, torch.float32) for rank in range(3)]
    for found in cluster.run(_reduce, False, 50, torch.float32, "sum", algorithm, timeout=60):
        assert torch.equal(found, sum(inputs))


def _same_bits():
    torch.manual_seed(dlab.rank())
    tensor = torch.randn(100_003) * 10.0 ** dlab.rank()
    dlab.allreduce(tensor)
    everyone = [torch.empty_like(tensor) for _ in range(3)]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(each, tensor) for each in everyone)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_a_sum_beyond_the_range_of_floats_is_infinite_without_a_warning(cluster, capfd, shared):
    def work():
        tensor = dlab.shared_empty(1000) if shared else torch.empty(1000)
        tensor.fill_(3e38)
        tensor[0] = float("inf") if dlab.rank() else -float("inf")
        dlab.allreduce(tensor)
        return tensor[:2].tolist()

    assert [str(each) for each in cluster.run(work)] == ["[nan, inf]"] * WORKERS
    assert "Warning" not in "".join(capfd.readouterr())


def test_all_ranks_hold_the_same_bits(cluster):
    assert cluster.run(_same_bits, timeout=60) == [True] * 3


def _many_in_a_row():
    flat = dlab.shared_empty(1000)
    for step in range(300):
        flat.fill_(dlab.rank() + step)
        dlab.allreduce(flat, op="mean")
        assert (flat == 1 + step).all(), step
        part = flat[100 : 100 + step]
        part.fill_(dlab.rank())
        dlab.allreduce(part)
        assert (part == 3).all() and (flat[:100] == 1 + step).all(), step
        private = torch.full((step,), float(dlab.rank()))
        dlab.allreduce(private, op="max")
        assert (private == 2).all(), step
    return True


def test_many_in_a_row_of_growing_size_and_views_of_a_shared_buffer(cluster):
    assert cluster.run(_many_in_a_row, timeout=100) == [True] * 3


def _shared_memory_in_use():
    from dlab import reduction

    kept = dlab.shared_empty(10)
    for _ in range(5):
        dlab.shared_empty(100_000)
    gc.collect()
    count = len(reduction._shared_memory()._arenas)
    dlab.allreduce(kept.fill_(1.0))
    return count, kept.tolist()


def test_a_shared_tensor_that_is_gone_gives_its_memory_back(cluster):
    assert cluster.run(_shared_memory_in_use, timeout=60) == [(1, [3.0] * 10)] * 3


def _call(bad):
    bad(dlab.rank())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda rank: dlab.allreduce(torch.ones(3 + rank)), "brings 3 float32 of its own for sum"),
        (
            lambda rank: dlab.allreduce(torch.ones(3 + rank)),
            r"rank [0-2] brings .* and rank [0-2] brings [345] float32",
        ),
        (
            lambda rank: dlab.all_gather(torch.ones(3 + rank)),
            r"own to an all-gather .* own: .* the same size and type$",
        ),
        (lambda rank: dlab.all_to_all(torch.ones(3, 1 + rank)), r"own to an all-to-all .* own: .* same size and type$"),
        (lambda rank: dlab.all_gather(torch.ones(3, 3).t()), "a collective takes only a dense, contiguous tensor"),
        (lambda rank: dlab.allreduce(torch.ones(3), op=["sum", "max", "sum"][rank]), "the same size, type and op"),
        (lambda rank: dlab.allreduce(torch.ones(3, dtype=[torch.int8, torch.int16][rank > 0])), "brings 3 int"),
        (lambda rank: dlab.allreduce(torch.ones(3), algorithm="star"), "no algorithm 'star': use auto"),
        (lambda rank: dlab.allreduce(torch.ones(3), op="median"), "no op 'median'"),
        (lambda rank: dlab.allreduce(torch.ones(3, 3).t()), "contiguous"),
        (lambda rank: dlab.allreduce(torch.eye(3).to_sparse()), "dense"),
        (lambda rank: dlab.shared_empty(3 + rank), r"own to shared_empty .* own: .* the same size and type$"),
    ],
)
def test_bad_input_gets_a_sentence_and_no_rank_is_left_hanging(cluster, bad, words):
    with pytest.raises(dlab.WorkerError, match=f"Error: .*{words}"):  # the words are also in the line that called it
        cluster.run(_call, bad, timeout=30)
    assert cluster.run(_same_bits, timeout=60) == [True] * 3


def _wait_for_a_dead_rank():
    if dlab.rank() == 1:
        import os

        os._exit(3)
    dlab.allreduce(torch.ones(3))


def test_ranks_that_wait_for_a_dead_one_are_released(cluster):
    with pytest.raises(dlab.WorkerError, match="rank 1 exited with code 3"):
        cluster.run(_wait_for_a_dead_rank, timeout=30)
    assert cluster.run(_same_bits, timeout=60) == [True] * 3


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_number_of_ranks(ranks):
    with dlab.Cluster(ranks) as cluster:
        inputs = [_input(rank, 1001, torch.float32) for rank in range(ranks)]
        for shared in (True, False):
            for found in cluster.run(_reduce, shared, 1001, torch.float32, "sum", timeout=60):
                assert torch.equal(found, sum(inputs))


def test_outside_a_process_group_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"cluster\.run"):
        dlab.allreduce(torch.ones(3))


def _averaged(allreduce):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)  # frozen: has no gradient, and needs none
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, (dlab.rank() + 1.0) * (number + 1))
    dlab.average_gradients(model, allreduce=allreduce)
    return [parameter.grad for parameter in model.parameters()]


def _by_hand(tensor, transport):
    """All to rank 0, and back."""
    if transport.rank:
        transport.send(tensor, 0)
        transport.recv(tensor, 0)
        return
    incoming = torch.empty_like(tensor)
    for other in (1, 2):
        transport.recv(incoming, other)
        tensor += incoming
    for other in (1, 2):
        transport.send(tensor, other)


@pytest.mark.parametrize("allreduce", [None, ring_allreduce, _by_hand], ids=["dist", "ring", "by hand"])
def test_average_gradients_gives_every_rank_the_mean_of_each_parameter(cluster, allreduce):
    for found in cluster.run(_averaged, allreduce, timeout=60):
        assert found[1] is None
        for number in (0, 2, 3):
            assert (found[number] == 2.0 * (number + 1)).all()


def test_average_gradients_before_backward_says_what_to_do(cluster):
    with pytest.raises(dlab.WorkerError, match=r"weight has no gradient: call loss\.backward\(\) first"):
        cluster.run(lambda: dlab.average_gradients(torch.nn.Linear(2, 2)), timeout=30)


def _train(flat_in):
    torch.manual_seed(0)
    model = dlab.TwoLayer()
    flat = dlab.models.flatten_gradients(model, empty=flat_in) if flat_in else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = dlab.mnist(train=False)[:96]
    for step in range(4):
        mine = slice(8 * (3 * step + dlab.rank()), 8 * (3 * step + dlab.rank() + 1))
        optimizer.zero_grad(set_to_none=flat is None)
        torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        if flat is None:
            dlab.average_gradients(model)
        else:
            dlab.allreduce(flat, op="mean")
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("flat_in", [torch.empty, dlab.shared_empty], ids=["private", "shared"])
def test_training_with_one_flat_gradient_equals_training_parameter_by_parameter(cluster, flat_in):
    for flat, single in zip(cluster.run(_train, flat_in), cluster.run(_train, None), strict=True):
        torch.testing.assert_close(flat, single)


def _use_the_group():
    import torch.distributed.nn

    sys.left = weakref.ref(dist.group.WORLD)
    dlab.allreduce(torch.ones(3))
    dlab.allreduce(torch.ones(3), algorithm="ring")
    assert torch.distributed.nn.all_reduce(torch.ones(1)) == 3


def test_a_group_that_was_left_is_gone_with_its_connections_and_threads(cluster):
    cluster.run(_use_the_group, timeout=60)
    with pytest.raises(dlab.WorkerError, match="division"):
        cluster.run(lambda: 1 / 0, timeout=60)  # all form a new one
    assert cluster.run(lambda: sys.left() is None, timeout=60) == [True] * 3
