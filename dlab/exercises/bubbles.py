"""Two exercises of `08_pipeline.ipynb`: predict bubble and peak of activations, and choose the micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from dlab.pipeline import schedule

RANKS, MICROBATCHES, VIRTUAL = 8, 32, 4  # of the first exercise; interleaved has four stages on each rank
NAMES = {"gpipe": 1, "1f1b": 1, "interleaved": VIRTUAL}  # and stages per rank
LIMIT = 0.1  # bubble of the second exercise
_NEAR = 0.01  # predictions may be rounded by so much of themselves
_LARGEST = 10**15  # what is larger, or NaN, is no prediction


def check_bubbles(predictions: Any) -> str:
    """Judge bubble and peak on rank 0 for 8 ranks and 32 micro-batches: "well done …", or "not yet: …".

    A dictionary from the name of a schedule to a pair: the bubble, waiting divided by computing, and how many
    activations rank 0 keeps at the same time. Interleaved has 4 stages on each rank, whose activations count each.

    >>> check_bubbles({"gpipe": (7 / 39, 32), "1f1b": (7 / 39, 8), "interleaved": (7 / 128, 39)})
    'not yet: the bubble of gpipe is not 0.1795: that is the share of the whole time …'
    """
    if not isinstance(predictions, Mapping) or set(map(str, predictions)) != set(NAMES):
        return f"not yet: give a dictionary with a pair for each of {', '.join(NAMES)}, as in {{'gpipe': (0.5, 4), …}}."
    for name in NAMES:
        pair = predictions[name]
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            return f"not yet: for {name} you have {pair!r}: give two numbers, the bubble and the peak on rank 0."
        for what, value in zip(("bubble", "peak"), pair, strict=True):
            if not _is_number(value):
                return f"not yet: the {what} of {name} is {value!r} here: give a number."
        if problem := _wrong_bubble(name, float(pair[0])) or _wrong_peak(name, float(pair[1])):
            return f"not yet: {problem}."
    return (
        "well done: GPipe and 1F1B wait equally long, 1F1B keeps a quarter as many activations, and interleaving buys "
        "a quarter of the bubble with 39 activations of quarter stages, as much as 9.75 of whole ranks."
    )


def _is_number(value: Any) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and bool(-_LARGEST < value < _LARGEST)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * abs(other)


def _wrong_bubble(name: str, found: float) -> str | None:
    virtual, p, m = NAMES[name], RANKS, MICROBATCHES
    right = schedule(name, p, m, virtual).bubble
    if _close(found, right):
        return None
    own = virtual * m
    known = {
        "that is the share of the whole time, (p-1)/(m+p-1): divide the waiting by the time of computing": (p - 1)
        / (own + p - 1),
        "the first micro-batch passes p-1 other ranks, not p": p / own,
        "ranks and micro-batches have changed places": (m - 1) / (p * virtual),
        "that is the naive pipeline's, where nothing else is under way": float(p - 1),
        "that is in percent: give the fraction itself": 100 * right,
        "that is how long a rank waits, in units of time: divide it by how long it computes": 3 * (p - 1) / virtual,
        "that is the time of the whole step": schedule(name, p, m, virtual).makespan(),
        "that is bubble and computing together: leave the 1 out": 1 + right,
        "that is its inverse": 1 / right,
        "the peak comes second": float(schedule(name, p, m, virtual).peak_activations[0]),
    }
    if virtual > 1:
        known["a stage takes only a quarter of the time of a rank's whole part, so divide by v as well"] = (p - 1) / m
        known["more and smaller stages make the bubble smaller: divide by v"] = (p - 1) * virtual / m
    else:
        known[f"that is with {VIRTUAL} stages on each rank, and {name} has one"] = (p - 1) / (VIRTUAL * m)
    if name == "1f1b":
        known["1F1B saves memory and no time: its bubble is GPipe's"] = 0.0
    return f"the bubble of {name} is not {found:.4g}: {_reason(found, known, 'count the units in which rank 0 waits')}"


def _wrong_peak(name: str, found: float) -> str | None:
    virtual, p, m = NAMES[name], RANKS, MICROBATCHES
    peaks = schedule(name, p, m, virtual).peak_activations
    if found == peaks[0]:
        return None
    known: dict[str, float]
    if name == "gpipe":
        known = {
            "GPipe keeps all micro-batches until the first backward; that is 1F1B's": p,
            "the last rank, too, keeps all m of them until the first backward": 1,
        }
    elif name == "1f1b":
        known = {
            "that is GPipe's: with 1F1B, rank 0 has its first backward long before its last forward": m,
            "the forward of a last one comes before the first backward: one more": p - 1,
            "that is the last rank's: rank 0 waits longest for its first backward": 1,
            "2(p-1)+1 is with several stages on a rank; with one, p-1 more forwards are enough": 2 * p - 1,
        }
    else:
        known = {
            "the forward before the first backward is missing: one more": peaks[0] - 1,
            "that would be all forwards of all stages: backwards begin before": m * virtual,
            "that is the peak of 1F1B, and here a rank has 4 stages": p,
            "that is the forwards of v stages; p-1 more pairs of forwards fit in, before the first gradient is back": p
            * virtual,
            "the last of the v stages gets only as far as the first backward: v-1 rounds of p, then 2(p-1)+1": (
                p * virtual + 2 * (p - 1) + 1
            ),
            "that is the last rank's: rank 0 waits longest for its first backward": peaks[-1],
            "that is in activations of a whole rank: count those of each stage": peaks[0] / virtual,
            "each of the p-1 ranks behind adds a forward there and one back: 2(p-1), not p-1": (
                (virtual - 1) * p + (p - 1) + 1
            ),
        }
    reason = _reason(found, known, "count the forwards of rank 0 before its first backward, that turn's included")
    return f"the bubble of {name} is right, but its peak on rank 0 is not {found:g}: {reason}"


def _reason(found: float, known: Mapping[str, float], otherwise: str) -> str:
    return next((sentence for sentence, value in known.items() if _close(found, value)), otherwise)


def check_microbatches(microbatches: Any) -> str:
    """Judge the smallest number of micro-batches for a bubble below a tenth, with 1F1B on 8 ranks: "well done …".

    >>> check_microbatches(8)
    'not yet: with 8 micro-batches the bubble is 0.875: use more.'
    """
    if not _is_number(microbatches) or microbatches != int(microbatches):
        return f"not yet: {microbatches!r} is not a number of micro-batches: give a whole number."
    microbatches = int(microbatches)
    if microbatches < 1:
        return f"not yet: {microbatches} micro-batches are no batch: give 1 or more."
    bubble = (RANKS - 1) / microbatches
    told = f"with {microbatches} micro-batch{'es' * (microbatches > 1)} the bubble is {bubble:.4g}"
    if bubble == LIMIT:
        return f"not yet: {told}, and it is to be below {LIMIT:g}: one more."
    if bubble > LIMIT:
        share = (RANKS - 1) / (microbatches + RANKS - 1)
        if share < LIMIT:
            return f"not yet: {told}; below {LIMIT:g} is only the share of the whole time, {share:.4g}: use more."
        return f"not yet: {told}: use more."
    if (RANKS - 1) / (microbatches - 1) < LIMIT:
        if microbatches == RANKS * 10 + 1:
            return f"not yet: {told}, which is below {LIMIT:g}, but fewer do as well: it is (p-1)/m, not p/m."
        return f"not yet: {told}, which is below {LIMIT:g}, but fewer do as well."
    return (
        f"well done: {told}, and with one less it would be {LIMIT:g}. A global batch of {8 * microbatches} images then "
        "has micro-batches of 8."
    )
