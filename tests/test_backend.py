"""The backend `dlab` under torch.distributed's own API: it gives what gloo gives, and DDP and the like run on it."""

import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dlab
import dlab.backend
from dlab.collectives import ring_allreduce

RANKS, BACKEND = 4, "dlab"  # of the cluster


@pytest.fixture(scope="module")
def gloo():
    with dlab.Cluster(RANKS, backend="gloo") as cluster:
        yield cluster


def _mine(elements=7, dtype=torch.float64):
    torch.manual_seed(dist.get_rank())
    return torch.randint(1, 9, (elements,)).to(dtype)


def _reductions():
    found = {}
    for op in ("SUM", "PRODUCT", "MAX", "MIN"):
        found[op] = _mine()
        dist.all_reduce(found[op], op=getattr(dist.ReduceOp, op))
    for op in ("BAND", "BOR", "BXOR"):
        found[op] = _mine(dtype=torch.int32)
        dist.all_reduce(found[op], op=getattr(dist.ReduceOp, op))
    found["reduce"] = _mine()
    dist.reduce(found["reduce"], dst=2)
    if dist.get_rank() != 2:
        found.pop("reduce")  # gloo leaves what it was in the middle of
    parts = [_mine() + to for to in range(RANKS)]
    found["part"] = torch.empty(7, dtype=torch.float64)
    dist.reduce_scatter(found["part"], parts)
    found["part of a tensor"] = torch.empty(2, 3)
    dist.reduce_scatter_single(found["part of a tensor"], torch.arange(24.0).view(8, 3) * (dist.get_rank() + 1))
    found["sparse"] = torch.sparse_coo_tensor([[dist.get_rank(), 4]], [1.0, 2.0], (5,), check_invariants=False)
    dist.all_reduce(found["sparse"])
    found["sparse"] = found["sparse"].to_dense()
    found["one number"] = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(found["one number"])
    return found


def _movements():
    rank = dist.get_rank()
    found = {"broadcast": _mine()}
    dist.broadcast(found["broadcast"], src=3)
    gathered = [torch.empty(7, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(gathered, _mine())
    found["all_gather"] = torch.stack(gathered)
    found["all_gather_single"] = torch.empty(RANKS * 2, 3)
    dist.all_gather_single(found["all_gather_single"], torch.full((2, 3), float(rank)))
    at_root = [torch.empty(7, dtype=torch.float64) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(_mine(), at_root, dst=1)
    found["gather"] = torch.stack(at_root) if at_root else torch.empty(0)
    found["scatter"] = torch.empty(2)
    dist.scatter(found["scatter"], [torch.full((2,), float(to)) for to in range(RANKS)] if rank == 1 else None, src=1)
    swapped = [torch.empty(3) for _ in range(RANKS)]
    dist.all_to_all(swapped, [torch.full((3,), 10.0 * rank + to) for to in range(RANKS)])
    found["all_to_all"] = torch.cat(swapped)
    rows = torch.arange(2.0 * RANKS * (rank + 1)).view(-1, 2)
    found["all_to_all_single"] = torch.empty(sum(from_ + 1 for from_ in range(RANKS)), 2)
    dist.all_to_all_single(
        found["all_to_all_single"],
        rows,
        output_split_sizes=[from_ + 1 for from_ in range(RANKS)],
        input_split_sizes=[rank + 1] * RANKS,
    )
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    found["objects"] = objects
    return found


def _messages():
    rank, after, before = dist.get_rank(), (dist.get_rank() + 1) % RANKS, (dist.get_rank() - 1) % RANKS
    large = torch.empty(1_000_000)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((1_000_000,), float(rank)), after), dist.P2POp(dist.irecv, large, before)]
    )
    for work in works:
        work.wait()
    first, second = torch.empty(2), torch.empty(3)
    sent = [dist.isend(torch.full((3,), 2.0), after, tag=2), dist.isend(torch.full((2,), 1.0), after, tag=1)]
    dist.recv(first, before, tag=1)  # the message with tag 2 is in front of it
    dist.recv(second, before, tag=2)
    for work in sent:
        work.wait()
    anyone, sources = torch.empty(1), []
    if rank == 0:
        sources = [dist.recv(anyone, src=None) for _ in range(1, RANKS)]
    else:
        dist.send(torch.ones(1), 0)
    return {"large": large.unique(), "first": first, "second": second, "sources": sorted(sources)}


