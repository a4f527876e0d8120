"""Checkpoints by slice: saved in one layout, loaded in another; nothing is stored twice, and nobody holds a whole."""

import copy
import json
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlab
from dlab.sharding import folders
from dlab.sharding.initial import part_of

RANKS = 4
# by the number of ranks: strategies of the two matmuls
CUTS = {
    1: (((1, 1), (1, 1)), ((1, 1), (1, 1))),
    2: (((1, 1), (1, 2)), ((1, 2), (2, 1))),
    4: (((2, 2), (2, 1)), ((1, 4), (4, 1))),
    8: (((1, 2), (2, 4)), ((2, 1), (1, 4))),
}


class Net(nn.Module):
    """Weights that are cut by rows, by columns and by both, or are whole on every rank; a buffer; a number."""

    def __init__(self, ranks):
        super().__init__()
        self.fc1 = dlab.parameter("normal", 24, 16, std=0.3, dtype=torch.float64)
        self.fc2 = dlab.parameter("xavier", 16, 32, dtype=torch.float64)
        self.norm = nn.LayerNorm(32, dtype=torch.float64)
        self.fc3 = nn.Linear(32, 8, dtype=torch.float64)
        self.unused = nn.Linear(3, 5, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.first, self.second = (dlab.ops.MatMul().shard(each) for each in CUTS[ranks])

    def forward(self, x):
        return self.fc3(self.norm(torch.relu(self.second(torch.relu(self.first(x, self.fc1)), self.fc2))))

    def alone(self, x):
        return self.fc3(self.norm(torch.relu(torch.relu(x @ self.fc1) @ self.fc2)))


def make(ranks, seed, lazy=True):
    torch.manual_seed(seed)
    if not lazy:
        return Net(ranks)
    with dlab.no_init_parameters():
        return Net(ranks)


def adam(net):
    slow = [each for name, each in net.named_parameters() if "fc3" in name]
    fast = [each for name, each in net.named_parameters() if "fc3" not in name]
    return torch.optim.Adam([{"params": fast}, {"params": slow, "lr": 3e-3}], lr=1e-2)


def train(call, optimizer, steps=3):
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(16, 24, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 8, (16,), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(call(inputs), labels).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def trained(transport, net, steps=3):
    net = copy.deepcopy(net)
    optimizer = adam(net)
    par = dlab.AutoParallel(net, transport=transport)
    train(par, optimizer, steps)
    return par, optimizer


@pytest.fixture(scope="module")
def uninterrupted():
    net = make(1, 5, lazy=False)
    optimizer = adam(net)
    train(net.alone, optimizer, 6)
    return {name: each.detach() for name, each in net.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder where 4 ranks have saved a network after three steps; tests leave it as it is."""
    folder, net = tmp_path_factory.mktemp("saved") / "deep" / "er", make(4, 5)

    def work(transport):
        par, optimizer = trained(transport, net)
        par.net.seen.fill_(7)
        par.save(folder, optimizer)

    dlab.rehearse(work, RANKS)
    return folder


@pytest.fixture
def own(saved, tmp_path):
    """A copy of it that a test may damage."""
    for each in saved.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    return tmp_path


@pytest.mark.parametrize("ranks", CUTS)
@pytest.mark.parametrize("lazy", [False, True], ids=["made whole", "made by part"])
@pytest.mark.parametrize("before", [0, 1], ids=["not placed", "placed"])
def test_resumed_in_any_layout_equals_uninterrupted(saved, uninterrupted, ranks, lazy, before):
    net = make(ranks, 99, lazy)  # other values, other layouts

    def work(transport):
        par, optimizer = trained(transport, net, before)
        par.load(saved, optimizer)
        train(par, optimizer)
        assert par.net.seen.tolist() == [7, 7, 7]
        return par.whole()

    for whole in dlab.rehearse(work, ranks):
        assert whole.keys() == uninterrupted.keys()
        for name, value in uninterrupted.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-12)


def test_each_element_is_stored_once(saved):
    files = {path.name: torch.load(path, weights_only=True) for path in saved.glob("*rank*.pt")}
    assert len(files) == RANKS
    net = make(1, 5, lazy=False)
    for name, parameter in net.named_parameters():
        stored = [each[name].numel() for each in files.values() if name in each]
        assert sum(stored) == parameter.numel(), name
        kept = [each[f"exp_avg of {name}"].numel() for each in files.values() if f"exp_avg of {name}" in each]
        assert sum(kept) == (0 if "unused" in name else parameter.numel()), name
    # fc1 is cut in two, and two ranks hold each half; fc2 is cut in four
    assert [name for name, each in sorted(files.items()) if "fc1" in each] == ["save-1-rank-0.pt", "save-1-rank-1.pt"]
    assert all(each["fc2"].shape == (4, 32) for each in files.values())
    bytes_of_values = sum(each.numel() * 8 for file in files.values() for each in file.values())
    on_disk = sum(path.stat().st_size for path in saved.glob("*rank*.pt"))
    entries = sum(map(len, files.values()))
    assert on_disk < bytes_of_values + entries * 300 + RANKS * 3000  # no part takes its whole memory along


def test_saved_before_anything_has_run_and_by_a_network_that_is_made_whole(tmp_path):
    one = dict(make(1, 3, lazy=False).named_parameters())
    for lazy in (True, False):
        net = make(4, 3, lazy)

        def work(transport, net=net):
            par, optimizer = trained(transport, net, steps=0)
            par.save(tmp_path, optimizer)
            again = dlab.AutoParallel(copy.deepcopy(make(4, 9)), transport=transport)
            again.load(tmp_path)
            return again.whole()

        for whole in dlab.rehearse(work, RANKS):
            assert all(torch.equal(whole[name], each) for name, each in one.items())
        shares = [torch.load(path)["fc1"].shape for path in tmp_path.glob("*rank*.pt")]
        assert shares == [(6, 16)] * RANKS


def test_what_is_loaded_lazily_survives_the_next_save_and_is_saved_itself(saved, own, uninterrupted):
    net = make(2, 99)

    def work(transport):
        par, optimizer = trained(transport, net, steps=0)
        par.load(own, optimizer)
        par.save(own, optimizer)  # from the files that it replaces
        other, its_optimizer = trained(transport, net, steps=0)
        other.load(own, its_optimizer)
        for each in (par, optimizer), (other, its_optimizer):
            train(*each)
        return par.whole(), other.whole()

    for wholes in dlab.rehearse(work, 2):
        for whole in wholes:
            for name, value in uninterrupted.items():
                torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-12)
    assert sorted(each.name for each in own.iterdir()) == [
        "manifest.json",
        *("save-2-common.pt", "save-2-rank-0.pt", "save-2-rank-1.pt"),
    ]


def test_what_waits_for_its_layout_can_be_copied_and_sent(saved):
    """A copy has its values in ordinary memory, where none may be given back to the system."""
    par = dlab.rehearse(lambda transport: loaded(transport, saved), 1)[0]
    first = dict(copy.deepcopy(par.net).named_parameters())
    second = dict(pickle.loads(pickle.dumps(par.net)).named_parameters())
    for _ in range(2):
        for name, each in par.net.named_parameters():
            truth = part_of(each)
            assert truth.abs().sum() > 0
            assert torch.equal(part_of(first[name]), truth) and torch.equal(part_of(second[name]), truth), name


def loaded(transport, folder):
    par = dlab.AutoParallel(make(1, 99), transport=transport)
    par.load(folder)
    return par


def test_an_interrupted_save_leaves_the_one_before(own, uninterrupted):
    """A rank whose disk is full: all ranks get the sentence, and the old checkpoint can still be loaded."""
    net = make(4, 99)
    (own / "save-2-rank-2.pt").mkdir()  # cannot be written

    def work(transport):
        par, optimizer = trained(transport, net)
        with pytest.raises(ValueError, match=r"save-2-rank-2.pt cannot be written \(Is a directory\): make room"):
            par.save(own, optimizer)
        par.load(own, optimizer)
        train(par, optimizer)
        return par.whole()

    for whole in dlab.rehearse(work, RANKS):
        torch.testing.assert_close(whole["fc1"], uninterrupted["fc1"], rtol=1e-12, atol=1e-12)


def refused(folder, sentence, ranks=4, net=None, optimizer=adam, change=lambda net: None):
    """Loading is refused on every rank with the same sentence, and changes nothing."""
    net = make(ranks, 99, lazy=False) if net is None else net

    def work(transport):
        mine = copy.deepcopy(net)
        par = dlab.AutoParallel(mine, transport=transport)
        given = None if optimizer is None else optimizer(mine)
        with pytest.raises(ValueError, match=sentence) as problem:
            par.load(folder, given)
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), net.parameters(), strict=True))
        return str(problem.value)

    assert len(set(dlab.rehearse(work, ranks))) == 1


def test_refusals(saved, own, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    refused(empty, "there is no checkpoint in .*empty.*: give the folder of par.save")
    refused(saved, "of another network, with fc1, .* only in the checkpoint and 0.weight only in the network", 2,
            nn.Sequential(nn.Linear(2, 2, bias=False)))  # fmt: skip
    wider = make(4, 1, lazy=False)
    wider.fc2 = dlab.parameter("ones", 16, 64)
    refused(
        saved, r"fc2 is \(16, 32\) of torch.float64 in the checkpoint .* but \(16, 64\) of torch.float32", net=wider
    )
    refused(saved, "for the parameters .* this one for", optimizer=lambda net: torch.optim.Adam(net.parameters()))
    other = nn.Linear(2, 2)
    refused(saved, r"parameter 0 of the optimizer, of shape \(2, 2\), is none", optimizer=adam_of(other))
    no_buffer = make(4, 1, lazy=False)
    del no_buffer.seen
    refused(saved, "has the buffers seen, the network none", net=no_buffer)


def adam_of(other):
    return lambda net: torch.optim.Adam(other.parameters())


def test_damage_is_found_by_every_rank(own):
    path = own / "save-1-rank-3.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(own, "is damaged: save-1-rank-3.pt is not as it was written")
    refused(own, "is damaged: save-1-rank-3.pt is not as it was written", ranks=1)
    path.unlink()
    refused(own, "is damaged: save-1-rank-3.pt is missing")
    manifest = own / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace("24", "12", 1))
    refused(own, "manifest.json is not as it was written")
    manifest.write_text(text[:100])
    refused(own, "manifest.json is not as it was written")


def test_a_checkpoint_without_an_optimizer(tmp_path):
    net = make(2, 5)

    def work(transport):
        par, optimizer = trained(transport, net)
        par.save(tmp_path)
        with pytest.raises(ValueError, match="holds no optimizer: save it with"):
            par.load(tmp_path, optimizer)
        par.load(tmp_path)

    dlab.rehearse(work, 2)


def test_what_cannot_be_saved(tmp_path):
    net = make(2, 5)
    (tmp_path / "file").write_text("")

    def work(transport):
        par, optimizer = trained(transport, net)
        with pytest.raises(ValueError, match="file is a file; give a folder"):
            par.save(tmp_path / "file" / "folder")
        optimizer.state[par.net.fc1]["factors"] = torch.zeros(7, 2)
        with pytest.raises(ValueError, match=r"keeps 'factors' of shape \(7, 2\) for fc1"):
            par.save(tmp_path, optimizer)

    dlab.rehearse(work, 2)
    with pytest.raises(ValueError, match="a plan holds no parameters"):
        dlab.AutoParallel(net, ranks=2).save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_manifest_is_plain_and_files_hold_tensors_only(saved):
    manifest = json.loads((saved / "manifest.json").read_text())["body"]
    assert manifest["ranks"] == RANKS
    fc2 = manifest["tensors"]["fc2"]
    assert fc2["shape"] == [16, 32] and fc2["dtype"] == "torch.float64"
    Layout = dlab.Layout
    placed = eval(fc2["layout"], {"Layout": Layout})
    assert [list(map(list, fc2["boxes"][str(rank)])) for rank in range(4)] == [
        [[each.start, each.stop] for each in box] for box in placed.slices((16, 32))
    ]
    assert folders.digest(manifest) == json.loads((saved / "manifest.json").read_text())["sha256"]


# ----------------------------------------------------------------------------------- memory, in real processes


def save_and_load(folder, width):
    """On a rank: train a big weight, save it, load it in another layout; return the growth of the peak."""
    import re

    import torch

    import dlab

    def status(key):
        with open("/proc/self/status") as file:
            return int(re.search(rf"{key}:\s+(\d+)", file.read())[1]) * 1024

    def make(width, rows):
        torch.manual_seed(3)
        with dlab.no_init_parameters():
            net = torch.nn.Linear(width, width, bias=False)
        layout = dlab.Layout((4,), ("tp",))
        return dlab.AutoParallel(net, layouts={"weight": layout("tp", None) if rows else layout(None, "tp")})

    def run(width):
        par = make(width, True)
        par.save(folder)
        before = par.net.weight.detach()[:3].clone()
        del par
        again = make(width, False)
        with torch.no_grad():
            again.net.weight.zero_()
        again.load(folder)
        return before, again.net.weight.detach()[:3].clone()

    run(64)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    by_rows, by_columns = run(width)
    return status("VmHWM") - before, by_rows, by_columns


def test_saving_and_loading_holds_parts_only(cluster, tmp_path):
    """The weight has 256 MiB, a rank's part 64."""
    width = 8192
    results = cluster.run(save_and_load, str(tmp_path), width)
    torch.manual_seed(3)
    truth = nn.Linear(width, width, bias=False).weight.detach()
    rows = width // RANKS
    for rank, (peak, by_rows, by_columns) in enumerate(results):
        assert torch.equal(by_rows, truth[rank * rows : rank * rows + 3])
        assert torch.equal(by_columns, truth[:3, rank * rows : (rank + 1) * rows])
        assert peak < 0.3 * truth.nbytes, peak / truth.nbytes
    assert sum(os.path.getsize(each) for each in tmp_path.glob("*rank*")) < truth.nbytes + 10_000
