"""Dropout on a cut tensor drops what one process drops, and never something else on each rank."""

import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlab

WORKERS = 4  # of the cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)).double()


def sharded(layouts, training=True):
    net = network().train(training)
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    par = dlab.AutoParallel(net, layouts=layouts)
    torch.manual_seed(5)
    result = par(x)
    result.square().sum().backward()
    if layouts:
        par.check(x)  # it draws the same numbers for both
    return result.detach(), par.whole(grad=True)


@pytest.mark.parametrize("cut", ["columns", "rows", "batch"])
@pytest.mark.parametrize("training", [True, False])
def test_the_mask_is_that_of_one_process_however_the_tensor_is_cut(cluster, cut, training):
    layout = dlab.Layout((2, 2), ("dp", "tp"))
    layouts = {
        "columns": {"1.weight": layout("tp", None), "1.bias": layout("tp"), "4.weight": layout(None, "tp")},
        "rows": {"1": layout(("tp", "dp"), None)},
        "batch": None,  # every operator is data parallel
    }[cut]
    truth = network().train(training)
    torch.manual_seed(5)
    right = truth(torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6))
    right.square().sum().backward()
    for result, gradients in cluster.run(sharded, layouts, training):
        assert torch.allclose(result, right, atol=1e-12)
        for name, parameter in truth.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-12), name


def test_a_plan_draws_no_random_numbers():
    par, before = dlab.AutoParallel(network(), ranks=4), torch.get_rng_state()
    told = par.explain(torch.empty(8, 6, dtype=torch.float64))
    assert sum("Dropout" in row.operator for row in told.rows) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_what_would_drop_other_numbers_on_each_rank_is_refused():
    def work(net):
        return dlab.rehearse(lambda transport: dlab.AutoParallel(net, transport=transport)(torch.ones(8, 6)), ranks=2)

    with pytest.raises(NotImplementedError, match="the threads of a rehearsal share one random number generator"):
        work(nn.Dropout(0.5))
    assert torch.equal(work(nn.Dropout(0.5).eval())[1], torch.ones(8, 6))
    with pytest.raises(NotImplementedError, match="does not change sharded tensors in place"):
        work(lambda x: F.dropout(x, 0.5, True, True))
