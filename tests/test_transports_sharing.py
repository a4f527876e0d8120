"""Ranks of one host that are to send each other everything get no shared memory, and results stay the same."""

import pytest
import torch
from torch import nn

import dlab
from dlab.collectives.shared_allreduce import SharedAllReduce
from dlab.transports import Group, Recorder, share_memory


class Machines(Group):
    shares_memory = False


def test_none_is_shared_on_any_rank_nor_in_a_group_of_such_a_group():
    def work(transport):
        everyone = Machines(transport, range(3))
        inner = Group(everyone, range(3))
        recorded = Recorder(everyone, lambda *_: None)
        assert share_memory(transport, 64) is not None
        return [share_memory(each, 64) for each in (everyone, recorded)] + [SharedAllReduce.connect(everyone)], inner

    for found, inner in dlab.rehearse(work, ranks=3):
        assert found == [None, None, None]
        assert inner.shares_memory is False


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_strategy_sends_then_and_learns_the_same(stage):
    def work(group):
        def learn(transport):
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            make = torch.Generator().manual_seed(3)
            for each in model.parameters():
                each.data = torch.randn(each.shape, generator=make, dtype=each.dtype)
            strategy = dlab.ZeRO(stage)
            module = strategy.begin(model, torch.optim.SGD(model.parameters(), lr=0.1), group(transport, range(2)))
            for _ in range(3):
                strategy.clear()
                module(torch.full((4, 6), 1.0 + transport.rank, dtype=torch.float64)).square().mean().backward()
                strategy.step()
            strategy.end()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return learn

    shared, sent = (dlab.rehearse(work(group), ranks=2) for group in (Group, Machines))
    assert torch.equal(sent[0], sent[1])
    torch.testing.assert_close(sent[0], shared[0], rtol=0, atol=1e-12)
    # a broadcast of the first weights comes first either way
    phases = [{each.data.get("phase", "") for each in run.messages} - {"broadcast", ""} for run in (shared, sent)]
    assert "reduce-scatter" in phases[1] and "reduce-scatter" not in phases[0]
