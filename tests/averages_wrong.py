"""Wrong answers to the exercise of the tour, each with the words that its sentence must have; for tests."""

import math
import os
from functools import partial

import torch
import torch.distributed as dist
from averages import as_in_the_tour, dlabs_allreduce, gradients_of, pack, unpack
from torch.distributed import all_reduce
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dlab
from dlab.collectives import ring_allreduce


def one_by_one(model):
    for parameter in model.parameters():
        all_reduce(parameter.grad)
        parameter.grad /= dlab.world_size()


def one_by_one_async(model):
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients_of(model)]
    for work, gradient in zip(works, gradients_of(model), strict=True):
        work.wait()
        gradient /= dlab.world_size()


def dlabs_one_by_one(model):
    for parameter in model.parameters():
        dlab.allreduce(parameter.grad, op="mean")


def weights_and_biases_apart(model):
    for dims in (True, False):
        gradients = [gradient for gradient in gradients_of(model) if (gradient.dim() > 1) == dims]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient) / dlab.world_size())


def reduce_then_broadcast(model):
    flat = pack(model)
    dist.reduce(flat, dst=0)
    flat /= dlab.world_size()
    dist.broadcast(flat, src=0)
    unpack(flat, model)


def gathered(model):
    flat = pack(model)
    rows = [torch.empty_like(flat) for _ in range(dlab.world_size())]
    dist.all_gather(rows, flat)
    unpack(torch.stack(rows).mean(0), model)


def by_hand(model):
    flat, size = pack(model), dlab.world_size()
    total, incoming = flat.clone(), torch.empty_like(flat)
    for distance in range(1, size):
        work = dist.isend(flat, (dlab.rank() + distance) % size)
        dist.recv(incoming, (dlab.rank() - distance) % size)
        work.wait()
        total += incoming
    unpack(total / size, model)


def nothing(model):
    pass


def not_copied_back(model):
    flat = pack(model)
    dist.all_reduce(flat)
    flat /= dlab.world_size()


def sum_only(model):
    flat = pack(model)
    dist.all_reduce(flat)
    unpack(flat, model)


def divided_twice(model):
    flat = pack(model)
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    unpack(flat / dlab.world_size(), model)


def divided_only(model):
    unpack(pack(model) / dlab.world_size(), model)


def four_by_heart(model):
    flat = pack(model)
    dist.all_reduce(flat)
    unpack(flat / 4, model)


def divided_by_its_length(model):
    flat = pack(model)
    dist.all_reduce(flat)
    unpack(flat / len(list(model.parameters())), model)


def shapes_by_heart(model):
    flat = pack(model)
    dist.all_reduce(flat)
    flat /= dlab.world_size()
    for gradient, part in zip(gradients_of(model), flat.split([400, 16, 12800, 32, 65536, 128, 1280, 10]), strict=True):
        gradient.copy_(part.view_as(gradient))


def each_by_its_own_mean(model):
    for parameter in model.parameters():
        parameter.grad.fill_(parameter.grad.mean())


def mean_of_means(model):
    means = torch.stack([gradient.mean() for gradient in gradients_of(model)])
    dist.all_reduce(means)
    for gradient, mean in zip(gradients_of(model), means / dlab.world_size(), strict=True):
        gradient.fill_(mean)


def transposed(model):
    as_in_the_tour(model)
    for gradient in gradients_of(model):
        if gradient.dim() == 2:
            gradient.copy_(gradient.t().flatten().view_as(gradient))


def last_one_first(model):
    flat = pack(model)
    dist.all_reduce(flat)
    flat /= dlab.world_size()
    gradients = gradients_of(model)[::-1]
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def averages_the_weights(model):
    flat = parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    vector_to_parameters(flat / dlab.world_size(), model.parameters())


def takes_the_step(model):
    as_in_the_tour(model)
    for parameter in model.parameters():
        parameter.data -= 0.01 * parameter.grad


def forgets_the_gradients(model):
    as_in_the_tour(model)
    model.zero_grad()


def clears_the_gradients(model):
    as_in_the_tour(model)
    model.zero_grad(set_to_none=False)


def only_rank_0(model):
    flat = pack(model)
    dist.reduce(flat, dst=0)
    if dlab.rank() == 0:
        unpack(flat / dlab.world_size(), model)


def from_rank(source, model):
    flat = pack(model)
    dist.broadcast(flat, src=source)
    unpack(flat, model)


def leaves_rank_2_out(model):
    if dlab.rank() != 2:
        as_in_the_tour(model)


def rank_0_alone(model):
    if dlab.rank() == 0:
        dlabs_allreduce(model)


def twice_on_rank_0(model):
    as_in_the_tour(model)
    if dlab.rank() == 0:
        as_in_the_tour(model)


def sizes_that_differ(model):
    flat = pack(model)[dlab.rank() :].contiguous()
    dist.all_reduce(flat)


def does_not_wait(model):
    flat = pack(model)
    dist.all_reduce(flat, async_op=True)
    unpack(flat / dlab.world_size(), model)


def in_16_bits(dtype, model):
    flat = pack(model).to(dtype)
    dist.all_reduce(flat)
    unpack(flat / dlab.world_size(), model)


def added_on_top(model):
    flat = pack(model)
    dist.all_reduce(flat)
    for gradient, part in zip(gradients_of(model), flat.split([g.numel() for g in gradients_of(model)]), strict=True):
        gradient += part.view_as(gradient) / dlab.world_size()


def largest(model):
    flat = pack(model)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    unpack(flat, model)


def premultiplied(model):
    flat = pack(model)
    dist.all_reduce(flat, op=dist._make_nccl_premul_sum(1 / dlab.world_size()))
    unpack(flat, model)


