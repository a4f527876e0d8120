"""ZeRO: what a rank holds and sends is what the formulas say, and what was saved in shards fits any number of ranks."""

import ctypes
import os
import sys
import time

import cloudpickle
import pytest
import torch
from test_strategies import BATCH, adam, data, difference, network, plain
from torch import nn

import dlab
from dlab.bench.measure import megabytes
from dlab.cost import zero_memory, zero_traffic
from dlab.strategies import MemoryTable, flat
from dlab.strategies.reducers import Reducer
from dlab.strategies.zero import gradients, strategy
from dlab.strategies.zero.shared import lay_out

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file
SMALL = 0.0005  # megabytes: several buckets, so that a shard has many spans
GIVEN = {"batch_size": BATCH, "lr": 0.05, "momentum": 0.9, "order": "global", "epochs": 4}


@pytest.fixture(scope="module")
def clusters():
    with dlab.Cluster(2) as two, dlab.Cluster(3) as three, dlab.Cluster(4) as four:
        yield {2: two, 3: three, 4: four}


# ------------------------------------------------------------------------------------------ checkpoints


SAVED = [((stage, stage), ranks) for stage in (1, 2, 3) for ranks in ((4, 2), (4, 3), (2, 4), (3, 2))]
SAVED += [((1, 3), (4, 3)), ((3, 2), (3, 4)), ((3, 1), (2, 3)), ((2, 1), (2, 2))]


@pytest.mark.parametrize("optimizer", [None, adam], ids=["momentum", "Adam"])
@pytest.mark.parametrize(("stages", "ranks"), SAVED, ids=str)
def test_shards_saved_by_some_ranks_are_resumed_by_others(clusters, tmp_path, stages, ranks, optimizer):
    given, (before, after) = GIVEN | {"optimizer": optimizer}, ranks
    first, then = (dlab.ZeRO(stage, SMALL) for stage in stages)
    dlab.train(network, data(), first, on=clusters[before], checkpoint=tmp_path, every=8, **given).wait(60)
    saved = tmp_path / "step-00000008"
    result = dlab.train(network, data(), then, on=clusters[after], resume=saved, **given).wait(60)
    assert result.identical
    assert difference(result.model, plain(1, **given)) < 1e-12


def test_no_file_of_stage_3_has_a_whole_weight(clusters, tmp_path):
    dlab.train(network, data(), dlab.ZeRO(3), on=clusters[2], checkpoint=tmp_path, every=8, **GIVEN).wait(60)
    folder = tmp_path / "step-00000008"
    common = torch.load(folder / "common.pt", weights_only=True)
    assert common["model"] == {name: tuple(each.shape) for name, each in network().state_dict().items()}
    parts = [torch.load(folder / f"rank-{rank}.pt", weights_only=True)["strategy"]["weights"] for rank in range(2)]
    weights = sum(each.numel() for each in network().parameters())
    lengths = [sum(len(values) for _, values in part) for part in parts]
    assert sum(lengths) == weights and max(lengths) - min(lengths) <= 3  # each of three layers may leave a remainder
    spans = sorted(span for part in parts for span, _ in part)
    assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]  # nothing is missing, nothing twice


def test_the_weights_of_another_model_are_refused(clusters, tmp_path):
    dlab.train(network, data(), dlab.ZeRO(3), on=clusters[2], checkpoint=tmp_path, every=8, **GIVEN).wait(60)

    def wider():
        return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    with pytest.raises(dlab.WorkerError, match=r"another model.*size mismatch for 0.weight: \(16, 6\) was saved"):
        dlab.train(wider, data(), dlab.ZeRO(3), on=clusters[2], resume=tmp_path, **GIVEN).wait(60)


# ------------------------------------------------------------------------------------------ what a rank holds


