"""Communication with gradients: each function against what one process computes; layouts and numbers of DTensor."""

import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from sharded import wave
from torch import nn

import dlab
from dlab.layout import Layout
from dlab.sharding import communication
from dlab.sharding.communication import (
    AllGather,
    AllReduce,
    AllToAll,
    Copy,
    ReduceScatter,
    Slice,
    World,
    redistribute,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4
LINE = Layout((4,), ("x",))
FUNCTIONS = [Copy, AllReduce, Slice, AllGather, ReduceScatter, AllToAll]


def on_line(work, ranks=4):
    """Call `work(line, world)` on every rank of one line."""

    def one(transport):
        world = World(ranks, transport.rank, transport)
        return work(world.line(Layout((ranks,), ("x",)), ("x",)), world)

    return dlab.rehearse(one, ranks=ranks)


def test_there_is_a_function_for_each_communication_and_its_docstring_says_what_goes_back():
    found = [
        each
        for each in vars(communication).values()
        if isinstance(each, type) and issubclass(each, torch.autograd.Function)
    ]
    assert set(found) == set(FUNCTIONS)
    for each in found:
        assert "Forward:" in each.__doc__ and "Backward:" in each.__doc__


# what goes forth, and what goes back: by the definition, a loop over the ranks


def run_one(function, *settings):
    """The result and the gradient of every rank's part, for gradients that differ from rank to rank."""

    def work(line, world):
        part = wave(torch.empty(4, 8, dtype=torch.float64)) * (world.rank + 1)
        part.requires_grad_()
        result = function.apply(part, line, *settings)
        gradient = wave(result.detach()) * (world.rank + 2)
        result.backward(gradient)
        return part.detach(), result.detach(), gradient, part.grad

    return list(zip(*on_line(work), strict=True))


def test_copy():
    parts, results, gradients, back = run_one(Copy, "name")
    assert all(torch.equal(a, b) for a, b in zip(parts, results, strict=True))
    assert all(torch.allclose(each, sum(gradients)) for each in back)


def test_all_reduce():
    parts, results, gradients, back = run_one(AllReduce)
    assert all(torch.allclose(each, sum(parts)) for each in results)
    assert all(torch.equal(a, b) for a, b in zip(back, gradients, strict=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_slice(dim):
    parts, results, gradients, back = run_one(Slice, dim, "name")
    assert all(torch.equal(result, parts[rank].chunk(4, dim)[rank]) for rank, result in enumerate(results))
    assert all(torch.equal(each, torch.cat(gradients, dim)) for each in back)


@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather(dim):
    parts, results, gradients, back = run_one(AllGather, dim, False, "name")
    assert all(torch.equal(each, torch.cat(parts, dim)) for each in results)
    assert all(torch.equal(each, gradients[rank].chunk(4, dim)[rank]) for rank, each in enumerate(back))
    *_, gradients, back = run_one(AllGather, dim, True, "name")
    assert all(torch.allclose(each, sum(gradients).chunk(4, dim)[rank]) for rank, each in enumerate(back))


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter(dim):
    parts, results, gradients, back = run_one(ReduceScatter, dim, "name")
    assert all(torch.allclose(each, sum(parts).chunk(4, dim)[rank]) for rank, each in enumerate(results))
    assert all(torch.equal(each, torch.cat(gradients, dim)) for each in back)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_all_to_all(source, target):
    parts, results, gradients, back = run_one(AllToAll, source, target, "name")
    whole = torch.cat(parts, source)
    assert all(torch.equal(each, whole.chunk(4, target)[rank]) for rank, each in enumerate(results))
    whole = torch.cat(gradients, target)
    assert all(torch.equal(each, whole.chunk(4, source)[rank]) for rank, each in enumerate(back))


def test_what_goes_back_is_nobody_elses_tensor():
    """A parameter keeps its first gradient and adds to it: that must not change the gradient that was given."""

    def work(line, world):
        part, given = torch.ones(2, 8, requires_grad=True), torch.ones(8, 8)
        for _ in range(3):
            AllGather.apply(part, line, 0, False, "name").backward(given)
        return given, part.grad

    for given, gradient in on_line(work):
        assert torch.equal(given, torch.ones(8, 8)) and torch.equal(gradient, torch.full((2, 8), 3.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16])
def test_every_type_of_number_can_be_moved(dtype):
    whole = (torch.arange(64).view(8, 8) % 2).to(dtype)

    def work(transport):
        world = World(4, transport.rank, transport)
        source, target = LINE("x", None), LINE(None, "x")
        part = whole[source.slices_of(transport.rank, (8, 8))]
        moved = redistribute(part, source, target, (8, 8), world)
        return moved, redistribute(moved, target, LINE(None, None), (8, 8), world)

    for rank, (part, all_) in enumerate(dlab.rehearse(work, ranks=4)):
        assert part.dtype == dtype and torch.equal(part, whole.chunk(4, 1)[rank]) and torch.equal(all_, whole)


# counts of known networks


def mlp(first, second, needs_gradient):
    """What a network of two layers and a ReLU communicates, on 4 ranks."""
    weights = [nn.Parameter(torch.randn(784, 512)), nn.Parameter(torch.randn(512, 784))]
    net = nn.ParameterList(weights)

    def forward(x):
        return second(torch.relu(first(x, net[0])), net[1])

    told = dlab.AutoParallel(forward, ranks=4).explain(torch.randn(128, 784, requires_grad=needs_gradient))
    return told.collectives("forward"), told.collectives("backward")


def test_a_column_and_a_row_need_one_all_reduce_forward_and_one_back():
    """Megatron's pair; the one on the way back only if the input needs a gradient."""
    first, second = dlab.ops.MatMul().shard(((1, 1), (1, 4))), dlab.ops.MatMul().shard(((1, 4), (4, 1)))
    assert mlp(first, second, True) == (["all-reduce"], ["all-reduce"])
    assert mlp(first, second, False) == (["all-reduce"], [])


def test_with_sequence_parallelism_a_gather_and_a_scatter():
    """The input comes in parts of rows, and the result leaves so: all-gather and reduce-scatter, both ways."""
    layout = Layout((4,), ("tp",))
    weights = nn.ParameterList([nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))])
    first = dlab.ops.MatMul().shard((layout(None, None), layout(None, "tp")))
    second = dlab.ops.MatMul().shard((layout(None, "tp"), layout("tp", None)), out_strategy=layout("tp", None))

    def forward(x):
        return second(torch.relu(first(x, weights[0])), weights[1])

    for needs, back in [(True, ["all-gather", "reduce-scatter"]), (False, ["all-gather"])]:
        par = dlab.AutoParallel(forward, ranks=4, dataset_strategy="data_parallel")
        told = par.explain(torch.randn(2, 8, requires_grad=needs))
        forth = [each.collective for each in told.messages if each.direction == "forward"]
        assert forth[:2] == ["all-gather", "reduce-scatter"] and forth[2:] == ["all-gather"]  # the last: whole again
        assert [each.collective for each in told.messages if each.direction == "backward"] == back


def test_recorded_bytes_are_those_of_the_explanation():
    first, second = dlab.ops.MatMul().shard(((2, 2), (2, 1))), dlab.ops.MatMul().shard(((1, 4), (4, 1)))
    torch.manual_seed(0)
    weights = [torch.randn(16, 16), torch.randn(16, 16)]

    def work(transport):
        net = nn.ParameterList([nn.Parameter(each.clone()) for each in weights])

        def forward(x):
            return second(torch.relu(first(x, net[0])), net[1]).sum(0)

        par = dlab.AutoParallel(forward, transport=transport)
        x = torch.ones(16, 16, requires_grad=True)
        told = par.explain(x).bytes_per_rank()
        par(x).sum().backward()
        return told

    run = dlab.rehearse(work, ranks=4)
    sent = [sum(each.data["bytes"] for each in run.messages if each.rank == rank) for rank in range(4)]
    assert sent == list(run) and sent[0] > 0


# DTensor, in the same processes


def with_dtensor():
    """On this rank: for each case, whether shards and gradients equal DTensor's, and the layouts of both."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layout = Layout((2, 2), ("dp", "tp"))
    x, w = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64)
    whole, rows, columns = Replicate(), Shard(0), Shard(1)

    def placed(placements, dims=2):
        cut = [[] for _ in range(dims)]
        for name, each in zip(("dp", "tp"), placements, strict=True):
            if isinstance(each, Shard):
                cut[each.dim].append(name)
        sums = [n for n, each in zip(("dp", "tp"), placements, strict=True) if isinstance(each, Partial)]
        return layout(*(tuple(names) or None for names in cut)).with_partial(*sums)

    def ours(function, tensors, placements, settings):
        """dlab's operator with these placements as its layouts: result, its layout, and gradients of the inputs."""
        seen = []
        strategy = tuple(placed(p, tensor.dim()) for p, tensor in zip(placements, tensors, strict=True))
        operator = dlab.shard(function, in_strategy=strategy)

        def body(*inputs):
            seen.append(operator(inputs[0], *settings, *inputs[1:]))
            return seen[0]

        mine = [each.clone().requires_grad_() for each in tensors]
        result = dlab.AutoParallel(body)(*mine)
        result.backward(wave(result.detach()))
        return result.detach(), seen[0].placed, seen[0].local().detach(), [each.grad for each in mine]

    cases = [
        ("matmul, rows and columns", torch.matmul, [x, w], [(rows, whole), (whole, columns)], ()),
        ("matmul, contracted", torch.matmul, [x, w], [(rows, columns), (whole, rows)], ()),
        ("matmul, two ways", torch.matmul, [x, w], [(columns, whole), (rows, columns)], ()),
        ("linear, columns", F.linear, [x, w], [(rows, whole), (whole, rows)], ()),
        ("linear, rows", F.linear, [x, w], [(rows, columns), (whole, columns)], ()),
        ("relu", torch.relu, [x], [(rows, columns)], ()),
        ("gelu", F.gelu, [x], [(columns, rows)], ()),
        ("layer_norm", F.layer_norm, [x, bias, bias], [(rows, rows), (whole, whole), (whole, whole)], ((8,),)),
        ("softmax", F.softmax, [x], [(rows, whole)], (1,)),
        ("add", torch.add, [x, bias], [(rows, columns), (whole, rows)], ()),
    ]
    found = {}
    for name, function, tensors, placements, settings in cases:
        theirs = [
            distribute_tensor(each.clone(), mesh, list(p)).requires_grad_()
            for each, p in zip(tensors, placements, strict=True)
        ]
        result = function(theirs[0], *settings, *theirs[1:])
        added = [whole if isinstance(each, Partial) else each for each in result.placements]
        settled = result.redistribute(placements=added)
        full = settled.full_tensor()
        settled.backward(distribute_tensor(wave(full.detach()), mesh, added))
        mine, where, local, gradients = ours(function, tensors, placements, settings)
        same = [torch.allclose(a, b.grad.full_tensor(), rtol=1e-12) for a, b in zip(gradients, theirs, strict=True)]
        found[name] = {
            "result": torch.allclose(mine, full.detach(), rtol=1e-12),
            "shard": torch.allclose(local, settled.to_local().detach(), rtol=1e-12),
            "layout": where.slices_of(rank, mine.shape) == placed(added, mine.dim()).slices_of(rank, mine.shape),
            "gradients": all(same),
        }
    return found


def test_results_shards_layouts_and_gradients_equal_those_of_dtensor(cluster):
    for found in cluster.run(with_dtensor, timeout=100):
        assert len(found) == 10
        for name, same in found.items():
            assert all(same.values()), (name, same)
