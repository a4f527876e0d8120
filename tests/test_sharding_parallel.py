"""AutoParallel: called like the network or the step that it wraps, it gives the same numbers, step after step."""

import copy
import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from sharded import Net, assert_same, by_ranks, by_torch, check_on_threads
from torch import nn

import dlab
from dlab.sharding.communication import Copy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4
COLUMN, ROW = ((1, 1), (1, 4)), ((1, 4), (4, 1))
MODES = ["semi_auto", "data_parallel", "stand_alone"]


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Cut(nn.Module):
    """8 × 8, ReLU, 8 × 8, each with a strategy; a bias, and a residual connection."""

    def __init__(self, first=COLUMN, second=ROW):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(8))
        self.one = dlab.ops.MatMul().shard(first)
        self.two = dlab.shard(torch.matmul, in_strategy=second)

    def forward(self, x):
        return self.two(torch.relu(self.one(x, self.first) + self.bias), self.second) + x


def ordinary():
    """A network of torch's own layers, which knows nothing of strategies."""
    return nn.Sequential(
        nn.Embedding(8, 8), nn.Flatten(1), nn.Linear(32, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8, bias=False)
    )


def on_ranks(work, ranks=4):
    return dlab.rehearse(work, ranks=ranks)


# whole in, whole out


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_numbers(mode):
    check_on_threads(Cut(), None, [torch.randn(8, 8)], ranks=4, passes=2, parallel_mode=mode)


def test_what_comes_out_is_whole_and_the_gradient_of_an_input_comes_once_to_every_rank():
    net, x, after = Cut(), torch.randn(8, 8), nn.Linear(8, 3)
    right = x.clone().requires_grad_()
    F.cross_entropy(after(net(right * 2)), torch.arange(8) % 3).backward()

    def work(transport):
        par, mine, behind = dlab.AutoParallel(copy.deepcopy(net), transport=transport), x.clone(), copy.deepcopy(after)
        mine.requires_grad_()
        result = par(mine * 2)  # ordinary code before and behind
        assert type(result) is torch.Tensor and result.requires_grad and result.shape == (8, 8)
        F.cross_entropy(behind(result), torch.arange(8) % 3).backward()
        return mine.grad, behind.weight.grad

    for gradient, behind in on_ranks(work):
        assert torch.allclose(gradient, right.grad, atol=1e-12) and torch.allclose(behind, after.weight.grad)


def test_each_call_is_data_parallel_not_only_the_first():
    """An operator that may choose cuts the batch, also when its weights have found their place."""

    def work(transport):
        par = dlab.AutoParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), transport=transport)
        x = torch.randn(8, 8)
        before = [row.inputs[0] for row in par.explain(x).rows]
        par(x)
        return before, [row.inputs[0] for row in par.explain(x).rows]

    before, after = on_ranks(work)[0]
    assert before == after and all(placed.cuts(0) == 4 for placed in after)


def test_data_parallel_ignores_strategies():
    def work(transport):
        par = dlab.AutoParallel(Cut(), transport=transport, parallel_mode="data_parallel")
        told = par.explain(torch.randn(8, 8))
        return told.collectives("forward"), set(map(str, told.layouts.values()))

    forward, layouts = on_ranks(work)[0]
    assert forward == ["all-gather"]  # of the result
    assert layouts == {"(None, None)", "(None)"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_rank_brings_its_own_batch(reduction):
    net = Cut(((4, 1), (1, 1)), ((4, 1), (1, 1)))
    images, labels = torch.randn(16, 8), torch.randint(0, 8, (16,))
    F.cross_entropy(net(images), labels, reduction=reduction).backward()

    def work(transport):
        mine = copy.deepcopy(net)
        mine.zero_grad()
        inputs = images.chunk(4)[transport.rank].clone().requires_grad_(), labels.chunk(4)[transport.rank]
        step = dlab.AutoParallel(
            lambda x, y: F.cross_entropy(mine(x), y, reduction=reduction),
            transport=transport,
            dataset_strategy="data_parallel",
        )
        loss = step(*inputs)
        loss.backward()
        return loss.detach(), step.whole(grad=True), inputs[0].grad

    for loss, gradients, _ in on_ranks(work):
        assert torch.allclose(loss, F.cross_entropy(net(images), labels, reduction=reduction))
        for name, each in net.named_parameters():
            assert torch.allclose(gradients[name], each.grad, atol=1e-12), name


def test_no_grad_and_eval_and_parameters_without_gradients():
    net = Cut()
    net.second.requires_grad_(False)
    x = torch.randn(8, 8)
    truth = by_torch(net, [x])
    assert truth["gradient of second"] is None

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net).eval(), transport=transport)
        with torch.no_grad():
            blind = par(x)
        with torch.inference_mode():
            quick = par(x)
        assert not blind.requires_grad and torch.allclose(blind, truth["result 0"]) and torch.allclose(quick, blind)
        return by_ranks(net, [x], transport)

    for found in on_ranks(work):
        assert_same(found, truth)