def learned(strategy, transport, make, steps=2, make_optimizer=torch.optim.Adam, inputs=None):
    """Some steps of a rank with the same samples as all others; returns the strategy and its model."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    module = strategy.begin(model, optimizer, transport)
    for _ in range(steps):
        strategy.clear()
        samples = data().tensors[0][:8] if inputs is None else inputs
        module(samples).square().mean().backward()
        strategy.step()
    return strategy, model


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_rank_holds_what_the_formula_says(ranks, stage):
    """Adam without master copies keeps two numbers of 8 bytes here, and one step count of 4 bytes for each piece."""
    tables = dlab.rehearse(lambda t: learned(dlab.ZeRO(stage, SMALL), t, network)[0].memory(), ranks)
    weights = sum(each.numel() for each in network().parameters())
    formula = zero_memory(weights, ranks, stage, optimizer_bytes=16, parameter_bytes=8, gradient_bytes=8)
    for _, held in tables[0].rows:
        rest = 8 * 6  # buckets that do not divide leave a number on some ranks
        assert abs(held["parameters"] - formula.parameters) <= rest
        assert abs(held["gradients"] - formula.gradients) <= rest
        assert abs(held["optimizer"] - formula.optimizer) <= 2 * rest + 4 * 6
    assert len({repr(table) for table in tables}) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_shows_its_table(clusters, stage):
    run = dlab.train(network, data(), dlab.ZeRO(stage), on=clusters[2], **GIVEN)
    run.wait(60)
    told = [event for event in run.events if event.kind == "log" and "held" in event.data]
    assert len(told) < 10  # it is told when it changes
    text = repr(MemoryTable.of(run.events))
    assert text.splitlines()[0].split() == ["rank", "parameters", "gradients", "optimizer", "most", "at", "a", "time"]
    assert len(text.splitlines()) == 3


def test_parameters_and_gradients_have_the_shape_of_the_shard():
    def look(transport):
        _, model = learned(dlab.ZeRO(3), transport, network)
        return [(each.shape, each.grad.shape, each.grad.clone()) for each in model.parameters()]

    ranks = dlab.rehearse(look, ranks=3)
    whole = list(network().parameters())
    for shards in ranks:
        assert all(shape == gradient for shape, gradient, _ in shards)
    assert [sum(rank[n][0].numel() for rank in ranks) for n in range(6)] == [each.numel() for each in whole]


BIG, LAYERS, BYTES = 1024, 8, 4 * 1024 * 1024


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(BIG, BIG, bias=False) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def peak(strategy):
    """By how many bytes this process has grown at most, in its share of memory, and what the strategy says."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # what has a megabyte or more goes back to the system at once
    transport, pid = dlab.transport(), os.getpid()
    dlab.ZeRO(3).build(lambda: nn.Linear(BIG, 1), transport)  # imports what it needs
    before, most = megabytes(pid), []
    model = strategy.build(Deep, transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy.stage == 3:
        most.append(megabytes(pid))
    module = strategy.begin(model, optimizer, transport)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: most.append(megabytes(pid)))
        layer.register_full_backward_hook(lambda *_: most.append(megabytes(pid)))
    for _ in range(3):
        strategy.clear()
        module(torch.ones(8, BIG, requires_grad=True)).square().mean().backward()
        most.append(megabytes(pid))
        strategy.step()
        transport.barrier()
    return (max(most) - before) * 2**20, strategy._sharded.held()["most"]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_process_itself_holds_no_more_than_is_told(stage):
    """Of eight layers of 4 MB with momentum, 96 MB in plain data parallelism. Pages count for those who share them."""

    def work():
        strategy.LARGE = 1
        return peak(dlab.ZeRO(stage))

    with dlab.Cluster(4, threads=1) as four:
        found = four.run(work, timeout=60)
    for grown, told in found:
        shared = BYTES * LAYERS * 3 / 4 if stage == 2 else 0  # all weights are told, but a quarter of their pages count
        assert grown < told - shared + 10e6  # and what the transport and torch allocate besides
        assert told < (70e6 if stage == 2 else 46e6)


def test_a_layer_is_let_go_before_the_next_is_gathered():
    """Of eight equal layers one is there at a time, beside its gradient; nothing else is held for the graph."""

    def look(transport):
        model, strategy = Deep(), dlab.ZeRO(3)
        module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), transport)
        with torch.no_grad():
            module(torch.ones(2, BIG))
        evaluated = strategy._sharded.meter.most
        strategy.clear()
        module(torch.ones(2, BIG, requires_grad=True)).square().mean().backward()
        return evaluated, strategy._sharded.meter.most

    assert dlab.rehearse(look, ranks=2) == [(BYTES, 2 * BYTES)] * 2


# ------------------------------------------------------------------------------------------ what is sent


class NoSharedMemory:
    """Ranks on several hosts, of which none can see another's memory."""

    @staticmethod
    def connect(transport):
        return None


