"""Compressed gradients: a loop over the values says what the codes must be; what is not sent is not lost."""

import math
import pickle
import re
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dlab.bench import compressing
from dlab.kvstore.compression import BFloat16, Compression, OneBit, TopK, TwoBit, parse_compression

ALL = [TwoBit(0.5), TwoBit(0.1), OneBit(), OneBit(-0.25), TopK(0.01), TopK(0.3), TopK(1.0), BFloat16()]
MODULE = sys.modules[Compression.__module__]  # the package may offer a function of that name
WAYS = ("packed", "unpacked")
COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000]


@pytest.fixture
def small_blocks(monkeypatch):
    """So that a short gradient has many, and a last one that is cut short."""
    monkeypatch.setattr(MODULE, "_BLOCK", 32)


def encode(kind: Compression, gradient, residual) -> torch.Tensor:
    """The code; whatever was there before is overwritten."""
    code = torch.full((kind.nbytes(len(gradient)),), 0xA5, dtype=torch.uint8)
    kind.encode(gradient, residual, code)
    return code


def decode(kind: Compression, code, count: int) -> torch.Tensor:
    out = torch.full((count,), 77.0)
    kind.decode(code, out)
    return out


def random(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


# --------------------------------------------------------------------------- a value at a time, from the facts


def two_bit(value: float, threshold: float) -> tuple[str, float]:
    """Code and what is sent."""
    if value >= threshold:
        return "11", threshold
    if value <= -threshold:
        return "10", -threshold
    return "00", 0.0


def one_bit(value: float, threshold: float) -> tuple[str, float]:
    return ("1", 1.0) if value > threshold else ("0", -1.0)


def by_hand(rule, threshold, gradient, residual) -> tuple[bytes, list[float], list[float]]:
    """Code, what is sent, and the new residual, by strings of bits: words of 32, the first value first."""
    bits, sent, left = "", [], []
    for each, kept in zip(gradient.tolist(), residual.tolist(), strict=True):
        value = f32(each + kept)
        code, sends = rule(value, f32(threshold))
        bits += code
        sent.append(sends)
        left.append(f32(value - sends))
    bits += "0" * (-len(bits) % 32)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:], sent, left


floats = some.floats(-2, 2, width=32) | some.sampled_from([0.5, -0.5, 0.0, 0.25, -0.25, 0.1, -0.1]).map(f32)


@settings(deadline=None)
@given(some.lists(some.tuples(floats, floats), max_size=100), some.sampled_from([0.5, 0.1, 1.0]))
def test_two_bits_are_those_of_the_loop(pairs, threshold):
    _as_by_hand(TwoBit(threshold), two_bit, threshold, pairs)


@settings(deadline=None)
@given(some.lists(some.tuples(floats, floats), max_size=100), some.sampled_from([0.0, 0.1, -0.25]))
def test_one_bit_is_that_of_the_loop(pairs, threshold):
    _as_by_hand(OneBit(threshold), one_bit, threshold, pairs)


def _as_by_hand(kind, rule, threshold, pairs):
    gradient, residual = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).T.contiguous()
    expected, sent, left = by_hand(rule, threshold, gradient, residual)
    before = gradient.clone()
    code = encode(kind, gradient, residual)
    assert bytes(code.tolist()) == expected
    assert decode(kind, code, len(pairs)).tolist() == sent
    assert residual.tolist() == left
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("count", [31, 32, 33, 64, 1000, 1023])
@pytest.mark.parametrize(("kind", "rule"), [(TwoBit(0.5), two_bit), (OneBit(0.1), one_bit)])
def test_many_blocks_are_as_one(small_blocks, kind, rule, count):
    pairs = torch.stack([random(count, 1), random(count, 2)], dim=1).tolist()
    _as_by_hand(kind, rule, kind.threshold, pairs)


