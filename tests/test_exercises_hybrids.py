"""The exercises of the lesson on hybrids: right answers of any style pass, mistakes are told apart."""

import json
import re
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

import dlab
from dlab.exercises import check_holdings, check_mesh, check_order, hybrids

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "10_hybrid.ipynb"


def is_one_sentence(answer):
    return answer.startswith(("well done: ", "not yet: ")) and answer.endswith(".") and "\n" not in answer


# ---------------------------------------------------------------------------------------- who holds what

HELD = {3: ("2:4", "5:10", "0:12"), 6: ("0:2", "0:5", "12:24"), 10: ("4:6", "0:5", "12:24")}


def test_what_is_called_right_is_what_a_run_would_hold():
    """Six layers of ten outputs, all cut by outputs along tp: the table of the strategy says who holds what."""

    def by_outputs(model, layout):
        return {f"{number}.weight": layout("tp", None) for number in range(6)}

    def network():
        return torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(6)))

    table = dlab.hybrid_table(network, {"dp": 2, "pp": 3, "tp": 2}, layouts=by_outputs, samples=24)
    for rank, (layers, outputs, samples) in HELD.items():
        row = table.rows[rank]
        first, last = int(row.layers[0]), int(row.layers[-1])
        assert layers == f"{first}:{last + 1}" and len(row.layers) == 2
        assert {f"{part[0].start}:{part[0].stop}" for part in row.slices.values()} == {outputs}
        assert samples == f"{row.samples.start}:{row.samples.stop}"


def numbers(text):
    return tuple(map(int, text.split(":")))


RIGHT_HELD = {
    "text": HELD,
    "text with words": {f"rank {rank}": [f"w[{part}]" for part in parts] for rank, parts in HELD.items()},
    "slices": {rank: tuple(slice(*numbers(part)) for part in parts) for rank, parts in HELD.items()},
    "ranges": {rank: [range(*numbers(part)) for part in parts] for rank, parts in HELD.items()},
    "pairs": {rank: tuple(map(numbers, parts)) for rank, parts in HELD.items()},
    "lists of pairs": {rank: [list(numbers(part)) for part in parts] for rank, parts in HELD.items()},
    "arrays": {rank: np.array([numbers(part) for part in parts]) for rank, parts in HELD.items()},
    "sets": {rank: [set(range(*numbers(part))) for part in parts] for rank, parts in HELD.items()},
    "names": {r: dict(zip(("layers", "outputs", "samples"), parts, strict=True)) for r, parts in HELD.items()},
    "in the order of the question": list(HELD.values()),
    "open ends": {3: (" 2 : 4", "5:", ":12"), 6: (":2", ":5", "12:"), 10: ("4:", slice(5), slice(12, None))},
    "more ranks": HELD | {0: ("0:2", "0:5", "0:12")},
}


@pytest.mark.parametrize("right", RIGHT_HELD.values(), ids=RIGHT_HELD)
def test_right_holdings_pass_in_whatever_style(right):
    answer = check_holdings(right)
    assert answer.startswith("well done: of the coordinates of a rank, pp says which layers") and is_one_sentence(
        answer
    )


def held(three, six, ten):
    return {3: three, 6: six, 10: ten}


def changed(place, *parts):
    """The right answer with other layers (0), outputs (1) or samples (2) of the three ranks."""
    return {
        rank: tuple(part if number == place else own for number, own in enumerate(HELD[rank]))
        for rank, part in zip(HELD, parts, strict=True)
    }


ORDERS = {  # what one finds on other orders of the axes, computed by numpy
    order: {
        rank: (
            f"{2 * at['pp']}:{2 * at['pp'] + 2}",
            f"{5 * at['tp']}:{5 * at['tp'] + 5}",
            f"{12 * at['dp']}:{12 * at['dp'] + 12}",
        )
        for rank in HELD
        for at in [dict(zip(order, np.unravel_index(rank, [{"pp": 3}.get(n, 2) for n in order]), strict=True))]
    }
    for order in permutations(("dp", "pp", "tp"))
}

