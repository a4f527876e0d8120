"""Mistakes that students make with sharded networks: each is told in a sentence, and nothing is silently wrong."""

import copy

import pytest
import torch
from torch import nn

import dlab
from dlab.sharding import rosetta
from dlab.sharding.communication import Copy

TP = dlab.Layout((4,), ("tp",))


def told(work, ranks=4, error=Exception):
    """The sentence with which `work(transport)` fails on ranks that are threads."""
    with pytest.raises(error) as caught:
        dlab.rehearse(work, ranks=ranks)
    return str(caught.value)


def pairs(factor=1.0, dtype=torch.float64):
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= factor
    return net.to(dtype)


# ------------------------------------------------------------------------------------- only a plan


@pytest.mark.parametrize("ask", [lambda par: par(torch.ones(4, 6)), lambda par: par.check(torch.ones(4, 6))])
def test_a_plan_computes_nothing(ask):
    with pytest.raises(RuntimeError, match="only planned, with ranks="):
        ask(dlab.AutoParallel(nn.Linear(6, 3, bias=False), ranks=4))


def test_a_plan_and_real_ranks_exclude_each_other():
    work = lambda ranks: dlab.AutoParallel(nn.Linear(8, 8), transport=ranks, ranks=8)  # noqa: E731
    assert "give one of them" in told(work, error=ValueError)