def test_gradients_add_up_and_a_network_may_be_called_twice_before_backward():
    net, first, second = Cut(), torch.randn(8, 8), torch.randn(8, 8)
    plain = copy.deepcopy(net)
    (plain(first).sum() * plain(second).mean()).backward()
    plain(second).pow(2).sum().backward()

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        (par(first).sum() * par(second).mean()).backward()
        par(second).pow(2).sum().backward()
        return par.whole(grad=True)

    for gradients in on_ranks(work):
        for name, each in plain.named_parameters():
            assert torch.allclose(gradients[name], each.grad, rtol=1e-10), name


def test_one_weight_in_two_operators_that_cut_it_differently():
    columns, rows = dlab.ops.MatMul().shard(COLUMN), dlab.ops.MatMul().shard(ROW)
    plain = Net(lambda w, x: torch.relu(x @ w[0]) @ w[0] + x @ w[0].t(), torch.randn(8, 8))
    cut = Net(lambda w, x: rows(torch.relu(columns(x, w[0])), w[0]) + x @ w[0].t(), torch.randn(8, 8))
    check_on_threads(plain, cut, [torch.randn(8, 8)], ranks=4, passes=2)


def test_a_weight_without_its_gradient():
    """What a detached weight adds is that of the whole, not of this rank's part."""
    columns = dlab.ops.MatMul().shard(COLUMN)
    plain = Net(lambda w, x: x @ w[0] + w[0].detach().sum() * torch.square(w[0].detach()), torch.randn(8, 8))
    cut = Net(lambda w, x: columns(x, w[0]) + w[0].detach().sum() * torch.square(w[0].detach()), torch.randn(8, 8))
    check_on_threads(plain, cut, [torch.randn(8, 8)], ranks=4, passes=2)


def test_a_parameter_among_the_results_is_whole():
    columns = dlab.ops.MatMul().shard(COLUMN)
    plain = Net(lambda w, x: (x @ w[0], w[0]), torch.randn(8, 8))
    cut = Net(lambda w, x: (columns(x, w[0]), w[0]), torch.randn(8, 8))
    check_on_threads(plain, cut, [torch.randn(8, 8)], ranks=4, passes=2)


def test_structures_of_inputs_and_results():
    def body(pair, scale=1.0, names=()):
        return {"sum": pair["a"] + pair["b"][0] * scale, "names": names, "n": 3}

    def work(transport):
        return dlab.AutoParallel(body, transport=transport)({"a": torch.ones(4), "b": [torch.ones(4)]}, scale=2.0)

    for result in on_ranks(work, ranks=2):
        assert result["sum"].tolist() == [3.0] * 4 and result["names"] == () and result["n"] == 3


# weights


