"""The schedules of the field, made for any number of ranks and micro-batches. Taught in `08_pipeline.ipynb`.

A rank begins with forwards, so that the ranks after it get something to do, alternates between forwards and backwards,
and ends with the backwards that are left. The schedules differ in how many forwards they begin with, and in what
fills the time in which a rank would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlab.pipeline.actions import Action
from dlab.pipeline.schedules import Schedule

Order = list[tuple[int, int]]  # stages and micro-batches


def schedule(name: str, stages: int = 4, microbatches: int = 8, virtual: int = 1) -> Schedule:
    """Make the schedule with this name, for `stages` ranks, each with `virtual` stages of the model.

    | name | what it does | bubble for F=1, B=2 |
    |---|---|---|
    | naive | one micro-batch at a time: one rank computes, the others wait | p-1 |
    | gpipe | all forwards, then all backwards | (p-1)/m |
    | 1f1b | the same bubble, but a rank keeps at most p activations instead of m | (p-1)/m |
    | interleaved | 1f1b with v smaller stages on each rank: more messages, less waiting | (p-1)/(v m) |
    | zb1p | 1f1b or interleaved, with gradients of weights where a rank would wait | (p-1)/(3 v m) |
    | zbv | that, with two stages per rank in a V: the last stage is on rank 0 again | (p-1)/(6 m), m >= 2p-1 |

    Interleaved and zb1p place stage s on rank s % p; with virtual=1, interleaved is 1f1b. zbv always has two stages
    per rank. Planning takes some microseconds per action.

    >>> print(schedule("1f1b", stages=2, microbatches=3))
    rank 0  0F0 0F1 ·   ·   0B0     0F2 0B1     ·   0B2
    rank 1  ·   1F0 1B0     1F1 1B1     1F2 1B2     ·   ·
    """
    for what, value in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what}={value!r}: a schedule has a whole number of {what} from 1 on")
    if name not in _MAKERS:
        raise ValueError(f"there is no schedule {name!r}: use {', '.join(map(repr, _MAKERS))}, or dlab.Schedule(rows)")
    if name not in _CUT and virtual > 1:
        raise ValueError(f"virtual={virtual}: {name} has one stage per rank; 'interleaved' and 'zb1p' can have more")
    if name == "zbv" and virtual > 2:
        raise ValueError(f"virtual={virtual}: zbv has two stages per rank")
    rows = [list(map(Action, _MAKERS[name](rank, stages, microbatches, virtual))) for rank in range(stages)]
    return Schedule(rows, name)


def _naive(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    for microbatch in range(microbatches):
        yield f"{rank}F{microbatch}"
        yield f"{rank}B{microbatch}"


def _gpipe(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    yield from (f"{rank}F{microbatch}" for microbatch in range(microbatches))
    yield from (f"{rank}B{microbatch}" for microbatch in range(microbatches))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    order = [(rank, microbatch) for microbatch in range(microbatches)]
    return _alternate(order, order, ahead=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    if virtual == 1:
        return _one_forward_one_backward(rank, ranks, microbatches, virtual)
    forwards, backwards, turn = _rounds(rank, ranks, microbatches, virtual)
    return _alternate(forwards, backwards, ahead=(virtual - 1) * turn + 2 * (ranks - 1 - rank))


def _zero_bubble(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    """As interleaved, but the gradients of weights come `rank` backwards later, so that they fill the waiting time."""
    forwards, backwards, turn = _rounds(rank, ranks, microbatches, virtual)
    return _alternate(forwards, backwards, ahead=(virtual - 1) * turn + ranks - 1 - rank, late=rank)


def _rounds(rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[Order, Order, int]:
    """Forwards and backwards of several stages on a rank: as many micro-batches as there are ranks go through the
    first stage, then through the second, and so on, before the next ones begin; some more where they do not divide.
    """
    count = max(1, microbatches // ranks)
    turn = -(-microbatches // count)  # micro-batches of the longest round
    sizes = [microbatches // count + (place < microbatches % count) for place in range(count)]
    forwards, backwards, first = Order(), Order(), 0
    for size in sizes:
        each = range(first, first + size)
        own = [rank + ranks * place for place in range(virtual)]
        forwards += [(stage, microbatch) for stage in own for microbatch in each]
        backwards += [(stage, microbatch) for stage in reversed(own) for microbatch in each]
        first += size
    return forwards, backwards, turn


def _alternate(forwards: Order, backwards: Order, ahead: int, late: int | None = None) -> Iterator[str]:
    """`ahead` forwards, then by turns a forward and a backward, then the backwards that are left.

    With `late`, a backward is cut in two, and its second half comes after `late` more backwards.
    """
    whole, weights = ("B", iter(())) if late is None else ("I", iter(backwards))
    ahead = min(ahead, len(forwards))
    yield from (_write(each, "F") for each in forwards[:ahead])
    for place, backward in enumerate(backwards):
        if ahead + place < len(forwards):
            yield _write(forwards[ahead + place], "F")
        yield _write(backward, whole)
        if late is not None and place >= late:
            yield _write(next(weights), "W")
    yield from (_write(each, "W") for each in weights)


def _write(place: tuple[int, int], kind: str) -> str:
    return f"{place[0]}{kind}{place[1]}"


def _zero_bubble_v(rank: int, ranks: int, microbatches: int, virtual: int) -> Iterator[str]:
    """The first stage of a rank is on the way down the V, the second on the way up."""
    count = max(2 * ranks - 1, microbatches)  # with fewer micro-batches it is the same, with gaps
    for stage, kind, microbatch in _v_order(rank, ranks, count):
        if microbatch < microbatches:
            yield f"{stage}{kind}{microbatch}"


def _v_order(rank: int, ranks: int, count: int) -> Iterator[tuple[int, str, int]]:
    down, up = rank, 2 * ranks - 1 - rank
    counts = {(stage, kind): 0 for stage in (down, up) for kind in "FIW"}

    def take(stage: int, kinds: str) -> Iterator[tuple[int, str, int]]:
        for kind in kinds:
            yield stage, kind, counts[stage, kind]
            counts[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from take(down, "F")
    for _ in range(rank):
        yield from take(up, "F")
        yield from take(down, "F")
    for _ in range(ranks - rank):
        yield from take(up, "FIW")
    while counts[up, "F"] < counts[down, "F"] or counts[down, "F"] < count:
        if counts[down, "F"] < count:
            yield from take(down, "F")
        yield from take(down, "IW")
        yield from take(up, "FIW")
    for _ in range(rank):
        yield from take(down, "I")
        yield from take(up, "I")
    for _ in range(ranks - rank):
        yield from take(down, "IW")
    for stage in (up, down):
        while counts[stage, "W"] < counts[stage, "I"]:
            yield from take(stage, "W")


Maker = Callable[[int, int, int, int], Iterator[str]]
_MAKERS: dict[str, Maker] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb1p": _zero_bubble,
    "zbv": _zero_bubble_v,
}
_CUT = ("interleaved", "zb1p", "zbv")  # that have several stages on a rank