@pytest.fixture
def several_hosts(monkeypatch):
    monkeypatch.setattr(gradients, "SharedAllReduce", NoSharedMemory)
    monkeypatch.setattr(flat, "reducer_for", Reducer)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_what_the_formula_says(several_hosts, ranks, stage):
    def work(transport):
        inputs = data().tensors[0][:8].requires_grad_()  # so that the backward pass needs the first layer, too
        mine, _ = learned(dlab.ZeRO(stage, SMALL), transport, network, 1, inputs=inputs)
        return None if stage == 1 else dict(mine._sharded.exchange.moved)

    run = dlab.rehearse(work, ranks)
    sent = sum(m.data["bytes"] for m in run.messages if m.data["phase"] in ("all-gather", "reduce-scatter"))
    weights = [8 * each.numel() for each in network().parameters()]
    formula = ranks * zero_traffic(sum(weights), ranks, stage)
    # the last layer is the first in the backward pass, and is not let go in between
    stays = (ranks - 1) * sum(weights[-2:]) if stage == 3 else 0
    flags = (ranks - 1) * 64 * 2 if stage == 1 else 0  # of unused parameters
    assert sent == formula - stays + flags
    if stage > 1:
        moved = sum(each["gather"] + each["reduce"] for each in run)
        assert moved == formula - stays


def test_the_next_layer_is_sent_before_anybody_asks_for_it(several_hosts):
    """In the second forward pass the parts of a layer are sent while the layer before computes."""
    order = []

    def work(transport):
        model = network()
        strategy = dlab.ZeRO(3)
        module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), transport)
        exchange = strategy._sharded.exchange
        start = exchange._start

        def note(word):
            if transport.rank == 0:
                order.append(word)

        def noted(number):
            note(number)
            start(number)

        exchange._start = noted
        layers = [each for each in model if isinstance(each, nn.Linear)]
        for number, layer in enumerate(layers):
            layer.register_forward_hook(lambda *_, word=f"computed {number}": note(word))
        for _ in range(2):
            order.clear()
            strategy.clear()
            module(data().tensors[0]).sum().backward()
            strategy.step()
        strategy.end()

    dlab.rehearse(work, ranks=2)
    forward = order[: order.index("computed 2") + 1]
    assert forward == [2, 1, "computed 0", 0, "computed 1", 1, "computed 2"]  # the last layer has bucket 0


# ------------------------------------------------------------------------------------------ precision and clipping


def float_network():
    return filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def filled(model):
    """The same weights on every thread: threads share torch's own random numbers."""
    make = torch.Generator().manual_seed(5)
    for each in model.parameters():
        each.data = torch.randn(each.shape, generator=make, dtype=each.dtype) / 4
    return model


def by_hand(ranks, steps, lr):
    """One process with bfloat16 weights and float32 copies: gradients are added in float32, in the ranks' order."""
    masters = [each.detach().clone() for each in float_network().parameters()]
    model = float_network().bfloat16()
    for _ in range(steps):
        sums = [torch.zeros_like(each) for each in masters]
        for rank in range(ranks):
            outputs = model(half_samples(rank).bfloat16()).float()
            found = torch.autograd.grad(outputs.square().mean(), list(model.parameters()))
            sums = [total + each.float() for total, each in zip(sums, found, strict=True)]
        for master, parameter, total in zip(masters, model.parameters(), sums, strict=True):
            master -= lr * (total / ranks)
            parameter.data.copy_(master)
    return torch.cat([master.view(-1) for master in masters])


def half_samples(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def in_halves(transport, stage, lr=1e-3):
    model = float_network()
    strategy, optimizer = dlab.ZeRO(stage, parameters=torch.bfloat16), torch.optim.SGD(model.parameters(), lr=lr)
    module = strategy.begin(model, optimizer, transport)
    kinds = set()
    for _ in range(5):
        strategy.clear()
        outputs = module(half_samples(transport.rank))
        kinds |= {outputs.dtype, *(each.dtype for each in model.parameters())}
        outputs.square().mean().backward()
        strategy.step()
    held = strategy._sharded.held()
    strategy.end()
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), kinds, held


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_parameters_of_16_bits_have_float32_copies(clusters, stage, shared):
    expected = by_hand(2, 5, 1e-3)
    if shared:
        results = clusters[2].run(lambda: in_halves(dlab.transport(), stage), timeout=60)
    else:
        results = dlab.rehearse(lambda transport: in_halves(transport, stage), ranks=2)
    for found, kinds, held in results:
        assert kinds == {torch.float32, torch.bfloat16}
        exact = 0 if stage > 1 else 2e-5  # stage 1 adds up in 16 bits
        torch.testing.assert_close(found, expected, rtol=0, atol=exact)
        half = 2 * len(expected)
        assert held["parameters"] == half if stage < 3 else abs(held["parameters"] - half / 2) <= 4
        assert abs(held["optimizer"] - 4 * len(expected) / 2) <= 16
    before = torch.nn.utils.parameters_to_vector(float_network().parameters())
    assert not torch.equal(before.bfloat16().float(), found)