def test_each_rank_holds_its_part_only():
    net = Cut()

    def work(transport):
        mine = copy.deepcopy(net)
        par = dlab.AutoParallel(mine, transport=transport)
        assert par.layouts == {"first": None, "second": None, "bias": None}
        par(torch.randn(8, 8)).sum().backward()
        sizes = {name: tuple(each.shape) for name, each in par.named_parameters()}
        same = all(a is b for a, b in zip(par.parameters(), mine.parameters(), strict=True))
        return sizes, same, par.whole(), mine.first.grad.shape, mine.first.untyped_storage().nbytes()

    for rank, (sizes, same, whole, gradient, memory) in enumerate(on_ranks(work)):
        assert sizes == {"first": (8, 2), "second": (2, 8), "bias": (2,)} and same
        assert gradient == (8, 2) and memory == 8 * 2 * 8, rank
        assert all(torch.equal(whole[name], each) for name, each in net.named_parameters())


def test_whole_is_a_copy_and_gradients_may_be_missing():
    def work(transport):
        par = dlab.AutoParallel(Cut(), transport=transport)
        assert set(par.whole(grad=True).values()) == {None}
        par.whole()["first"].zero_()
        return par.whole()["first"].abs().sum().item()

    assert all(value > 0 for value in on_ranks(work))


def test_layouts_from_outside():
    layout = dlab.Layout((2, 2), ("dp", "tp"))
    net, ids = ordinary(), torch.randint(0, 8, (8, 4))
    for layouts in [
        {"2.weight": layout("tp", "None"), "2.bias": layout("tp"), "5.weight": layout("None", "tp")},
        {"2.weight": layout(("dp", "tp"), "None"), "5.weight": layout("None", ("dp", "tp"))},
        {"0.weight": layout("tp", "None"), "2.weight": layout("None", "dp"), "3.weight": layout("None")},
        {"0.weight": layout("dp", "tp"), "5.weight": layout("tp", "dp"), "5": layout("dp", "None")},
        {"2": layout("dp", "None"), "3": layout("dp", "None")},
    ]:
        check_on_threads(net, None, [ids], ranks=4, where=str(layouts), passes=2, layouts=layouts)


def test_layouts_that_do_not_fit_are_refused():
    layout, eight = dlab.Layout((2, 2), ("dp", "tp")), dlab.Layout((8,), ("x",))
    for layouts, words in [
        ({"7.weight": layout("tp", "None")}, "no parameter or module '7.weight'"),
        ({"2.weight": layout("tp")}, "2.weight: .*2"),
        ({"3.weight": eight("x")}, "8 places, but there are 4 ranks"),
    ]:
        with pytest.raises(ValueError, match=words):
            dlab.AutoParallel(ordinary(), ranks=4, layouts=layouts)


def test_layouts_that_are_refused_leave_the_network_whole():
    layout = dlab.Layout((4,), ("tp",))
    right = {"2.weight": layout("tp", "None")}

    def work(transport):
        net = ordinary()
        for wrong in ({"9": layout("tp")}, {"3.weight": layout("tp", "None")}, {"3": dlab.Layout((2,), ("x",))("x")}):
            with pytest.raises(ValueError, match=r"no parameter or module '9'|3.weight: |2 places, but there are 4"):
                dlab.AutoParallel(net, transport=transport, layouts=right | wrong)
            assert net[2].weight.shape == (16, 32)
        par = dlab.AutoParallel(net, transport=transport, layouts={"2.weight": layout("None", "tp")})
        return par(torch.zeros(8, 4, dtype=torch.long)).shape

    assert on_ranks(work) == [(8, 8)] * 4


# training

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=False),
}
BATCHES = [(torch.randn(8, 8, dtype=torch.float64), torch.arange(8)) for _ in range(4)]