@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_a_long_gradient_is_coded_as_its_pieces_are_without_blocks(monkeypatch, kind):
    gradient, whole, pieces = random(200_001), random(200_001, 1), random(200_001, 1)
    code = encode(kind, gradient, whole)
    monkeypatch.setattr(MODULE, "_BLOCK", 1 << 20)
    assert torch.equal(code, encode(kind, gradient, pieces))
    assert torch.equal(whole, pieces)


# ------------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize(
    ("pushes", "sent", "residuals"),
    [
        ((0.4, 0.1, 0.2, 0.3), (0, 0.5, 0, 0.5), (0.4, 0, 0.2, 0)),
        ((0.4, 0.2, 0.2, 0.2), (0, 0.5, 0, 0.5), (0.4, 0.1, 0.3, 0)),
    ],
)
def test_the_series_of_mxnet(pushes, sent, residuals):
    kind, residual = TwoBit(0.5), torch.zeros(20)
    for push, sends, left in zip(pushes, sent, residuals, strict=True):
        code = encode(kind, torch.full((20,), push), residual)
        assert decode(kind, code, 20).tolist() == [sends] * 20
        torch.testing.assert_close(residual, torch.full((20,), float(left)), rtol=0, atol=1e-6)


def test_the_bytes_of_two_bits():
    code = encode(TwoBit(0.5), torch.tensor([0.5, -0.5, 0.4, 0.9, -3.0]), torch.zeros(5))
    assert code.tolist() == [0b11_10_00_11, 0b10_00_00_00, 0, 0]


def test_the_bytes_of_one_bit():
    gradient = torch.tensor([1, -1, 0, 0.1, -0.1, 2, 3, -4, 5.0])  # 0 is not above 0
    assert encode(OneBit(), gradient, torch.zeros(9)).tolist() == [0b10010110, 0b10000000, 0, 0]


def test_the_bytes_of_the_largest():
    code = encode(TopK(0.4), torch.tensor([1, -5, 0, 4, 3.0]), torch.zeros(5))
    assert bytes(code.tolist()) == struct.pack("<iiff", 1, 3, -5, 4)


def test_the_bytes_of_bfloat16():
    assert encode(BFloat16(), torch.tensor([1.0, -2.0]), torch.zeros(2)).tolist() == [0x80, 0x3F, 0x00, 0xC0]


# ---------------------------------------------------------------------------------------- bytes on the transport


@pytest.mark.parametrize(
    ("kind", "share"),
    [(TwoBit(), 1 / 16), (OneBit(), 1 / 32), (TopK(0.01), 0.02), (TopK(0.25), 0.5), (BFloat16(), 0.5)],
)
def test_the_share_of_the_bytes(kind, share):
    assert kind.nbytes(3200) == 4 * 3200 * share


@pytest.mark.parametrize("count", COUNTS)
def test_words_are_whole(count):
    assert TwoBit().nbytes(count) == 4 * math.ceil(count / 16)
    assert OneBit().nbytes(count) == 4 * math.ceil(count / 32)
    assert TopK(0.3).nbytes(count) == 8 * math.ceil(0.3 * count)
    assert TopK(1e-9).nbytes(count) == 8 * (count > 0)
    assert BFloat16().nbytes(count) == 2 * count


# ------------------------------------------------------------------------------------------ error feedback


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_what_is_sent_and_what_is_left_are_all_there_was(kind, count):
    gradient, residual = random(count, 3), random(count, 4)
    value = gradient + residual
    sent = decode(kind, encode(kind, gradient, residual), count)
    torch.testing.assert_close(sent + residual, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "scale", "bound"),
    [(TwoBit(0.5), 0.45, 0.5), (OneBit(), 0.9, 1.9), (TopK(0.1), 0.5, 10), (BFloat16(), 0.5, 0.01)],
    ids=lambda case: getattr(case, "name", str(case)),
)
def test_in_the_long_run_everything_is_sent(kind, scale, bound):
    """No gradient is above what one code can say, so that the residual never grows; without it the sums drift apart."""
    steps, count = 400, 100
    constant = torch.linspace(-scale, scale, count) / 2
    residual, given, sent = torch.zeros(count), torch.zeros(count).double(), torch.zeros(count).double()
    for step in range(steps):
        gradient = constant + scale / 2 * random(count, step).clamp(-1, 1)
        given += gradient
        sent += decode(kind, encode(kind, gradient, residual), count)
        assert residual.abs().max() <= bound
    torch.testing.assert_close(sent + residual, given, rtol=0, atol=1e-3)
    assert (sent / steps - given / steps).abs().max() <= 1.01 * bound / steps


