"""Formulas for the memory of sharded training give the published numbers."""

import pickle

import pytest

import dlab
from dlab.cost import activation_memory, deepspeed_memory, zero_memory, zero_traffic

GIB = 2**30


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_figure_of_the_zero_paper(stage, gigabytes):
    assert zero_memory(7.5e9, ranks=64, stage=stage) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("stage", "parts"),
    [(0, (15, 15, 60)), (1, (15, 15, 7.5)), (2, (15, 1.875, 7.5)), (3, (1.875, 1.875, 7.5))],
)
def test_eight_billion_parameters_on_eight_ranks(stage, parts):
    """The published numbers are of 16-bit parameters and gradients, 7.5 GB per byte, and of 8 bytes for Adam."""
    found = zero_memory(7.5e9, ranks=8, stage=stage, optimizer_bytes=8)
    assert (found.parameters / 1e9, found.gradients / 1e9, found.optimizer / 1e9) == parts
    assert found == sum(parts) * 1e9


def test_it_says_what_it_is_made_of_and_can_be_sent():
    found = zero_memory(7.5e9, ranks=64, stage=1)
    assert repr(found) == "31.4 GB per rank: parameters 15, gradients 15, optimizer 1.41"
    assert repr(pickle.loads(pickle.dumps(found))) == repr(found)
    assert dlab.cost.zero_memory(1000, ranks=4, stage=3, optimizer_bytes=4, parameter_bytes=4, gradient_bytes=4) == 3000


@pytest.mark.parametrize(
    ("stage", "offload", "gib"),
    [(2, None, 15.93), (2, "optimizer", 5.31), (3, None, 6.09), (3, "optimizer", 0.78), (3, "parameters", 0.12)],
)
def test_the_estimates_of_deepspeed(stage, offload, gib):
    found = deepspeed_memory(2851e6, ranks=8, stage=stage, largest_layer=32e6, offload=offload)
    assert found / GIB == pytest.approx(gib, abs=0.005)


ONE, EIGHT, SEVENTY, MOST = (2048, 16, 32), (4096, 32, 32), (8192, 80, 64), (16384, 126, 128)


@pytest.mark.parametrize(
    ("model", "given", "gib"),
    [
        (ONE, {"scores": False}, 1.0625),
        (EIGHT, {"scores": False}, 4.25),
        (SEVENTY, {"scores": False}, 21.25),
        (SEVENTY, {"scores": False, "tensor_parallel": 8}, 8.125),
        (SEVENTY, {"scores": False, "tensor_parallel": 16}, 7.1875),
        (SEVENTY, {"scores": False, "tensor_parallel": 8, "sequence_parallel": True}, 2.65625),
        (EIGHT, {}, 9.25),
        (SEVENTY, {}, 46.25),
        (MOST, {}, 145.69),
    ],
)
def test_activations_of_known_models(model, given, gib):
    hidden, layers, heads = model
    found = activation_memory(1024, 1, hidden, layers, heads, **given) / GIB
    assert found == pytest.approx(gib, abs=0.005 if model is MOST else 0)


def test_traffic():
    assert [zero_traffic(1000, ranks=4, stage=stage) for stage in range(4)] == [1500, 1500, 1500, 2250]
    assert zero_traffic(1000, ranks=1, stage=3) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zero_memory(1e9, ranks=0, stage=1), "give a number, 0 or more, and 1 rank or more"),
        (lambda: zero_memory(1e9, ranks=2, stage=4), "ZeRO has no stage 4"),
        (lambda: zero_memory(1e9, ranks=2, stage=1, optimizer_bytes=-1), "optimizer_bytes=-1: give a number of bytes"),
        (lambda: deepspeed_memory(1e9, 8, stage=1), "DeepSpeed has estimates for stage 2"),
        (lambda: activation_memory(0, 1, 8, 1), "tokens=0: give a whole number"),
    ],
)
def test_bad_numbers_get_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
