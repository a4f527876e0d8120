"""Key-value stores: each fact of MXNet's, known answers to the digit, and nothing lost under stress."""

import sys

import cloudpickle
import pytest
import torch
from torch.nn import functional as F

import dlab
from dlab import kvstore

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

WORKERS, SERVERS = 4, 2
ON_SERVERS = ["dist_sync", "dist_async"]
DISTRIBUTED = [*ON_SERVERS, "dist_device_sync"]


def twice(key, gradient, stored):
    stored += 2 * gradient


def add(key, gradient, stored):
    stored += gradient


def each(cluster, function, *args, timeout=60, **kwargs):
    """The results of all ranks, which must be the same."""
    first, *others = cluster.run(function, *args, timeout=timeout, **kwargs)
    assert all(str(other) == str(first) for other in others)
    return first


# ------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize("type", ["dist_sync", "dist_device_sync"])
def test_the_first_series_to_the_digit(cluster, type):
    def series():
        kv = kvstore.create(type)
        kv.init(3, torch.ones(2, 3))
        kv.set_updater(twice)
        pulled = []
        for _ in range(3):
            kv.push(3, torch.full((2, 3), kv.rank + 1.0))
            pulled.append(kv.pull(3).unique().tolist())
        return pulled

    assert each(cluster, series) == [[21.0], [41.0], [61.0]]


@pytest.mark.parametrize("type", ["dist_sync", "dist_device_sync"])
def test_the_series_with_two_bits_to_the_digit(cluster, type):
    def series():
        kv = kvstore.create(type)
        kv.init("w", torch.zeros(17))
        kv.set_updater(twice)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        pulled = []
        for gradient in (0.4, 0.1, 0.2, 0.3):
            kv.push("w", torch.full((17,), gradient))
            pulled.append((kv.pull("w").unique().tolist(), round(kv.residual("w")[0].item(), 6)))
        return pulled

    assert each(cluster, series) == [([0.0], 0.4), ([4.0], 0.0), ([4.0], 0.2), ([8.0], 0.0)]


def test_the_series_without_servers():
    kv = kvstore.create("device")
    kv.init("w", torch.zeros(5))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    residuals = []
    for gradient in (0.4, 0.2, 0.2, 0.2):
        kv.push("w", torch.full((5,), gradient))
        residuals.append(round(kv.residual("w")[0].item(), 6))
    assert residuals == [0.4, 0.1, 0.3, 0.0]


# ------------------------------------------------------------------------------------- the facts


@pytest.mark.parametrize("type", ["dist_sync", "dist_device_sync"])
def test_without_an_updater_the_sum_replaces_the_value(cluster, type):
    def replace():
        kv = kvstore.create(type)
        kv.init("w", torch.full((3,), 100.0))
        kv.push("w", [torch.full((3,), 1.0), torch.full((3,), float(kv.rank))])  # of two devices
        return kv.pull("w").tolist()

    assert each(cluster, replace) == [WORKERS + 0 + 1 + 2 + 3.0] * 3


@pytest.mark.parametrize("type", DISTRIBUTED)
def test_only_rank_0s_first_value_counts(cluster, type):
    def begin():
        kv = kvstore.create(type)
        kv.init(["a", 7], [torch.full((2,), 1.0 + kv.rank), torch.full((), 10.0 + kv.rank, dtype=torch.float64)])
        return [value.tolist() for value in kv.pull(["a", 7])], kv.num_workers

    assert each(cluster, begin) == ([[1.0, 1.0], 10.0], WORKERS)


def test_ranks_are_those_of_the_workers(cluster):
    assert cluster.run(lambda: [kvstore.create(type).rank for type in DISTRIBUTED]) == [[r] * 3 for r in range(WORKERS)]


@pytest.mark.parametrize("type", DISTRIBUTED)
def test_each_worker_writes_checkpoints_under_a_name_of_its_own(cluster, type):
    names = cluster.run(lambda: kvstore.create(type).prefix("mnist"))
    assert names == ["mnist", "mnist-1", "mnist-2", "mnist-3"]
    assert kvstore.create("local").prefix("mnist") == "mnist"