# --------------------------------------------------------------------------------------- top-k and bfloat16


@pytest.mark.parametrize("ratio", [1e-6, 0.001, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 100, 20_000, 100_000])
def test_the_largest_are_those_of_torch(ratio, count):
    gradient, residual = random(count, 5), random(count, 6)
    value = gradient + residual
    kind = TopK(ratio)
    sent = decode(kind, encode(kind, gradient, residual), count)
    largest = value.abs().topk(math.ceil(ratio * count)).indices
    expected = torch.zeros(count).index_copy(0, largest, value[largest])
    assert torch.equal(sent, expected)
    assert torch.equal(residual, value - expected)


@settings(deadline=None)
@given(some.lists(some.integers(-3, 3), min_size=1, max_size=200), some.floats(0.001, 1))
def test_of_equal_magnitudes_the_first_are_sent(values, ratio):
    gradient = torch.tensor(values, dtype=torch.float32)
    code = encode(TopK(ratio), gradient, torch.zeros(len(values))).numpy()
    count = math.ceil(ratio * len(values))
    first = sorted(sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:count])
    assert code[: 4 * count].view(np.int32).tolist() == first
    assert code[4 * count :].view(np.float32).tolist() == [values[place] for place in first]


@pytest.mark.parametrize("others", [0, 10, 2000, 100_000])
def test_a_sample_that_misleads_changes_nothing(others):
    """All that a sample sees is large, and the rest small; or all but a few are 0."""
    value = torch.zeros(100_000)
    value[:others] = random(others, 7).abs() + 0.1
    value[:: (len(value) >> 14) | 1] = 100.0 + torch.arange(len(value[:: (len(value) >> 14) | 1]))
    value[others:] *= others > 0
    sent = decode(TopK(0.2), encode(TopK(0.2), value, torch.zeros(len(value))), len(value))
    least = value.sort(descending=True).values[20_000 - 1]
    assert torch.equal(sent[value > least], value[value > least])
    assert sent.count_nonzero() == min(20_000, value.count_nonzero())
    assert not sent[value < least].any()


@pytest.mark.parametrize("count", COUNTS)
def test_bfloat16_rounds_as_torch_does(count):
    gradient, residual = random(count, 8), random(count, 9)
    value = gradient + residual
    code = encode(BFloat16(), gradient, residual)
    assert torch.equal(decode(BFloat16(), code, count), value.bfloat16().float())
    assert torch.equal(residual, value - value.bfloat16().float())


# ----------------------------------------------------------------------------------------- nan and infinity

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (TwoBit(0.5), [0, 0.5, -0.5, 0]),
        (OneBit(), [-1, 1, -1, 1]),
        (TopK(0.75), [NAN, INF, -INF, 0]),
        (TopK(0.25), [NAN, 0, 0, 0]),
        (BFloat16(), [NAN, INF, -INF, 0.25]),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_leaves_no_residual(kind, sent):
    gradient = torch.tensor([NAN, INF, -INF, 0.25])
    residual = torch.zeros(4)
    code = encode(kind, gradient, residual)
    torch.testing.assert_close(decode(kind, code, 4), torch.tensor(sent, dtype=torch.float32), equal_nan=True)
    assert residual[:3].tolist() == [0, 0, 0]
    assert residual[3] == 0.25 - sent[3]