# ------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("factor", [1e-3, 0.01, 1.0, 30.0])
def test_check_judges_small_and_large_numbers_alike(factor, monkeypatch):
    net, x = pairs(factor), torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def check(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, layouts=dlab.megatron_layouts(net, TP))
        return par.check(x)

    assert "equal those of one process" in dlab.rehearse(check, ranks=4)[0]
    monkeypatch.setattr(Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None, None)))
    assert "the gradient of" in told(check, error=AssertionError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_check_knows_how_exact_a_type_is(dtype):
    torch.manual_seed(0)
    net, x = nn.Linear(784, 64, bias=False).to(dtype), (torch.rand(32, 784) * 255).round().to(dtype)
    layouts = {"weight": TP(None, "tp")}

    def check(transport):
        return dlab.AutoParallel(copy.deepcopy(net), transport=transport, layouts=layouts).check(x)

    assert "1 operator equal" in dlab.rehearse(check, ranks=4)[0]


def test_check_tells_who_was_given_another_batch_or_other_weights():
    net, x = pairs(), torch.ones(4, 8, dtype=torch.float64)

    def other_batch(transport):
        return dlab.AutoParallel(copy.deepcopy(net), transport=transport).check(x + (transport.rank == 2))

    def other_weights(transport):
        mine = copy.deepcopy(net)
        mine[0].bias.data += transport.rank == 3
        return dlab.AutoParallel(mine, transport=transport).check(x)

    assert told(other_batch, error=ValueError).startswith("rank 2 was given another input 0 than rank 0")
    assert told(other_weights, error=ValueError).startswith("rank 3 holds other numbers of 0.bias than rank 0")


def test_check_takes_keywords_and_refuses_what_it_cannot_copy():
    class Scaled(nn.Linear):
        def forward(self, x, scale=None):
            return super().forward(x) * scale

    torch.manual_seed(0)
    net, x = Scaled(8, 8).double(), torch.ones(4, 8, dtype=torch.float64)

    def check(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        return par.check(x, scale=x.cos()), len(par.explain(x, scale=x.cos()).rows)

    assert "equal those" in dlab.rehearse(check, ranks=2)[0][0]
    assert "nn.Module whose forward" in told(lambda t: dlab.AutoParallel(net.forward, transport=t).check(x, scale=x))
    assert "above 0" in told(lambda t: dlab.AutoParallel(copy.deepcopy(net), transport=t).check(x, tolerance=-1))


# --------------------------------------------------------------------- parameters, and who updates them


def test_parameters_that_a_function_names_are_cut_and_those_that_it_hides_are_refused():
    torch.manual_seed(0)
    start, x = torch.randn(8, 12, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    matmul = dlab.shard(torch.matmul, in_strategy=((1, 4), (4, 1)))

    def work(transport):
        weight, more = nn.Parameter(start.clone()), [nn.Parameter(start.T.clone())]
        par = dlab.AutoParallel(lambda x: torch.relu(matmul(x, weight)) @ more[0], transport=transport)
        loss = par(x).square().sum()
        loss.backward()
        return loss.item(), par.whole(grad=True), {name: tuple(each.shape) for name, each in par.named_parameters()}

    weight, more = nn.Parameter(start.clone()), nn.Parameter(start.T.clone())
    loss = (torch.relu(x @ weight) @ more).square().sum()
    loss.backward()
    for found, gradients, shapes in dlab.rehearse(work, ranks=4):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        assert shapes == {"weight": (2, 12), "more.0": (12, 8)}
        torch.testing.assert_close(gradients, {"weight": weight.grad, "more.0": more.grad}, rtol=1e-10, atol=1e-10)

    def hidden(transport):
        box = {"weight": nn.Parameter(start.clone())}
        return dlab.AutoParallel(lambda x: matmul(x, box["weight"]), transport=transport)(x)

    assert "a parameter of shape (8, 12) that AutoParallel has not found" in told(hidden, error=ValueError)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_looks_at_whole_layers_is_refused_only_where_they_are_cut(kind):
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8, bias=False), torch.ones(4, 8)

    def work(transport, layouts):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, layouts=layouts)
        optimizer = kind(par.parameters())

        def closure():
            optimizer.zero_grad()
            loss = par(x).square().sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    assert "updates a whole layer" in told(lambda t: work(t, {"weight": TP("tp", None)}), error=ValueError)
    dlab.rehearse(lambda t: work(t, {"weight": TP(None, None)}), ranks=4)


# ------------------------------------------------------------------------------------------ sentences


def test_a_sharded_tensor_in_a_text_communicates_nothing():
    def work(transport):
        def show(x):
            y = dlab.ops.ReLU().shard(((2, 2),))(x)
            if transport.rank == 0:
                texts.append(f"{y}")
            return y

        return dlab.AutoParallel(show, transport=transport)(torch.ones(4, 4))

    texts = []
    dlab.rehearse(work, ranks=4)
    assert texts == ["<ShardedTensor 4 × 4, (a, b), here (2, 2)>"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: dlab.AutoParallel(nn.Linear(8, 8), ranks=4, layouts={"weight": (2, 1)}),
            "the layout of weight is (2, 1)",
        ),
        (lambda: dlab.AutoParallel(nn.Linear(8, 8), ranks=4, layouts=[TP]), "give a dict"),
        (lambda: dlab.AutoParallel(nn.Linear, ranks=4), "make the network first"),
        (lambda: dlab.redistribution(TP, TP("tp"), shape=(8,)), "places no tensor yet"),
        (lambda: dlab.redistribution(TP("tp"), (1,), shape=(8,)), "the second layout is (1,)"),
        (lambda: rosetta.to_dtensor(TP), "places no tensor yet"),
        (lambda: rosetta.to_partition_spec(TP), "places no tensor yet"),
        (lambda: rosetta.to_tensor_map((1, 2)), "give a layout with an entry for each dimension"),
        (lambda: TP("tp", None).slices((-8, 4)), "a tuple of whole numbers"),
        (lambda: TP("tp", None).slices((8.0, 4)), "not (8.0, 4)"),
        (lambda: TP("tp").slices(8), "not 8"),
        (lambda: TP("tp").slices(torch.ones(8)), "not a Tensor"),
    ],
)
def test_what_is_not_a_layout_or_a_shape_is_told(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: dlab.ops.MatMul().shard((TP, TP))(x, x), "MatMul: call the layout with an entry for each dimension"),
        (lambda x: torch.relu(x).data, "how to cut 'data'"),
        (lambda x: torch.relu(x).numpy(), "let the network return the tensor"),
        (lambda x: torch.relu(x).cumsum(0), "such as sum"),
    ],
)
def test_what_cannot_be_cut_is_told(body, words):
    assert words in told(lambda transport: dlab.AutoParallel(body, transport=transport)(torch.ones(8, 8)))


def test_a_sum_over_dimensions_is_called_as_in_torch():
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(dlab.ops.ReduceSum()(x, 1), x.sum(1))
    assert torch.equal(dlab.ops.ReduceSum(dim=0)(x), x.sum(0))
    par = dlab.AutoParallel(dlab.ops.ReduceSum(), ranks=4)
    assert len(par.explain(x, 1).rows) == 1
