"""The exercises of the lesson on sharded optimizers: right answers of any style pass, mistakes are told apart."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlab
from dlab.collectives import (
    all_gather,
    broadcast,
    naive_allreduce,
    reduce,
    reduce_scatter,
    ring_allreduce,
    tree_allreduce,
)
from dlab.collectives.ring import collect_chunks, pass_chunks
from dlab.cost import zero_memory
from dlab.exercises import check_held_bytes, check_sent_bytes, check_sharded_step, sharded_step
from dlab.exercises.gathering import sent_in_stage_3
from dlab.transports import Group

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "09_sharded_optimizers.ipynb"


def is_one_sentence(answer):
    return answer.startswith(("well done: ", "not yet: ")) and answer.endswith(".") and "\n" not in answer


# ------------------------------------------------------------------------------------ what a rank holds

HELD = {1: 16, 2: 11, 3: 6}


def test_what_is_called_right_is_what_the_formula_says():
    assert {stage: zero_memory(3e9, 6, stage, optimizer_bytes=8) / 1e9 for stage in HELD} == pytest.approx(HELD)


@pytest.mark.parametrize("right", [HELD, [16, 11, 6], (16.0, 11.0, 6.0), {3: 6, 2: 11, 1: 16}, {0: 36} | HELD])
def test_right_predictions_pass(right):
    answer = check_held_bytes(right)
    assert answer.startswith("well done: 36 GB without ZeRO") and is_one_sentence(answer)


WRONG_HELD = [
    (1, 36, "in stage 1 a rank does not hold 36 GB: that is without ZeRO, where nothing is cut"),
    (1, 18, "that is with the 12 bytes of Adam, but momentum and the float32 copy are 4 bytes each, 8 in all"),
    (1, 14, "that is with 4 bytes per parameter for the optimizer, but it keeps two numbers of 4 bytes"),
    (1, 15, "that is with 6 bytes per parameter for the optimizer"),
    (1, 20, "that is with 16 bytes per parameter for the optimizer"),
    (1, 32, "a rank keeps a sixth of what is cut, and does without the other five"),
    (1, 16.8, "there are 6 ranks, so a rank's part is a sixth, not a fifth"),
    (1, 24, "there are 6 ranks, so a rank's part is a sixth, not a half"),
    (1, 12.375, "there are 6 ranks here, not 64"),
    (1, 12, "that is without the optimizer, of which each rank keeps a sixth"),
    (1, 4, "that is the optimizer alone"),
    (1, 10, "that is without the gradients; or that is without the bfloat16 parameters"),
    (1, 28, "that is with 4 bytes for each parameter and each gradient, but in bfloat16 they have 2"),
    (1, 16e9, "does not hold 16,000,000,000 GB: that is in bytes: divide by 10**9"),
    (1, 16e3, "that is in megabytes"),
    (1, 16e9 / 2**30, "that is in GiB, of 2**30 bytes: a GB has 10**9"),
    (1, 128, "that is in bits"),
    (1, 96, "that is of all 6 ranks together, and the question is for one"),
    (1, 16 / 3, "that is the bytes per parameter: there are 3 billion of them"),
    (1, 11, "that is what stage 2 leaves"),
    (1, 6, "that is what stage 3 leaves"),
    (
        1,
        0.7,
        "of each parameter there are parameters 2, gradients 2, momentum 4, float32 copy 4 bytes; stage 1 cuts the",
    ),
    (1, 0, "that is nothing: add up parameters, gradients and the optimizer"),
    (1, -16, "that is nothing"),
    (1, "16 GB", "in stage 1 it is '16 GB': give a number of gigabytes"),
    (1, None, "in stage 1 it is None: give a number"),
    (1, True, "in stage 1 it is True: give a number"),
    (2, 31, "stage 2 cuts the gradients as well, and leaves the optimizer's state cut as in stage 1"),
    (2, 16, "that is what stage 1 leaves"),
    (2, 13, "that is with the 12 bytes of Adam"),
    (2, 10, "that is with 6 bytes per parameter for the optimizer, but the momentum and the copy are both float32; or"),
    (2, 10, "; or that is without the gradients"),
    (2, 5, "that is without the bfloat16 parameters, which are there beside their float32 copies"),
    (2, 18, "that is with 4 bytes for each parameter and each gradient, but in bfloat16 they have 2"),
    (2, 12, "that is with gradients of 4 bytes, but they are bfloat16"),
    (2, 17, "that is with parameters of 4 bytes, but the model computes with bfloat16"),
    (2, 13.5, "there are 6 ranks here, not 4"),
    (2, 3, "stage 2 cuts the optimizer's state and gradients into sixths, and leaves parameters whole"),
    (3, 31, "stage 3 cuts the parameters as well, and leaves gradients and optimizer cut as in stage 2"),
    (3, 30, "a rank keeps a sixth of what is cut, and does without the other five"),
    (3, 8, "that is with the 12 bytes of Adam"),
    (3, 36, "that is without ZeRO"),
    (3, 6e9, "that is in bytes"),
    (
        3,
        12,
        "that is with the 12 bytes of Adam, but momentum and the float32 copy are 4 bytes each, 8 in all; and there",
    ),
]


@pytest.mark.parametrize(("stage", "value", "sentence"), WRONG_HELD)
def test_wrong_predictions(stage, value, sentence):
    answer = check_held_bytes(HELD | {stage: value})
    assert answer.startswith(f"not yet: in stage {stage} ") and is_one_sentence(answer)
    assert sentence in answer


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({1: 16, 3: 6}, "stage 2 is missing: give a number for each of 1, 2 and 3"),
        ({}, "stage 1 is missing"),
        ([16, 11], "[16, 11] is not a prediction: give a dictionary"),
        ("16", "'16' is not a prediction"),
        (16, "16 is not a prediction"),
        (..., "Ellipsis is not a prediction"),
    ],
)
def test_what_is_no_prediction(wrong, sentence):
    answer = check_held_bytes(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer) and sentence in answer


# ------------------------------------------------------------------------------ what is sent in stage 3


class Machines(Group):
    """The same ranks, as if each were on a machine of its own."""

    shares_memory = False


@pytest.mark.parametrize(("layers", "ranks"), [(1, 2), (2, 3), (3, 4), (5, 4), (4, 1)])
def test_the_bytes_that_are_called_right_are_those_that_ranks_send(layers, ranks):
    width = 12

    def work(transport):
        everyone = Machines(transport, range(ranks))
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        strategy = dlab.ZeRO(3)
        module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), everyone)
        strategy.clear()
        module(torch.ones(2, width)).sum().backward()
        strategy.step()

    messages = dlab.rehearse(work, ranks).messages
    of_rank_0 = [each.data for each in messages if each.data["source"] == 0]
    sent = sum(each["bytes"] for each in of_rank_0 if each["phase"] in ("all-gather", "reduce-scatter"))
    assert sent == sent_in_stage_3([4 * width**2] * layers, ranks)


def by_slices(layers, ranks):
    return (2 * sum(layers) + sum(layers[1:-1])) * (ranks - 1) / ranks


def by_loop(layers, ranks):
    total = 0
    for number, layer in enumerate(layers):
        rounds = 3 if 0 < number < len(layers) - 1 else 2
        total += rounds * layer * (ranks - 1) // ranks
    return total


def by_zero_traffic(layers, ranks):
    kept = layers[:1] + layers[-1:] if len(layers) > 1 else layers
    return dlab.cost.zero_traffic(sum(layers), ranks, stage=3) - sum(kept) * (ranks - 1) / ranks


@pytest.mark.parametrize("right", [by_slices, by_loop, by_zero_traffic, sent_in_stage_3])
def test_right_formulas_pass(right):
    answer = check_sent_bytes(right)
    assert answer.startswith("well done: two of the three rounds") and is_one_sentence(answer)


def share(ranks):
    return (ranks - 1) / ranks


WRONG_SENT = [
    (lambda each, n: 3 * sum(each) * share(n), "with 4 layers of 4,096 bytes on 4 ranks, it is not 36,864 bytes: that"),
    (lambda each, n: 3 * sum(each) * share(n), "has each layer three times, as in the formula 3P. The last layer is"),
    (lambda each, n: 2 * sum(each) * share(n), "that is stage 2, or stage 3 without the gathers of the backward pass"),
    (lambda each, n: sum(each) * share(n), "that has each layer once only"),
    (lambda each, n: (3 * sum(each) - each[-1]) * share(n), "that gathers the first layer once more"),
    (
        lambda each, n: (2 * sum(each) + each[0] * (len(each) > 2) * (len(each) - 2)) * share(n),
        "with layers of 1,200, 4",
    ),
    (lambda each, n: (3 * sum(each) - each[0]) * share(n), "that gathers the last layer once more"),
    (
        lambda each, n: (3 * sum(each) - each[0] - each[-1]) * share(n),
        "with 1 layer of 6,000 bytes on 4 ranks, it is n",
    ),
    (
        lambda each, n: (3 * sum(each) - each[0] - each[-1]) * share(n),
        "the first and the last in one, and is taken awa",
    ),
    (lambda each, n: (sum(each) + sum(each[1:-1])) * share(n), "one of the three rounds is missing"),
    (lambda each, n: 3 * sum(each[1:-1]) * share(n), "the first and the last layer are missing where they count"),
    (lambda each, n: (3 * sum(each) + sum(each[1:-1])) * share(n), "that all-reduces the gradients"),
    (lambda each, n: (3 * len(each) - 2) * each[0] * share(n), "that takes all layers to be as large as the first"),
    (lambda each, n: 2 * sum(each) + sum(each[1:-1]), "a rank has its own part already, so that a gather or a reduce-"),
    (lambda each, n: (2 * sum(each) + sum(each[1:-1])) / n, "a rank sends its part, one n-th, to each of the n-1 oth"),
    (lambda each, n: n * by_slices(each, n), "that is what all ranks send together"),
    (lambda each, n: 2 * by_slices(each, n), "a gather sends (n-1)/n of a layer: 2(n-1)/n is an all-reduce"),
    (lambda each, n: 4 * by_slices(each, n), "the layers are given in bytes, so do not multiply by 4"),
    (lambda each, n: by_slices(each, n) / 4, "the layers are given in bytes, so do not divide by 4"),
    (
        lambda each, n: 3 * sum(each),
        "in the formula 3P. The last layer is still there when the backward pass begins, a",
    ),
    (lambda each, n: 3 * sum(each), "; and a rank has its own part already"),
    (lambda each, n: 3 * n * sum(each) * share(n), "as in the formula 3P"),
    (
        lambda each, n: by_slices(each, n) or 1,
        "with 4 layers of 4,096 bytes on 1 rank, it is not 1 bytes: one rank has",
    ),
    (lambda each, n: -by_slices(each, n), "a rank cannot send less than nothing"),
    (lambda each, n: 12345, "it is not 12,345 bytes: add up three rounds, the gathers of the forward pass"),
    (lambda each, n: None, "it returns nothing: end with return"),
    (lambda each, n: print(), "it returns nothing"),
    (lambda each, n: "many", "it returns 'many': return one number"),
    (lambda each, n: [1, 2], "it returns [1, 2]: return one number"),
    (lambda each, n: True, "it returns True: return one number"),
    (lambda each, n: each[7] * n, "it ended in IndexError: list index out of range"),
    (lambda each: sum(each), "takes 1 positional argument but 2 were given"),
    (lambda each, n: sys.exit(), "called exit()"),
    (7, "7 is not a function: write def my_bytes(layers, ranks)"),
    (None, "None is not a function"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_SENT)
def test_wrong_formulas(wrong, sentence):
    answer = check_sent_bytes(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


# ---------------------------------------------------------------------------------- the step of stage 1


def updated(part, mean, state):
    """The usual update of a part, in place."""
    velocity = state.setdefault("velocity", torch.zeros_like(part))
    velocity.mul_(0.9).add_(mean)
    part -= 0.1 * velocity


def as_in_the_solution(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    parts = weights.tensor_split(transport.size)
    updated(parts[transport.rank], mine, state)
    pass_chunks(parts, transport)


def divided_afterwards(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport) / transport.size
    parts = weights.tensor_split(transport.size)
    velocity = 0.9 * state["v"] + mine if "v" in state else mine
    state["v"] = velocity
    parts[transport.rank].sub_(velocity, alpha=0.1)
    pass_chunks(parts, transport)


def reduced_in_place(weights, gradient, state, transport):
    def add(mine, incoming):
        mine += incoming

    grads, parts = gradient.tensor_split(transport.size), weights.tensor_split(transport.size)
    collect_chunks(grads, transport, add)
    updated(parts[transport.rank], grads[transport.rank] / transport.size, state)
    pass_chunks(parts, transport)


def with_an_optimizer(weights, gradient, state, transport):
    part = weights.tensor_split(transport.size)[transport.rank]
    if "optimizer" not in state:
        state["optimizer"] = torch.optim.SGD([part], lr=0.1, momentum=0.9)
    part.grad = reduce_scatter(gradient, transport, op="mean")
    optimizer = state["optimizer"]
    optimizer.param_groups[0]["params"][0].grad = part.grad
    optimizer.step()
    pass_chunks(weights.tensor_split(transport.size), transport)


def padded(weights, gradient, state, transport):
    n = transport.size
    most = -(-len(weights) // n)
    begin, end = transport.rank * most, (transport.rank + 1) * most
    whole = torch.zeros(n * most, dtype=weights.dtype)
    whole[: len(weights)] = gradient
    mean = reduce_scatter(whole, transport, op="mean")
    whole = torch.zeros(n * most, dtype=weights.dtype)
    whole[: len(weights)] = weights
    part = whole[begin:end].clone()
    updated(part, mean, state)
    weights.copy_(torch.cat(all_gather(part, transport))[: len(weights)])


def straight_to_each_other(weights, gradient, state, transport):
    n, rank = transport.size, transport.rank
    grads, parts = gradient.tensor_split(n), weights.tensor_split(n)
    every = [grads[rank].clone() for _ in range(n)]
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        transport.exchange(grads[to], to, every[source], source)
    updated(parts[rank], sum(every) / n, state)
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        transport.exchange(parts[rank], to, parts[source], source)


def ring_by_hand(weights, gradient, state, transport):
    n, rank = transport.size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    grads, parts = gradient.tensor_split(n), weights.tensor_split(n)
    for step in range(n - 1):
        outgoing, mine = grads[(rank - step - 1) % n], grads[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        transport.exchange(outgoing, right, incoming, left)
        mine += incoming
    updated(parts[rank], grads[rank] / n, state)
    for step in range(n - 1):
        transport.exchange(parts[(rank - step) % n], right, parts[(rank - step - 1) % n], left)


def neighbours_part(weights, gradient, state, transport):
    """Rank r looks after part r + 1, as the ring of the second lesson leaves it."""
    n, rank = transport.size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    grads, parts = gradient.tensor_split(n), weights.tensor_split(n)
    for step in range(n - 1):
        outgoing, mine = grads[(rank - step) % n], grads[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        transport.exchange(outgoing, right, incoming, left)
        mine += incoming
    own = (rank + 1) % n
    updated(parts[own], grads[own] / n, state)
    for step in range(n - 1):
        transport.exchange(parts[(own - step) % n], right, parts[(own - step - 1) % n], left)


def with_a_master(weights, gradient, state, transport):
    mean = reduce_scatter(gradient, transport, op="mean")
    parts = weights.tensor_split(transport.size)
    master = state.setdefault("master", parts[transport.rank].clone())
    updated(master, mean, state)
    parts[transport.rank].copy_(master)
    pass_chunks(parts, transport)


def with_messages_of_torch(weights, gradient, state, transport):
    n = transport.size
    grads, parts = list(gradient.tensor_split(n)), list(weights.tensor_split(n))
    if len({len(each) for each in parts}) > 1:
        return as_in_the_solution(weights, gradient, state, transport)
    mine = torch.empty_like(grads[0])
    dist.reduce_scatter(mine, [each.contiguous() for each in grads])
    updated(parts[transport.rank], mine / n, state)
    dist.all_gather(parts, parts[transport.rank].clone())
    return None


def velocities_are_sent(weights, gradient, state, transport, tenth=lambda velocity: 0.1 * velocity):
    mine = reduce_scatter(gradient, transport, op="mean")
    state["velocity"] = 0.9 * state.get("velocity", 0) + mine
    whole = torch.empty_like(weights)
    parts = whole.tensor_split(transport.size)
    parts[transport.rank].copy_(state["velocity"])
    pass_chunks(parts, transport)
    weights -= tenth(whole)


RIGHT_STEPS = [velocities_are_sent]
RIGHT_STEPS += [as_in_the_solution, divided_afterwards, reduced_in_place, with_an_optimizer, padded]
RIGHT_STEPS += [straight_to_each_other, ring_by_hand, neighbours_part, with_a_master, with_messages_of_torch]


@pytest.mark.parametrize("right", RIGHT_STEPS, ids=lambda each: each.__name__)
def test_right_steps_pass(right):
    answer = check_sharded_step(right)
    assert answer.startswith("well done: on 1 to 4 ranks") and is_one_sentence(answer)


def step(reduced=None, update=updated, gathered=None):
    """The step of the solution, with one of its three parts in another way."""

    def my_step(weights, gradient, state, transport):
        parts = weights.tensor_split(transport.size)
        usual = lambda g, t: reduce_scatter(g, t, op="mean")  # noqa: E731
        update(parts[transport.rank], (reduced or usual)(gradient, transport), state)
        (gathered or pass_chunks)(parts, transport)

    return my_step


def momentum(rule):
    """A step with another velocity, and perhaps another way to use it."""

    def update(part, mean, state):
        old = state.get("v", torch.zeros_like(part))
        state["v"], along = rule(old, mean)
        part -= 0.1 * along

    return step(update=update)


def everything(allreduce):
    """All-reduce, and the whole update on every rank."""

    def my_step(weights, gradient, state, transport):
        allreduce(gradient, transport)
        updated(weights, gradient / transport.size, state)

    return my_step


def reduced_whole_then_gathered(weights, gradient, state, transport):
    ring_allreduce(gradient, transport, op="mean")
    parts, grads = weights.tensor_split(transport.size), gradient.tensor_split(transport.size)
    updated(parts[transport.rank], grads[transport.rank], state)
    pass_chunks(parts, transport)


def whole_state_gathered(weights, gradient, state, transport):
    """All the momentum, but the parts of the weights are sent."""
    ring_allreduce(gradient, transport, op="mean")
    updated(weights, gradient, state)
    pass_chunks(weights.tensor_split(transport.size), transport)


def whole_state_sharded_bytes(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    velocity = state.setdefault("velocity", torch.zeros_like(weights)).tensor_split(transport.size)[transport.rank]
    parts = weights.tensor_split(transport.size)
    velocity.mul_(0.9).add_(mine)
    parts[transport.rank].sub_(0.1 * velocity)
    pass_chunks(parts, transport)


def all_parts_of_the_state(weights, gradient, state, transport):
    velocities = state.setdefault("all", [torch.zeros_like(e) for e in weights.tensor_split(transport.size)])
    mine = reduce_scatter(gradient, transport, op="mean")
    parts, rank = weights.tensor_split(transport.size), transport.rank
    velocities[rank].mul_(0.9).add_(mine)
    parts[rank].sub_(0.1 * velocities[rank])
    pass_chunks(parts, transport)


def by_way_of_rank_0(weights, gradient, state, transport):
    """Its bytes are right in all, and most of them leave one rank."""
    reduce(gradient, transport)
    if transport.rank == 0:
        updated(weights, gradient / transport.size, state)
    broadcast(weights, transport)


def in_small_pieces(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    parts, n, rank = weights.tensor_split(transport.size), transport.size, transport.rank
    updated(parts[rank], mine, state)
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        longest = max(map(len, parts))
        for place in range(longest):
            pair = parts[rank][place : place + 1], parts[source][place : place + 1]
            transport.exchange(pair[0], to, pair[1], source)


def naive_reduced(gradient, transport):
    naive_allreduce(gradient, transport)
    return gradient.tensor_split(transport.size)[transport.rank] / transport.size


def own_part(gradient, transport):
    return gradient.tensor_split(transport.size)[transport.rank].clone()


def nothing(parts, transport):
    pass


def equal_parts_only(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    part = weights.tensor_split(transport.size)[transport.rank]
    updated(part, mine, state)
    weights.copy_(torch.cat(all_gather(part.clone(), transport)))


def cut_by_floor(weights, gradient, state, transport):
    """The rest of a division is forgotten."""
    n, least = transport.size, len(weights) // transport.size
    mine = reduce_scatter(gradient[: n * least].clone(), transport, op="mean")
    parts = list(weights[: n * least].split(least)) if least else [weights[:0]] * n
    updated(parts[transport.rank], mine, state)
    pass_chunks(parts, transport)


def reversed_order(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    part = weights.tensor_split(transport.size)[transport.rank].clone()
    updated(part, mine, state)
    weights.copy_(torch.cat(all_gather(part, transport)[::-1]))


def neighbours_gradient(weights, gradient, state, transport):
    n, rank = transport.size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    grads, parts = gradient.tensor_split(n), weights.tensor_split(n)
    for each in range(n - 1):
        outgoing, mine = grads[(rank - each) % n], grads[(rank - each - 1) % n]
        incoming = torch.empty_like(mine)
        transport.exchange(outgoing, right, incoming, left)
        mine += incoming
    updated(parts[rank], grads[(rank + 1) % n] / n, state)
    pass_chunks(parts, transport)


def under_another_name(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    part = weights.tensor_split(transport.size)[transport.rank].clone()
    updated(part, mine, state)
    weights = torch.cat(all_gather(part, transport))


def returned_only(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    part = weights.tensor_split(transport.size)[transport.rank].clone()
    updated(part, mine, state)
    return torch.cat(all_gather(part, transport))


def alone(weights, gradient, state, transport):
    updated(weights, gradient, state)


def alone_with_messages(weights, gradient, state, transport):
    reduce_scatter(gradient, transport)
    updated(weights, gradient, state)


def along_rank_0(weights, gradient, state, transport):
    broadcast(gradient, transport)
    updated(weights, gradient, state)


def rank_0_only(weights, gradient, state, transport):
    ring_allreduce(gradient, transport, op="mean")
    if transport.rank == 0:
        updated(weights, gradient, state)


def stays_away(weights, gradient, state, transport):
    if transport.rank == 0:
        reduce_scatter(gradient, transport)


def first_step_gathers_only(weights, gradient, state, transport):
    mine = reduce_scatter(gradient, transport, op="mean")
    parts = weights.tensor_split(transport.size)
    updated(parts[transport.rank], mine, state)
    if not state.get("begun"):
        pass_chunks(parts, transport)
    state["begun"] = True


def aliased(weights, gradient, state, transport):
    """The velocity is a view of the memory of the gradient."""
    parts, grads = weights.tensor_split(transport.size), gradient.tensor_split(transport.size)
    mean = reduce_scatter(gradient, transport, op="mean")
    if "v" in state:
        mean += 0.9 * state["v"]
    grads[transport.rank].copy_(mean)
    state["v"] = grads[transport.rank]
    parts[transport.rank].sub_(0.1 * mean)
    pass_chunks(parts, transport)


def kept_elsewhere():
    velocities = {}

    def my_step(weights, gradient, state, transport):
        mine = reduce_scatter(gradient, transport, op="mean")
        parts = weights.tensor_split(transport.size)
        updated(parts[transport.rank], mine, velocities.setdefault((transport.rank, len(weights), transport.size), {}))
        pass_chunks(parts, transport)

    return my_step


def adds_in_its_own_order(weights, gradient, state, transport):
    """Every rank adds up all gradients of all weights, its own first."""
    n, rank = transport.size, transport.rank
    every = [torch.empty_like(gradient) for _ in range(n)]
    every[rank] = gradient.clone()
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        transport.exchange(gradient, to, every[source], source)
    updated(weights, sum(every[(rank + distance) % n] for distance in range(n)) / n, state)


def into_a_tuple(weights, gradient, state, transport):
    parts = weights.tensor_split(transport.size)
    parts[transport.rank] -= 0.1 * reduce_scatter(gradient, transport, op="mean")
    pass_chunks(parts, transport)


def in_its_own_way(weights, gradient, state, transport):
    """The velocities are sent, and each rank has its own way to take a tenth of them."""
    velocities_are_sent(
        weights, gradient, state, transport, (lambda v: 0.1 * v) if transport.rank else lambda v: v / 10
    )


def by_dlab(weights, gradient, state, transport):
    dlab.ZeRO(1).begin(nn.Linear(2, 2), torch.optim.SGD([weights], lr=0.1), transport)


def shrinks(weights, gradient, state, transport):
    weights.resize_(3)


def noisy(weights, gradient, state, transport):
    as_in_the_solution(weights, gradient, state, transport)
    weights += torch.arange(len(weights)) * 0.3


def spoils_others(parts, transport):
    pass_chunks(parts, transport)
    for rank, part in enumerate(parts):
        if rank != transport.rank:
            part += 1 + rank


WRONG_STEPS = [
    (
        lambda weights, gradient, state, transport: None,
        "with 2 ranks and 8 weights, the weights have not changed: redu",
    ),
    (under_another_name, "have not changed, although messages were sent: write into them"),
    (returned_only, "have not changed, and what the function returns is not used: write into them, as weights.copy_"),
    (alone, "every rank steps along its own gradient: reduce-scatter gives it the mean"),
    (alone_with_messages, "every rank steps along its own gradient, although messages were sent"),
    (along_rank_0, "all ranks step along the gradient of rank 0: what the others have learned is lost"),
    (rank_0_only, "rank 0 has the right weights, but rank 1 has not: all ranks must end with the same ones"),
    (step(gathered=nothing), "each rank has updated its own part, and the other parts are as they were: the all-gathe"),
    (step(own_part, gathered=nothing), "updated its own part along its own gradient, and nothing else"),
    (step(own_part), "every part is updated by one rank and has come to all, but along the gradient of that rank alo"),
    (step(reduce_scatter), "the step is 2 times too long: the gradients are added up over 2 ranks and not divided"),
    (step(reduce_scatter, gathered=nothing), "updated its own part only, and not along the mean gradient"),
    (step(lambda g, t: reduce_scatter(g, t, op="mean") / t.size), "the step is 2 times too short: the sum over the ra"),
    (step(lambda g, t: -reduce_scatter(g, t, op="mean")), "the step goes uphill: subtract 0.1 times the velocity"),
    (step(lambda g, t: 10 * reduce_scatter(g, t, op="mean")), "10 times too long: multiply the velocity by the learn"),
    (step(lambda g, t: reduce_scatter(g, t, op="mean") * 3), "the step is 3 times as long as it should be"),
    (step(lambda g, t: reduce_scatter(g, t) / 2), "with 4 ranks and 12 weights, the step is 2 times as long as it sho"),
    (step(lambda g, t: reduce_scatter(g, t, op="max")), "on rank 0 should be"),
    (momentum(lambda v, g: (0.9 * v + 0.1 * g, 0.9 * v + 0.1 * g)), "is 10 times too short: the velocity takes the w"),
    (momentum(lambda v, g: (0.9 * v + g, g + 0.9 * (0.9 * v + g))), "1.9 times too long, as with Nesterov's momentum"),
    (momentum(lambda v, g: (v, g)), "the first step is right, but the momentum is not: each step is along its gradien"),
    (momentum(lambda v, g: (g, g + 0.9 * v)), "the velocity remembers only the gradient before"),
    (momentum(lambda v, g: (v + g, v + g)), "the velocity adds up all gradients: keep only 0.9 of the old one"),
    (momentum(lambda v, g: (g - 0.9 * v, g - 0.9 * v)), "the old velocity is subtracted: add 0.9 of it"),
    (momentum(lambda v, g: (0.1 * v + g, 0.1 * v + g)), "0.1 of the old velocity is kept, and it is to be 0.9"),
    (momentum(lambda v, g: (0.9 * v + (0.1 if v.any() else 1) * g,) * 2), "takes only 0.1 of each new gradient"),
    (momentum(lambda v, g: (v if v.any() else g, 0.9 * v + g)), "the velocity is kept as it was in the first step"),
    (momentum(lambda v, g: (0.5 * v + g, 0.5 * v + g)), "all is right until step 1, counted from 0: look at what a"),
    (aliased, "all is right until step 1, counted from 0"),
    (first_step_gathers_only, "rank 0 has its own part right and others not: gather the parts of all ranks in every s"),
    (everything(ring_allreduce), "with 2 ranks and 8 weights, weights and bytes are right, but rank 0 keeps a tensor"),
    (
        everything(ring_allreduce),
        "a tensor of 8 numbers in memory, and its part of the weights has 4: keep the momentum",
    ),
    (everything(naive_allreduce), "numbers in memory, and its part of the weights has"),
    (everything(tree_allreduce), "keeps a tensor of 8 numbers in memory, and its part of the weights has 4"),
    (
        reduced_whole_then_gathered,
        "the weights are right, but the ranks send 192 bytes in a step, and a reduce-scatter",
    ),
    (reduced_whole_then_gathered, "take 128: an all-reduce is both already, and all-gathering the parts after it mak"),
    (whole_state_gathered, "the ranks send 192 bytes in a step, and a reduce-scatter and an all-gather take 128"),
    (step(naive_reduced), "and a reduce-scatter and an all-gather take 128: an all-reduce is both already"),
    (whole_state_sharded_bytes, "weights and bytes are right, but rank 0 keeps a tensor of 8 numbers"),
    (all_parts_of_the_state, "with 4 ranks and 12 weights, weights and bytes are right, but rank 0 keeps 12 numbers"),
    (by_way_of_rank_0, "keeps a tensor of 8 numbers in memory"),
    (in_small_pieces, "the weights and bytes are right, but there are"),
    (kept_elsewhere(), "but state has no tensor in it: keep the momentum there"),
    (equal_parts_only, "with 3 ranks and 10 weights, "),
    (equal_parts_only, "the parts have 4, 3 and 3 weights here, so a collective that wants equal ones will not do"),
    (cut_by_floor, "with 3 ranks and 10 weights, "),
    (reversed_order, "the numbers are right, but in wrong places: rank r has part r"),
    (neighbours_gradient, "each rank updates its weights along the gradient of another rank's part: rank r has part r"),
    (step(gathered=spoils_others), "each rank has updated its own part rightly, but what it has of the other parts is"),
    (noisy, "with 2 ranks and 8 weights, the step is not along the mean gradient: reduce-scatter with op='mean'"),
    (adds_in_its_own_order, "keeps a tensor of 8 numbers in memory"),
    (in_its_own_way, "differ in their last bits: let each part be updated by one rank only"),
    (stays_away, "there is a deadlock: rank 0 waits"),
    (by_dlab, "this calls dlab's own ZeRO.begin, which is the answer: write the reduce-scatter, the update"),
    (into_a_tuple, ": give the part a name, part = parts[transport.rank], then part -= …"),
    (shrinks, "the weights have the shape (3,) after a step, and had (8,)"),
    (lambda weights, gradient, state, transport: 1 / 0, "ranks 0 and 1 ended in ZeroDivisionError: division by zero"),
    (lambda weights, gradient, state: None, "takes 3 positional arguments but 4 were given"),
    (lambda weights, gradient, state, transport: state["velocity"], "ended in KeyError: 'velocity'"),
    (lambda *given: sys.exit(), "called exit(), which ends a whole program: use return"),
    (7, "7 is not a function: write def my_step(weights, gradient, state, transport)"),
    (None, "None is not a function"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_STEPS)
def test_each_mistake_in_a_step_gets_its_own_sentence(wrong, sentence):
    answer = check_sharded_step(wrong)
    assert answer.startswith("not yet: ") and is_one_sentence(answer)
    assert sentence in answer


def test_a_step_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(sharded_step, "LIMIT", 0.3)

    def spin(weights, gradient, state, transport):
        for _ in itertools.count():
            weights * 1

    assert "had not returned after 0.3 s" in check_sharded_step(spin)


def test_the_checks_leave_the_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    check_sharded_step(as_in_the_solution)
    check_held_bytes(HELD)
    check_sent_bytes(by_slices)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------------ the notebook

STUBS = {
    "my_gigabytes": lambda found: check_held_bytes(found["my_gigabytes"]),
    "def my_step": lambda found: check_sharded_step(found["my_step"]),
    "def my_bytes": lambda found: check_sent_bytes(found["my_bytes"]),
}


def define(source):
    names = {"torch": torch, "reduce_scatter": reduce_scatter, "ring_allreduce": ring_allreduce}
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
        (solution,) = [text for text in solutions if begins in text]
        assert check(define(solution)).startswith("well done")
        (stub,) = [text for text in sources if text.startswith(begins)]
        answer = check(define(stub))
        assert answer.startswith("not yet") and f"{answer}\n" in shown