@pytest.mark.parametrize("kind", ALL, ids=repr)
@pytest.mark.filterwarnings("error")
def test_a_residual_that_is_not_finite_heals(kind):
    residual = torch.tensor([INF, NAN, 3e38, -INF] * 25)
    encode(kind, torch.tensor([-INF, 1.0, 3e38, 1.0] * 25), residual)
    assert residual.tolist() == [0.0] * 100
    gradient = random(100)
    sent = decode(kind, encode(kind, gradient, residual), 100)
    torch.testing.assert_close(sent + residual, gradient, rtol=1e-6, atol=1e-7)


def test_more_nans_than_are_sent_are_dropped():
    gradient = random(100_000)
    gradient[::2] = NAN
    residual = torch.zeros(100_000)
    assert decode(TopK(0.01), encode(TopK(0.01), gradient, residual), 100_000).isnan().sum() == 1000
    assert torch.equal(residual[1::2], gradient[1::2])
    assert not residual[::2].any()


# ------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_a_code_may_lie_anywhere(kind):
    gradient, residual = random(50), torch.zeros(50)
    expected = encode(kind, gradient, residual.clone())
    for offset in range(1, 4):
        buffer = torch.zeros(len(expected) + 8, dtype=torch.uint8)
        code = buffer[offset : offset + len(expected)]
        kind.encode(gradient, residual.clone(), code)
        assert torch.equal(code, expected)
        assert not buffer[:offset].any() and not buffer[offset + len(expected) :].any()
        assert torch.equal(decode(kind, code, 50), decode(kind, expected, 50))


@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_parts_of_a_flat_tensor_that_learns(kind):
    flat, kept, out = torch.nn.Parameter(random(60)), torch.zeros(60), torch.full((60,), 7.0, requires_grad=True)
    code = torch.empty(kind.nbytes(33), dtype=torch.uint8)
    kind.encode(flat[5:38], kept[5:38], code)
    kind.decode(code, out[5:38])
    assert not kept[:5].any() and not kept[38:].any()
    assert torch.equal(decode(kind, encode(kind, flat.detach()[5:38], torch.zeros(33)), 33), out[5:38])
    assert out[:5].eq(7).all() and out[38:].eq(7).all()


@pytest.mark.parametrize(
    ("gradient", "residual", "nbytes", "complaint"),
    [
        (torch.zeros(5).double(), torch.zeros(5), 4, "flat float32 tensors in main memory: use .cpu"),
        (torch.zeros(5), torch.zeros(5).half(), 4, "flat float32 tensors"),
        (torch.zeros(5, 2), torch.zeros(10), 4, "flat float32 tensors"),
        (torch.zeros(10)[::2], torch.zeros(5), 4, "flat float32 tensors"),
        (torch.zeros(5), torch.zeros(6), 4, "5 values cannot use a residual of 6: keep one per gradient"),
        (torch.zeros(17), torch.zeros(17), 4, "the code of 17 values by 2bit is a flat uint8 tensor of 8"),
    ],
)
def test_what_does_not_fit_is_told(gradient, residual, nbytes, complaint):
    with pytest.raises(ValueError, match=complaint):
        TwoBit().encode(gradient, residual, torch.zeros(nbytes, dtype=torch.uint8))


def test_a_code_that_is_too_short_is_not_decoded():
    with pytest.raises(ValueError, match="the code of 17 values by 2bit is a flat uint8 tensor of 8"):
        TwoBit().decode(torch.zeros(4, dtype=torch.uint8), torch.zeros(17))


# ------------------------------------------------------------------------------------------- how it is asked


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, None),
        ("2bit", TwoBit(0.5)),
        ({"type": "2bit", "threshold": 2}, TwoBit(2)),
        ("1bit", OneBit(0.0)),
        ({"type": "1bit", "threshold": -0.5}, OneBit(-0.5)),
        ("topk", TopK(0.01)),
        ({"type": "topk", "ratio": 0.05}, TopK(0.05)),
        ({"type": "topk", "ratio": np.float32(0.5)}, TopK(0.5)),
        ("bfloat16", BFloat16()),
        (TopK(0.2), TopK(0.2)),
    ],
)
def test_what_is_asked_is_given(asked, given):
    assert parse_compression(asked) == given