WRONG_HELD = [
    (ORDERS["tp", "pp", "dp"], "the first axis is the fastest here, but it is the slowest: rank = 6 dp + 2 pp + tp"),
    (ORDERS["pp", "dp", "tp"], "this is the order pp, dp, tp, but here it is dp, pp, tp, slowest first"),
    (ORDERS["dp", "tp", "pp"], "this is the order dp, tp, pp, but here it is dp, pp, tp"),
    (ORDERS["tp", "dp", "pp"], "this is the order tp, dp, pp, but here it is dp, pp, tp"),
    (ORDERS["pp", "tp", "dp"], "this is the order pp, tp, dp, but here it is dp, pp, tp"),
    (changed(0, "0:6", "0:6", "0:6"), "every rank has all layers here, but pp cuts them into 3 stages"),
    (changed(0, "3:6", "0:3", "0:3"), "tp cuts the layers here, but it cuts inside of them: the stages are along pp"),
    (changed(0, "0:3", "3:6", "3:6"), "dp cuts the layers here, but its ranks hold copies of the same"),
    (changed(0, "1:2", "3:4", "5:6"), "the layers are cut along dp and pp here: only pp, whose ranks hold stages"),
    (changed(0, "3:4", "0:1", "4:5"), "the layers are cut along pp and tp here: only pp, whose ranks hold stages"),
    (changed(0, {1, 4}, {0, 3}, {2, 5}), "the stages take the layers in turn here, but a stage is consecutive layers"),
    (
        changed(1, "0:10", "0:10", "0:10"),
        "every rank has all outputs of its layers here, but tp cuts each layer into 2",
    ),
    (changed(1, "0:5", "5:10", "5:10"), "dp cuts the outputs here, but its ranks hold copies of the same"),
    (changed(1, "3:6", "0:3", "6:9"), "pp cuts the outputs here, but it cuts between the layers"),
    (
        changed(2, "0:24", "0:24", "0:24"),
        "every rank has all samples here, but the two copies of the network, along dp",
    ),
    (changed(2, "6:8", "12:14", "20:22"), "the samples are cut over all 12 ranks here, but the ranks of one copy"),
    (changed(2, "4:8", "12:16", "20:24"), "the samples are cut along dp and pp here, but all stages of a copy work"),
    (changed(2, "6:12", "12:18", "12:18"), "the samples are cut along dp and tp here, but ranks of a tp group have"),
    (
        changed(2, "8:16", "0:8", "16:24"),
        "the samples are cut along pp here, but all stages of a copy work on the same",
    ),
    (changed(2, "12:24", "0:12", "0:12"), "the samples are cut along tp here, but ranks of a tp group have the same"),
    (
        held(("2:3", "5:9", "0:11"), ("0:1", "0:4", "12:23"), ("4:5", "0:4", "12:23")),
        "each end is one too early: it is the first index that does not belong to the part, as in a Python slice",
    ),
    (
        held(([2, 3], [5, 9], [0, 11]), ([0, 1], [0, 4], [12, 23]), ([4, 5], [0, 4], [12, 23])),
        "each end is one too early",
    ),
    (
        held(("3:5", "6:11", "1:13"), ("1:3", "1:6", "13:25"), ("5:7", "1:6", "13:25")),
        "indices begin with 1 here, but they begin with 0, as in Python",
    ),
    (
        held(("3:4", "6:10", "1:12"), ("1:2", "1:5", "13:24"), ("5:6", "1:5", "13:24")),
        "indices begin with 1 here and the last one belongs to the part",
    ),
    (
        held(("2:4", "0:10", "0:24"), ("0:2", "0:10", "0:24"), ("4:6", "0:10", "0:24")),
        "tp cuts each layer into 2; and every rank has all samples here",
    ),
    (
        {rank: (layers, outputs, "0:24") for rank, (layers, outputs, _) in ORDERS["pp", "dp", "tp"].items()},
        "rank = 6 dp + 2 pp + tp; and every rank has all samples here",
    ),
    (
        HELD | {10: ("4:6", "5:10", "12:24")},
        "the outputs of rank 10 are not 5:10: rank = 6 dp + 2 pp + tp, so it is at dp 1, pp 2, tp 0, and of these tp",
    ),
    (
        HELD | {6: ("2:4", "0:5", "12:24")},
        "the layers of rank 6 are not 2:4: rank = 6 dp + 2 pp + tp, so it is at dp 1",
    ),
    (
        HELD | {3: ("2:4", "5:10", "0:8")},
        "the samples of rank 3 are not 0:8: dp cuts 24 samples into 2, so a rank has 12",
    ),
    (HELD | {3: ("2:5", "5:10", "0:12")}, "the layers of rank 3 are not 2:5: pp cuts 6 layers into 3, so a rank has 2"),
    (HELD | {10: ("6:8", "0:5", "12:24")}, "the layers of rank 10 are not 6:8: there are 6 layers, counted from 0"),
    (HELD | {10: ((), "0:5", "12:24")}, "the layers of rank 10 are not none at all: pp cuts 6 layers into 3"),
    ({3: HELD[3], 6: HELD[6]}, "rank 10 is missing: give its layers, outputs and samples"),
    ({}, "ranks 3, 6 and 10 are missing: give their layers, outputs and samples"),
    (HELD | {6: ("0:2", "0:5")}, "rank 6 has ('0:2', '0:5'): give three things, its layers, outputs and samples"),
    (HELD | {6: "0:2"}, "rank 6 has '0:2': give three things"),
    (HELD | {6: None}, "rank 6 has None: give three things"),
    (HELD | {6: (0, "0:5", "12:24")}, "the layers of rank 6 are 0: give first and end as in a slice, such as '0:3'"),
    (HELD | {6: ("two", "0:5", "12:24")}, "the layers of rank 6 are 'two': give first and end as in a slice"),
    (HELD | {6: ("0:2", (0.0, 5.0), "12:24")}, "the outputs of rank 6 are (0.0, 5.0): give first and end"),
    (..., "Ellipsis is no dictionary: give one with an entry for each rank"),
    (7, "7 is no dictionary"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_HELD)
def test_each_mistake_in_the_holdings_gets_its_own_sentence(wrong, sentence):
    answer = check_holdings(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


# -------------------------------------------------------------------------------------- the mesh that fits

BEST = {"dp": 2, "pp": 4}


def test_what_is_sent_is_what_messages_of_a_run_come_to():
    """A small transformer on four machines: the formulas of the exercise, with its sizes put in, count its messages."""

    class Machines(dlab.transports.Group):
        shares_memory = False

    def bytes_of_a_step(axes, model):
        found = []
        for steps in (2, 1):
            data = dlab.Partition(dlab.mnist(), range(16 * steps))
            plan = dlab.Training(
                model=model, data=data, strategy=dlab.Hybrid(axes, microbatches=2), batch_size=16, order="global"
            )
            rehearsal = dlab.rehearse(lambda transport, plan=plan: plan(Machines(transport, range(4))), ranks=4)
            sums = dict.fromkeys(axes, 0)
            for each in rehearsal.messages:
                sums[each.data["axis"]] += each.data["bytes"] * (each.data["source"] == 0)
            found.append(sums)
        return {axis: found[0][axis] - found[1][axis] for axis in axes}

    def model():
        return dlab.RowTransformer(width=32, depth=4)

    activations = 16 * 28 * 32 * 4  # of a whole batch
    sent = bytes_of_a_step({"pp": 2, "tp": 2}, model)
    assert sent["tp"] == 4 * 2 * activations  # four all-reduces in each of two blocks
    assert sent["pp"] == activations
    sent = bytes_of_a_step({"dp": 2, "tp": 2}, model)
    assert sent["tp"] == 4 * 4 * activations / 2
    table = dlab.hybrid_table(model, {"dp": 2, "tp": 2})
    assert sent["dp"] == pytest.approx(4 * table.rows[0].numbers, rel=0.01)


def test_the_best_mesh_is_the_best_of_all():
    """By counting anew, with integers, over every mesh of eight ranks."""
    found = {}
    for dp, tp, pp in np.ndindex(9, 9, 9):
        if dp * tp * pp != 8 or 12 % pp or 200e6 * tp * pp < 12 * 12 * 512**2 * 16:
            continue
        tokens = 32 // dp * 128 * 512 * 4
        along_dp = 2 * (dp - 1) * 12 * 12 * 512**2 * 4 // (dp * tp * pp)
        along_tp = 4 * (12 // pp) * 2 * (tp - 1) * tokens // tp
        found[dp, tp, pp] = along_dp + along_tp + min(2, pp - 1) * tokens
    assert min(found, key=found.get) == (2, 1, 4) and found[2, 1, 4] == 46_137_344
    assert len(found) == 6


@pytest.mark.parametrize("axes", [BEST, {"pp": 4, "dp": 2}, {"dp": 2, "tp": 1, "pp": 4}, dlab.Hybrid(BEST)])
@pytest.mark.parametrize("megabytes", [46.137344, 46.1, 46, np.float32(46.14)])
def test_the_right_mesh_passes(axes, megabytes):
    answer = check_mesh(axes, megabytes)
    assert answer.startswith("well done: with dp 2 × pp 4 a rank holds 151 MB and sends 46.1, 37.7 along dp and 8.4")
    assert is_one_sentence(answer)


GRADIENTS, ACTIVATIONS = 37.748736, 8.388608  # megabytes along dp and along pp
WRONG_MESHES = [
    ({"dp": 8}, "dp 8 does not fit: a rank has all of 37.7 million parameters, 16 bytes for each, which are 604 MB"),
    ({"dp": 4, "tp": 2}, "dp 4 × tp 2 does not fit: a rank has 1/2 of 37.7 million parameters"),
    ({"dp": 4, "pp": 2}, "which are 302 MB, and there is room for 200; only tp and pp divide them"),
    ({"pp": 8}, "12 layers cannot be divided among 8 stages: use a number of stages that divides 12"),
    ({"tp": 8}, "tp 8 fits, with 75 MB, but a rank sends 704.6 MB in a step, 704.6 of them along tp"),
    ({"dp": 2, "tp": 4}, "dp 2 × tp 4 fits, with 151 MB, but a rank sends 339.7 MB in a step, 302.0 of them along tp"),
    ({"dp": 2, "tp": 2, "pp": 2}, "a rank sends 142.6 MB in a step, 100.7 of them along tp"),
    ({"tp": 2, "pp": 4}, "a rank sends 117.4 MB in a step, 100.7 of them along tp: another mesh that fits sends less"),
    ({"tp": 4, "pp": 2}, "a rank sends 310.4 MB in a step, 302.0 of them along tp"),
    ({"dp": 2, "pp": 2}, "dp 2 × pp 2 needs 4 ranks, and there are 8: the product must be 8"),
    ({"dp": 4, "pp": 4}, "needs 16 ranks, and there are 8"),
    ({"dp": 1}, "a mesh of length 1 needs 1 ranks, and there are 8"),
    ({"data": 2, "pp": 4}, "there is no axis 'data' here: the axes are dp, tp and pp"),
    ({"dp": 2, "pp": 4.0}, "the axis pp has the length 4.0: give a number of ranks, 1 or more"),
    ({"dp": 8, "pp": 0}, "the axis pp has the length 0: give a number of ranks"),
    ({"dp": True, "pp": 8}, "the axis dp has the length True"),
    ({}, "{} is not a mesh: give the length of each axis"),
    ((2, 1, 4), "(2, 1, 4) is not a mesh: give the length of each axis, as in {'dp': 4, 'tp': 2}"),
    (None, "None is not a mesh"),
]
WRONG_BYTES = [
    (GRADIENTS, "along pp nothing is counted: a rank in the middle sends activations on and gradients back"),
    (ACTIVATIONS, "along dp nothing is counted: the two copies of each stage average their gradients, once in a step"),
    (2 * GRADIENTS + ACTIVATIONS, "an all-reduce over n ranks sends 2(n-1)/n of the gradients, which is once with 2"),
    (GRADIENTS / 2 + ACTIVATIONS, "an all-reduce is a reduce-scatter and an all-gather, so 2(n-1)/n of the gradients"),
    (
        4 * GRADIENTS + ACTIVATIONS,
        "along dp a rank sends gradients of its own stage only, a quarter of all, of 4 bytes",
    ),
    (GRADIENTS * 8 / 12 + ACTIVATIONS, "a layer has 12 h² parameters, 4 h² of them in attention and 8 h² in the MLP"),
    (GRADIENTS / 3 + ACTIVATIONS, "; or a layer has 12 h² parameters, and there are 3 layers in a stage, not 1"),
    (GRADIENTS + ACTIVATIONS / 2, "a stage in the middle sends in both directions: activations forward, and as much"),
    (GRADIENTS + 2 * ACTIVATIONS, "each copy has half of the batch, 16 samples"),
    (GRADIENTS + 3 * ACTIVATIONS, "a rank sends to its own neighbours only, not at all three boundaries"),
    (GRADIENTS + 4 * ACTIVATIONS, "that is what all four stages of a copy send together, and the question is for one"),
    (46_137_344, "a rank does not send 46,137,344 MB: that is in bytes: a megabyte has 10**6"),
    (44, "that is in MiB, of 2**20 bytes: a megabyte has 10**6"),
    (46.137344 / 4, "that is in numbers, and each has 4 bytes"),
    (46.137344 / 2, "numbers have 4 bytes here, not 2"),
    (46.137344e-3, "that is in gigabytes"),
    (46.137344 * 8, "that is in bits: a byte has 8"),
    (150.994944, "that is what a rank holds, not what it sends"),
    (352.3, "that is what all 8 ranks send together, and the question is for one"),
    (339.7, "that is for dp 2 × tp 4"),
    (142.6, "that is for dp 2 × tp 2 × pp 2"),
    (2 * GRADIENTS, "which is once with 2 ranks; and along pp nothing is counted"),
    (GRADIENTS / 2 + 2 * ACTIVATIONS, "not (n-1)/n; and each copy has half of the batch, 16 samples"),
    (
        1e6 * GRADIENTS,
        "along pp nothing is counted: a rank in the middle sends activations on and gradients back; and that",
    ),
    (
        70.0,
        "add up 2(n-1)/n of the gradients of a stage, for the all-reduce along dp, and the activations of 16 samples",
    ),
    (0, "gradients go along dp, and activations along pp"),
    (-46.1, "gradients go along dp, and activations along pp"),
    ("46 MB", "the mesh is the right one, but '46 MB' is not a number of megabytes: give one"),
    (None, "the mesh is the right one, but None is not a number of megabytes"),
    (float("nan"), "but nan is not a number of megabytes"),
    (True, "but True is not a number of megabytes"),
]


@pytest.mark.parametrize(("axes", "sentence"), WRONG_MESHES)
def test_each_wrong_mesh_is_told_apart(axes, sentence):
    answer = check_mesh(axes, 46.1)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


@pytest.mark.parametrize(("megabytes", "sentence"), WRONG_BYTES)
def test_each_wrong_number_of_bytes_is_told_apart(megabytes, sentence):
    answer = check_mesh(BEST, megabytes)
    assert answer.startswith("not yet: the mesh is the right one, but ") and is_one_sentence(answer)
    assert sentence in answer


def test_two_mistakes_with_one_number_are_not_taken_for_each_other():
    """Every single mistake has its own number, apart from the others by more than is rounded."""
    pairs = [(told, value + ACTIVATIONS) for told, value in hybrids._GRADIENTS.items() if told]
    pairs += [(told, value + GRADIENTS) for told, value in hybrids._ACTIVATIONS.items() if told]
    for _, value in pairs:
        fitting = [other for other, near in pairs if abs(near - value) <= 0.01 * near]
        assert all(other in check_mesh(BEST, value) for other in fitting[:2])


# ---------------------------------------------------------------------------------------- the order of axes


@pytest.mark.parametrize(
    "right",
    [("pp", "dp", "tp"), ["pp", "tp", "dp"], "pp, dp, tp", "pp tp dp", {"pp": 2, "dp": 2, "tp": 2}],
    ids=str,
)
def test_right_orders_pass(right):
    answer = check_order(right)
    assert answer.startswith("well done: [0, 4] is a group along pp, with a rank on each host, and 4.2 MB per rank go")
    assert is_one_sentence(answer)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            ("dp", "pp", "tp"),
            "with dp first, [0, 4] is a group along dp, with a rank on each host, and each sends 37.7 MB",
        ),
        (("dp", "tp", "pp"), "this is the right order, fastest first: turn it round"),
        (("tp", "pp", "dp"), "each sends 100.7 MB to the other host; along another axis it is less"),
        (("tp", "dp", "pp"), "this is the right order, fastest first: turn it round"),
        (("dp", "tp"), "dp and tp: give each of dp, tp and pp once, slowest first"),
        (("pp", "pp", "tp"), "pp, pp and tp: give each of dp, tp and pp once"),
        ((), "nothing: give each of dp, tp and pp once"),
        ("tp", "tp: give each of dp, tp and pp once"),
        ((2, 2, 2), "(2, 2, 2) is not an order: give the names of the axes, slowest first"),
        (None, "None is not an order"),
    ],
)
def test_wrong_orders(wrong, sentence):
    answer = check_order(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


# ------------------------------------------------------------------------------------------ the notebook

STUBS = {
    "my_holdings": lambda found: check_holdings(found["my_holdings"]),
    "my_axes": lambda found: check_mesh(found["my_axes"], found["my_megabytes"]),
    "my_order": lambda found: check_order(found["my_order"]),
}


def define(source):
    names = {}
    exec("\n".join(line for line in source.splitlines() if not line.startswith("print(")), names)
    return names


def test_the_hidden_solutions_pass_and_the_stubs_do_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    shown = "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
    (hidden,) = [text for text in sources if "<details>" in text]
    solutions = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert len(solutions) == len(STUBS)
    for begins, check in STUBS.items():
        (solution,) = [text for text in solutions if text.startswith(begins)]
        assert check(define(solution)).startswith("well done")
        (stub,) = [text for text in sources if text.startswith(begins)]
        answer = check(define(stub))
        assert answer.startswith("not yet") and f"{answer}\n" in shown
