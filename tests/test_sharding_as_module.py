"""A network that is cut answers what code around a network asks: its mode, its gradients, its whole state."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn

import dlab

RANKS = 4


class Net(nn.Module):
    """A tied weight, a module with two names, dropout, a count that changes in place, and a mean that is replaced."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.one = nn.Linear(8, 8)
        self.again = self.one
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        self.calls += 1
        hidden = self.drop(torch.relu(self.again(self.one(self.table(ids)))))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.head(hidden)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


IDS = torch.arange(8)


def layouts(ranks=RANKS):
    layout = dlab.Layout((ranks,), ("tp",))
    return {"one.weight": layout("tp", None), "one.bias": layout("tp"), "table.weight": layout(None, "tp")}


def on_ranks(net, work, ranks=RANKS, **settings):
    settings = {"layouts": layouts(ranks), **settings}
    return list(
        dlab.rehearse(
            lambda transport: work(dlab.AutoParallel(copy.deepcopy(net), transport=transport, **settings)), ranks=ranks
        )
    )


def test_it_is_trained_and_evaluated_like_the_network(net):
    def work(par):
        assert par.training and par.net.drop.training
        assert par.eval() is par and not par.training and not par.net.drop.training
        scores = par(IDS)
        assert par.train() is par and par.net.drop.training
        assert not par.train(False).training
        par(IDS).sum().backward()
        par.zero_grad(set_to_none=False)
        zeros = par.whole(grad=True)
        par.zero_grad()
        return scores.detach(), zeros, par.whole(grad=True)

    right = copy.deepcopy(net).eval()(IDS)
    for scores, zeros, nothing in on_ranks(net, work):
        assert torch.allclose(scores, right, atol=1e-12)
        assert all((each == 0).all() for each in zeros.values()) and set(nothing.values()) == {None}


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_state_is_that_of_the_whole_network(net, ranks):
    plain = copy.deepcopy(net).eval()
    for _ in range(2):
        plain(IDS)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for each in other.state_dict().values():
            each.mul_(2)
    given = copy.deepcopy(other.state_dict())
    target = other(IDS)

    def work(par):
        par.eval()
        par(IDS), par(IDS)
        state = par.state_dict()
        parts = [tuple(each.shape) for each in par.parameters()]
        par.load_state_dict(given)
        assert [tuple(each.shape) for each in par.parameters()] == parts  # still this rank's part
        return state, par(IDS).detach(), par.state_dict(), parts

    for state, scores, after, parts in on_ranks(net, work, ranks):
        assert parts[0] == (8, 8 // ranks)
        assert list(state) == list(plain.state_dict())  # a tied weight by both names, and no scratch
        for name, each in plain.state_dict().items():
            assert type(state[name]) is torch.Tensor and torch.allclose(state[name], each, atol=1e-12), name
        assert torch.allclose(scores, target, atol=1e-10)
        assert all(torch.allclose(after[name], each, atol=1e-12) for name, each in other.state_dict().items())


def test_a_state_is_loaded_before_anything_is_placed_or_made(net):
    right = copy.deepcopy(net).eval()(IDS)

    def load(transport):
        with dlab.no_init_parameters():
            made = Net().double()
        par = dlab.AutoParallel(made.eval(), transport=transport)
        par.load_state_dict(net.state_dict())
        return par(IDS).detach()

    for scores in dlab.rehearse(load, ranks=RANKS):
        assert torch.allclose(scores, right, atol=1e-12)


def test_a_state_of_another_network_is_refused_on_every_rank(net):
    state = net.state_dict()
    wrong = {
        r"size mismatch for one.weight: \(8, 9\) was saved, and the network here has \(8, 8\)": state
        | {"one.weight": torch.zeros(8, 9)},
        "of another network: it lacks one.bias$": {name: each for name, each in state.items() if name != "one.bias"},
        "of another network: it has more, unlike the network here$": state | {"more": torch.zeros(1)},
    }
    for words, given in wrong.items():

        def work(par, given=given, words=words):
            with pytest.raises(RuntimeError, match=words):
                par.load_state_dict(given)

        on_ranks(net, work)


def test_a_step_over_two_networks_and_a_loose_weight(net):
    torch.manual_seed(1)
    first, second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    x = torch.randn(4, 8, dtype=torch.float64)

    def work(transport):
        a, b, scale = copy.deepcopy(first), copy.deepcopy(second), nn.Parameter(torch.ones(8, dtype=torch.float64))
        layout = dlab.Layout((RANKS,), ("tp",))
        par = dlab.AutoParallel(
            lambda x: b(torch.relu(a(x))) * scale,
            transport=transport,
            layouts={"a.weight": layout("tp", None), "scale": layout("tp")},
        )
        before, whole = par(x).detach(), par.state_dict()
        par.load_state_dict({name: each * 2 for name, each in whole.items()})
        return before, par(x).detach(), list(whole), not par.eval().training and not a.training and not b.training

    for before, after, names, mode in dlab.rehearse(work, ranks=RANKS):
        right = second(torch.relu(first(x)))
        assert torch.allclose(before, right, atol=1e-12) and mode
        assert names == ["a.weight", "a.bias", "b.weight", "b.bias", "scale"]
        doubled = 2 * (torch.relu(2 * first(x)) @ (2 * second.weight).t() + 2 * second.bias)
        assert torch.allclose(after, doubled, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"layouts": None}, {"layouts": None, "parallel_mode": "auto"}])
def test_a_buffer_that_a_result_replaces_is_whole_afterwards(net, settings):
    plain = copy.deepcopy(net).eval()
    plain(IDS), plain(IDS)

    def work(par):
        par.eval()
        par(IDS), par(IDS)
        return par.net.mean, par.net.calls.item()

    for mean, calls in on_ranks(net, work, **settings):
        assert type(mean) is torch.Tensor and torch.allclose(mean, plain.mean, atol=1e-12) and calls == 2


