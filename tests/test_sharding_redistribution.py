"""Redistribution: counts that others have published, bytes that are recorded, parts that are slices of the whole."""

import sys
from itertools import product
from math import prod

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlab
from dlab.layout import Layout, Placed, replicated
from dlab.sharding.redistribution import steps_between, volume

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
WORKERS = 4
SQUARE, CUBE = Layout((2, 2), ("x", "y")), Layout((2, 2, 2), ("x", "y", "z"))
BOTH = pytest.mark.parametrize("planner", ["rules", "bytes"])


def dtensor(layout, words, dims=3):
    """A placement in DTensor's words, one for each axis of the mesh: S0, S1, …, R or P."""
    cut = [[] for _ in range(dims)]
    for name, word in zip(layout.names, words, strict=True):
        if word.startswith("S"):
            cut[int(word[1])].append(name)
    made = layout(*(tuple(names) or None for names in cut))
    return made.with_partial(*(name for name, word in zip(layout.names, words, strict=True) if word == "P"))


def parse(layout, text):
    """`S0RP` as DTensor's tests write it."""
    words, rest = [], text
    while rest:
        size = 2 if rest[0] == "S" else 1
        words, rest = [*words, rest[:size]], rest[size:]
    return dtensor(layout, words)


@pytest.mark.parametrize(
    ("layout", "source", "target", "number"),
    [
        (SQUARE, "S0S1", "S0S0", 1),
        (SQUARE, "S0S1", "S1S0", 2),
        (SQUARE, "S0S0", "S1S1", 2),
        (SQUARE, "S1S1", "S1S2", 1),
        (CUBE, "S0S0S0", "S1S1S1", 3),
        (CUBE, "S0S1S2", "S2S1S0", 2),
        (CUBE, "S1S0S0", "RS0S0", 1),
        (CUBE, "S1RS0", "RS0S0", 2),
        (CUBE, "S0S0S1", "S0S1S2", 2),
    ],
)
def test_the_number_of_collectives_is_the_published_one(layout, source, target, number):
    plan = dlab.redistribution(parse(layout, source), parse(layout, target), (16, 16, 16))
    assert len(plan.collectives) == number, plan
    fewest = dlab.redistribution(parse(layout, source), parse(layout, target), (16, 16, 16), "bytes")
    assert len(fewest.collectives) <= number or fewest.bytes_per_rank < plan.bytes_per_rank, fewest  # more, but smaller


@BOTH
@pytest.mark.parametrize(
    ("source", "target", "collectives", "back"),
    [
        ("S0R", "RR", ["all-gather"], []),
        ("RR", "S0R", [], ["all-gather"]),
        ("PR", "RR", ["all-reduce"], []),
        ("PR", "S0R", ["reduce-scatter"], ["all-gather"]),
        ("S0R", "S1R", ["all-to-all"], ["all-to-all"]),
        ("PP", "RR", ["all-reduce"], []),
        ("S0R", "S0R", [], []),
    ],
)
def test_the_table_of_transitions_with_what_goes_back(source, target, collectives, back, planner):
    """Counted in the run itself, forward and backward."""
    from dlab.sharding.communication import World, redistribute

    source, target, shape = parse(SQUARE, source), parse(SQUARE, target), (4, 4, 4)
    assert dlab.redistribution(source, target, shape, planner).collectives == collectives

    def work(transport):
        world = World(4, transport.rank, transport, told=[])
        local = torch.ones(source.local_shape(shape), requires_grad=True)
        redistribute(local, source, target, shape, world, (), planner).sum().backward()
        return [(each.collective, each.direction) for each in world.told]

    for told in dlab.rehearse(work, ranks=4):
        assert told == [(name, "forward") for name in collectives] + [(name, "backward") for name in back]


@BOTH
def test_an_axis_of_length_1_never_needs_anything(planner):
    layout = Layout((1, 4), ("one", "four"))
    places = [layout("one", None), layout(None, "one"), layout(None, None)]
    for source, target in product(places, places):
        assert dlab.redistribution(source, target, (4, 4), planner).collectives == []
    partial = layout(None, None).with_partial("one")
    assert dlab.redistribution(partial, layout(None, None), (4, 4), planner).collectives == []


def test_the_all_to_all_of_a_mixture_of_experts():
    """Both axes move at once: one by one, their order would change. The rules move one axis and cut the other anew."""
    layout = Layout((2, 2, 2), ("dp", "vp", "mp"))
    source, target = layout("None", ("dp", "vp"), "None"), layout(("dp", "vp"), "None", "None")
    plan = dlab.redistribution(source, target, (8, 1024, 1024), "bytes")
    assert plan.collectives == ["all-to-all"] and plan.steps[0].axes == ("dp", "vp")
    assert plan.bytes_per_rank == 4 * 8 * 1024 * 1024 // 4 * 3 // 4  # three quarters of what a rank has
    assert "all-to-all" in dlab.redistribution(source, target, (8, 1024, 1024)).collectives
    weights = Layout((2, 2, 2, 2), ("dp", "sp", "mp", "vp"))(("dp", "vp"), "None", ("sp", "mp"))
    assert weights.local_shape((8, 1024, 1024)) == (2, 1024, 256)


