"""Parameters that nobody holds whole: their parts have the bits of one process, and cost the memory of parts."""

import copy
import hashlib
import math
import pickle
import random
import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlab
from dlab.sharding.initial import Postponed, part_of

RANKS = 4


class Zoo(nn.Module):
    """Layers of torch, and the ways in which people initialise their own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(37, 53)
        self.norm = nn.LayerNorm(53)
        self.embedding = nn.Embedding(11, 7, padding_idx=3)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.recurrent = nn.LSTM(3, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.batch_norm = nn.BatchNorm1d(3)
        self.weight = dlab.parameter("normal", 53, 10)
        self.scaled = nn.Parameter(torch.randn(5, 30) * 0.02 + 1)
        self.rows = nn.Parameter(torch.zeros(4, 4))
        self.cube = nn.Parameter(torch.rand(3, 5, 9).mul_(2).sub_(1))
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.number = nn.Parameter(torch.tensor(3.0))
        self.attention.in_proj_weight.data.normal_(0, 0.02)
        self.linear.bias.data.zero_()
        with torch.no_grad():
            self.rows[1] = 5.0
            self.rows[-1].fill_(3)
            self.rows.mul_(2)
        self.rows.data[0:1].fill_(9)
        nn.init.xavier_normal_(self.recurrent.weight_hh_l0)
        positions = torch.zeros(6, 4)
        positions[:, 0::2] = torch.sin(torch.arange(12.0).view(6, 2))
        self.register_buffer("positions", positions)


def both(make, seed=1):
    """The same made by one process, and without values; the generator must stand alike after both."""
    torch.manual_seed(seed)
    one, next_one = make(), torch.rand(5)
    torch.manual_seed(seed)
    with dlab.no_init_parameters():
        other = make()
    assert torch.equal(torch.rand(5), next_one)
    return one, other


def boxes(shape, count=15):
    rng = random.Random(str(shape))
    for _ in range(count):
        ends = [sorted(rng.sample(range(length + 1), 2)) for length in shape]
        yield tuple(slice(*each) for each in ends)


def test_every_part_of_every_layer_has_the_bits_of_one_process():
    one, other = both(Zoo)
    copies = copy.deepcopy(other), pickle.loads(pickle.dumps(other))
    for net in (other, *copies):
        theirs = dict(net.named_parameters())
        for name, value in one.named_parameters():
            assert isinstance(theirs[name], nn.Parameter)
            assert isinstance(theirs[name], Postponed) == (name not in ("given", "number"))
            assert torch.equal(part_of(theirs[name]), value), name
            assert theirs[name].shape == value.shape and theirs[name].dtype == value.dtype
            for box in boxes(value.shape):
                assert torch.equal(part_of(theirs[name], box), value[box]), (name, box)
    for name, value in one.named_buffers():  # they are no parameters: every rank has them
        assert type(dict(other.named_buffers())[name]) is torch.Tensor
        assert torch.equal(dict(other.named_buffers())[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "uniform", "kaiming", "xavier", "zeros", "ones"])
def test_sizes_around_those_in_which_torch_draws(kind, dtype):
    """Normal numbers are drawn in groups of 16, and fewer than 16 in another way; blocks here have 65,536."""
    for shape in [(1, 1), (3, 5), (4, 4), (17, 1), (2, 1000), (1, 65_537), (257, 256), (3, 2, 21_846), (65_551, 2)]:
        one, other = both(lambda shape=shape: dlab.parameter(kind, *shape, dtype=dtype))
        assert type(one) is nn.Parameter and isinstance(other, Postponed)
        assert one.dtype == dtype and torch.equal(part_of(other), one), shape
        for box in boxes(shape, 3):
            assert torch.equal(part_of(other, box), one[box]), (shape, box)


def test_a_small_draw_leaves_the_generator_as_one_process_does():
    """An odd number of normal numbers leaves one over, which the next call takes."""
    both(lambda: [dlab.parameter("normal", 3), dlab.parameter("normal", 2), dlab.parameter("normal", 5, 7)])


def test_a_generator_of_its_own():
    def make(generator):
        return nn.init.normal_(nn.Parameter(torch.empty(40, 30)), generator=generator)

    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    one = make(mine)
    with dlab.no_init_parameters():
        other = make(theirs)
    assert torch.equal(part_of(other), one)
    assert torch.equal(mine.get_state(), theirs.get_state())


def test_initialisers_have_the_spread_that_they_promise():
    torch.manual_seed(0)
    assert dlab.parameter("normal", 400, 500).std().item() == pytest.approx(0.01, rel=0.02)
    assert dlab.parameter("normal", 400, 500, std=0.2, mean=3).mean().item() == pytest.approx(3, rel=0.01)
    assert dlab.parameter("uniform", 400, 500, bound=0.5).abs().max().item() == pytest.approx(0.5, rel=0.01)
    # x @ weight keeps the size of x, halved by relu; the rows are its inputs
    assert dlab.parameter("kaiming", 400, 50).std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert dlab.parameter("xavier", 400, 50).std().item() == pytest.approx(math.sqrt(2 / 450), rel=0.02)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = dlab.parameter("normal", 24, 16, std=0.3, dtype=torch.float64)
        self.fc2 = dlab.parameter("xavier", 16, 32, dtype=torch.float64)
        self.norm = nn.LayerNorm(32, dtype=torch.float64)
        self.fc3 = nn.Linear(32, 8, dtype=torch.float64)
        self.first = dlab.ops.MatMul().shard(((2, 2), (2, 1)))
        self.second = dlab.shard(torch.matmul, in_strategy=((1, 4), (4, 1)))

    def forward(self, x):
        return self.fc3(self.norm(torch.relu(self.second(torch.relu(self.first(x, self.fc1)), self.fc2))))

    def alone(self, x):
        return self.fc3(self.norm(torch.relu(torch.relu(x @ self.fc1) @ self.fc2)))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
}


def batch():
    generator = torch.Generator().manual_seed(8)
    images = torch.randn(16, 24, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 8, (16,), generator=generator)


def train(call, optimizer, steps=3):
    inputs, labels = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(call(inputs), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_made_inside_train_as_in_one_process(kind):
    def make():
        net = Net()
        return net, OPTIMIZERS[kind](net.parameters())

    (one, its_optimizer), together = both(make)
    train(one.alone, its_optimizer)

    def work(transport):
        net, optimizer = copy.deepcopy(together)
        objects = list(net.parameters())
        par = dlab.AutoParallel(net, transport=transport)
        train(par, optimizer)
        assert all(mine is before for mine, before in zip(net.parameters(), objects, strict=True))
        assert all(type(each) is nn.Parameter for each in objects)
        assert net.fc1.shape == (12, 16) and net.fc2.shape == (4, 32)
        return par.whole()

    for whole in dlab.rehearse(work, RANKS):
        for name, value in one.named_parameters():
            torch.testing.assert_close(whole[name], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_before_its_parameters_are_cut(kind):
    torch.manual_seed(2)
    one = Net()
    its_optimizer = OPTIMIZERS[kind](one.parameters())
    train(one.alone, its_optimizer)
    half = copy.deepcopy((one, its_optimizer))
    train(one.alone, its_optimizer)

    def work(transport):
        net, optimizer = copy.deepcopy(half)
        par = dlab.AutoParallel(net, transport=transport)
        train(par, optimizer)
        return par.whole()

    for whole in dlab.rehearse(work, RANKS):
        for name, value in one.named_parameters():
            torch.testing.assert_close(whole[name], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "one rank"])
def test_where_nothing_is_cut_a_parameter_is_made_whole(mode):
    one, other = both(Net)
    truth = one.alone(batch()[0])

    def work(transport):
        net = copy.deepcopy(other)
        settings = {} if mode == "one rank" else {"parallel_mode": mode}
        if mode == "stand_alone":
            net.forward = net.alone
        result = dlab.AutoParallel(net, transport=transport, **settings)(batch()[0])
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), one.parameters(), strict=True))
        return result

    for result in dlab.rehearse(work, 1 if mode == "one rank" else RANKS):
        torch.testing.assert_close(result, truth, rtol=1e-10, atol=1e-12)


def test_layouts_from_outside_and_before_the_first_call():
    one, other = both(lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)))
    layout = dlab.Layout((4,), ("tp",))

    def work(transport):
        net = copy.deepcopy(other)
        par = dlab.AutoParallel(
            net, transport=transport, layouts={"0.weight": layout("tp", None), "2.weight": layout(None, "tp")}
        )
        rank = transport.rank
        assert torch.equal(net[0].weight, one[0].weight[3 * rank : 3 * rank + 3])
        assert torch.equal(par.whole()["2.bias"], one[2].bias)  # not placed yet, and made for this call alone
        assert isinstance(net[2].bias, Postponed)
        assert par.explain(torch.ones(2, 8)).layouts["0.weight"] == layout("tp", None)
        return par(torch.ones(2, 8))

    for result in dlab.rehearse(work, RANKS):
        torch.testing.assert_close(result, one(torch.ones(2, 8)))


def test_a_plan_makes_nothing():
    with dlab.no_init_parameters():
        net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
        for each in net:
            each.weight = dlab.parameter("ones", 1 << 16, 1 << 16)  # 17 GB each
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = dlab.Layout((64,), ("tp",))
    par = dlab.AutoParallel(net, ranks=64, layouts={"0.weight": layout("tp", None)})
    assert "all-" in str(par.explain(torch.empty(64, 1 << 16, device="meta")))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_sentences():
    with dlab.no_init_parameters():
        net = dlab.TwoLayer()
        with pytest.raises(NotImplementedError, match=r"1.weight of 100 × 784 cannot be made .* 'orthogonal_'"):
            nn.init.orthogonal_(net[1].weight)
    with pytest.raises(RuntimeError, match=r"1.weight of 100 × 784 has no values yet.*AutoParallel"):
        net(torch.ones(2, 784))
    with pytest.raises(NotImplementedError, match="'trunc_normal_'"):
        nn.init.trunc_normal_(net[1].weight)
    with pytest.raises(ValueError, match="there is no initialiser 'norm': use 'zeros', 'ones'"):
        dlab.parameter("norm", 2, 3)
    with pytest.raises(ValueError, match="'ones' has no option 'std': it has no options"):
        dlab.parameter("ones", 2, 3, std=1)
    with pytest.raises(ValueError, match=r"shape \(2, 0\) is not possible"):
        dlab.parameter("ones", 2, 0)
    with pytest.raises(ValueError, match="needs inputs and outputs"):
        dlab.parameter("kaiming", 5)
    assert repr(net[1].weight) == "<parameter of 100 × 784, not made yet>"


def test_the_context_ends_also_by_an_error():
    with pytest.raises(ZeroDivisionError), dlab.no_init_parameters():
        1 / 0  # noqa: B018
    assert type(nn.Linear(2, 3).weight) is nn.Parameter


# ----------------------------------------------------------------------------------- memory, in real processes

WIDTH, LAYERS = 4096, 4  # 256 MiB


def stack():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def digest(part):
    return hashlib.sha256(part.detach().contiguous().numpy()).hexdigest()


def make_parts(width, layers):
    """On a rank: make a stack, run it once; return the growth of the peak, and the digests of its parts."""
    import hashlib
    import re

    import torch
    from torch import nn

    import dlab

    def status(key):
        with open("/proc/self/status") as file:
            return int(re.search(rf"{key}:\s+(\d+)", file.read())[1]) * 1024

    def run(width):
        torch.manual_seed(6)
        with dlab.no_init_parameters():
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        layout = dlab.Layout((4,), ("tp",))
        names = [f"{number}.weight" for number in range(layers)]
        cuts = {name: layout("tp", None) if i % 2 == 0 else layout(None, "tp") for i, name in enumerate(names)}
        par = dlab.AutoParallel(net, layouts=cuts)
        with torch.no_grad():
            total = float(par(torch.ones(4, width)).sum())
        return total, [hashlib.sha256(each.detach().numpy()).hexdigest() for each in net.parameters()]

    run(64)  # what is imported and allocated once
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = status("VmRSS")
    total, digests = run(width)
    return status("VmHWM") - before, total, digests


def test_a_rank_never_holds_more_than_its_parts(cluster):
    """Four ranks make a stack of layers: the peak of each is at most 0.3 of the whole, 0.25 being its parts."""
    results = cluster.run(make_parts, WIDTH, LAYERS)
    torch.manual_seed(6)
    truth = stack().requires_grad_(False)
    for rank, (peak, total, digests) in enumerate(results):
        mine = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
        parts = [layer.weight[mine] if i % 2 == 0 else layer.weight[:, mine] for i, layer in enumerate(truth)]
        assert digests == [digest(part) for part in parts]
        assert total == pytest.approx(float(truth(torch.ones(4, WIDTH)).sum()), rel=1e-4)
        whole = sum(each.nbytes for each in truth.parameters())
        assert 0.2 < peak / whole <= 0.3, peak / whole
