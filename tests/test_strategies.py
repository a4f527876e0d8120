"""Every synchronous strategy equals one plain process on the same global batches; ranks agree to the bit."""

from itertools import count, islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dlab
from dlab.data.batches import take
from dlab.data.sampler import EpochSampler
from dlab.strategies import nesterov

STEPS, BATCH, SAMPLES = 20, 12, 53  # 53 is no multiple of anything: the last batches are unequal


def data():
    make = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=make, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,), generator=make)
    )


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def options(ranks, **changed):
    steps = EpochSampler(data(), ranks, BATCH, changed.get("order", "shards")).steps
    return {"epochs": -(-STEPS // steps), "batch_size": BATCH, "lr": 0.1, "momentum": 0.9} | changed


def plain(ranks, order="shards", epochs=1, batch_size=BATCH, lr=0.1, momentum=0.9, optimizer=None, seed=1234, **_):
    """One process, plain torch, on the global batches of so many ranks."""
    samples, sampler = data(), EpochSampler(data(), ranks, batch_size, order, seed)
    torch.manual_seed(seed)
    model = network()
    optimizer = (optimizer or (lambda each: torch.optim.SGD(each, lr=lr, momentum=momentum)))(model.parameters())
    for epoch in range(epochs):
        for step in range(sampler.steps):
            inputs, labels = take(samples, torch.cat([sampler.positions(epoch, step, rank) for rank in range(ranks)]))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def difference(one, other):
    return max(
        (a - b).abs().max().item() for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def cluster(request):
    with dlab.Cluster(request.param) as cluster:
        yield cluster


SYNCHRONOUS = {
    "sync": dlab.SyncSGD(),
    "sync, tree": dlab.SyncSGD(dlab.collectives.tree_allreduce),
    "all-reduce": dlab.AllReduceSGD(bucket_mb=0.0005),
    "all-reduce, one bucket": dlab.AllReduceSGD(overlap=False),
    "ZeRO": dlab.ZeRO(bucket_mb=0.0005),
    "DDP": dlab.DDP(),
}


@pytest.mark.parametrize("order", ["shards", "global"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_equals_one_process_on_the_same_global_batches(cluster, name, order):
    given = options(cluster.workers, order=order)
    result = dlab.train(network, data(), SYNCHRONOUS[name], on=cluster, **given).wait(60)
    assert result.identical
    assert len(result.losses) >= STEPS
    assert difference(result.model, plain(cluster.workers, **given)) < 1e-12


@pytest.mark.parametrize("name", ["sync", "all-reduce", "ZeRO", "DDP"])
@pytest.mark.parametrize("changed", [{"optimizer": adam}, {"accumulate": 3}, {"accumulate": 3, "order": "global"}])
def test_with_any_optimizer_and_in_pieces(cluster, name, changed):
    given = options(cluster.workers, **changed)
    result = dlab.train(network, data(), SYNCHRONOUS[name], on=cluster, **given).wait(60)
    assert result.identical
    assert difference(result.model, plain(cluster.workers, **given)) < 1e-12


def test_the_global_order_gives_one_result_for_any_number_of_workers(cluster):
    given = options(cluster.workers, order="global")
    result = dlab.train(network, data(), dlab.AllReduceSGD(), on=cluster, **given).wait(60)
    assert difference(result.model, plain(1, **given)) < 1e-12


def test_averaging_models_after_every_step_of_plain_sgd_is_synchronous(cluster):
    given = options(cluster.workers, momentum=0.0)
    averaged = dlab.train(network, data(), dlab.ModelAveraging(every=1), on=cluster, **given).wait(60)
    assert averaged.identical
    assert difference(averaged.model, plain(cluster.workers, **given)) < 1e-12


def alone(ranks, rank, given, model, epoch_steps):
    """What one rank of a data-sliced training does by itself, from `model` on, for these (epoch, step)."""
    samples, sampler = data(), EpochSampler(data(), ranks, BATCH, "shards")
    optimizer = torch.optim.SGD(model.parameters(), lr=given["lr"], momentum=given["momentum"])
    for epoch, step in epoch_steps:
        positions = sampler.positions(epoch, step, rank)
        optimizer.zero_grad()
        inputs, labels = take(samples, positions if len(positions) else [0, 0])
        (F.cross_entropy(model(inputs), labels) * sampler.weight(step, rank)).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def first_model():
    torch.manual_seed(1234)
    return network()


def test_slices_trained_alone_are_averaged_at_the_end(cluster):
    given = options(cluster.workers)
    steps = [(e, s) for e in range(given["epochs"]) for s in range(EpochSampler(data(), cluster.workers, BATCH).steps)]
    vectors = [alone(cluster.workers, rank, given, first_model(), steps) for rank in range(cluster.workers)]
    result = dlab.train(network, data(), dlab.ModelAveraging(), on=cluster, **given).wait(60)
    found = torch.nn.utils.parameters_to_vector(result.model.parameters()).detach()
    torch.testing.assert_close(found, torch.stack(vectors).mean(0), rtol=0, atol=1e-12)
    assert result.identical


def test_local_sgd_with_an_outer_optimizer(cluster):
    """Every 5 steps, by hand: the way from the common model to the mean is a gradient for Nesterov."""
    ranks, given = cluster.workers, options(cluster.workers, momentum=0.0)
    steps = [(e, s) for e in range(given["epochs"]) for s in range(EpochSampler(data(), ranks, BATCH).steps)]
    common = torch.nn.utils.parameters_to_vector(first_model().parameters()).detach()
    velocity = None
    for begin in range(0, len(steps), 5):
        ends = []
        for rank in range(ranks):
            model = network()
            torch.nn.utils.vector_to_parameters(common.clone(), model.parameters())
            ends.append(alone(ranks, rank, given, model, steps[begin : begin + 5]))
        slope = common - torch.stack(ends).mean(0)
        velocity = slope.clone() if velocity is None else 0.9 * velocity + slope
        common = common - 0.7 * (slope + 0.9 * velocity)
    result = dlab.train(network, data(), dlab.ModelAveraging(every=5, outer=nesterov), on=cluster, **given).wait(60)
    found = torch.nn.utils.parameters_to_vector(result.model.parameters()).detach()
    torch.testing.assert_close(found, common, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sync", "all-reduce", "ZeRO"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_in_a_rehearsal_on_threads(name, ranks):
    given = options(ranks)
    training = dlab.Training(model=network, data=data(), strategy=SYNCHRONOUS[name], **given)
    shares = dlab.rehearse(training, ranks=ranks)
    assert len({share.digest for share in shares}) == 1
    model = network()
    model.load_state_dict(shares[0].weights)
    assert difference(model, plain(ranks, **given)) < 1e-12


class WithUnused(nn.Module):
    """A layer that only some batches use, and batch norm, whose buffers differ between ranks while they train."""

    def __init__(self):
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.calls = count()

    def forward(self, inputs):
        layer = self.one if next(self.calls) % 3 else self.other
        return layer(self.norm(inputs.float()))


WITH_UNUSED = {
    **{name: SYNCHRONOUS[name] for name in ("sync", "all-reduce", "ZeRO")},
    "DDP": dlab.DDP(find_unused_parameters=True),
    "averaging": dlab.ModelAveraging(every=2),
}


@pytest.mark.parametrize("name", WITH_UNUSED)
def test_layers_that_a_batch_does_not_use_and_buffers(cluster, name):
    even = TensorDataset(*(tensor[:48] for tensor in data().tensors))  # batch norm refuses a batch of one
    result = dlab.train(WithUnused, even, WITH_UNUSED[name], on=cluster, epochs=2, batch_size=BATCH).wait(60)
    assert result.identical
    assert result.model.norm.num_batches_tracked > 0


def test_bfloat16_autocast_learns(cluster):
    losses = dlab.train(network_in_float, data_in_float(), on=cluster, amp=True, epochs=20, batch_size=BATCH, lr=0.2)
    losses = losses.wait(60).losses
    assert sum(losses[-5:]) < sum(losses[:5])


def network_in_float():
    return network().float()


def data_in_float():
    inputs, _ = data().tensors
    return TensorDataset(inputs.float(), (inputs.sum(1) > 0).long())


def simulate(ranks, given, clock):
    """Asynchronous training by one process: all events of the virtual clock in order, each rank with its own model."""
    samples, sampler = data(), EpochSampler(data(), ranks, BATCH)
    steps = [(e, s) for e in range(given["epochs"]) for s in range(sampler.steps)]
    models = [first_model() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=given["lr"], momentum=given["momentum"]) for m in models]
    mailboxes, made, staleness = [[] for _ in range(ranks)], [[0] * ranks for _ in range(ranks)], []

    def update(rank, source, gradient, seen):
        staleness.append(sum(max(0, mine - theirs) for mine, theirs in zip(made[rank], seen, strict=True)))
        for parameter, part in zip(models[rank].parameters(), gradient, strict=True):
            parameter.grad = part.clone()
        optimizers[rank].step()
        made[rank][source] += 1

    def begin(rank, number):
        for message in mailboxes[rank]:
            update(rank, *message)
        mailboxes[rank].clear()
        epoch, step = steps[number]
        positions = sampler.positions(epoch, step, rank)
        models[rank].zero_grad()
        inputs, labels = take(samples, positions if len(positions) else [0, 0])
        (F.cross_entropy(models[rank](inputs), labels) * sampler.weight(step, rank)).backward()
        return [parameter.grad.clone() for parameter in models[rank].parameters()], list(made[rank])

    ends = sorted(end for rank in range(ranks) for end in islice(clock.ends(rank), len(steps)))
    under_way, numbers = [begin(rank, 0) for rank in range(ranks)], [0] * ranks
    for _, rank in ends:
        gradient, seen = under_way[rank]
        update(rank, rank, gradient, seen)
        for other in set(range(ranks)) - {rank}:
            mailboxes[other].append((rank, gradient, seen))
        numbers[rank] += 1
        if numbers[rank] < len(steps):
            under_way[rank] = begin(rank, numbers[rank])
    for rank in range(ranks):
        for message in mailboxes[rank]:
            update(rank, *message)
    vectors = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    return torch.stack(vectors).mean(0), staleness


@pytest.mark.parametrize("speeds", [(), (1, 5, 2, 1)])
def test_asynchronous_by_the_virtual_clock_equals_a_simulation_in_one_process(cluster, speeds):
    clock = dlab.VirtualClock(seed=3, speeds=speeds)
    given = options(cluster.workers, lr=0.05, momentum=0.5)
    expected, staleness = simulate(cluster.workers, given, clock)
    run = dlab.train(network, data(), dlab.AsyncSGD(clock), on=cluster, **given)
    result = run.wait(60)
    found = torch.nn.utils.parameters_to_vector(result.model.parameters()).detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert result.identical
    told = [each for event in run.events if event.kind == "log" for each in event.data["staleness"]]
    assert len(told) <= len(staleness)  # what is applied after the last step belongs to none
    if cluster.workers > 1:
        assert max(told) > 0


def test_asynchronous_in_real_time_learns_and_ends_on_one_model(cluster):
    given = options(cluster.workers, epochs=20, lr=0.05, momentum=0.0)
    run = dlab.train(network_in_float, data_in_float(), dlab.AsyncSGD(), on=cluster, **given)
    result = run.wait(60)
    assert result.identical
    assert sum(result.losses[-10:]) < 0.7 * sum(result.losses[:10])


def test_asynchronous_in_a_rehearsal():
    given = options(3, lr=0.05, momentum=0.5)
    clock = dlab.VirtualClock(seed=3)
    shares = dlab.rehearse(dlab.Training(model=network, data=data(), strategy=dlab.AsyncSGD(clock), **given), ranks=3)
    vector = torch.cat([tensor.view(-1) for tensor in shares[0].weights.values()])
    torch.testing.assert_close(vector, simulate(3, given, clock)[0], rtol=0, atol=1e-12)
    real = dlab.rehearse(dlab.Training(model=network, data=data(), strategy=dlab.AsyncSGD(), **given), ranks=3)
    assert len({share.digest for share in real}) == 1