def losses(net, optimizer, call, wrap=lambda step: step):
    """Train for some steps by a step that does all of it, or by a loop around the network."""

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    found = []
    inside = wrap(step)
    for x, y in BATCHES:
        if call == "step":
            found.append(inside(x, y).item())
        else:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def train(transport, net, name, call, made, mode="semi_auto"):
    """On one rank: the losses, and the whole weights after the last step."""
    mine = copy.deepcopy(net)
    if call == "step":
        optimizer, wrapped = OPTIMIZERS[name](mine.parameters()), []

        def wrap(step):
            wrapped.append(dlab.AutoParallel(step, parallel_mode=mode, transport=transport))
            return wrapped[0]

        return losses(mine, optimizer, call, wrap), wrapped[0].whole()
    optimizer = OPTIMIZERS[name](mine.parameters()) if made == "before" else None
    par = dlab.AutoParallel(mine, parallel_mode=mode, transport=transport)
    if made == "after first call":
        par(BATCHES[0][0])
    return losses(par, optimizer or OPTIMIZERS[name](par.parameters()), call), par.whole()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("call", "made"), [("loop", "before"), ("loop", "after"), ("loop", "after first call"), ("step", "before")]
)
def test_training_equals_one_process(name, call, made):
    for net in (Cut(), Cut(((2, 2), (2, 1)), ((1, 2), (2, 2)))):
        plain = copy.deepcopy(net)
        truth = losses(plain, OPTIMIZERS[name](plain.parameters()), call)
        for mode in MODES if name == "SGD" else ["semi_auto"]:
            for found, weights in on_ranks(lambda transport: train(transport, net, name, call, made, mode)):  # noqa: B023
                assert found == pytest.approx(truth, abs=1e-12)
                for key, each in plain.named_parameters():
                    assert torch.allclose(weights[key], each, atol=1e-12), (key, mode)


def on_a_worker(net, name, call, made):
    torch.set_default_dtype(torch.float64)
    try:
        return train(None, net, name, call, made)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "call", "made"), [("Adam", "loop", "before"), ("SGD", "step", "before")])
def test_training_on_processes_equals_one_process(cluster, name, call, made):
    net = Cut()
    plain = copy.deepcopy(net)
    truth = losses(plain, OPTIMIZERS[name](plain.parameters()), call)
    for found, weights in cluster.run(on_a_worker, net, name, call, made, timeout=60):
        assert found == pytest.approx(truth, abs=1e-12)
        assert all(torch.allclose(weights[key], each, atol=1e-12) for key, each in plain.named_parameters())