def biases_forgotten(model):
    gradients = [gradient for gradient in gradients_of(model) if gradient.dim() > 1]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / dlab.world_size())


def stays_flat(model):
    flat = pack(model)
    dist.all_reduce(flat)
    flat /= dlab.world_size()
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad.data = part


def random_noise(model):
    for gradient in gradients_of(model):
        gradient.copy_(torch.linspace(0, math.pi, gradient.numel()).view_as(gradient))


def broken(model):
    raise ZeroDivisionError("oh")


def broken_on_1(model):
    if dlab.rank() == 1:
        raise KeyError("lost")
    as_in_the_tour(model)


def swallows_everything(model):
    try:
        leaves_rank_2_out(model)
    except Exception:
        pass


def ends_itself(model):
    if dlab.rank() == 3:
        os._exit(7)
    as_in_the_tour(model)


WRONG = [
    (one_by_one, "all_reduce was called 8 times: pack the gradients into one tensor first"),
    (one_by_one_async, "all_reduce was called 8 times"),
    (dlabs_one_by_one, "allreduce was called 8 times"),
    (weights_and_biases_apart, "all_reduce was called 2 times"),
    (dlab.average_gradients, "this calls dlab's own average_gradients, which sends a message for each parameter"),
    (lambda model: dlab.average_gradients(model, ring_allreduce), "dlab's own average_gradients"),
    (reduce_then_broadcast, "the mean is right, but it took reduce and broadcast: one all_reduce"),
    (gathered, "the mean is right, but it took all_gather: one all_reduce"),
    (by_hand, "the mean is right, but it took 3 times send and 3 times recv: one all_reduce"),
    (nothing, "every gradient is still the rank's own: sum it over all ranks by all_reduce"),
    (not_copied_back, "still the rank's own, although there was an all-reduce: torch.cat makes a copy"),
    (sum_only, "the sum over the 4 ranks, not the mean: the division by their number, dlab.world_size(), is missing"),
    (divided_twice, "the sum over the 4 ranks was divided by 16: divide only once (ReduceOp.AVG"),
    (divided_only, "the rank's own, divided by 4: the sum over the ranks is missing"),
    (four_by_heart, "with 3 ranks and another network, the sum over the ranks was divided by 4, and there are 3 ranks"),
    (divided_by_its_length, "the sum over the ranks was divided by 8, and there are 4 ranks"),
    (shapes_by_heart, "with 3 ranks and another network, ranks 0, 1 and 2 ended in RuntimeError: split_with_sizes"),
    (each_by_its_own_mean, "filled with the mean of its own elements: the exercise asks for the mean over the ranks"),
    (mean_of_means, "filled with one number, the mean of all its elements"),
    (transposed, "fc1.weight and fc2.weight have the right numbers in the wrong places: undo flatten by view_as"),
    (last_one_first, "the numbers are right, but they are in the wrong parameters"),
    (averages_the_weights, "the weights are averaged, parameter.data: average the gradients, parameter.grad"),
    (takes_the_step, "the weights have changed: change the gradients, parameter.grad, and leave the step to"),
    (forgets_the_gradients, "the gradient of conv1.weight on rank 0 is None"),
    (clears_the_gradients, "every gradient is zero"),
    (only_rank_0, "rank 0 has the mean, but ranks 1, 2 and 3 have not: every rank needs it"),
    (partial(from_rank, 0), "every rank has the gradients of rank 0: those of the others are lost. A mean needs all 4"),
    (partial(from_rank, 1), "every rank has the gradients of rank 1"),
    (leaves_rank_2_out, "ranks 0, 1 and 3 call all_reduce, but rank 2 has returned without it: every rank must"),
    (rank_0_alone, "rank 0 calls allreduce, but ranks 1, 2 and 3 have returned without it"),
    (twice_on_rank_0, "rank 0 calls all_reduce, but ranks 1, 2 and 3 have returned without it"),
    (swallows_everything, "rank 2 has returned without it"),
    (sizes_that_differ, "rank 0 calls all_reduce with 80202 numbers, but rank 1 all_reduce with 80201 numbers: all"),
    (does_not_wait, "async_op=True returns at once, before the sum is there: keep what it returns"),
    (partial(in_16_bits, torch.float16), "right to two or three digits only: numbers of 16 bits round it"),
    (partial(in_16_bits, torch.bfloat16), "right to two or three digits only"),
    (added_on_top, "the mean was added to the rank's own gradient: replace that gradient, with copy_"),
    (largest, "the largest over the ranks, not the mean: reduce with ReduceOp.SUM"),
    (premultiplied, "Cannot use ReduceOp.PREMUL_SUM with Gloo, in the line `dist.all_reduce(flat, op=dist._make"),
    (
        biases_forgotten,
        "conv1.weight, conv2.weight, fc1.weight and fc2.weight are averaged, but conv1.bias, conv2.bias, fc1.bias and "
        "fc2.bias are not: go through all parameters",
    ),
    (stays_flat, "the gradient of conv1.weight should have the shape (16, 1, 5, 5) and has (400,): give each part"),
    (random_noise, "the gradient of conv1.weight on rank 0 is not the mean over the ranks: its element"),
    (broken, 'ranks 0, 1, 2 and 3 ended in ZeroDivisionError: oh, in the line `raise ZeroDivisionError("oh")`'),
    (broken_on_1, "rank 1 ended in KeyError: 'lost', in the line `raise KeyError(\"lost\")`"),
    (lambda: None, "TypeError"),
    ("my_average", "'my_average' is not a function: write def my_average(model)"),
    (ends_itself, "rank 3 exited with code 7"),
]