def test_a_checkpoint_of_16_bit_parameters_has_the_copies(clusters, tmp_path):
    floats = torch.utils.data.TensorDataset(data().tensors[0].float(), data().tensors[1])
    for before, after in ((1, 2), (2, 3), (3, 3)):
        folder = tmp_path / f"{before} {after}"
        first, then = (dlab.ZeRO(stage, parameters=torch.bfloat16) for stage in (before, after))
        once = dlab.train(float_network, floats, first, on=clusters[2], checkpoint=folder, every=8, **GIVEN).wait(60)
        saved = folder / "step-00000008"
        again = dlab.train(float_network, floats, then, on=clusters[2], resume=saved, **GIVEN).wait(60)
        assert difference(once.model, again.model) <= (0 if before == after else 2e-3)  # stage 1 adds up in 16 bits


@pytest.mark.parametrize("largest", [0.05, 100.0])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_of_the_whole_gradient_is_clipped(stage, largest):
    def work(transport):
        model, norms = filled(network()), []
        strategy, optimizer = dlab.ZeRO(stage, SMALL, clip=largest), torch.optim.SGD(model.parameters(), 0.5, 0.9)
        module = strategy.begin(model, optimizer, transport)
        for _ in range(3):
            strategy.clear()
            module(data().tensors[0][:8]).square().mean().backward()
            norms.append(strategy.step()["norm"])
        return {name: each.clone() for name, each in strategy.whole_state().items()}, norms

    model, norms = filled(network()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(data().tensors[0][:8]).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), largest)))
        optimizer.step()
    for state, found in dlab.rehearse(work, ranks=3):
        assert found == pytest.approx(norms, rel=1e-9)
        for name, each in model.state_dict().items():
            torch.testing.assert_close(state[name], each, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------ around the training


@pytest.mark.parametrize("stage", [2, 3])
def test_it_is_watched_evaluated_and_gets_other_learning_rates_like_any_other(clusters, stage):
    run = dlab.train(network, data(), dlab.ZeRO(stage, SMALL), on=clusters[2], watch=1, test=data(), **GIVEN)
    result = run.wait(60)
    assert result.accuracy == pytest.approx(dlab.evaluate(result.model, data()).accuracy)
    stages = {event.data["stage"] for event in run.events if event.kind == "gradient"}
    assert stages == {"computed", "bucketed", "sent", "reduced", "applied"}
    norms = [event.data["norms"] for event in run.events if event.kind == "gradients"]
    assert norms and all(norm > 0 for norm in norms[0].values())
    assert difference(result.model, plain(1, **GIVEN)) < 1e-12


@pytest.mark.parametrize("stage", [2, 3])
def test_a_learning_rate_that_changes_and_bfloat16_autocast(clusters, stage):
    floats = torch.utils.data.TensorDataset(data().tensors[0].float(), data().tensors[1])
    given = GIVEN | {"amp": True, "epochs": 8}
    one = dlab.train(float_network, floats, dlab.ZeRO(stage), on=clusters[2], **given).wait(60)
    other = dlab.train(float_network, floats, dlab.AllReduceSGD(), on=clusters[2], **given).wait(60)
    assert one.losses == pytest.approx(other.losses, rel=1e-2)

    def work(transport):
        model = filled(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        strategy = dlab.ZeRO(stage)
        module = strategy.begin(model, optimizer, transport)
        for _ in range(3):
            strategy.clear()
            module(data().tensors[0]).square().mean().backward()
            strategy.step()
            scheduler.step()
        return torch.cat([each.reshape(-1) for each in strategy.whole_state().values()])

    (found, _) = dlab.rehearse(work, ranks=2)
    model = filled(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rate in (0.1, 0.01, 0.001):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(data().tensors[0]).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(
        found, torch.nn.utils.parameters_to_vector(model.parameters()).detach(), atol=1e-12, rtol=0
    )


def test_in_shared_memory_a_rank_can_evaluate_alone(clusters):
    def alone():
        torch.manual_seed(1)
        strategy, model = learned(dlab.ZeRO(3), dlab.transport(), network)
        if dlab.rank() == 0:
            with torch.no_grad():
                model(data().tensors[0])
        dlab.transport().barrier()
        return strategy.whole_state()["0.weight"]

    assert torch.equal(*clusters[2].run(alone, timeout=30))


def test_no_weight_changes_before_all_ranks_have_ended_their_backward_passes(clusters):
    def work():
        model = filled(network())
        strategy = dlab.ZeRO(2, SMALL)
        module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), dlab.transport())
        before, seen = [each.detach().clone() for each in model.parameters()], []

        def late(_):  # after the last gradient of a weight
            if dlab.rank():
                time.sleep(0.3)
            seen.extend(each.detach().clone() for each in model.parameters())

        inputs = data().tensors[0].requires_grad_() * 1
        inputs.register_hook(late)
        strategy.clear()
        module(inputs).square().mean().backward()
        strategy.step()
        return all(map(torch.equal, before, seen)), all(map(torch.equal, before, model.parameters()))

    assert clusters[2].run(work, timeout=30) == [(True, False)] * 2


# ------------------------------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stage": 0}, "ZeRO has no stage 0: use stage=1"),
        ({"stage": "1"}, "ZeRO has no stage '1': use stage=1"),
        ({"stage": True}, "ZeRO has no stage True: use stage=1"),
        ({"bucket_mb": 0}, "bucket_mb=0: give a size in megabytes"),
        ({"parameters": torch.float64}, "parameters=torch.float64: give torch.bfloat16"),
        ({"parameters": "bfloat16"}, "parameters='bfloat16': give torch.bfloat16"),
        ({"clip": 0}, "clip=0: give the largest norm"),
    ],
)
def test_a_bad_argument_gets_a_sentence(given, words):
    with pytest.raises(ValueError, match=words):
        dlab.ZeRO(**given)


