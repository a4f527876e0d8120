"""The exercise of the lesson on compression: right quantisers pass, and each mistake is told apart."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlab.exercises import calling, check_quantiser
from dlab.exercises.quantising import quantise
from dlab.kvstore import TwoBit

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "06_gradient_compression.ipynb"


def by_where(gradient, residual, threshold):
    value = gradient + residual
    codes = torch.where(value >= threshold, 1, torch.where(value <= -threshold, -1, 0))
    return codes, value - threshold * codes


def in_place(gradient, residual, threshold):
    """The residual is its own."""
    residual += gradient
    codes = (residual >= threshold).int() - (residual <= -threshold).int()
    residual -= threshold * codes
    return [codes, residual]


def by_loop(gradient, residual, threshold):
    codes, left = [], []
    for one, other in zip(gradient.tolist(), residual.tolist(), strict=True):
        value = one + other
        codes.append(1 if value >= threshold else -1 if value <= -threshold else 0)
        left.append(value - threshold * codes[-1])
    return codes, left


def by_clamping(gradient, residual, threshold):
    value = gradient + residual
    codes = torch.clamp(torch.trunc(value / threshold), -1, 1)
    return codes, torch.sub(value, codes, alpha=threshold)


def by_masks(gradient, residual, threshold):
    left = gradient + residual
    up, down = left >= threshold, left <= -threshold
    codes = torch.zeros(len(gradient), dtype=torch.int8)
    codes[up], codes[down] = 1, -1
    left[up] -= threshold
    left[down] += threshold
    return codes, left


def in_numpy(gradient, residual, threshold):
    value = gradient.numpy() + residual.numpy()
    codes = np.sign(value) * (np.abs(value) >= threshold)
    return codes.astype(np.int64), value - threshold * codes


RIGHT = [by_where, in_place, by_loop, by_clamping, by_masks, in_numpy]


@pytest.mark.parametrize("right", RIGHT, ids=lambda each: each.__name__)
def test_right_quantisers_pass(right):
    answer = check_quantiser(right)
    assert answer.startswith("well done: ") and answer.endswith(".") and "\n" not in answer


def test_the_checker_knows_the_series_of_mxnet():
    residual, residuals, sums = torch.zeros(1), [], [0.0]
    for gradient in (0.4, 0.1, 0.2, 0.3):
        codes, residual = quantise(torch.tensor([gradient]), residual, 0.5)
        residuals.append(round(residual.item(), 6))
        sums.append(sums[-1] + 2 * 4 * 0.5 * codes.item())  # of four workers, at rate 2
    assert residuals == [0.4, 0.0, 0.2, 0.0] and sums[1:] == [0, 4, 4, 8]


# ------------------------------------------------------------------------------- wrong in some way


def by_dlab(gradient, residual, threshold):
    two_bit, sent = TwoBit(threshold), torch.empty(len(gradient))
    code = torch.empty(two_bit.nbytes(len(gradient)), dtype=torch.uint8)
    two_bit.encode(gradient, residual, code)
    two_bit.decode(code, sent)
    return sent.sign(), residual


def by_the_checker(gradient, residual, threshold):
    return quantise(gradient, residual, threshold)


def codes_of(value, threshold):
    return (value >= threshold).int() - (value <= -threshold).int()


def no_residual(gradient, residual, threshold):
    codes = codes_of(gradient, threshold)
    return codes, gradient - threshold * codes


def residual_ignored(gradient, residual, threshold):
    """Compared without it, but kept."""
    codes = codes_of(gradient, threshold)
    return codes, gradient + residual - threshold * codes


def strict(gradient, residual, threshold):
    value = gradient + residual
    codes = (value > threshold).int() - (value < -threshold).int()
    return codes, value - threshold * codes


def not_reduced(gradient, residual, threshold):
    value = gradient + residual
    return codes_of(value, threshold), value


def reduced_by_codes(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, threshold)
    return codes, value - codes


def emptied(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, threshold)
    return codes, value * (codes == 0)


def emptied_always(gradient, residual, threshold):
    return codes_of(gradient + residual, threshold), torch.zeros_like(residual)


def old_residual(gradient, residual, threshold):
    return codes_of(gradient + residual, threshold), residual


def without_the_old(gradient, residual, threshold):
    codes = codes_of(gradient + residual, threshold)
    return codes, gradient - threshold * codes


def other_way_round(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, threshold)
    return codes, threshold * codes - value


def no_sign(gradient, residual, threshold):
    value = gradient + residual
    codes = (value.abs() >= threshold).int()
    return codes, value - threshold * codes


def only_up(gradient, residual, threshold):
    value = gradient + residual
    codes = (value >= threshold).int()
    return codes, value - threshold * codes


def sent_values(gradient, residual, threshold):
    value = gradient + residual
    sent = threshold * codes_of(value, threshold)
    return sent, value - sent


def many_levels(gradient, residual, threshold):
    value = gradient + residual
    codes = torch.trunc(value / threshold)
    return codes, value - threshold * codes


def always_half(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, 0.5)
    return codes, value - 0.5 * codes


def swapped(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return left, codes


def gradient_changed(gradient, residual, threshold):
    gradient += residual
    codes = codes_of(gradient, threshold)
    return codes, gradient - threshold * codes


def noisy(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return codes, left + 7


def raising(gradient, residual, threshold):
    return gradient[99]


def shorter(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return codes[1:], left


def one_number(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return codes, left.sum()


def fails_when_empty(gradient, residual, threshold):
    gradient.max()
    return by_where(gradient, residual, threshold)


def fails_far_on(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    codes[700:] = 0
    return codes, left


def residual_subtracted(gradient, residual, threshold):
    value = gradient - residual
    codes = codes_of(value, threshold)
    return codes, value - threshold * codes


def sent_is_added(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, threshold)
    return codes, value + threshold * codes


def old_residual_twice(gradient, residual, threshold):
    value = gradient + residual
    codes = codes_of(value, threshold)
    return codes, residual + value - threshold * codes


def bits_of_mxnet(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return torch.where(codes == 1, 3, torch.where(codes == -1, 2, 0)), left


def bits_written_out(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return [{1: "11", -1: "10", 0: "00"}[code] for code in codes.tolist()], left


def packed(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return torch.zeros(4 * -(-len(codes) // 16), dtype=torch.uint8), left


def signs_only(gradient, residual, threshold):
    """One bit."""
    value = gradient + residual
    codes = torch.where(value > 0, 1, -1)
    return codes, value - threshold * codes


def down_is_up(gradient, residual, threshold):
    codes, _ = by_where(gradient, residual, threshold)
    return -codes, gradient + residual + threshold * codes


def strict_below(gradient, residual, threshold):
    value = gradient + residual
    codes = (value >= threshold).int() - (value < -threshold).int()
    return codes, value - threshold * codes


def rounded(gradient, residual, threshold):
    value = gradient + residual
    codes = torch.round(value / threshold)
    return codes, value - threshold * codes


def rounded_and_clamped(gradient, residual, threshold):
    value = gradient + residual
    codes = torch.round(value / threshold).clamp(-1, 1)
    return codes, value - threshold * codes


def small_ones_forgotten(gradient, residual, threshold):
    value = gradient + residual
    value[value.abs() < threshold] = 0
    return value.sign(), value - threshold * value.sign()


def one_tensor_for_both(gradient, residual, threshold):
    residual += gradient
    codes = residual
    codes[:] = codes_of(residual, threshold)
    residual -= threshold * codes
    return codes, residual


def remembers(kept=[]):  # noqa: B006
    def quantiser(gradient, residual, threshold):
        value = gradient + sum(kept[-1:])
        codes = codes_of(value, threshold)
        kept.append(value - threshold * codes)
        return codes, kept[-1]

    return quantiser


def one_value_only(gradient, residual, threshold):
    value = gradient + residual
    code = 1 if value >= threshold else -1 if value <= -threshold else 0
    return [code], value - threshold * code


def item_only(gradient, residual, threshold):
    value = (gradient + residual).item()
    code = (value >= threshold) - (value <= -threshold)
    return [code], [value - threshold * code]


def deeper(gradient):
    return gradient + "values"


def fails_in_a_function_of_its_own(gradient, residual, threshold):
    return deeper(gradient)


def yields(gradient, residual, threshold):
    yield from by_where(gradient, residual, threshold)


def not_a_number(gradient, residual, threshold):
    codes, left = by_where(gradient, residual, threshold)
    return codes, left / 0 * 0


WRONG = [
    (residual_subtracted, "the residual 0.375 and the threshold 0.5, the code is 0, but should be 1: the residual is"),
    (residual_subtracted, "the residual is subtracted from the gradient; add it, since it was not sent yet"),
    (sent_is_added, "the new residual is 1.25 and should be 0.25: what was sent is subtracted, not added"),
    (old_residual_twice, "the new residual is 0.5 and should be 0.125: the old residual is in it twice; it is a part"),
    (bits_of_mxnet, "the code is 3, but should be 1: how codes are packed into bits is another matter; give -1, 0"),
    (bits_written_out, "the codes are ['00']: give a tensor of numbers"),
    (packed, "the gradient has shape (1,), but the codes have (4,): give a number for each value"),
    (signs_only, "the code is 1, but should be 0: 0.25 does not reach the threshold, so nothing is sent yet"),
    (down_is_up, "the code is -1, but should be 1: values of at least the threshold send 1, so mind the sign"),
    (strict_below, "with the gradient -0.5, the residual 0 and the threshold 0.5, the code is 0, but should be -1: a"),
    (rounded, "the code is 2, but should be 1: there are only the codes -1, 0 and 1; what is too much for one step"),
    (rounded_and_clamped, "the code is 1, but should be 0: 0.4 does not reach the threshold, so nothing is sent yet"),
    (small_ones_forgotten, "the new residual is 0 and should be 0.25: nothing was sent, so all of it is kept"),
    (one_tensor_for_both, "codes and new residual lie in the same memory, so that writing one overwrites the other"),
    (remembers(), "it gives another answer the second time: keep nothing outside of the function; what was left over"),
    (one_value_only, "with a gradient of 8 values, it ended in RuntimeError: Boolean value of Tensor with more than"),
    (one_value_only, ", in the line `code = 1 if value >= threshold else -1 if value <= -threshold else 0`: work on"),
    (item_only, "`: work on all values at once, as value >= threshold does"),
    (fails_in_a_function_of_its_own, "with the gradient 0.25, the residual 0 and the threshold 0.5, it ended in"),
    (fails_in_a_function_of_its_own, ', in the line `return gradient + "values"`'),
    (yields, "it gave a generator, which has done nothing yet: use return, not yield"),
    (not_a_number, "the code is right, but the new residual is nan and should be 0.25"),
    (lambda gradient, residual: None, "it ended in TypeError: <lambda>() takes 2 positional arguments but 3 were"),
    (lambda *given: sys.exit(), "it called exit(), which ends a whole program: use return"),
    (lambda *given: {"codes": given[0], "residual": given[1]}, "it gave {'codes': tensor([0.2500]), 'residual'"),
    (0.5, "0.5 is not a function: write def my_quantise(gradient, residual, threshold)"),
    (by_dlab, "this calls dlab's own Compression.encode, which is the answer: compare with the threshold yourself"),
    (by_the_checker, "this calls dlab's own quantise, which is the answer: compare with the threshold yourself"),
    (quantise, "this calls dlab's own quantise, which is the answer: compare with the threshold yourself"),
    (no_residual, "the residual 0.375 and the threshold 0.5, the code is 0, but should be 1: add the residual to the"),
    (residual_ignored, "add the residual to the gradient before you compare"),
    (
        strict,
        "with the gradient 0.5, the residual 0 and the threshold 0.5, the code is 0, but should be 1: a value that "
        "just reaches the threshold is sent, so compare by >= and <=",
    ),
    (
        not_reduced,
        "with the gradient 0.75, the residual 0 and the threshold 0.5, the code is right, but the new residual is 0.75 "
        "and should be 0.25: subtract what was sent, threshold times code",
    ),
    (reduced_by_codes, "what was sent is threshold times code, not the code itself"),
    (emptied, "the new residual is 0 and should be 0.25: only the threshold was sent; what 0.75 has beyond it is kept"),
    (emptied_always, "the new residual is 0 and should be 0.25: nothing was sent, so all of it is kept"),
    (old_residual, "the new residual is 0 and should be 0.25: nothing was sent, so all of it is kept"),
    (without_the_old, "the residual 0.375 and the threshold 0.5, the code is right, but the new residual is -0.25"),
    (without_the_old, "should be 0.125: the old residual is a part of it"),
    (other_way_round, "less what was sent, not the other way round"),
    (no_sign, "with the gradient -0.75, the residual 0 and the threshold 0.5, the code is 1, but should be -1: values"),
    (only_up, "the code is 0, but should be -1: -0.75 is as low as -threshold, and that is sent"),
    (sent_values, "the code is 0.5, but should be 1: a code only says which way; the receiver multiplies it"),
    (
        many_levels,
        "the code is 4, but should be 1: there are only the codes -1, 0 and 1; what is too much for one",
    ),
    (always_half, "of 8, the gradient"),
    (always_half, ": that is the code for a threshold of 0.5; use the one that is given"),
    (
        lambda *given: (torch.ones(len(given[0])), given[1]),
        "should be 0: 0.25 does not reach the threshold, so",
    ),
    (swapped, "codes and residual have changed places: return the codes first"),
    (gradient_changed, "it has changed the gradient, which is not its own: write value = gradient + residual"),
    (noisy, "the new residual is 7.25 and should be 0.25: it is gradient + residual, less threshold times code"),
    (lambda *given: (by_where(*given)[0], given[0] * float("nan")), "the new residual is nan and should be 0.25"),
    (raising, "with the gradient 0.25, the residual 0 and the threshold 0.5, it ended in IndexError: index 99 is out"),
    (lambda gradient: None, "it ended in TypeError"),
    (shorter, "the gradient has shape (1,), but the codes have (0,): give a number for each value"),
    (one_number, "the gradient has shape (1,), but the new residual has (): give a number for each value"),
    (fails_when_empty, "with an empty gradient, it ended in"),
    (fails_far_on, "of 1000, the gradient"),
    (lambda *given: None, "it gave None: give two things, return codes, new_residual"),
    (lambda *given: by_where(*given)[0], "it gave tensor([0]): give two things"),
    (lambda *given: list(range(99)), "it gave [0, 1, 2, 3, "),
    (lambda *given: ("up", given[1]), "the codes are 'up': give a tensor of numbers"),
    (lambda *given: (by_where(*given)[0], None), "the new residual is None: give a tensor of numbers"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[getattr(wrong, "__name__", "") for wrong, _ in WRONG])
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_quantiser(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_a_loop_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(calling, "LIMIT", 0.3)

    def spin(gradient, residual, threshold):
        while True:
            residual = residual + gradient

    answer = check_quantiser(spin)
    assert "the threshold 0.5, it had not returned after 0.3 s: look for a loop that does not end" in answer


def test_it_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_quantiser(by_where)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_hidden_solution_passes_and_the_stub_does_not():
    cells = json.loads(NOTEBOOK.read_text())["cells"]

    def define(source):
        names = {"torch": torch}
        exec(source, names)
        return names["my_quantise"]

    (hidden,) = [text for cell in cells if "<details>" in (text := "".join(cell["source"]))]
    (solution,) = re.findall(r"```python\n(.*?)```", hidden, re.DOTALL)
    assert check_quantiser(define(solution)).startswith("well done")
    (stub,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("def my_quantise")]
    answer = check_quantiser(define(stub))
    assert "nothing was sent, so all of it is kept" in answer
    shown = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    assert f"{answer}\n" in shown