def test_the_options_are_not_changed():
    asked = {"type": "2bit", "threshold": 1.0}
    parse_compression(asked)
    assert asked == {"type": "2bit", "threshold": 1.0}


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("4bit", "there is no gradient compression '4bit': use 2bit, 1bit, topk, bfloat16, or None for none"),
        ({"threshold": 0.5}, "there is no gradient compression None: use 2bit, 1bit"),
        ({"type": ["2bit"]}, "there is no gradient compression ['2bit']: use 2bit"),
        (2, "there is no gradient compression 2: use 2bit"),
        ({"type": "2bit", "ratio": 0.5}, "2bit has no option 'ratio': use threshold"),
        ({"type": "topk", "threshold": 0.5}, "topk has no option 'threshold': use ratio"),
        ({"type": "bfloat16", "threshold": 0.5}, "bfloat16 has no option 'threshold': it takes none"),
        *(
            ({"type": "2bit", "threshold": bad}, f"2bit cannot have the threshold {bad!r}: use a number above 0")
            for bad in (0, -0.5, NAN, INF, 1e-60, 1e60, None, "0.5")
        ),
        *(
            ({"type": "1bit", "threshold": bad}, f"1bit cannot have the threshold {bad!r}: use a finite number")
            for bad in (NAN, INF, None)
        ),
        *(
            ({"type": "topk", "ratio": bad}, f"topk cannot have the ratio {bad!r}: use a share above 0, up to 1")
            for bad in (0, -0.1, 1.00000001, NAN, None, "all")
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_is_answered_with_what_can(asked, answer):
    with pytest.raises(ValueError, match="^" + re.escape(answer)):
        parse_compression(asked)


@pytest.mark.parametrize("kind", ALL, ids=repr)
def test_it_can_be_sent_to_a_worker_and_not_be_changed(kind):
    assert pickle.loads(pickle.dumps(kind)) == kind
    assert parse_compression(kind.name).name == kind.name
    for option in vars(kind):
        with pytest.raises(AttributeError):
            setattr(kind, option, 0.7)


# ----------------------------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
@pytest.mark.parametrize("way", ["packed", "unpacked"])
def test_a_row_is_the_slowest_size_in_gigabytes_a_second(monkeypatch, kind, way):
    made_up = {(size, who, what): [1.0] for size in ("small", "large") for who in ("2bit", "1bit") for what in WAYS}
    made_up |= {("small", kind, way): [7.0, 3.0, 4.0], ("large", kind, way): [5.0, 6.0, 1.0]}
    made_up |= {("small", "copy", "copy"): [9.0]}
    monkeypatch.setattr(compressing, "measured", lambda quick: made_up)
    row = compressing.against_network(kind, way, "a row", quick=True)
    assert (row.name, row.ours, row.theirs, row.ratio, row.verdict) == ("a row: small", 4.0, 1.0, 4.0, "met")
    assert "small 4, large 5 GB/s" in row.note and "makes 9 GB/s" in row.note


def test_every_compression_is_measured_both_ways_on_one_thread(monkeypatch):
    monkeypatch.setattr(compressing, "QUICK", {4096: "4 KiB"})
    compressing.measured.cache_clear()
    threads = torch.get_num_threads()
    grid = compressing.grid("a grid", quick=True)
    compressing.measured.cache_clear()
    assert torch.get_num_threads() == threads
    assert grid.headings == ("", "4 KiB")
    ways = [f"{kind} {way}" for kind in ("2bit", "1bit", "bfloat16", "topk") for way in WAYS]
    assert [line[0] for line in grid.lines] == [*ways, "copy"]
    assert all(float(speed) > 0 for _, speed in grid.lines)