@pytest.mark.parametrize("ask", ["explain", "plan", "check"])
def test_a_question_leaves_buffers_and_gradients_as_they_were(net, ask):
    settings = {"layouts": None, "parallel_mode": "auto"} if ask == "plan" else {}

    def work(par):
        par.eval()
        par(IDS).sum().backward()
        buffers, gradients = [par.net.calls, par.net.mean], [each.grad for each in par.parameters()]
        values = [each.clone() for each in (*buffers, *gradients)]
        getattr(par, ask)(IDS)
        assert par.net.calls is buffers[0] and par.net.mean is buffers[1]
        assert all(one is two.grad for one, two in zip(gradients, par.parameters(), strict=True))
        assert all(torch.equal(one, two) for one, two in zip(values, (*buffers, *gradients), strict=True))

    on_ranks(net, work, **settings)


def test_a_weight_or_a_module_with_two_names_can_be_placed_by_each(net):
    layout = dlab.Layout((RANKS,), ("tp",))
    right = copy.deepcopy(net).eval()(IDS)
    for name, placed in {
        "head.weight": layout("tp", None),
        "again.weight": layout("tp", None),
        "again": layout("tp", None),
    }.items():
        found = on_ranks(net, lambda par: (par.eval()(IDS).detach(), par.layouts), layouts={name: placed})
        for scores, placement in found:
            assert torch.allclose(scores, right, atol=1e-12), name
            if name != "again":
                assert placement["table.weight" if "head" in name else "one.weight"] == placed


def test_two_layouts_for_one_weight_are_refused(net):
    layout = dlab.Layout((RANKS,), ("tp",))
    both = {"table.weight": layout("tp", None), "head.weight": layout(None, "tp")}
    with pytest.raises(
        ValueError, match=r"head.weight is another name of table.weight, which has the layout \(tp, None"
    ):
        dlab.AutoParallel(net, ranks=RANKS, layouts=both)


def test_it_says_what_it_is(net):
    assert repr(dlab.AutoParallel(net, "auto", ranks=8)) == "AutoParallel(Net, 'auto', 8 ranks)"
    assert repr(dlab.AutoParallel(on_ranks, ranks=2)) == "AutoParallel(on_ranks, 'semi_auto', 2 ranks)"


def a_step(kind):
    """A function that uses a network of two layers in some way, and the names of their weights."""
    torch.manual_seed(2)
    one, two = nn.Linear(8, 8, bias=False).double(), nn.Linear(8, 8, bias=False).double()
    both, stack = [one, two], nn.Sequential(one, nn.Tanh(), two)

    def with_factor(factor, x):
        return factor * stack(x)

    def helper(x):
        return stack(x) if len(x) else helper(x)

    def later(x):
        return par.training and stack(x)

    class Trainer:
        def __init__(self):
            self.nets = both

        def step(self, x):
            return self.nets[1](torch.tanh(self.nets[0](x)))

    made = {
        "a partial": functools.partial(with_factor, 1.0),
        "a partial with the network": functools.partial(lambda net, x: net(x), stack),
        "by keyword": functools.partial(lambda x, net: net(x), net=stack),
        "a helper": lambda x: helper(x),
        "a list": lambda x: both[1](torch.tanh(both[0](x))),
        "a method": Trainer().step,
        "itself": later,
    }
    names = {"a list": "both", "a method": "nets"}.get(kind, "")
    if kind == "itself":
        par = dlab.AutoParallel(later, ranks=2)
    return made[kind], [f"{names}.{n}.weight" if names else f"{2 * n}.weight" for n in (0, 1)], stack


KINDS = ["a partial", "a partial with the network", "by keyword", "a helper", "a list", "a method", "itself"]


@pytest.mark.parametrize("kind", KINDS)
def test_networks_are_found_where_a_function_has_them(kind):
    x = torch.randn(4, 8, dtype=torch.float64)
    layout = dlab.Layout((2,), ("tp",))
    lock = threading.Lock()

    def work(transport):
        with lock:
            step, (first, second), _ = a_step(kind)
        cuts = {first: layout("tp", None), second: layout(None, "tp")}
        par = dlab.AutoParallel(step, transport=transport, layouts=cuts)
        assert repr(par).startswith("AutoParallel(")
        return par(x).detach(), list(par.state_dict()), [tuple(each.shape) for each in par.parameters()]

    right = a_step(kind)[2](x)
    for result, names, shapes in dlab.rehearse(work, ranks=2):
        assert torch.allclose(result, right, atol=1e-12)
        assert names == a_step(kind)[1] and shapes == [(4, 8), (8, 4)]


MODULE_LEVEL = nn.Linear(8, 8)


def test_a_global_network_is_found_in_a_comprehension_and_behind_a_partial():
    def helper(x):
        return torch.cat([MODULE_LEVEL(each) for each in (x,)])

    def method(x):
        return x.helper().other.MODULE_LEVEL  # names of attributes are none of the function's own

    assert list(dlab.AutoParallel(method, ranks=2).parameters()) == []
    for step in (helper, functools.partial(lambda k, x: helper(x) * k, 2)):
        assert [name for name, _ in dlab.AutoParallel(step, ranks=2).named_parameters()] == ["weight", "bias"]


def test_a_step_is_planned_anew_in_another_mode():
    class Longer(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.two(self.one(x)) if self.training else self.one(x)

    net = Longer()
    par = dlab.AutoParallel(lambda x: net(x), "auto", ranks=2)
    rows = [len(par.train(mode).plan(torch.ones(8, 8)).rows) for mode in (True, False)]
    assert rows == [4, 2]  # each layer is a product and a sum