def test_the_batch_size_is_per_worker(cluster):
    """n workers with batches of b learn what one process learns with a batch of n * b."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(WORKERS * 8, 5, dtype=torch.float64), torch.randint(3, (WORKERS * 8,))
    first = torch.randn(3, 5, dtype=torch.float64)

    def gradient(weight, some, answers):
        weight = weight.clone().requires_grad_()
        F.cross_entropy(some @ weight.T, answers, reduction="sum").backward()
        return weight.grad

    def learn():
        kv = kvstore.create("dist_sync")
        mine = slice(8 * kv.rank, 8 * kv.rank + 8)
        kv.init("w", first)
        kv.set_optimizer("sgd", lr=0.1, momentum=0.9, rescale=1 / (8 * WORKERS))
        weight = kv.pull("w")
        for _ in range(5):
            kv.push("w", gradient(weight, inputs[mine], labels[mine]))
            kv.pull("w", out=weight)
        return weight

    alone = first.clone()
    optimizer = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    for _ in range(5):
        alone.grad = gradient(alone, inputs, labels) / (8 * WORKERS)
        optimizer.step()
    for weight in cluster.run(learn, timeout=60):
        torch.testing.assert_close(weight, alone, rtol=0, atol=1e-12)


def test_a_pull_sees_the_last_push_of_this_worker(cluster):
    def look():
        kv = kvstore.create("dist_async")
        kv.init("w", torch.zeros(WORKERS))
        kv.set_updater(add)
        mine = torch.zeros(WORKERS)
        mine[kv.rank] = 1.0
        seen = []
        for _ in range(200):
            kv.push("w", mine)
            seen.append(kv.pull("w")[kv.rank].item())
        return seen

    assert cluster.run(look, timeout=60) == [[float(number) for number in range(1, 201)]] * WORKERS


@pytest.mark.slow
def test_asynchronous_updates_are_atomic_and_none_is_lost():
    """Eight workers push 10,000 whole numbers each: all are in the sum, and no update is half done when pulled."""

    def hammer(count):
        kv = kvstore.create("dist_async")
        kv.init("w", torch.zeros(500))
        kv.set_updater(add)
        out, torn = torch.empty(500), 0
        for number in range(count):
            kv.push("w", torch.full((500,), float(number % 3)))
            if number % 50 == 0:
                kv.pull("w", out=out)
                torn += len(out.unique()) > 1
        kv.barrier()
        return torn, kv.pull("w").unique().tolist()

    with dlab.Cluster(8, servers=2) as cluster:
        results = cluster.run(hammer, 10_000, timeout=110)
    assert {torn for torn, _ in results} == {0}
    assert results[0][1] == results[7][1] == [8.0 * sum(number % 3 for number in range(10_000))]


def test_a_key_may_be_pushed_in_another_order_by_each_worker(cluster):
    def shuffled():
        kv = kvstore.create("dist_sync")
        keys = [f"layer {number}" for number in range(6)]
        kv.init(keys, [torch.zeros(3)] * 6)
        kv.set_updater(add)
        mine = keys[kv.rank :] + keys[: kv.rank]
        for _ in range(3):
            for key in mine:
                kv.push(key, torch.full((3,), 1.0 + kv.rank))
            pulled = [kv.pull(key)[0].item() for key in reversed(keys)]
        return pulled

    assert each(cluster, shuffled) == [3.0 * (1 + 2 + 3 + 4)] * 6


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_large_key_is_cut_over_all_servers(servers):
    def cut():
        kv = kvstore.create("dist_sync")
        kv.big = 10
        kv.init("w", torch.arange(13.0).view(1, 13))
        kv.init("v", torch.zeros(9))
        kv.set_optimizer("sgd", lr=1.0)
        kv.push("w", torch.full((1, 13), 0.5))
        return [(part.server, part.begin, part.end) for part in kv.parts], kv.pull("w").tolist()

    with dlab.Cluster(2, servers=servers) as cluster:
        parts, value = each(cluster, cut)
    assert value == [[number - 1.0 for number in range(13)]]
    assert len(parts) == (servers if servers > 1 else 1) + 1
    assert sorted(server for server, _, _ in parts[:-1]) == list(range(servers))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_other_types_of_numbers(cluster, dtype):
    def count():
        kv = kvstore.create("dist_sync")
        kv.init(0, torch.zeros(3, dtype=dtype))
        kv.push(0, torch.full((3,), kv.rank + 1, dtype=dtype))
        return kv.pull(0).dtype, kv.pull(0).tolist()

    assert each(cluster, count) == (dtype, [10] * 3)


def test_a_store_after_another_and_two_at_once(cluster):
    def two():
        first, second = kvstore.create("dist_sync"), kvstore.create("dist_async")
        first.init("w", torch.zeros(2))
        second.init("w", torch.ones(2))
        second.set_updater(add)
        first.push("w", torch.ones(2))
        second.push("w", torch.ones(2))
        second.barrier()
        return first.pull("w").tolist(), second.pull("w").tolist()

    for _ in range(3):
        assert each(cluster, two) == ([4.0, 4.0], [5.0, 5.0])


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}), torch.optim.SGD),
        (("adam", {"lr": 0.1, "betas": (0.8, 0.9)}), torch.optim.Adam),
        (("adagrad", {"lr": 0.1}), torch.optim.Adagrad),
    ],
)
def test_servers_update_as_torchs_optimizers_do(cluster, optimizer, plain):
    name, numbers = optimizer

    def learn(from_torch):
        kv = kvstore.create("dist_sync")
        kv.init("w", torch.linspace(-1, 1, 7, dtype=torch.float64))
        if from_torch:
            kv.set_optimizer(plain([torch.zeros(1)], **numbers))
        else:
            kv.set_optimizer(name, **numbers)
        for step in range(4):
            kv.push("w", torch.arange(7, dtype=torch.float64) * (kv.rank + step))
        return kv.pull("w")

    weight = torch.linspace(-1, 1, 7, dtype=torch.float64)
    alone = plain([weight], **numbers)
    for step in range(4):
        weight.grad = torch.arange(7, dtype=torch.float64) * (0 + 1 + 2 + 3 + WORKERS * step)
        alone.step()
    for from_torch in (False, True):
        torch.testing.assert_close(each(cluster, learn, from_torch), weight, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------- rows, and fewer bytes


@pytest.mark.parametrize("type", ["local", *DISTRIBUTED])
@pytest.mark.parametrize("big", [10, 10**6], ids=["cut", "whole"])
def test_rows_of_a_table(cluster, type, big):
    def look_up():
        kv = kvstore.create(type)
        kv.big = big
        kv.init("table", torch.arange(21.0).view(7, 3), rows=True)
        kv.set_optimizer("sgd", lr=1.0)
        rows, values = torch.tensor([[5, 1, 5]]), torch.ones(3, 3)
        kv.push("table", torch.sparse_coo_tensor(rows, values, (7, 3), check_invariants=True))
        kv.barrier()
        return kv.row_sparse_pull("table", torch.tensor([5, 0, 1, 5])), kv.pull("table")

    times = 1 if type == "local" else WORKERS
    expected = torch.arange(21.0).view(7, 3)
    expected[5] -= 2 * times
    expected[1] -= times
    for rows, table in [look_up()] if type == "local" else cluster.run(look_up, timeout=60):
        assert torch.equal(table, expected)
        assert torch.equal(rows, expected[[5, 0, 1, 5]])


def test_rows_touch_no_other_rows(cluster):
    """Momentum would move rows that nobody has pushed to; there the gradient is taken as a whole."""

    def learn(momentum):
        kv = kvstore.create("dist_sync")
        kv.init("table", torch.zeros(4, 2), rows=True)
        kv.set_optimizer("sgd", lr=1.0, momentum=momentum)
        for row in (0, 1):
            kv.push("table", torch.sparse_coo_tensor([[row]], torch.ones(1, 2), (4, 2), check_invariants=True))
        return kv.pull("table")[:, 0].tolist()

    assert each(cluster, learn, 0.0) == [-4.0, -4.0, 0.0, 0.0]
    assert each(cluster, learn, 0.5) == [-6.0, -4.0, 0.0, 0.0]


def test_bytes_that_are_sent_are_recorded(cluster):
    def send(how):
        kv = kvstore.create("dist_sync")
        kv.init("w", torch.zeros(1600))
        if how:
            kv.set_gradient_compression(how)
        kv.push("w", torch.ones(1600))
        kv.pull("w")

    for how, expected in ((None, 6400), ("2bit", 400), ("1bit", 200), ("bfloat16", 3200)):
        run = cluster.start(send, how)
        run.wait(30)
        messages = [event.data for event in run.events if event.kind == "message"]
        pushed = [each for each in messages if each["phase"] == "push w"]
        assert [each["bytes"] for each in pushed] == [expected] * WORKERS
        assert sorted(each["source"] for each in pushed) == list(range(WORKERS))
        assert all(each["destination"] >= WORKERS for each in pushed)
        assert [each["bytes"] for each in messages if each["phase"] == "pull w"] == [6400] * WORKERS


def test_pushpull_is_not_compressed(cluster):
    def both():
        kv = kvstore.create("dist_sync")
        kv.init("w", torch.zeros(3))
        kv.set_gradient_compression("2bit")
        return kv.pushpull("w", torch.full((3,), 0.125)).tolist()

    assert each(cluster, both) == [0.5] * 3


# ------------------------------------------------------------------------------------- one process


def test_local_stores():
    for type in ("local", "device"):
        kv = kvstore.create(type)
        kv.init("w", torch.ones(2))
        kv.push("w", [torch.ones(2), torch.full((2,), 2.0)])
        assert kv.pull("w").tolist() == [3.0, 3.0]
        kv.set_optimizer("sgd", lr=0.5)
        outs = [torch.zeros(2), torch.zeros(2)]
        kv.pushpull("w", torch.ones(2), out=outs)
        assert [out.tolist() for out in outs] == [[2.5, 2.5]] * 2
        assert (kv.rank, kv.num_workers) == (0, 1)


# ------------------------------------------------------------------------------------- what goes wrong


def _push_too_early(kv):
    kv.push("w", torch.ones(3))


def _pull_nothing(kv):
    kv.pull("nothing")


def _push_another_shape(kv):
    kv.init("w", torch.ones(3))
    kv.push("w", torch.ones(4))


def _push_another_type(kv):
    kv.init("w", torch.ones(3))
    kv.push("w", torch.ones(3, dtype=torch.float64))


def _init_twice(kv):
    kv.init("w", torch.ones(3))
    kv.init("w", torch.ones(3))


def _compress_integers(kv):
    kv.init("w", torch.ones(3, dtype=torch.int64))
    kv.set_gradient_compression("2bit")
    kv.push("w", torch.ones(3, dtype=torch.int64))


def _pull_into_another_shape(kv):
    kv.init("w", torch.ones(3))
    kv.pull("w", out=torch.ones(2))


def _odd_key(kv):
    kv.init(1.5, torch.ones(3))


def _optimizer_of_another_world(kv):
    kv.set_optimizer(torch.optim.Rprop([torch.zeros(1)]))


def _odd_number(kv):
    kv.set_optimizer("sgd", lr=0.1, betas=(0.1, 0.2))


def _row_too_far(kv):
    kv.init("w", torch.ones(3, 2), rows=True)
    kv.row_sparse_pull("w", torch.tensor([3]))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (_push_too_early, r"key 'w' has no value yet: call kv.init\('w', value\) first"),
        (_pull_nothing, "key 'nothing' has no value yet"),
        (_push_another_shape, r"key 'w' has shape \(3,\); \(4,\) cannot be pushed to it"),
        (_push_another_type, "key 'w' is torch.float32; torch.float64 cannot be pushed to it: call .to"),
        (_init_twice, "key 'w' has a value already"),
        (_compress_integers, "compression is for dense float32; key 'w' is pushed torch.int64"),
        (_pull_into_another_shape, r"key 'w' has shape \(3,\); \(2,\) cannot be pulled into it"),
        (_odd_key, "1.5 cannot be a key: use a whole number or a string"),
        (_optimizer_of_another_world, "a server has no optimizer 'rprop': use one of sgd, adam, adagrad"),
        (_odd_number, "sgd takes no 'betas': it takes lr, momentum"),
        (_row_too_far, "key 'w' has rows 0 to 2: give row_ids in that range"),
    ],
)
def test_faults_are_told_in_a_sentence_and_nobody_hangs(cluster, fault, sentence):
    def on_one_rank():
        kv = kvstore.create("dist_sync")
        if kv.rank == 1 or fault not in (_push_too_early, _pull_nothing):
            fault(kv)
        else:
            kv.init("w", torch.ones(3))  # waits for rank 1, in vain

    with pytest.raises(dlab.WorkerError, match=sentence):
        cluster.run(on_one_rank, timeout=30)
    if fault not in (_compress_integers,):
        with pytest.raises((LookupError, ValueError, TypeError, IndexError), match=sentence):
            fault(kvstore.create("device"))


@pytest.mark.parametrize("fill", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)])
def test_ranks_that_do_not_agree_on_a_key_are_told(cluster, fill):
    def disagree():
        kv = kvstore.create("dist_sync")
        kv.init("w", fill if kv.rank == 2 else torch.zeros(3))

    with pytest.raises(
        dlab.WorkerError, match=r"server . failed: ValueError: rank . gives key 'w' the shape .*all ranks"
    ):
        cluster.run(disagree, timeout=30)


def test_an_asynchronous_store_wants_to_know_what_to_do(cluster):
    def forget():
        kv = kvstore.create("dist_async")
        kv.init("w", torch.ones(3))
        kv.push("w", torch.ones(3))

    with pytest.raises(dlab.WorkerError, match=r"call kv.set_optimizer"):
        cluster.run(forget, timeout=30)


def test_types_and_places_that_do_not_exist():
    with pytest.raises(ValueError, match="there is no store of type 'dist': use 'local', 'device', 'dist_sync'"):
        kvstore.create("dist")
    with pytest.raises(RuntimeError, match=r"there are no servers here: make the cluster with some"):
        kvstore.create("dist_sync")
    with pytest.raises(ValueError, match="nothing is sent by a 'local' store"):
        kvstore.create("local").set_gradient_compression("2bit")
    with dlab.Cluster(1) as alone, pytest.raises(dlab.WorkerError, match="there are no servers here"):
        alone.run(kvstore.create, "dist_sync")