class Tied(nn.Module):
    """One weight for two operators that cut it differently, so that one of them has to move it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.one, self.two = dlab.ops.MatMul().shard(COLUMN), dlab.ops.MatMul().shard(ROW)

    def forward(self, x):
        return self.two(torch.relu(self.one(x, self.weight)), self.weight)


@pytest.mark.parametrize("make_net", [Cut, Tied])
@pytest.mark.parametrize("behind_the_back", [False, True])
def test_weights_that_are_changed_by_hand_inside_of_a_step(make_net, behind_the_back):
    """Plain gradient descent with a penalty, without any optimizer; two steps in one call."""

    def make(net):
        def step(x):
            for _ in range(2):
                loss = net(x).pow(2).mean() + 0.1 * sum((each**2).sum() for each in net.parameters())
                loss.backward()
                with torch.no_grad():
                    for each in net.parameters():
                        if behind_the_back:
                            each.data.sub_(0.1 * each.grad)  # autograd does not notice
                        else:
                            each -= 0.1 * each.grad
                        each.grad = None
            return loss

        return step

    net, x = make_net(), torch.randn(8, 8)
    plain = copy.deepcopy(net)
    loss = make(plain)(x).item()

    def work(transport):
        par = dlab.AutoParallel(make(copy.deepcopy(net)), transport=transport)
        return par(x).item(), par.whole()

    for found, weights in on_ranks(work):
        assert found == pytest.approx(loss, abs=1e-12)
        assert all(torch.allclose(weights[name], each) for name, each in plain.named_parameters())


def test_clipping_by_the_norm_of_a_part_is_refused():
    """Each rank would divide by another norm, without any sign of it."""
    net = Cut()

    def work(transport):
        mine = copy.deepcopy(net)

        def step(x):
            mine(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)

        with pytest.raises(NotImplementedError, match="norm"):
            dlab.AutoParallel(step, transport=transport)(torch.randn(8, 8))

    on_ranks(work)


# more than one


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_by_the_norm_of_the_whole(ranks, max_norm):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x = torch.randn(12, 8, dtype=torch.float64)
    plain = copy.deepcopy(net)
    plain(x).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    layout = dlab.Layout((ranks,), ("tp",))
    cut = {"0.weight": layout("tp", None), "0.bias": layout("tp"), "2.weight": layout(None, "tp")}  # one bias is copied

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, layouts=cut)
        par(x).square().sum().backward()
        return par.clip_gradients(max_norm), par.whole(grad=True)

    for found, gradients in dlab.rehearse(work, ranks=ranks):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-15)


def test_two_networks_in_one_process():
    first, second, x = Cut(), Cut(((2, 2), (2, 1))), torch.randn(8, 8)

    def work(transport):
        one, two = (dlab.AutoParallel(copy.deepcopy(each), transport=transport) for each in (first, second))
        (two(one(x)) * one(x)).sum().backward()
        return one.whole(grad=True), two.whole(grad=True)

    (second(first(x)) * first(x)).sum().backward()
    for found in on_ranks(work):
        for net, gradients in zip((first, second), found, strict=True):
            for name, each in net.named_parameters():
                assert torch.allclose(gradients[name], each.grad, rtol=1e-9, atol=1e-12), name


def test_two_wrappers_of_one_network_agree_on_its_parts():
    """A step that trains, and the network itself for evaluation: the second knows that the weights are cut."""
    net, x = Cut(), torch.randn(8, 8)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).sum().backward()
    optimizer.step()

    def work(transport):
        mine = copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)

        def step(x):
            mine(x).sum().backward()
            optimizer.step()

        evaluate = dlab.AutoParallel(mine, transport=transport)
        dlab.AutoParallel(step, transport=transport)(x)
        late = dlab.AutoParallel(mine, transport=transport)
        return evaluate(x), late(x), late.whole()

    for results in on_ranks(work):
        assert torch.allclose(results[0], plain(x)) and torch.allclose(results[1], plain(x))
        assert results[2]["first"].shape == (8, 8)


def test_a_deep_copy_trains_on_its_own():
    net, x = Cut(), torch.randn(8, 8)
    truth = net(x).detach()

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        par(x)
        other = copy.deepcopy(par)
        other(x).sum().backward()
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        return par(x), other(x), other.whole(), par.whole(grad=True)

    for mine, other, weights, gradients in on_ranks(work):
        assert torch.allclose(mine, truth) and torch.allclose(other, x)
        assert weights["first"].shape == (8, 8) and set(gradients.values()) == {None}


def test_one_rank_needs_no_strategy():
    net = Cut()
    check_on_threads(net, None, [torch.randn(8, 8)], ranks=1)


# a silent error


def test_check_passes_when_all_is_right():
    def work(transport):
        par = dlab.AutoParallel(Cut(), transport=transport)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        par(x).sum().backward()
        before, gradient = par.whole(grad=True), x.grad.clone()
        said = par.check(x)
        after = par.whole(grad=True)
        assert all(torch.equal(before[name], after[name]) for name in before) and torch.equal(x.grad, gradient)
        return said

    net = Cut()

    def same_net(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        return par.check(torch.ones(8, 8))

    for said in on_ranks(same_net):
        assert "equal those of one process" in said
    on_ranks(work, ranks=1)


def test_check_finds_a_forgotten_copy(monkeypatch):
    """The results stay right, and gradients are wrong: it names the operator before the cut one."""
    net, x = Cut(), torch.randn(8, 8)
    deeper = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), net)
    layout = dlab.Layout((4,), ("tp",))

    def work(transport):
        layouts = {"0.weight": layout("None", "None"), "0.bias": layout("None")}
        par = dlab.AutoParallel(copy.deepcopy(deeper), transport=transport, layouts=layouts)
        right = par(x)
        try:
            return right, par.check(x)
        except AssertionError as problem:
            return right, str(problem)

    assert all("equal" in said for _, said in on_ranks(work))
    monkeypatch.setattr(Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None, None)))
    for right, said in on_ranks(work):
        assert torch.allclose(right, deeper(x))  # the forward pass tells nothing
        assert "gradient of the result of" in said and "Tanh" in said and "right" in said, said


def test_check_sees_the_gradient_of_an_input_and_of_a_batch_in_parts(monkeypatch):
    columns = dlab.ops.MatMul().shard(COLUMN)
    net, x = Net(lambda w, x: columns(x, w[0]), torch.randn(8, 8)), torch.randn(8, 8)

    def work(transport):
        try:
            par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
            return par.check(x.clone().requires_grad_())
        except AssertionError as problem:
            return str(problem)

    def own_batch(transport):
        mine = copy.deepcopy(Cut(((4, 1), (1, 1)), ((4, 1), (1, 1))))
        with torch.no_grad():
            for each in mine.parameters():
                each.fill_(0.1)
        par = dlab.AutoParallel(mine, transport=transport, dataset_strategy="data_parallel")
        return par.check(x.chunk(4)[transport.rank].clone().requires_grad_())

    assert all("equal" in said for said in [*on_ranks(work), *on_ranks(own_batch)])
    monkeypatch.setattr(Copy, "backward", staticmethod(lambda ctx, gradient: (gradient, None, None)))
    assert all("gradient of input 0 differs" in said for said in on_ranks(work))


# trouble


def test_bad_settings_are_refused():
    for settings, words in [
        ({"parallel_mode": "half_auto"}, "no parallel mode 'half_auto': use 'semi_auto'"),
        ({"dataset_strategy": "mine"}, "'full_batch' or 'data_parallel'"),
        ({"planner": "quick"}, "no planner 'quick'"),
        *(({"ranks": each}, "ranks=.*: give the number of ranks to plan for, 1 or more") for each in (0, -1, 2.0, "4")),
        *(({"latency": each}, "latency=.*: give the bytes that a collective counts more") for each in (-1, 0.5, "9")),
    ]:
        with pytest.raises(ValueError, match=words):
            dlab.AutoParallel(Cut(), **({"ranks": 4} | settings))
    for mode in ("auto", "data_parallel", "stand_alone"):
        with pytest.raises(ValueError, match=f"parallel_mode='{mode}' .*: leave out layouts=, or use 'semi_auto'"):
            dlab.AutoParallel(Cut(), mode, ranks=4, layouts={"first": dlab.Layout((4,), ("tp",))("tp", None)})
    with pytest.raises(TypeError, match="transport='gloo': give a transport, such as"):
        dlab.AutoParallel(Cut(), transport="gloo")
    with pytest.raises(ValueError, match="a network or a function, not 3"):
        dlab.AutoParallel(3, ranks=2)


def different_batches():
    """Rank 1 brings another batch than the others."""
    torch.manual_seed(0)
    par = dlab.AutoParallel(Cut().float())
    return par(torch.ones(8 if dlab.rank() else 16, 8))


def other_weights():
    par = dlab.AutoParallel(Cut().float())
    return par(torch.ones(8, 8)).shape


def test_another_shape_on_one_rank_does_not_leave_the_others_waiting(cluster, the_next_run_works):
    with pytest.raises(dlab.WorkerError, match="all ranks must bring the same size"):
        cluster.run(different_batches, timeout=20)
    assert cluster.run(other_weights, timeout=20) == [(8, 8)] * 4


def illegal():
    net = Cut(((3, 1), (1, 1)))
    try:
        dlab.AutoParallel(net.float())(torch.ones(8, 8))
    except ValueError as problem:
        sentence = str(problem)
    return sentence, dlab.AutoParallel(Cut().float())(torch.ones(8, 8)).shape


def test_an_illegal_strategy_on_processes_is_a_sentence_on_every_rank(cluster):
    for sentence, shape in cluster.run(illegal, timeout=20):
        assert "3 parts" in sentence and "4 ranks cannot share" in sentence and shape == (8, 8)


def test_a_sharded_tensor_that_escapes_is_refused():
    kept = []
    columns = dlab.ops.MatMul().shard(((1, 1), (1, 2)))

    def body(x, w):
        kept.append(columns(x, w))
        return kept[0]

    dlab.AutoParallel(body, ranks=2).explain(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="outside of the network that AutoParallel wraps: let the network return it"):
        torch.relu(kept[0])


@pytest.mark.parametrize("strategies", [(COLUMN, ROW), (ROW, COLUMN), (((4, 1), (1, 1)), ((4, 1), (1, 1)))])
def test_gradients_of_gradients_are_refused_because_they_would_be_wrong(strategies):
    net = Cut(*strategies)

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        x = torch.randn(8, 8).requires_grad_()
        torch.autograd.grad(par(x).square().sum(), x)
        with pytest.raises(NotImplementedError, match=r"cannot be differentiated twice, as create_graph=True asks: "):
            torch.autograd.grad(par(x).square().sum(), x, create_graph=True)

    on_ranks(work)


def test_one_network_inside_of_another_is_refused():
    def work(transport):
        inner = dlab.AutoParallel(Cut(), transport=transport)
        for outer in (inner, lambda x: inner(x)):
            with pytest.raises(RuntimeError, match="inside of another: let the outer one wrap the network itself"):
                dlab.AutoParallel(outer, transport=transport)(torch.ones(8, 8))
        assert inner(torch.ones(8, 8)).shape == (8, 8)

    on_ranks(work)


def test_check_tells_who_brought_fewer_samples():
    """Nothing else would: a loss is one number, however many samples it is of."""
    net = Cut(((4, 1), (1, 1)), ((4, 1), (1, 1)))

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport, dataset_strategy="data_parallel")
        with pytest.raises(ValueError, match="rank 3 was given an input 0 of another shape than rank 0: give every"):
            par.check(torch.ones(8 - (transport.rank == 3), 8))

    on_ranks(work)


@pytest.mark.parametrize("ask", [lambda par: par.whole(), lambda par: par.clip_gradients(1.0)])
def test_a_plan_holds_nothing_whole(ask):
    layout = dlab.Layout((4,), ("tp",))
    par = dlab.AutoParallel(nn.Linear(8, 8), ranks=4, layouts={"weight": layout("tp", None)})
    with pytest.raises(RuntimeError, match="only planned, with ranks="):
        ask(par)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), "1", None])
def test_a_norm_to_clip_to_is_a_number_above_zero(norm):
    def work(transport):
        with pytest.raises(ValueError, match=r"max_norm=.*: give a number above 0"):
            dlab.AutoParallel(Cut(), transport=transport).clip_gradients(norm)

    on_ranks(work, ranks=2)


def two_slices():
    layout = dlab.Layout((2, 2), ("dp", "tp"))
    net = nn.Linear(8, 6)
    dlab.AutoParallel(net, layouts={"weight": layout("tp", "None")})(torch.ones(4, 8))
    return tuple(net.weight.shape)


def test_every_rank_tells_which_part_of_a_weight_it_holds(cluster):
    run = cluster.start(two_slices)
    assert run.wait(20) == [(3, 8)] * 4
    told = {event.rank: event.data for event in run.events if event.data.get("tensor") == "weight"}
    assert [told[rank]["slice"] for rank in range(4)] == [[[0, 3], [0, 8]], [[3, 6], [0, 8]]] * 2
    assert told[0]["shape"] == [6, 8]


def test_autocast_gives_the_types_and_the_numbers_of_one_process():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).float()
    x, layout = torch.randn(4, 8, dtype=torch.float32), dlab.Layout((2,), ("tp",))
    layouts = {"0.weight": layout("tp", "None"), "0.bias": layout("tp"), "2.weight": layout("None", "tp")}

    def product(call):
        with torch.autocast("cpu", torch.bfloat16):
            return call(x)

    whole = product(net)
    assert whole.dtype == torch.bfloat16
    cut = dlab.rehearse(
        lambda ranks: product(dlab.AutoParallel(copy.deepcopy(net), transport=ranks, layouts=layouts)), ranks=2
    )
    for found in cut:
        assert found.dtype == whole.dtype
        assert torch.allclose(found.float(), whole.float(), atol=2e-2)
