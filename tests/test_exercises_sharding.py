"""The exercises of the lesson on operator parallelism: right answers of any style pass, mistakes are told apart."""

import copy
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlab
from dlab.collectives import halving_doubling_allreduce, naive_allreduce, ring_allreduce, tree_allreduce
from dlab.exercises import check_bytes, check_row_parallel, check_slices, check_strategy, row_parallel
from dlab.exercises.sharding import CHAIN
from dlab.sharding.communication import AllReduce, World

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "07_operator_parallel.ipynb"


def is_one_sentence(answer):
    return answer.startswith(("well done: ", "not yet: ")) and answer.endswith(".") and "\n" not in answer


# ------------------------------------------------------------------------- a strategy that sends nothing

tp = dlab.Layout((8,), ("tp",))
grid = dlab.Layout((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    "strategy",
    [
        ((1, 1), (1, 8)),
        [[1, 1], [1, 8]],
        (tp("None", "None"), tp("None", "tp")),
        (grid(None, None), grid(None, ("tp", "dp"))),
        dlab.ops.MatMul().shard(((1, 1), (1, 8))),
        dlab.shard(torch.matmul, in_strategy=((1, 1), (1, 8))),
    ],
)
def test_the_strategy_that_sends_nothing(strategy):
    answer = check_strategy(strategy)
    assert answer.startswith("well done: each rank holds 64 columns of w") and is_one_sentence(answer)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (
            ((1, 8), (8, 1)),
            "rows of w are cut into 8, so each rank has only a partial sum of its result, and the all-re",
        ),
        (((1, 8), (8, 1)), "over 8 ranks, 114,688 bytes per rank, follows: leave the dimension that is summed over wh"),
        (((2, 4), (4, 1)), "are cut into 4"),
        (((1, 2), (2, 4)), "are cut into 2"),
        ((tp(None, "tp"), tp("tp", None)), "are cut into 8"),
        (
            ((8, 1), (1, 1)),
            "forward nothing is sent, but the rows of x are cut into 8. Each rank gets the gradient of w",
        ),
        (
            ((8, 1), (1, 1)),
            "from its own 4 samples, and backward the all-reduce over 8 ranks, 2,809,856 bytes per rank",
        ),
        (((2, 1), (1, 4)), "the rows of x are cut into 2"),
        (((1, 1), (1, 1)), "nothing is cut, so all 8 ranks compute the same: give each rank a part of its own"),
        (((1, 1), (1, 4)), "there are only 4 parts, so 2 ranks at a time compute the same: make 8 parts"),
        (((1, 4), (4, 1)), "there are only 4 parts"),
        ((tp(None, None), tp(None, None)), "nothing is cut"),
        (((1, 2), (4, 1)), "dimension 0 of input 1 is cut into 4, but dimension 1 of input 0"),
        (((1, 1), (1, 16)), "makes 16 parts, which 8 ranks cannot share equally"),
        (((1, 1), (1, 3)), "makes 3 parts"),
        (((1, 1),), "the strategy ((1, 1),) has 1 entr"),
        (((1, 1), (1, 8.0)), "is not a strategy: give the cuts of x and those of w"),
        ((1, 8), "(1, 8) is not a strategy"),
        ("columns", "'columns' is not a strategy"),
        (None, "None is not a strategy"),
        ((tp("tp", None), tp(None, "tp")), "tp"),
        ((tp(None, None), dlab.Layout((4,), ("tp",))(None, "tp")), "4"),
        (dlab.ops.MatMul(), "None is not a strategy"),
        (dlab.ops.MatMul().shard(((8, 1), (1, 1))), "the rows of x are cut into 8"),
        (dlab.ops.MatMul().shard(((1, 1), (1, 8)), out_strategy=((1, 1),)), "leave out_strategy away"),
        (dlab.ops.MatMul(transpose_b=True).shard(((1, 1), (8, 1))), "w is 784 × 512 here and is not transposed"),
        (dlab.ops.Add().shard(((1, 1), (1, 8))), "is not a matmul: give the strategy of dlab.ops.MatMul()"),
        (torch.ones(40, 2), "... is not a strategy: give the cuts of x"),
    ],
)
def test_a_strategy_that_sends_or_repeats_is_told_why(strategy, sentence):
    answer = check_strategy(strategy)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