def test_volumes_are_those_of_a_ring():
    names = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "slice"]
    assert [volume(name, 4, 1000) for name in names] == [1500, 3000, 750, 750, 0]
    assert volume("all-reduce", 4, 4000) == volume("reduce-scatter", 4, 4000) + volume("all-gather", 4, 1000)


# random pairs


@st.composite
def placements(draw, layout, dims=2, partial=True):
    names = [[] for _ in range(dims)]
    sums = []
    for name in draw(st.permutations(layout.names)):
        place = draw(st.integers(-2 if partial else -1, dims - 1))
        if place >= 0:
            names[place].append(name)
        elif place == -2:
            sums.append(name)
    return layout(*(tuple(each) or None for each in names)).with_partial(*sums)


def layouts(ranks):
    shapes = {4: [(4,), (2, 2), (1, 4)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)], 6: [(6,), (2, 3), (3, 2)]}
    return st.sampled_from([Layout(shape, ("x", "y", "z")[: len(shape)]) for shape in shapes[ranks]])


@st.composite
def pairs(draw, ranks=None, partial=True):
    """Two placements on layouts of the same number of ranks, and a shape that both can cut."""
    ranks = draw(st.sampled_from([4, 6, 8])) if ranks is None else ranks
    first, second = draw(layouts(ranks)), draw(layouts(ranks))
    dims = draw(st.integers(1, 3))
    source = draw(placements(first, dims, partial))
    return source, draw(placements(second, dims, False)), tuple(ranks * draw(st.integers(1, 2)) for _ in range(dims))


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_fewest_bytes_are_never_more_than_those_of_the_rules(pair):
    source, target, shape = pair
    rules, fewest = (dlab.redistribution(source, target, shape, planner) for planner in ("rules", "bytes"))
    assert fewest.bytes_per_rank <= rules.bytes_per_rank
    for plan in (rules, fewest):
        place = None
        for step in plan.steps:  # each begins where the last one ended
            assert place is None or step.before == place or step.before.layout != place.layout
            place = step.after
        if source == target:
            assert plan.steps == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_way_round_is_never_shorter(data):
    """cost(a, b) <= cost(a, i) + cost(i, b), for the planner that counts bytes."""
    layout = data.draw(st.sampled_from([SQUARE, CUBE, Layout((2, 4), ("x", "y")), Layout((8,), ("x",))]))
    dims = data.draw(st.integers(1, 2))
    shape = (64,) * dims
    a = data.draw(placements(layout, dims, True))
    i, b = (data.draw(placements(layout, dims, False)) for _ in range(2))

    def cost(source, target):
        return dlab.redistribution(source, target, shape, "bytes").bytes_per_rank

    assert cost(a, b) <= cost(a, i) + cost(i, b)


def parts_of(whole, placed, rank):
    """A rank's part; of a partial sum, a summand that only all of them together make whole."""
    part = whole[placed.slices_of(rank, whole.shape)].clone()
    for name in placed.partial:
        length, place = placed.layout.lengths[name], placed.layout.coordinate(rank, name)
        if length > 1:
            weights = torch.arange(1.0, length + 1)
            part = part * weights[place] / weights.sum()
    return part


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs(), st.sampled_from(["rules", "bytes"]))
def test_a_plan_that_runs_gives_slices_of_the_whole_and_sends_what_it_says(pair, planner):
    source, target, shape = pair
    plan = dlab.redistribution(source, target, shape, planner, itemsize=8)
    whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    run = dlab.rehearse(
        lambda transport: plan.run(parts_of(whole, source, transport.rank), transport), ranks=source.layout.size
    )
    for rank, part in enumerate(run):
        assert torch.allclose(part, whole[target.slices_of(rank, shape)], rtol=1e-12), plan
    sent = [0] * source.layout.size
    for message in run.messages:
        sent[message.rank] += message.data["bytes"] if message.data.get("direction") != "recv" else 0
    if all(step.before.local_shape(shape) and _even(step, shape) for step in plan.steps):
        assert set(sent) == {plan.bytes_per_rank}, plan


def _even(step, shape):
    """Whether an all-reduce can cut what a rank has into equal parts."""
    return step.collective != "all-reduce" or prod(step.before.local_shape(shape)) % step.ranks == 0


def everywhere(work):
    """On this rank of a cluster: run every plan, and tell whether the part is a slice of the whole."""
    found = []
    for source, target, shape, planner in work:
        whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
        part = dlab.redistribution(source, target, shape, planner).run(parts_of(whole, source, dlab.rank()))
        found.append(torch.allclose(part, whole[target.slices_of(dlab.rank(), shape)], rtol=1e-12))
    return found


def test_plans_run_on_processes(cluster):
    work = []

    @settings(max_examples=40, deadline=None, database=None)
    @given(pairs(ranks=WORKERS), st.sampled_from(["rules", "bytes"]))
    def collect(pair, planner):
        work.append((*pair, planner))

    collect()
    for found in cluster.run(everywhere, work, timeout=60):
        assert found == [True] * len(work)


