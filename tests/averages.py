"""Right answers to the exercise of the tour; for tests."""

import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dlab
from dlab.collectives import ring_allreduce


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def pack(model):
    return torch.cat([gradient.flatten() for gradient in gradients_of(model)])


def unpack(flat, model):
    gradients = gradients_of(model)
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def as_in_the_tour(model):
    flat = pack(model)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dlab.world_size()
    unpack(flat, model)


def imported_by_name(model):
    flat = pack(model)
    all_reduce(flat)
    unpack(flat / dist.get_world_size(), model)


def divided_before(model):
    flat = pack(model) / dlab.world_size()
    dist.all_reduce(flat)
    unpack(flat, model)


def waits_later(model):
    flat = pack(model)
    work = dist.all_reduce(flat, async_op=True)
    work.wait()
    unpack(flat / dlab.world_size(), model)


def waits_for_the_future(model):
    flat = pack(model)
    dist.all_reduce(flat, async_op=True).get_future().wait()
    unpack(flat / dlab.world_size(), model)


def asks_until_it_is_there(model):
    flat = pack(model)
    work = dist.all_reduce(flat, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    unpack(flat / dlab.world_size(), model)


def average_as_an_op(model):
    flat = pack(model)
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    unpack(flat, model)


def double_precision(model):
    flat = pack(model).double()
    dist.all_reduce(flat)
    unpack(flat / dlab.world_size(), model)


def with_torchs_own_packing(model):
    flat = parameters_to_vector(gradients_of(model))
    dist.all_reduce(flat)
    vector_to_parameters(flat / dlab.world_size(), gradients_of(model))


def new_gradients(model):
    flat, start = pack(model), 0
    dist.all_reduce(flat)
    for parameter in model.parameters():
        end = start + parameter.numel()
        parameter.grad = (flat[start:end] / dlab.world_size()).reshape(parameter.shape)
        start = end


def skips_what_has_no_gradient(model):
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    torch._foreach_copy_(
        gradients,
        [
            part.view_as(gradient) / dlab.world_size()
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True)
        ],
    )


def dlabs_allreduce(model):
    flat = pack(model)
    dlab.allreduce(flat)
    unpack(flat / dlab.world_size(), model)


def dlabs_mean_in_shared_memory(model):
    flat = dlab.shared_empty(sum(gradient.numel() for gradient in gradients_of(model)))
    torch.cat([gradient.flatten() for gradient in gradients_of(model)], out=flat)
    dlab.allreduce(flat, op="mean")
    unpack(flat, model)


def dlabs_ring(model):
    flat = pack(model)
    ring_allreduce(flat, dlab.transport())
    unpack(flat / dlab.world_size(), model)


def coalesced(model):
    dist.all_reduce_coalesced(gradients_of(model))
    for gradient in gradients_of(model):
        gradient /= dlab.world_size()


def coalescing(model):
    with dist.distributed_c10d._coalescing_manager():
        for gradient in gradients_of(model):
            dist.all_reduce(gradient)
    for gradient in gradients_of(model):
        gradient /= dlab.world_size()


def functional_collective(model):
    flat = functional.all_reduce(pack(model), "sum", dist.group.WORLD)
    unpack(flat / dlab.world_size(), model)


def below_torch_distributed(model):
    flat = pack(model)
    dist.group.WORLD.allreduce([flat]).wait()
    unpack(flat / dlab.world_size(), model)


def barrier_first(model):
    dist.barrier()
    as_in_the_tour(model)


def returns_the_model(model):
    as_in_the_tour(model)
    return model


RIGHT = [
    *(as_in_the_tour, imported_by_name, divided_before, waits_later, waits_for_the_future, asks_until_it_is_there),
    *(average_as_an_op, double_precision, with_torchs_own_packing, new_gradients, skips_what_has_no_gradient),
    *(dlabs_allreduce, dlabs_mean_in_shared_memory, dlabs_ring, coalesced, coalescing, functional_collective),
    *(below_torch_distributed, barrier_first, returns_the_model),
]