# --------------------------------------------------------------------------------- the bytes of a chain


class Chain(nn.Module):
    """The chain of the exercise."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(784, 512)), nn.Parameter(torch.randn(512, 320))
        first, second, third = CHAIN
        self.matmul1, self.matmul2 = dlab.ops.MatMul().shard(first), dlab.ops.MatMul().shard(third)
        self.relu = dlab.ops.ReLU().shard(second)

    def forward(self, x):
        return self.matmul2(self.relu(self.matmul1(x, self.w1)), self.w2)


def test_the_bytes_that_are_called_right_are_those_that_ranks_send():
    net, x = Chain(), torch.randn(32, 784)

    def work(transport):
        par = dlab.AutoParallel(copy.deepcopy(net), transport=transport)
        par(x).sum().backward()

    messages = dlab.rehearse(work, ranks=16).messages
    sent = {}
    for message in messages:
        if message.data["source"] == 0:
            key = tuple(message.data["group"])
            sent[key] = sent.get(key, 0) + message.data["bytes"]
    joined = 3 * 8 * 320 * 4  # the rows of the result, joined along the first axis; the exercise leaves it cut
    assert sent == {(0, 1, 2, 3): 15360, (0, 4, 8, 12): 847872 + joined}
    assert check_bytes(15360, 847872).startswith("well done: 15,360 bytes forward")


def test_right_bytes_of_another_type_pass():
    assert check_bytes(15360.0, 2 * 3 / 4 * (784 * 128 + 128 * 320) * 4).startswith("well done")
    assert check_bytes(Fraction(15360), torch.tensor(847872)).startswith("well done")
    assert check_bytes(np.int64(15360), np.float32(847872)).startswith("well done")


local, w1, w2 = 8 * 320, 784 * 128, 128 * 320
FORWARD = [
    (2 * local * 4, "it is not 20,480 bytes: an all-reduce over n ranks sends 2(n-1)/n of a tensor, and this is witho"),
    (3 / 4 * local * 4, "an all-reduce is a reduce-scatter and an all-gather, so there is a factor of 2"),
    (1.5 * local, "that is how many numbers are sent, and each of them has 4 bytes"),
    (1.5 * 32 * 320 * 4, "that is for whole tensors, or for 4 ranks together, and each rank sends of its own part on"),
    (2 * 15360, "that is twice as much as a rank sends: what it receives is not counted again"),
    (15, "that is right in KiB"),
    (2 * 15 / 16 * local * 4, "that is for a group of all 16 ranks, and each all-reduce is among 4"),
    (16 * 1.5 * local * 4, "that is what all 16 ranks send together"),
    (local * 4, "without (n-1)/n; and an all-reduce is a reduce-scatter and an all-gather"),
    (
        2 * 15 / 16 * 32 * 320 * 4,
        "that is for whole tensors, or for 4 ranks together, and each rank sends of its own part only; and that is fo",
    ),
    (0, "the second matmul's inner dimension is cut into 4, so its ranks hold partial sums"),
    (15360 + 847872, "that is forward and backward together"),
    (15360 + 3 * local * 4, "that has the joining of the result in it"),
    (15360 + 1.5 * 8 * 128 * 4, "that has an all-reduce after the first matmul in it"),
    (1.5 * 8 * 128 * 4, "the first matmul's inner dimension is not cut; look at the second"),
    (12289, "find the operator whose ranks hold partial sums"),
    (-1, "find the operator"),
    ("many", "forward it is 'many': give a number of bytes"),
    (torch.ones(2), "forward it is tensor([1., 1.]): give a number of bytes"),
    (True, "forward it is True: give a number"),
    (..., "forward it is Ellipsis: give a number"),
]
BACKWARD = [
    (0, "4 ranks hold the same part of w1, and each has its gradient from other rows of x"),
    (15360, "the gradient of a sum is the gradient of each summand"),
    (15360 + 847872, "that is forward and backward together, or an all-reduce that sends in both directions"),
    (1.5 * w1 * 4, "that has the gradient of w1 alone in it"),
    (1.5 * w2 * 4, "that has the gradient of w2 alone in it"),
    (2 * w2 * 4, "that has the gradient of w2 alone in it"),
    (2 * (w1 + w2) * 4, "this is without (n-1)/n"),
    (3 / 4 * (w1 + w2) * 4, "so there is a factor of 2"),
    (1.5 * (w1 + w2), "each of them has 4 bytes"),
    (4 * 1.5 * (w1 + w2) * 4, "that is for whole tensors"),
    (2 * 15 / 16 * (w1 + w2) * 4, "that is for a group of all 16 ranks"),
    (16 * 847872, "that is what all 16 ranks send together"),
    (847872 + 1.5 * 8 * 784 * 4, "that has the gradient of x in it, and x are images"),
    (847872 + 1.5 * 8 * 128 * 4, "that has the gradient of what ReLU gives in it"),
    (2 * 847872, "that is twice as much as a rank sends"),
    (5, "find the weights of which several ranks hold copies"),
    (None, "backward it is None: give a number of bytes"),
]


@pytest.mark.parametrize(("forward", "sentence"), FORWARD)
def test_wrong_bytes_forward(forward, sentence):
    answer = check_bytes(forward, 847872)
    assert answer.startswith("not yet: forward it is") and sentence in answer and is_one_sentence(answer)


@pytest.mark.parametrize(("backward", "sentence"), BACKWARD)
def test_wrong_bytes_backward(backward, sentence):
    answer = check_bytes(15360, backward)
    assert answer.startswith("not yet: backward it is") and sentence in answer and is_one_sentence(answer)


def test_bytes_in_the_wrong_order():
    assert "have changed places: give forward first" in check_bytes(847872, 15360)


# ---------------------------------------------------------------------------------------- a slice table


def table(rows=lambda dp, sp, mp: 2 * mp + sp, columns=lambda dp, sp, mp: dp):
    """By rank, worked out by hand."""
    parts = {}
    for rank in range(8):
        place = rank // 4, rank // 2 % 2, rank % 2
        row, column = rows(*place), columns(*place)
        parts[rank] = slice(4 * row, 4 * row + 4), slice(3 * column, 3 * column + 3)
    return parts


def each(change, of=None):
    return {rank: tuple(map(change, part)) for rank, part in (of or table()).items()}


RIGHT_TABLES = {
    "slices": table(),
    "list": list(table().values()),
    "pairs": each(lambda part: (part.start, part.stop)),
    "ranges": each(lambda part: range(part.start, part.stop)),
    "text": {r: f"w[{a.start}:{a.stop}, {b.start}:{b.stop}]" for r, (a, b) in table().items()},
    "short text": {
        r: f"{a.start}:{a.stop},{b.start or ''}:{'' if b.stop == 6 else b.stop}" for r, (a, b) in table().items()
    },
    "open": each(lambda part: slice(part.start or None, part.stop)),
    "coordinates": {(rank // 4, rank // 2 % 2, rank % 2): part for rank, part in table().items()},
    "lists": [list(part) for part in table().values()],
    "texts": {r: (f"{a.start}:{a.stop}", f"{b.start}:{b.stop}") for r, (a, b) in table().items()},
    "text from the end": {
        r: f"w[{a.start - 16}:{a.stop - 16 or ''}, {b.start}:{b.stop}]" for r, (a, b) in table().items()
    },
    "keys as text": {f"({r // 4},{r // 2 % 2},{r % 2})": part for r, part in table().items()},
    "rank in words": {f"rank {rank}": part for rank, part in table().items()},
    "array": np.array([[(part.start, part.stop) for part in row] for row in table().values()]),
    "tensor": torch.tensor([[(part.start, part.stop) for part in row] for row in table().values()]),
    "floats": each(lambda part: (part.start / 1, part.stop / 1)),
    "layout": dlab.Layout((2, 2, 2), ("dp", "sp", "mp"))(("mp", "sp"), "dp").slices((16, 6)),
}


@pytest.mark.parametrize("right", RIGHT_TABLES.values(), ids=RIGHT_TABLES)
def test_right_tables_pass(right):
    answer = check_slices(right)
    assert answer.startswith("well done") and is_one_sentence(answer)


def without(*ranks):
    return {rank: part for rank, part in table().items() if rank not in ranks}


WRONG_TABLES = [
    (table(rows=lambda dp, sp, mp: 2 * sp + mp), "the last name of the tuple is the major one here"),
    (table(lambda mp, sp, dp: 2 * mp + sp, lambda mp, sp, dp: dp), "as if dp were the fastest axis"),
    ({rank: part[::-1] for rank, part in table().items()}, "rows and columns have changed places"),
    (each(lambda part: slice(part.start, part.stop - 1)), "every slice ends one too early"),
    (each(lambda part: slice(part.start + 1, part.stop + 1)), "indices begin with 1 here"),
    (each(lambda part: slice(part.start + 1, part.stop)), "the last one is in the slice"),
    (each(lambda part: (part.start, part.stop - part.start)), "each pair is a first index and a length"),
    (dict.fromkeys(range(8), (slice(0, 16), slice(0, 6))), "every rank holds the whole tensor"),
    (
        {r: (slice(8 * (r % 2), 8 * (r % 2) + 8), part[1]) for r, part in table().items()},
        "the rows are cut along mp only",
    ),
    ({r: (slice(8 * (r // 2 % 2), 8 * (r // 2 % 2) + 8), part[1]) for r, part in table().items()}, "cut along sp only"),
    ({rank: (part[0], slice(0, 6)) for rank, part in table().items()}, "the columns are whole: dp cuts them into 2"),
    (without(5), "rank 5 is missing: there are 8 of them"),
    (without(1, 2, 3), "ranks 1, 2 and 3 are missing"),
    (list(table().values())[:7], "rank 7 is missing"),
    ([*table().values(), table()[0]], "there is no rank 8: the ranks are 0 to 7"),
    (table() | {(0, 0, 2): table()[0]}, "there is no rank (0, 0, 2)"),
    (table() | {3: "all"}, "rank 3 has 'all': give a slice for the rows and one for the columns"),
    (table() | {3: (slice(0, 4),)}, "rank 3 has (slice(0, 4, None),): give"),
    (table() | {3: (0, 4)}, "rank 3 has (0, 4): give"),
    (table() | {3: ("a", "bc")}, "rank 3 has ('a', 'bc'): give"),
    (table() | {3: None}, "rank 3 has None: give"),
    (table() | {3: "w[12.0:16, 0:3]"}, "rank 3 has 'w[12.0:16, 0:3]': give"),
    (table() | {3: "w[12:16:2, 0:3]"}, "rank 3 has 'w[12:16:2, 0:3]': give"),
    (table() | {3: (slice(12, 16, 2), slice(0, 3))}, "rank 3 has (slice(12, 16, 2), slice(0, 3, None)): give"),
    (table() | {3: ((12, 16.5), (0, 3))}, "rank 3 has ((12, 16.5), (0, 3)): give"),
    (table() | {"rank 9": table()[0]}, "there is no rank 9: the ranks are 0 to 7"),
    ("\n".join(f"w[{a.start}:{a.stop}, {b.start}:{b.stop}]" for a, b in table().values()), "is not a table"),
    (
        table() | {6: (slice(4, 8), slice(0, 3))},
        "rank 6 has 0:3, but it is (dp 1, sp 1, mp 0), and its part of the col",
    ),
    (table() | {6: (slice(4, 8), slice(0, 3))}, "of the columns is block dp = 1, 3:6"),
    (table() | {6: (slice(8, 12), slice(3, 6))}, "its part of the rows is block 2 * mp + sp = 1, 4:8"),
    (
        table() | {6: (slice(4, 7), slice(3, 6))},
        "the block is right, but a slice ends with the first index that is not",
    ),
    (table() | {6: (slice(4, 12), slice(3, 6))}, "it begins at the right place, but a block has 4 rows"),
    (table() | {6: (slice(3, 6), slice(4, 8))}, "rank 6 has rows and columns in changed places"),
    ("w", "'w' is not a table: give a dictionary"),
    (None, "None is not a table"),
    ({}, "ranks 0, 1, 2, 3, 4, 5, 6 and 7 are missing"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_TABLES)
def test_wrong_tables(wrong, sentence):
    answer = check_slices(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


# --------------------------------------------------------------------------------- a row-parallel layer


def layer(forward, backward=None):
    """An autograd function of a forward and a backward pass."""

    def usual(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient, None

    return type("MyRowParallel", (torch.autograd.Function,), {
        "forward": staticmethod(forward), "backward": staticmethod(backward or usual),
    })  # fmt: skip


def summed(allreduce):
    def forward(ctx, x, w, transport):
        ctx.save_for_backward(x, w)
        product = x @ w
        allreduce(product, transport)
        return product

    return forward


by_ring = summed(ring_allreduce)


def kept_on_ctx(ctx, x, w, transport):
    ctx.x, ctx.w, ctx.transport = x, w, transport
    product = torch.einsum("ij,jk->ik", x, w)
    dlab.allreduce(product, group=transport)
    return product


def back_only_what_is_needed(ctx, gradient):
    needs_x, needs_w, _ = ctx.needs_input_grad
    return gradient.mm(ctx.w.t()) if needs_x else None, ctx.x.t().mm(gradient) if needs_w else None, None


class Sum(torch.autograd.Function):
    """The all-reduce alone."""

    @staticmethod
    def forward(ctx, partial, transport):
        total = partial.clone()
        ring_allreduce(total, transport)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def composed(x, w, transport):
    """The matmul is left to autograd."""
    return Sum.apply(x @ w, transport)


def torch_distributed(product, transport):
    dist.all_reduce(product)


def dlab_transport(product, transport):
    ring_allreduce(product, dlab.transport())


RIGHT_LAYERS = {
    "ring": layer(by_ring),
    "on ctx": layer(kept_on_ctx, back_only_what_is_needed),
    "composed": composed,
    "tree": layer(summed(tree_allreduce)),
    "halving": layer(summed(halving_doubling_allreduce)),
    "torch.distributed": layer(summed(torch_distributed)),
    "dlab.allreduce": layer(summed(lambda product, transport: dlab.allreduce(product))),
    "dlab.transport": layer(summed(dlab_transport)),
}


@pytest.mark.parametrize("right", RIGHT_LAYERS.values(), ids=RIGHT_LAYERS)
def test_right_layers_pass(right):
    answer = check_row_parallel(right)
    assert answer.startswith("well done: on 1 to 4 ranks") and is_one_sentence(answer)


def nothing_added(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    return x @ w


def twice(ctx, x, w, transport):
    product = by_ring(ctx, x, w, transport)
    ring_allreduce(product, transport)
    return product


def averaged(ctx, x, w, transport):
    return by_ring(ctx, x, w, transport) / transport.size


def zeros(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    return torch.zeros(12, 36, dtype=x.dtype)


def sent_twice(ctx, x, w, transport):
    ring_allreduce(torch.zeros(12, 36, dtype=x.dtype), transport)
    return by_ring(ctx, x, w, transport)


def in_place(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    with torch.no_grad():
        x.mul_(2)
        product = x @ w / 2
    ring_allreduce(product, transport)
    return product


def gathered(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    columns, rows = dlab.all_gather(x, group=transport), dlab.all_gather(w, group=transport)
    return torch.cat(list(columns), 1) @ torch.cat(list(rows), 0)


def reduced_back(ctx, gradient):
    gradient = gradient.clone()
    ring_allreduce(gradient, ctx.transport)
    return back_only_what_is_needed(ctx, gradient)


def reduced_back_in_place(ctx, gradient):
    ring_allreduce(gradient, ctx.transport)
    return back_only_what_is_needed(ctx, gradient)


def x_reduced(ctx, gradient):
    """As behind a column-parallel layer."""
    of_x, of_w, _ = back_only_what_is_needed(ctx, gradient)
    if of_x is not None:
        ring_allreduce(of_x, ctx.transport)
    return of_x, of_w, None


def w_reduced(ctx, gradient):
    """As in data parallelism."""
    of_x, of_w, _ = back_only_what_is_needed(ctx, gradient)
    of_w = of_w.contiguous()
    ring_allreduce(of_w, ctx.transport)
    return of_x, of_w, None


def divided(ctx, gradient):
    of_x, of_w, _ = back_only_what_is_needed(ctx, gradient)
    return of_x, of_w / ctx.transport.size, None


def useless_messages(ctx, gradient):
    ring_allreduce(gradient.clone(), ctx.transport)
    return back_only_what_is_needed(ctx, gradient)


def changed_in_the_end(ctx, gradient):
    answer = back_only_what_is_needed(ctx, gradient)
    gradient.zero_()
    return answer


def in_half_the_digits(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    product = x.float() @ w.float()
    ring_allreduce(product, transport)
    return product.double()


def rank_0_only(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    product = x @ w
    if transport.rank == 0:
        ring_allreduce(product, transport)
    return product


def two_ranks_only(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    product = x @ w
    if transport.size > 1:
        other, incoming = 1 - transport.rank, torch.empty_like(product)
        transport.exchange(product, other, incoming, other)
        product = product + incoming
    return product


def by_dlab(ctx, x, w, transport):
    ctx.save_for_backward(x, w)
    world = World(transport.size, transport.rank, transport)
    return AllReduce.apply(x @ w, world.line(dlab.Layout((transport.size,), ("tp",)), ("tp",)))


WRONG_LAYERS = [
    (layer(nothing_added), "with 2 ranks, each rank returns its own partial sum: add up the products of all ranks, by"),
    (layer(twice), "with 2 ranks, forward gives 2 times the product: the sum over ranks is taken twice"),
    (layer(averaged), "forward gives 0.5 times the product: the partial sums are added up, not averaged"),
    (
        layer(sent_twice),
        "the ranks send 13,824 bytes forward, and one all-reduce of the product takes 6,912: it is all-re",
    ),
    (layer(in_place), "forward has changed x, which is the caller's: make a new tensor for the product"),
    (layer(gathered), "are right, but the ranks send 9,216 bytes forward"),
    (layer(summed(naive_allreduce)), "with 3 ranks, result and gradients are right, but the ranks send"),
    (layer(summed(naive_allreduce)), "that is what naive_allreduce takes, so take ring_allreduce"),
    (layer(kept_on_ctx, reduced_back), "the gradient of x is 2 times what it should be: backward all-reduces as well"),
    (layer(kept_on_ctx, reduced_back_in_place), "backward has changed the gradient that it is given"),
    (
        layer(kept_on_ctx, x_reduced),
        "with 2 ranks, the result is right, but the gradient of x is wrong, and 1,152 bytes",
    ),
    (
        layer(kept_on_ctx, w_reduced),
        "the gradient of w is wrong, and 3,456 bytes are sent backward: every rank has the",
    ),
    (layer(kept_on_ctx, divided), "the gradient of w is 0.5 times what it should be: nothing is averaged here"),
    (layer(kept_on_ctx, useless_messages), "result and gradients are right, but 6,912 bytes are sent backward: each"),
    (layer(kept_on_ctx, changed_in_the_end), "backward has changed the gradient that it is given"),
    (
        layer(kept_on_ctx, lambda ctx, g: (None, ctx.x.T @ g, None)),
        "right, but x gets no gradient: backward returns one",
    ),
    (
        layer(kept_on_ctx, lambda ctx, g: (g @ ctx.w.T, None, None)),
        "right, but w gets no gradient: backward returns one",
    ),
    (layer(kept_on_ctx, lambda ctx, g: (-(g @ ctx.w.T), ctx.x.T @ g, None)), "x is -1 times what it should be"),
    (layer(kept_on_ctx, lambda ctx, g: (ctx.x * 1, ctx.x.T @ g, None)), "gradient of x is wrong: it is gradient @ w.T"),
    (layer(kept_on_ctx, lambda ctx, g: (g @ ctx.w.T, ctx.w * 1, None)), "gradient of w is wrong: it is x.T @ gradient"),
    (layer(kept_on_ctx, lambda ctx, g: (g @ ctx.w.T, ctx.x.T @ g)), "ended in RuntimeError"),
    (layer(kept_on_ctx, lambda ctx, g: (ctx.x.T @ g, g @ ctx.w.T, None)), "ended in RuntimeError"),
    (
        layer(in_half_the_digits),
        "is right to a few digits only: x and w are float64 here, so compute in the type of the",
    ),
    (layer(rank_0_only), "there is a deadlock: rank 0 waits"),
    (layer(two_ranks_only), "with 3 ranks, "),
    (layer(by_dlab), "this calls dlab's own AllReduce.forward, which is the answer: write x @ w and ring_allreduce"),
    (layer(lambda ctx, x, w, transport: None), "forward gives None: return the product, a tensor"),
    (layer(lambda ctx, x, w, transport: (x @ w, x)), "...: return the product, a tensor"),
    (
        layer(lambda ctx, x, w, transport: x @ w[:, :3]),
        "forward gives a tensor of shape (12, 3), but the product has (12, 36)",
    ),
    (layer(zeros), "forward gives 0 times the product"),
    (layer(lambda ctx, x, w: x @ w), "takes 3 positional arguments but 4 were given"),
    (layer(lambda ctx, *given: sys.exit()), "called exit(), which ends a whole program: use return"),
    (lambda x, w, transport: Sum.apply(x @ w, transport).detach(), "the result has no way back to w"),
    (lambda x, w, transport: 1 / 0, "ranks 0 and 1 ended in ZeroDivisionError: division by zero"),
    (7, "7 is not a layer: write class MyRowParallel(torch.autograd.Function)"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_LAYERS)
def test_each_mistake_in_a_layer_gets_its_own_sentence(wrong, sentence):
    answer = check_row_parallel(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


def test_a_layer_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(row_parallel, "LIMIT", 0.3)

    def spin(ctx, x, w, transport):
        while True:
            x = x * 1

    assert "had not returned after 0.3 s" in check_row_parallel(layer(spin))


def test_the_checks_leave_the_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_row_parallel(layer(by_ring))
    check_bytes(1, 2)
    check_strategy(((1, 1), (1, 8)))
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------------------------------ the notebook

STUBS = {
    "my_strategy": lambda found: check_strategy(found["my_strategy"]),
    "forward_bytes": lambda found: check_bytes(found["forward_bytes"], found["backward_bytes"]),
    "my_table": lambda found: check_slices(found["my_table"]),
    "class MyRowParallel": lambda found: check_row_parallel(found["MyRowParallel"]),
}


def define(source):
    names = {"torch": torch, "dlab": dlab}
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
