"""One loop trains what a strategy cuts: here a layer cut over peers on a mesh, and a pipeline of two stages."""

import io

import pytest
import torch
from rich.console import Console
from test_strategies import BATCH, SAMPLES, data, difference, plain
from torch import nn

import dlab
from dlab.collectives import all_gather, broadcast
from dlab.strategies import Strategy
from dlab.training.progress import show_progress
from dlab.transports import Group

GIVEN = {"batch_size": BATCH, "lr": 0.05, "momentum": 0.9, "epochs": 3, "test": data()}


@pytest.fixture(scope="module")
def four():
    with dlab.Cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two():
    with dlab.Cluster(2) as cluster:
        yield cluster


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def with_dropout():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 3)).double()


def one_process(ranks, monkeypatch, **changed):
    """Plain torch on the same global batches."""
    monkeypatch.setattr("test_strategies.network", network)
    return plain(ranks, **GIVEN | changed)


# ------------------------------------------------------------------------------------------ a layer in columns


class GatherColumns(torch.autograd.Function):
    """All peers get the outputs of all; each has the gradient of all of them, and takes that of its own."""

    @staticmethod
    def forward(context, mine, peers):
        context.peers = peers
        return torch.cat(all_gather(mine.contiguous(), peers), dim=1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(context.peers.size, dim=1)[context.peers.rank], None


class SplitLinear(nn.Linear):
    """This rank's share of the outputs of a linear layer."""

    def __init__(self, whole, peers):
        super().__init__(whole.in_features, whole.out_features // peers.size, dtype=whole.weight.dtype)
        self.load_state_dict(take_share(whole.state_dict(), peers))
        self.peers = peers

    def forward(self, inputs):
        return GatherColumns.apply(super().forward(inputs), self.peers)


def take_share(state, peers):
    return {name: value.chunk(peers.size)[peers.rank] for name, value in state.items()}


class ColumnSplit(Strategy):
    """The first layer is cut over `tp` peers; `step` comes from a strategy that averages along the data group."""

    sharded = True

    def __init__(self, tp=2):
        super().__init__()
        self.tp = tp

    def data_group(self, transport):
        self.mesh = dlab.Mesh((transport.size // self.tp, self.tp), ("dp", "tp"), transport)
        return self.mesh["dp"]

    def build(self, make_model, transport):
        model = make_model()
        model[0] = SplitLinear(model[0], self.mesh["tp"])
        return model

    def backward(self, module, batch, objective):
        dlab.log(inputs=batch.inputs.sum().item(), seed=torch.initial_seed())
        loss = super().backward(module, batch, objective)
        return loss if self.mesh["tp"].rank == 0 else None

    def whole_state(self):
        state = self.model.state_dict()
        return {n: torch.cat(all_gather(v, self.mesh["tp"])) if n.startswith("0.") else v for n, v in state.items()}

    def load_whole_state(self, state):
        first = {name: value for name, value in state.items() if name.startswith("0.")}
        self.model.load_state_dict(state | take_share(first, self.mesh["tp"]))

    def state(self):
        return {"optimizer": self.optimizer.state_dict()}

    def restore(self, states):
        self.optimizer.load_state_dict(states[self.mesh["tp"].rank]["optimizer"])


class SplitSync(ColumnSplit, dlab.SyncSGD):
    pass


class SplitAllReduce(ColumnSplit, dlab.AllReduceSGD):
    pass


class SplitZeRO(ColumnSplit, dlab.ZeRO):
    pass


@pytest.mark.parametrize("strategy", [SplitSync, SplitAllReduce, SplitZeRO])
@pytest.mark.parametrize("order", ["shards", "global"])
def test_a_layer_cut_over_peers_equals_one_process(four, monkeypatch, order, strategy):
    result = dlab.train(network, data(), strategy(), on=four, order=order, **GIVEN).wait(60)
    right = one_process(2, monkeypatch, order=order)
    assert result.identical
    assert difference(result.model, right) < 1e-12
    assert result.evaluation.loss == pytest.approx(dlab.evaluate(right, data()).loss, rel=1e-9)
    replicas = dlab.train(network, data(), dlab.SyncSGD(), workers=2, order=order, **GIVEN).wait(60)
    assert result.losses == pytest.approx(replicas.losses, rel=1e-9)


def test_peers_have_the_same_samples_and_random_numbers_and_replicas_others(four):
    run = dlab.train(with_dropout, data(), SplitSync(), on=four, **GIVEN)
    result = run.wait(60)
    logs = [event for event in run.events if event.kind == "log"]
    for key in ("inputs", "seed"):
        seen = [[event.data[key] for event in logs if event.rank == rank and key in event.data] for rank in range(4)]
        assert seen[0] == seen[1] != seen[2] == seen[3]
    told = [event for event in logs if "step" in event.data]
    assert {event.rank for event in told if "loss" in event.data} == {0, 2}
    assert sum(event.data["samples"] for event in told) == 3 * SAMPLES  # each of them once
    replicas = dlab.train(with_dropout, data(), dlab.SyncSGD(), workers=2, **GIVEN).wait(60)
    assert result.identical
    assert difference(result.model, replicas.model) < 1e-12
    assert result.losses == pytest.approx(replicas.losses, rel=1e-9)


def test_what_was_cut_is_saved_whole_and_resumed_by_more_or_fewer_replicas(four, two, tmp_path, monkeypatch):
    given = GIVEN | {"order": "global"}
    whole = dlab.train(with_dropout, data(), SplitSync(), on=four, checkpoint=tmp_path, every=6, **given).wait(60)
    again = dlab.train(with_dropout, data(), SplitSync(), on=four, resume=tmp_path / "step-00000006", **given)
    again = again.wait(60)
    assert difference(whole.model, again.model) == 0
    assert again.losses == pytest.approx(whole.losses, rel=1e-12)

    right = one_process(1, monkeypatch, order="global")
    for one, other in ((four, two), (two, four)):
        folder = tmp_path / f"by {one.workers}"
        dlab.train(network, data(), SplitSync(), on=one, checkpoint=folder, every=6, **given).wait(60)
        resumed = dlab.train(network, data(), SplitSync(), on=other, resume=folder / "step-00000006", **given)
        assert difference(resumed.wait(60).model, right) < 1e-12


# ------------------------------------------------------------------------------------------ a pipeline


class TwoStages(Strategy):
    """Rank 0 has the first layers, rank 1 the last one and the loss."""

    sharded = True

    def data_group(self, transport):
        return Group(transport, [transport.rank])

    def build(self, make_model, transport):
        with torch.device("meta"):
            self.whole = make_model().state_dict()
        layers = list(make_model().named_children())
        self.last = layers[-1][0]
        stage = nn.Sequential()
        for name, layer in layers[-1:] if transport.rank else layers[:-1]:
            stage.add_module(name, layer)
        return stage

    def backward(self, module, batch, objective):
        if self.transport.rank == 0:
            hidden = module(batch.inputs)
            self.transport.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            self.transport.recv(gradient, 1)
            hidden.backward(gradient)
            return None
        hidden = torch.empty(len(batch.labels), 16, dtype=torch.float64)
        self.transport.recv(hidden, 0)
        loss = objective.loss(module(hidden.requires_grad_()), batch.labels)
        (loss * batch.weight).backward()
        self.transport.send(hidden.grad, 0)
        return loss.item()

    def step(self):
        self.optimizer.step()
        return {"wait": 0.0}

    def whole_state(self):
        own = self.model.state_dict()
        state = {name: own.get(name, torch.empty_like(like, device="cpu")) for name, like in self.whole.items()}
        for name, value in state.items():
            broadcast(value, self.transport, int(name.startswith(self.last)))
        return state

    def load_whole_state(self, state):
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})

    def state(self):
        return {"optimizer": self.optimizer.state_dict()}

    def restore(self, states):
        self.optimizer.load_state_dict(states[self.transport.rank]["optimizer"])


def test_two_stages_equal_one_process(two, tmp_path, monkeypatch):
    run = dlab.train(network, data(), TwoStages(), on=two, checkpoint=tmp_path, every=6, **GIVEN)
    result = run.wait(60)
    right = one_process(1, monkeypatch)
    assert result.identical
    assert difference(result.model, right) < 1e-12
    assert result.evaluation.loss == pytest.approx(dlab.evaluate(right, data()).loss, rel=1e-9)
    logs = [event for event in run.events if event.kind == "log"]
    assert {event.rank for event in logs} == {0, 1}
    assert [event.data["loss"] for event in logs if event.rank == 1] == result.losses
    assert not any("loss" in event.data for event in logs if event.rank == 0)
    assert sum(event.data["samples"] for event in logs) == 3 * SAMPLES

    resumed = dlab.train(network, data(), TwoStages(), on=two, resume=tmp_path / "step-00000006", **GIVEN).wait(60)
    assert difference(resumed.model, result.model) == 0
    assert resumed.losses == result.losses


def test_a_terminal_shows_the_progress_of_a_rank_without_a_loss(two):
    run = dlab.train(network, data(), TwoStages(), on=two, **GIVEN)
    shown = io.StringIO()
    show_progress(run, 15, Console(file=shown, width=120))
    without, having = (line for line in shown.getvalue().splitlines() if line.startswith("rank"))
    assert "15/15" in without and "loss" not in without
    assert "15/15" in having and f"loss {run.wait(60).losses[-1]:.3f}" in having


def test_nobody_goes_on_without_a_part_of_the_model():
    with pytest.raises(
        ValueError, match="elastic=True is for SyncSGD and AllReduceSGD; this strategy cannot restart without a"
    ):
        dlab.train(network, data(), SplitSync(), elastic=True)


class Halves(nn.Sequential):
    """A network of 16-bit weights, and nothing else."""

    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.bfloat16()

    def forward(self, inputs):
        return super().forward(inputs.bfloat16()).float()


def test_weights_of_16_bits_are_updated(two):
    """Torch's fused SGD leaves all but the last few of a tensor as they are, without a word."""
    result = dlab.train(Halves, data(), on=two, batch_size=BATCH, lr=0.5, momentum=0.0, epochs=1).wait(60)
    torch.manual_seed(1234)  # that of dlab.train
    before = nn.utils.parameters_to_vector(Halves().parameters())
    after = nn.utils.parameters_to_vector(result.model.parameters())
    assert (before != after).float().mean() > 0.9
