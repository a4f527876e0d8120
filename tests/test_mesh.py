"""Meshes: the groups are those that others have published; collectives along a line equal the plain computation."""

import sys

import cloudpickle
import netns
import pytest
import torch

import dlab
from dlab import reduction
from dlab.collectives import (
    halving_doubling_allreduce,
    hierarchical_allreduce,
    ring_allreduce,
    tree_allreduce,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4


def everybody(shape, names, ask):
    """What each rank answers, in a rehearsal of as many as the mesh needs."""
    ranks = torch.Size(shape).numel()
    return dlab.rehearse(lambda transport: ask(dlab.Mesh(shape, names, transport)), ranks=ranks)


def groups(shape, names, name):
    """All lines along an axis, as text: `02 13`."""
    found = everybody(shape, names, lambda mesh: "".join(map(str, mesh[name].members)))
    return " ".join(sorted(set(found)))


@pytest.mark.parametrize(
    ("names", "dp", "pp"),
    [
        (("pp", "dp", "tp"), "02 13 46 57", "04 15 26 37"),  # Megatron, DeepSpeed, torchtitan
        (("dp", "pp", "tp"), "04 15 26 37", "02 13 46 57"),  # picotron, Llama 3
    ],
)
def test_the_two_orders_in_use(names, dp, pp):
    assert groups((2, 2, 2), names, "tp") == "01 23 45 67"
    assert groups((2, 2, 2), names, "dp") == dp
    assert groups((2, 2, 2), names, "pp") == pp


def test_megatrons_groups_of_24_ranks():
    found = everybody((4, 3, 2), ("pp", "dp", "tp"), lambda mesh: list(mesh["dp"].members))
    assert sorted(set(map(tuple, found)))[:2] == [(0, 2, 4), (1, 3, 5)] and found[23] == [19, 21, 23]


@pytest.mark.parametrize(  # from MindSpore's tests
    ("shape", "rank", "lines"),
    [
        ((2, 3), 0, [[0, 3], [0, 1, 2]]),
        ((2, 2, 3), 5, [[5, 11], [2, 5], [3, 4, 5]]),
        ((2, 1, 4, 2), 5, [[5, 13], [5], [1, 3, 5, 7], [4, 5]]),
        ((3, 4, 2, 3, 2), 5, [[5, 53, 101], [5, 17, 29, 41], [5, 11], [1, 3, 5], [4, 5]]),
    ],
)
def test_the_lines_of_a_rank_along_each_axis(shape, rank, lines):
    names = "abcde"[: len(shape)]
    mesh = dlab.Mesh(shape, tuple(names), _Only(rank, torch.Size(shape).numel()))
    assert [list(mesh[name].members) for name in names] == lines


class _Only(dlab.transports.Transport):
    """One rank that talks to nobody."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def move(self, outgoing, incoming):
        raise AssertionError("making a mesh sends nothing")


def test_coordinates_and_planes():
    mesh = dlab.Mesh((2, 2, 2), ("pp", "dp", "tp"), _Only(5, 8))
    assert mesh.coordinates == {"pp": 1, "dp": 0, "tp": 1} and list(mesh.coordinates) == ["pp", "dp", "tp"]
    assert list(mesh["dp", "tp"].members) == [4, 5, 6, 7]
    assert list(mesh["tp", "dp"].members) == [4, 6, 5, 7]  # the first name slowest
    assert list(mesh["pp", "dp", "tp"].members) == list(range(8))
    assert mesh["dp"] is mesh["dp"] and (mesh["dp"].rank, mesh["dp"].size) == (0, 2)
    assert repr(mesh) == "<Mesh of 8 ranks: pp 2, dp 2, tp 2>"


@pytest.mark.parametrize(
    ("shape", "names", "words"),
    [
        ((2, 3), ("dp", "tp"), "a mesh of 2 × 3 needs 6 ranks, but there are 4: the product"),
        ((2, 2), ("dp", "dp"), "two axes of the mesh are called 'dp'"),
        ((2, 2), ("dp",), "has 2 axes but got 1 name, "),
        ((4,), ("dp", "tp"), "has 1 axis but got 2 names"),
        (4, ("dp",), "a mesh of shape 4 is not possible: give a length for each axis"),
        ((2, 0), ("dp", "tp"), "is not possible: give a whole number, 1 or more, per axis"),
        ((), (), "is not possible"),
        ((2, 2), ("dp", 3), "the name of an axis must be a word, such as 'dp', not 3"),
    ],
)
def test_what_is_no_mesh_gets_a_sentence(shape, names, words):
    with pytest.raises(ValueError, match=words):
        dlab.Mesh(shape, names, _Only(0, 4))


def test_an_axis_that_is_not_there_gets_a_sentence():
    mesh = dlab.Mesh((2, 2), ("dp", "tp"), _Only(0, 4))
    with pytest.raises(KeyError, match="this mesh has no axis 'pp': its axes are 'dp', 'tp'"):
        mesh["pp"]
    with pytest.raises(KeyError, match="this mesh has no axis 0: its axes are"):
        mesh[0]
    with pytest.raises(KeyError, match="names an axis twice"):
        mesh["dp", "dp"]
    with pytest.raises(KeyError, match="no axis without a name"):
        mesh[()]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda mesh: mesh.coordinates_of(4), "there is no rank 4 in this mesh: its ranks are 0 to 3"),
        (lambda mesh: mesh.coordinates_of(-1), "there is no rank -1 in this mesh"),
        (lambda mesh: mesh.coordinates_of("one"), "there is no rank 'one' in this mesh"),
        (lambda mesh: mesh.line(9, "tp"), "there is no rank 9 in this mesh"),
        (lambda mesh: mesh.line(0, "x"), "this mesh has no axis 'x': its axes are 'dp', 'tp'"),
        (lambda mesh: mesh.line(0, "tp", "tp"), "names an axis twice"),
        (lambda mesh: mesh.rank_at({"dp": 2, "tp": 0}), "there is no dp 2 in this mesh: it goes from 0 to 1"),
        (lambda mesh: mesh.rank_at({"dp": -1, "tp": 0}), "there is no dp -1 in this mesh"),
        (lambda mesh: mesh.rank_at({"dp": 0}), "give one coordinate for each of the axes 'dp', 'tp'"),
        (lambda mesh: mesh.rank_at({"dp": 0, "tp": 0, "pp": 0}), "give one coordinate for each of the axes"),
    ],
)
def test_what_is_not_on_the_grid_gets_a_sentence(ask, words):
    with pytest.raises((KeyError, IndexError), match=words):
        ask(dlab.Mesh((2, 2), ("dp", "tp"), _Only(0, 4)))


def test_ranks_and_coordinates_are_each_others_inverse():
    mesh = dlab.Mesh((3, 4, 2), ("pp", "dp", "tp"), _Only(0, 24))
    assert [mesh.rank_at(mesh.coordinates_of(rank)) for rank in range(24)] == list(range(24))


def test_a_line_shows_its_axis_and_its_members():
    mesh = dlab.Mesh((2, 2), ("dp", "tp"), _Only(3, 4))
    assert repr(mesh["tp"]) == "<Group of ranks 2 and 3 along tp>"
    assert repr(mesh["tp", "dp"]) == "<Group of ranks 0, 2, 1 and 3 along tp, dp>"
    assert repr(dlab.transports.Group(_Only(3, 4), [1, 3])) == "<Group of ranks 1 and 3>"


def test_without_a_process_group_it_says_to_pass_the_transport():
    with pytest.raises(
        RuntimeError, match=r"the transport that .* gives to fn, as in dlab.Mesh\(shape, names, transport"
    ):
        dlab.rehearse(lambda transport: dlab.Mesh((2, 2), ("dp", "tp")))


def test_a_table_can_be_returned_from_a_worker_and_a_mesh_says_why_not(cluster):
    def fn(ask):
        mesh = dlab.Mesh((2, 2), ("dp", "tp"))
        dlab.allreduce(torch.ones(3), group=mesh["tp"])
        return ask(mesh)

    tables = cluster.run(fn, lambda mesh: mesh.table(), timeout=60)
    assert set(map(str, tables)) == {str(dlab.Mesh((2, 2), ("dp", "tp"), _Only(0, 4)).table())}
    with pytest.raises(dlab.WorkerError, match=r"a mesh cannot be sent to another process.*: return mesh.table\(\)"):
        cluster.run(fn, lambda mesh: mesh, timeout=60)


def test_the_table_as_text_and_as_html():
    table = dlab.Mesh((2, 2), ("dp", "tp"), _Only(0, 4)).table()
    assert str(table).splitlines() == [
        "rank  dp  tp  dp group  tp group",
        "   0   0   0  0, 2      0, 1",
        "   1   0   1  1, 3      0, 1",
        "   2   1   0  0, 2      2, 3",
        "   3   1   1  1, 3      2, 3",
    ]
    assert "<th style='text-align:left'>tp group</th>" in table._repr_html_() and "2, 3" in table._repr_html_()
    long = dlab.Mesh((64, 2), ("dp", "tp"), _Only(0, 128)).table()
    assert "… ranks 8 to 119" in str(long)


# ------------------------------------------------------------------------------- collectives along a line


def input_of(rank, count, dtype, names):
    chance = torch.Generator().manual_seed(1000 * rank + 10 * len(names) + ord(names[0][0]))
    return torch.randint(-9, 9, (count,), generator=chance).to(dtype)


def use(mesh, shared, count=1001, dtype=torch.float32):
    """Every collective along each axis and over the plane, with what it should have given."""
    right = []
    for names in ("dp", "tp", ("dp", "tp"), ("tp", "dp")):
        group = mesh[names]
        rank, size, members = group.rank, group.size, list(group.members)

        def mine(content, group=group):
            tensor = (
                dlab.shared_empty(*content.shape, dtype=dtype, group=group) if shared else torch.empty_like(content)
            )
            return tensor.copy_(content)

        inputs = torch.stack([input_of(member, size * count, dtype, names) for member in members])
        tensor = mine(inputs[rank])
        dlab.allreduce(tensor, group=group)
        right.append(torch.equal(tensor, inputs.sum(0).to(dtype)))
        tensor = mine(inputs[rank])
        right.append(
            torch.equal(dlab.reduce_scatter(tensor, group=group), inputs.sum(0).to(dtype).tensor_split(size)[rank])
        )
        right.append(torch.equal(tensor, inputs[rank]))  # the input stays
        right.append(torch.equal(dlab.all_gather(tensor, group=group), inputs))
        swapped = dlab.all_to_all(tensor.view(size, count), group=group)
        right.append(torch.equal(swapped, inputs.view(size, size, count)[:, rank]))
        odd = mine(inputs[rank])[: size * count - 1]
        expected = inputs[:, : size * count - 1].amax(0).tensor_split(size)[rank]
        right.append(torch.equal(dlab.reduce_scatter(odd.contiguous(), "max", group=group), expected))
    return right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_over_every_transport(transport, dtype):
    found = transport(lambda t, _: use(dlab.Mesh((2, 2), ("dp", "tp"), t), False, 7, dtype), [torch.zeros(1)] * 4)
    assert all(all(each) for each in found), found
    through_shared_memory = transport.kind in ("shared memory", "gloo")  # of one host, without messages
    assert bool(found.messages) is not through_shared_memory


@pytest.mark.parametrize("count", [0, 1, 1001, 300_000])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_in_a_cluster(cluster, shared, count):
    for found in cluster.run(lambda: use(dlab.Mesh((2, 2), ("dp", "tp")), shared, count), timeout=60):
        assert all(found), found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.complex64])
def test_in_a_cluster_with_other_types(cluster, dtype):
    def fn():
        group, count = dlab.Mesh((1, 4), ("dp", "tp"))["tp"], 99_991
        inputs = torch.stack([torch.full((4 * count,), rank + 1).to(dtype) for rank in range(4)])
        tensor = inputs[dlab.rank()].clone()
        parts = dlab.reduce_scatter(tensor, group=group)
        swapped = dlab.all_to_all(tensor.view(4, count), group=group)
        return bool(
            (parts == 10).all()
            and torch.equal(swapped, inputs[:, :count])
            and torch.equal(dlab.all_gather(tensor, group=group), inputs)
        )

    assert cluster.run(fn, timeout=60) == [True] * 4


def test_over_all_ranks_and_on_both_backends(cluster):
    def fn():
        rank, whole = dlab.rank(), torch.arange(4.0 * 50).view(4, 50)
        gathered = dlab.all_gather(whole[rank].contiguous())
        part = dlab.reduce_scatter(whole)
        swapped = dlab.all_to_all(whole + 1000 * rank)
        out = torch.empty(50)
        dlab.reduce_scatter(dlab.shared_empty(200).copy_(whole.view(-1)), "mean", out=out)
        return (
            torch.equal(gathered, whole)
            and torch.equal(part, 4 * whole[rank])
            and torch.equal(swapped, whole[rank] + 1000 * torch.arange(4.0)[:, None])
            and torch.equal(out, whole[rank])
        )

    assert cluster.run(fn, timeout=60) == [True] * 4
    with dlab.Cluster(4, backend="dlab") as other:
        assert other.run(fn, timeout=60) == [True] * 4
        assert all(map(all, other.run(lambda: use(dlab.Mesh((2, 2), ("dp", "tp")), True), timeout=60)))


def test_two_groups_in_turn_and_at_the_same_time_never_mix(cluster):
    """Ranks of one row are busy with small all-reduces, those of the other with large ones; then columns, at once."""

    def fn():
        mesh = dlab.Mesh((2, 2), ("dp", "tp"))
        row, column, found = mesh.coordinates["dp"], mesh.coordinates["tp"], []
        for step in range(200):
            one = torch.full((10 if row else 40_000,), float(step + row))
            dlab.allreduce(one, group=mesh["tp"])
            other = torch.full((3,), float(step * column))
            dlab.allreduce(other, group=mesh["dp"])
            whole = torch.full((2,), float(dlab.rank()))
            dlab.allreduce(whole, group=mesh["dp", "tp"])
            found.append(bool((one == 2 * (step + row)).all() and (other == 2 * step * column).all() and whole[0] == 6))
        return all(found)

    assert cluster.run(fn, timeout=60) == [True] * 4


def test_different_collectives_of_a_group_are_named_with_the_ranks_of_the_world(cluster):
    def fn():
        mesh = dlab.Mesh((2, 2), ("dp", "tp"))
        tensor = torch.zeros(8)
        dlab.allreduce(tensor, group=mesh["tp"])
        if dlab.rank() == 2:
            dlab.all_gather(tensor, group=mesh["tp"])
        elif dlab.rank() == 3:
            dlab.allreduce(tensor, group=mesh["tp"])

    with pytest.raises(dlab.WorkerError, match=r"rank [23] is in an all-(gather|reduce) and rank [23] in an all-"):
        cluster.run(fn, timeout=60)
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


def test_a_rank_that_dies_is_named_in_a_group(cluster):
    def fn():
        mesh = dlab.Mesh((2, 2), ("dp", "tp"))
        tensor = torch.zeros(8)
        dlab.allreduce(tensor, group=mesh["tp"])
        if dlab.rank() == 3:
            import os

            os._exit(9)
        try:
            dlab.allreduce(tensor, group=mesh["dp"] if dlab.rank() == 1 else mesh["tp"])
        except ConnectionError as problem:
            print(f"told: {problem}")
            raise

    with pytest.raises(dlab.WorkerError, match="rank 3 exited with code 9"):
        cluster.run(fn, timeout=60)


def test_who_waits_in_a_group_says_for_which_rank_of_the_world():
    def fn(transport):
        mesh = dlab.Mesh((2, 2), ("dp", "tp"), transport)
        if transport.rank != 3:
            ring_allreduce(torch.zeros(4), mesh["tp"])

    with pytest.raises(dlab.Deadlock, match=r"rank 2 waits to .* 3, which has returned"):
        dlab.rehearse(fn, ranks=4)


def test_what_does_not_fit_gets_a_sentence(cluster):
    def fn():
        told = []
        for wrong in (
            lambda: dlab.all_to_all(torch.zeros(3, 2)),
            lambda: dlab.all_gather(torch.zeros(3), out=torch.zeros(3)),
            lambda: dlab.reduce_scatter(torch.zeros(8), out=torch.zeros(2, dtype=torch.float64)),
            lambda: dlab.reduce_scatter(torch.zeros(8), op="median"),
        ):
            try:
                wrong()
            except ValueError as problem:
                told.append(str(problem))
        return told

    rows, shape, kind, op = cluster.run(fn, timeout=60)[1]
    assert "a tensor with a row for each of 4 ranks, not 3 × 2" in rows
    assert (
        "the result is 12 torch.float32 on cpu, but out has room for 3" in shape
        and "torch.float64" in kind
        and "no op 'median'" in op
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda group: dlab.allreduce(torch.zeros(4), group=group),
        lambda group: dlab.allreduce(torch.zeros(4), "ring", group=group),
        lambda group: dlab.reduce_scatter(torch.zeros(4), group=group),
        lambda group: dlab.all_gather(torch.zeros(4), group=group),
        lambda group: dlab.all_to_all(torch.zeros(4), group=group),
        lambda group: dlab.shared_empty(4, group=group),
    ],
)
@pytest.mark.parametrize("group", [dlab.Mesh((2, 2), ("dp", "tp"), _Only(0, 4)), "tp", [0, 1], []])
def test_what_is_no_group_gets_a_sentence(call, group):
    with pytest.raises(TypeError, match=r"is not a group of ranks: give a line of a mesh, such as mesh\['tp'\]"):
        call(group)


def test_ranks_that_disagree_on_who_is_in_a_group_are_told(cluster):
    def fn():
        mesh = dlab.Mesh((2, 2) if dlab.rank() < 2 else (4, 1), ("dp", "tp"))
        dlab.allreduce(torch.zeros(4), group=mesh["dp"])

    told = r"rank 2 is in a group of ranks 0, 1, 2 and 3, but rank 0 has other members .* must make the same mesh"
    with pytest.raises(dlab.WorkerError, match=told):
        cluster.run(fn, timeout=60)
    assert cluster.run(dlab.rank) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------- on two hosts


@pytest.mark.slow
@pytest.mark.skipif(netns.why_not() is not None, reason=f"no two hosts here: {netns.why_not()}")
def test_on_two_hosts_lines_within_a_host_share_memory_and_others_use_the_backend():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    with netns.TwoHosts() as hosts:
        commands = [
            [*torchrun, f"--master-addr={hosts.addresses[0]}", "--master-port=29500", f"--node-rank={host}", __file__]
            for host in range(2)
        ]
        answers = hosts.run(*commands, seconds=90, environment={"GLOO_SOCKET_IFNAME": hosts.interface})
    told = sorted(line for answer in answers for line in answer.output.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank}: tp shares memory, dp does not, 24 of 24 right" for rank in range(4)], answers


def as_a_rank():
    """What each rank does under torchrun."""
    torch.distributed.init_process_group("gloo")
    mesh = dlab.Mesh((2, 2), ("dp", "tp"))
    right = use(mesh, shared=True)
    near, far = (reduction._shared_memory(mesh[name]) for name in ("tp", "dp"))
    words = f"tp {'shares' if near else 'does not share'} memory, dp {'does' if far else 'does not'}"
    # in one piece: an end of line on its own could come after another rank's line
    sys.stdout.write(f"rank {dlab.rank()}: {words}, {sum(right)} of {len(right)} right\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    as_a_rank()


# ------------------------------------------------------------------------------------- what is recorded


def along_both(mesh):
    ring_allreduce(torch.ones(4), mesh["tp"])
    ring_allreduce(torch.ones(4), mesh["dp"])
    tree_allreduce(torch.ones(4), mesh["dp", "tp"])
    ring_allreduce(torch.ones(4), mesh.transport)


def groups_of(messages):
    """By axis, the groups in which messages went, and between whom."""
    found = {}
    for data in (event.data for event in messages if event.kind == "message"):
        ends = found.setdefault((data.get("axis"), tuple(data.get("group", ()))), set())
        ends.add((data["source"], data["destination"]))
    return found


RING, TREE = {(0, 1), (1, 2), (2, 3), (3, 0)}, {(0, 1), (0, 2), (1, 0), (2, 0), (2, 3), (3, 2)}
RECORDED = {
    ("tp", (0, 1)): {(0, 1), (1, 0)},
    ("tp", (2, 3)): {(2, 3), (3, 2)},
    ("dp", (0, 2)): {(0, 2), (2, 0)},
    ("dp", (1, 3)): {(1, 3), (3, 1)},
    ("dp, tp", (0, 1, 2, 3)): TREE,
    (None, ()): RING,
}


def test_a_message_names_its_group_in_a_rehearsal():
    rehearsal = everybody((2, 2), ("dp", "tp"), along_both)
    assert groups_of(rehearsal.messages) == RECORDED


def test_a_message_names_its_group_in_a_cluster(cluster):
    run = cluster.start(lambda: along_both(dlab.Mesh((2, 2), ("dp", "tp"))))
    run.wait(60)
    assert groups_of(run.events) == RECORDED


def test_connecting_shared_memory_is_not_among_the_messages(cluster):
    """A ring of two ranks takes two steps, in each of which both send: 3 rings in each of 2 columns are 24 messages."""

    def fn():
        mesh, tensor = dlab.Mesh((2, 2), ("dp", "tp")), torch.ones(4)
        for _ in range(3):
            dlab.allreduce(tensor, group=mesh["tp"])
            dlab.allreduce(tensor, "ring", group=mesh["dp"])
            dlab.all_gather(tensor, group=mesh["dp", "tp"])
        dlab.all_to_all(tensor)
        dlab.reduce_scatter(tensor, group=mesh["tp"])
        dlab.shared_empty(4, group=mesh["tp", "dp"])

    run = cluster.start(fn)
    run.wait(60)
    sent = [event.data for event in run.events if event.kind == "message"]
    assert len(sent) == 24 and {message["bytes"] for message in sent} == {8}
    assert groups_of(run.events) == {line: RECORDED[line] for line in RECORDED if line[0] == "dp"}


@pytest.mark.parametrize("strategy", [dlab.AllReduceSGD(), dlab.ZeRO()], ids=lambda strategy: type(strategy).__name__)
def test_nor_is_that_of_a_training(cluster, strategy):
    samples = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randint(2, (64,)))
    run = dlab.train(lambda: torch.nn.Linear(2, 2), samples, strategy, batch_size=8, on=cluster)
    run.wait(60)
    phases = {event.data["phase"] for event in run.events if event.kind == "message"}
    assert phases <= {"broadcast"}, phases
    sizes = {event.data["bytes"] for event in run.events if event.kind == "message"}
    assert sizes <= {16, 8}, "the weights and the biases"


def test_a_line_of_a_mesh_of_a_line_is_the_one_that_is_named():
    def work(mesh):
        inner = dlab.Mesh((2, 2), ("x", "y"), mesh["tp"])
        ring_allreduce(torch.ones(4), inner["x"])
        return list(inner["x"].members)

    rehearsal = everybody((2, 4), ("dp", "tp"), work)
    assert rehearsal == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert groups_of(rehearsal.messages) == {
        ("x", (a, b)): {(a, b), (b, a)} for a, b in [(0, 2), (1, 3), (4, 6), (5, 7)]
    }


def test_the_parts_of_an_algorithm_are_not_taken_for_groups():
    """Hierarchical all-reduce and halving and doubling among three make groups of their own."""

    def work(mesh):
        hierarchical_allreduce(torch.ones(4), mesh["tp"])
        halving_doubling_allreduce(torch.ones(4), mesh["dp"])

    found = groups_of(everybody((3, 4), ("dp", "tp"), work).messages)
    assert found.keys() == {("tp", tuple(range(first, first + 4))) for first in (0, 4, 8)} | {
        ("dp", (rank, rank + 4, rank + 8)) for rank in range(4)
    }
