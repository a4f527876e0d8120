"""The exercise of the lesson on compression: right quantisers pass, and each mistake is told apart."""

import json
import re
from pathlib import Path

import pytest
import torch

from dlab.exercises import check_quantiser
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


def by_dlab(gradient, residual, threshold):
    two_bit, sent = TwoBit(threshold), torch.empty(len(gradient))
    code = torch.empty(two_bit.nbytes(len(gradient)), dtype=torch.uint8)
    two_bit.encode(gradient, residual, code)
    two_bit.decode(code, sent)
    return sent.sign(), residual


@pytest.mark.parametrize("right", [quantise, by_where, in_place, by_loop, by_dlab])
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
    codes, left = quantise(gradient, residual, threshold)
    return left, codes


def gradient_changed(gradient, residual, threshold):
    gradient += residual
    codes = codes_of(gradient, threshold)
    return codes, gradient - threshold * codes


def noisy(gradient, residual, threshold):
    codes, left = quantise(gradient, residual, threshold)
    return codes, left + 7


def raising(gradient, residual, threshold):
    return gradient[99]


def shorter(gradient, residual, threshold):
    codes, left = quantise(gradient, residual, threshold)
    return codes[1:], left


def one_number(gradient, residual, threshold):
    codes, left = quantise(gradient, residual, threshold)
    return codes, left.sum()


def fails_when_empty(gradient, residual, threshold):
    gradient.max()
    return quantise(gradient, residual, threshold)


def fails_far_on(gradient, residual, threshold):
    codes, left = quantise(gradient, residual, threshold)
    codes[700:] = 0
    return codes, left


WRONG = [
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
        "and should be 0.25: take off what was sent, threshold times code",
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
    (lambda *given: (quantise(*given)[0], given[0] * float("nan")), "the new residual is nan and should be 0.25"),
    (raising, "with the gradient 0.25, the residual 0 and the threshold 0.5, it ended in IndexError: index 99 is out"),
    (lambda gradient: None, "it ended in TypeError"),
    (shorter, "the gradient has shape (1,), but the codes have (0,): give a number for each value"),
    (one_number, "the gradient has shape (1,), but the new residual has (): give a number for each value"),
    (fails_when_empty, "with an empty gradient, it ended in"),
    (fails_far_on, "of 1000, the gradient"),
    (lambda *given: None, "it gave None: give two things, return codes, new_residual"),
    (lambda *given: quantise(*given)[0], "it gave tensor([0.]): give two things"),
    (lambda *given: list(range(99)), "it gave [0, 1, 2, 3, "),
    (lambda *given: ("up", given[1]), "the codes are 'up': give a tensor of numbers"),
    (lambda *given: (quantise(*given)[0], None), "the new residual is None: give a tensor of numbers"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_each_mistake_gets_its_own_sentence(wrong, sentence):
    answer = check_quantiser(wrong)
    assert answer.startswith("not yet: ") and answer.endswith(".") and "\n" not in answer
    assert sentence in answer


def test_it_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_quantiser(quantise)
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