# PyTorch's own


def by_dtensor(cases, shape):
    """On this rank: what DTensor's redistribute leaves here, and what dlab's plans do, of the same whole tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    words = {"R": Replicate(), "P": Partial()} | {f"S{dim}": Shard(dim) for dim in range(3)}
    found = []
    for source, target in cases:
        begin, end = dtensor(SQUARE, source), dtensor(SQUARE, target)
        local = parts_of(whole, begin, dist.get_rank())
        made = DTensor.from_local(local, mesh, [words[each] for each in source], run_check=False)
        theirs = made.redistribute(placements=[words[each] for each in target]).to_local()
        ours = [dlab.redistribution(begin, end, shape, planner).run(local.clone()) for planner in ("rules", "bytes")]
        found.append([torch.equal(theirs, each) or torch.allclose(theirs, each, rtol=1e-12) for each in ours])
    return found


def test_local_parts_equal_those_of_dtensor(cluster):
    words = ["S0", "S1", "S2", "R"]
    cases = [((a, b), (c, d)) for a in [*words, "P"] for b in [*words, "P"] for c in words for d in words]
    for found in cluster.run(by_dtensor, cases, (4, 8, 4), timeout=100):
        assert found == [[True, True]] * len(cases)


# what is printed, and what is refused


def test_a_plan_prints_itself():
    layout = Layout((2, 2), ("dp", "tp"))
    plan = dlab.redistribution(layout("dp", "tp"), layout("dp", "None"), (32, 784))
    text = repr(plan)
    assert all(word in text for word in ("step", "collective", "axis", "group of rank 0", "bytes per rank"))
    row = text.splitlines()[-1].split()
    assert row[:5] == ["1", "all-gather", "tp", "0,", "1"] and str(16 * 392 * 4) in row
    assert "<table" in plan._repr_html_()
    nothing = dlab.redistribution(layout("dp", "tp"), layout("dp", "tp"), (32, 784))
    assert "nothing to do" in repr(nothing) and nothing.bytes_per_rank == 0 and nothing.collectives == []
    three = Layout((2, 2, 2), ("x", "y", "z"))
    long = dlab.redistribution(three("x", "y", "z"), three("z", "y", "x"), (8, 8, 8))
    assert [line.split()[0] for line in repr(long).splitlines()[1:]] == [str(n + 1) for n in range(len(long.steps))]


def test_what_cannot_be_planned():
    layout = Layout((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match="no planner 'fast': use 'rules' or 'bytes'"):
        dlab.redistribution(layout("dp"), layout("tp"), (8,), planner="fast")
    with pytest.raises(ValueError, match=r"4 ranks and .* 8: a redistribution keeps the number"):
        dlab.redistribution(layout("dp"), Layout((8,), ("x",))("x"), (8,))
    with pytest.raises(ValueError, match="cannot be cut into 2 equal parts"):
        dlab.redistribution(layout("dp"), layout("tp"), (7,))
    with pytest.raises(ValueError, match="one entry for each dimension"):
        dlab.redistribution(layout("dp"), layout("tp"), (8, 8))
    with pytest.raises(ValueError, match="partial sum"):
        dlab.redistribution(layout("dp"), layout("None").with_partial("tp"), (8,))


def test_a_part_of_the_wrong_shape_is_refused_before_anything_is_sent():
    layout = Layout((2,), ("x",))
    plan = dlab.redistribution(layout("x"), layout(None), (8,))

    def work(transport):
        with pytest.raises(ValueError, match=f"rank {transport.rank} gives a part of shape .*5.* holds .*4"):
            plan.run(torch.ones(5), transport)
        return plan.run(torch.ones(4), transport).sum().item()

    run = dlab.rehearse(work, ranks=2)
    assert run == [8.0, 8.0]
    with pytest.raises(ValueError, match="the number of ranks"):
        dlab.rehearse(lambda transport: plan.run(torch.ones(4), transport), ranks=4)


def test_plans_of_many_ranks_take_no_time_that_grows_with_them():
    """A plan is about axes: for 4,096 ranks it is that of 8 with other lengths."""
    small, large = Layout((2, 2, 2), ("x", "y", "z")), Layout((16, 16, 16), ("x", "y", "z"))
    for planner in ("rules", "bytes"):
        few = dlab.redistribution(small("x", ("y", "z")), small(("z", "x"), "y"), (4096, 4096), planner)
        many = dlab.redistribution(large("x", ("y", "z")), large(("z", "x"), "y"), (4096, 4096), planner)
        assert few.collectives == many.collectives


def test_a_placed_layout_is_its_own_destination():
    placed = Placed(SQUARE, (("x",), ("y",)))
    assert steps_between(placed, placed, (4, 4)) == ()
    assert steps_between(replicated(SQUARE, 2), replicated(CUBE_OF_4, 2), (4, 4)) == ()


CUBE_OF_4 = Layout((4,), ("all",))