def _groups_and_works():
    rank, found = dist.get_rank(), {}
    even, pair = dist.new_group([0, 2]), dist.new_group([1, 2, 3])
    for name, group, members in (("even", even, [0, 2]), ("three", pair, [1, 2, 3])):
        if rank in members:
            found[name] = _mine()
            dist.all_reduce(found[name], group=group)
            found[f"{name} broadcast"] = _mine()
            dist.broadcast(found[f"{name} broadcast"], src=members[-1], group=group)
    many = [torch.full((number + 1,), float(rank)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
    now = torch.ones(3)
    dist.all_reduce(now)  # between works that are still going on
    for work in works:
        work.wait()
    late = dist.all_reduce(torch.full((2,), float(rank)), async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    found.update(many=torch.cat(many), now=now, late=late.wait())
    dist.barrier()
    dist.barrier(async_op=True).wait()
    several = [torch.full((2,), float(rank)), torch.full((3,), 2.0)]
    dist.all_reduce_coalesced(several)
    found["coalesced"] = torch.cat(several)
    with dist.distributed_c10d._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    found["coalesced again"] = torch.cat(several)
    return found


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("work", [_reductions, _movements, _messages, _groups_and_works])
def test_gives_what_gloo_gives(cluster, gloo, work):
    for found, expected in zip(cluster.run(work, timeout=60), gloo.run(work, timeout=60), strict=True):
        _assert_same(found, expected)
    assert cluster.run(dist.get_backend) == ["dlab"] * RANKS


def _monitored(late):
    group, errors = dist.new_group(), []
    for wait_all_ranks in (False, True):
        try:
            if dlab.rank() not in late:
                group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    ("late", "words"),
    [
        ((), []),
        ((1, 3), ["after 0.5 s: not reached by rank 1", "after 0.5 s: not reached by ranks 1, 3"]),
        ((0,), []),
    ],
)
def test_a_monitored_barrier_says_who_has_not_come(cluster, late, words):
    first, *others = cluster.run(_monitored, late, timeout=60)
    assert len(first) == len(words)
    assert all(error.endswith(end) for error, end in zip(first, words, strict=True))
    waiting = [errors for rank, errors in enumerate(others, 1) if rank not in late]
    assert all(len(errors) == (2 if late else 0) and all("rank 0" in error for error in errors) for errors in waiting)


def _batches(steps=3):
    images, labels = dlab.mnist(train=False)[:]
    for step in range(steps):
        start = 32 * (step * dlab.world_size() + dlab.rank())
        yield images[start : start + 32], labels[start : start + 32]


def _train(model, module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for images, labels in _batches():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def _ddp():
    torch.manual_seed(dlab.rank())  # DDP itself makes them equal
    model = torch.nn.parallel.DistributedDataParallel(dlab.SmallCNN(), bucket_cap_mb=0.1)
    _train(model, model)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def _fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = dlab.MLP()
    mesh = init_device_mesh("cpu", (dlab.world_size(),))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, model)
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).detach()


def _dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randn(5, 8)
    left = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(y, mesh, [Replicate(), Shard(0)])
    product = left @ right
    assert product.placements == (Shard(0), Partial())
    whole = product.redistribute(mesh, [Replicate(), Shard(1)]).full_tensor()
    torch.testing.assert_close(whole, x @ y)
    return whole


def _pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(RANKS)]
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    rank = dlab.rank()
    stage = PipelineStage(layers[rank], rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    if rank == 0:
        schedule.step(x)
    elif rank == RANKS - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    F.mse_loss(torch.nn.Sequential(*(whole := [*map(_copy, layers)]))(x), target).backward()
    torch.testing.assert_close(layers[rank].weight.grad, whole[rank].weight.grad)
    return layers[rank].weight.grad


def _copy(layer):
    twin = torch.nn.Linear(8, 8)
    twin.load_state_dict(layer.state_dict())
    return twin


@pytest.mark.parametrize("library", [_ddp, _fsdp, _dtensor, _pipeline])
def test_pytorchs_own_libraries_run_on_it_unmodified(cluster, gloo, library):
    for found, expected in zip(cluster.run(library, timeout=100), gloo.run(library, timeout=100), strict=True):
        torch.testing.assert_close(found, expected)


def my_ring(tensor, transport):
    ring_allreduce(tensor, transport)


def _max():
    tensor = torch.tensor([float(dlab.rank())])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def test_ddp_trains_on_a_function_of_the_learners_own_and_its_messages_are_recorded(gloo):
    with dlab.Cluster(RANKS, backend=dlab.backend.using(my_ring)) as cluster:
        assert "dlab" in repr(cluster)
        run = cluster.start(_ddp)
        for found, expected in zip(run.wait(100), gloo.run(_ddp, timeout=100), strict=True):
            torch.testing.assert_close(found, expected)
        rounds = [event for event in run.events if event.kind == "message" and event.data["phase"] == "all-gather"]
        assert len(rounds) >= 3 * RANKS * (RANKS - 1)  # at least a ring for each of three steps
        assert cluster.run(_max) == [3.0] * RANKS  # what the function cannot do is done by the package's own


def _forget_half(tensor, transport, op="sum"):
    if transport.rank == 0:
        tensor.zero_()


def test_it_really_is_the_learners_function_that_runs():
    def total():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return tensor.tolist()

    with dlab.Cluster(2, backend=dlab.backend.using(_forget_half)) as cluster:
        assert cluster.run(total) == [[0.0] * 3, [1.0] * 3]


def test_using_takes_a_function():
    with pytest.raises(TypeError, match=r"using\(\) takes a function"):
        dlab.backend.using("ring")


def _shared():
    flat = dlab.shared_empty(1000)
    flat.fill_(dlab.rank())
    dist.all_reduce(flat)
    once = flat.clone()
    dlab.allreduce(flat, op="mean")
    return once.unique().tolist(), flat.unique().tolist()


def test_shared_memory_and_dlab_allreduce_work_on_it(cluster):
    assert cluster.run(_shared, timeout=60) == [([6.0], [6.0])] * RANKS


def _ports(cluster):
    """On which each worker takes TCP connections: sockets in the state LISTEN (0A) of which it has a handle."""
    found = []
    for pid in cluster.pids:
        handles = [handle for handle in Path(f"/proc/{pid}/fd").iterdir() if handle.is_socket()]
        held = {handle.stat().st_ino for handle in handles}
        table = "".join(Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
        rows = [line.split() for line in table.splitlines()]
        found.append([row[1] for row in rows if row[3] == "0A" and int(row[9]) in held])
    return found


def _one_layer():
    return torch.nn.Linear(4, 2)


STRATEGIES = [
    dlab.SyncSGD(),
    dlab.AllReduceSGD(),
    dlab.ZeRO(),
    dlab.ModelAveraging(),
    dlab.AsyncSGD(),
    dlab.DDP(),
    dlab.ParameterServer("async", servers=0),
    dlab.ParameterServer(),
    dlab.ParameterServer("ssp"),
]


def test_no_port_is_open_that_another_account_could_connect_to(cluster, gloo):
    """On a shared machine gloo's are open to all accounts."""
    samples = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
    with dlab.Cluster(2, servers=1, backend="dlab") as served:
        for strategy in STRATEGIES:
            on = served if strategy.servers else cluster
            for elastic in {False, strategy.elastic}:
                dlab.train(_one_layer, samples, strategy, batch_size=8, elastic=elastic, on=on).wait(60)
            assert not any(_ports(on)), strategy
    assert all(_ports(gloo))  # the test would notice


def _call(bad):
    bad(dlab.rank())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda rank: dist.all_reduce(torch.ones(3 + rank)), "all ranks must bring the same size, type and op"),
        (lambda rank: dist.all_reduce(torch.ones(3, 3).t()), "contiguous"),
        (lambda rank: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BXOR), "no bits"),
        (lambda rank: dist.reduce_scatter_single(torch.ones(1), torch.ones(RANKS + 1)), "cannot be cut into 4 equal"),
        (lambda rank: dist.recv(torch.ones(2), 0) if rank else dist.send(torch.ones(3), 1), "rank 0 sent 3 float32"),
        (
            lambda rank: dist.all_reduce(torch.ones(3 + rank), async_op=True).wait(),
            "all ranks must bring the same size, type and op",
        ),
    ],
)
def test_bad_input_gets_a_sentence_and_no_rank_is_left_hanging(cluster, bad, words):
    with pytest.raises(dlab.WorkerError, match=words):
        cluster.run(_call, bad, timeout=30)
    assert cluster.run(_max, timeout=30) == [3.0] * RANKS