def begun(transport, make, stage=3, use=None, make_optimizer=torch.optim.SGD, **given):
    model = make()
    strategy = dlab.ZeRO(stage, **given)
    module = strategy.begin(model, make_optimizer(model.parameters(), lr=0.1), transport)
    strategy.clear()
    return use(strategy, module) if use else None


def an_old_graph(strategy, module):
    loss = module(data().tensors[0].requires_grad_()).square().mean()
    loss.backward(retain_graph=True)
    strategy.step()
    loss.backward()


def twice(strategy, module):
    loss = module(data().tensors[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def changed_in_place(strategy, module):
    inputs = data().tensors[0].requires_grad_().clone()
    outputs = module(inputs)
    inputs += 1
    outputs.sum().backward()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"use": an_old_graph}, RuntimeError, "weights that a step has changed since its forward pass"),
        ({"use": twice, "stage": 2, "bucket_mb": SMALL}, RuntimeError, "a second time in one backward pass"),
        ({"use": changed_in_place}, RuntimeError, "changed in place after the forward pass"),
        ({"make_optimizer": torch.optim.Adafactor}, ValueError, "Adafactor updates a whole layer at a time"),
        ({"parameters": torch.bfloat16}, ValueError, "is for a float32 model, but this one has torch.float64"),
    ],
)
def test_what_cannot_be_done_gets_a_sentence_on_all_ranks(given, error, words):
    with pytest.raises(error, match=words):
        dlab.rehearse(lambda transport: begun(transport, network, **given), ranks=1)


def test_weights_in_a_loss_outside_of_the_model_are_not_quietly_those_of_a_part():
    def penalty(strategy, module):
        module(data().tensors[0])
        return sum(each.square().sum() for each in module.parameters()).item()

    assert all(
        each != each for each in dlab.rehearse(lambda transport: begun(transport, network, use=penalty), ranks=2)
    )


def test_one_rank_that_evaluates_while_others_train_is_named(several_hosts):
    def work(transport):
        model = network()
        strategy = dlab.ZeRO(3)
        module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), transport)
        strategy.clear()
        if transport.rank:
            module(data().tensors[0]).sum().backward()
            strategy.step()
        else:
            with torch.no_grad():
                module(data().tensors[0])

    with pytest.raises(RuntimeError, match="rank 0 ended a pass without a backward pass"):
        dlab.rehearse(work, ranks=2)


def test_places_in_a_buffer_are_used_again():
    assert lay_out([4, 4, 4], room=8) == ([0, 4, 0], [0, 0, 1])
    assert lay_out([4, 3, 3, 8], room=8) == ([0, 4, 0, 0], [0, 0, 1, 3])
    assert lay_out([], room=8) == ([], [])