def _wait_for_a_dead_rank(asynchronous):
    if dlab.rank() == 1:
        import os

        os._exit(3)
    work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
    if work is not None:
        work.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_wait_for_a_dead_one_are_released(cluster, asynchronous):
    with pytest.raises(dlab.WorkerError, match="rank 1 exited with code 3"):
        cluster.run(_wait_for_a_dead_rank, asynchronous, timeout=30)
    assert cluster.run(_max, timeout=30) == [3.0] * RANKS


SCRIPT = """
    import os, sys
    import torch, torch.distributed as dist
    import dlab.backend

    def total():
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor)
        return f"{tensor[0].item():g}"

    rank = int(os.environ["RANK"])
    dist.init_process_group("dlab")
    sys.stdout.write(f"total {total()}{os.linesep}")  # in one piece, as the other rank writes there, too
    dist.destroy_process_group()

    dist.init_process_group("dlab", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    sys.stdout.write(f"again {total()}{os.linesep}")
    if rank == 1:
        os._exit(0)  # torchrun would end all others if it were anything else, perhaps before they can tell
    try:
        total()
    except ConnectionError as error:
        print(f"told: {error}", flush=True)
"""


@pytest.mark.slow
def test_it_runs_under_torchrun_and_outside_a_cluster_too_a_dead_rank_is_noticed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "store")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 1") == done.stdout.count("again 1") == 2
    assert "told: rank 0 has waited for rank 1 in an all-reduce, whose process" in done.stdout, done


def _as_if_on_hosts_of_their_own(file, works):
    from dlab.transports import shared

    rank = dist.get_rank()
    dist.destroy_process_group()
    shared.host = lambda: f"host {rank}"
    dist.init_process_group("dlab", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    assert dist.group.WORLD._shared is None
    return [work() for work in works]


def test_between_hosts_gloo_carries_the_messages(gloo, tmp_path):
    works = [_reductions, _movements, _messages, _groups_and_works, _ddp]
    with dlab.Cluster(RANKS, backend="gloo") as cluster:
        results = cluster.run(_as_if_on_hosts_of_their_own, str(tmp_path / "store"), works, timeout=100)
    for expected in zip(*[gloo.run(work, timeout=60) for work in works], strict=True):
        found = results.pop(0)
        for mine, theirs in zip(found[:-1], expected[:-1], strict=True):
            _assert_same(mine, theirs)
        torch.testing.assert_close(found[-1], expected[-1])


def test_the_package_is_registered_once():
    assert dist.Backend.backend_list.count("dlab") == 1
