"""ZeRO: a rank holds its shard of the optimizer's state only, and what was saved in shards fits any number of ranks."""

import pytest
import torch
from test_strategies import BATCH, adam, data, difference, network, plain

import dlab

SMALL = 0.0005  # megabytes: several buckets, so that a shard has many spans
GIVEN = {"batch_size": BATCH, "lr": 0.05, "momentum": 0.9, "order": "global", "epochs": 4}


@pytest.fixture(scope="module")
def clusters():
    with dlab.Cluster(2) as two, dlab.Cluster(3) as three, dlab.Cluster(4) as four:
        yield {2: two, 3: three, 4: four}


def numbers_remembered(strategy, ranks):
    """By rank: how many numbers of each kind the optimizer remembers after a step."""

    def ask(transport):
        mine, model = type(strategy)(bucket_mb=SMALL), network()
        optimizer = torch.optim.Adam(model.parameters())
        module = mine.begin(model, optimizer, transport)
        mine.clear()
        module(data().tensors[0]).sum().backward()
        mine.step()
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    return dlab.rehearse(ask, ranks=ranks)


def test_a_rank_remembers_its_shard_only():
    weights = sum(parameter.numel() for parameter in network().parameters())
    assert numbers_remembered(dlab.AllReduceSGD(), 4) == [weights] * 4
    shards = numbers_remembered(dlab.ZeRO(), 4)
    assert sum(shards) == weights and max(shards) - min(shards) <= 6  # a bucket may leave a remainder


@pytest.mark.parametrize("optimizer", [None, adam], ids=["momentum", "Adam"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 3), (2, 4), (3, 2)])
def test_shards_saved_by_some_ranks_are_resumed_by_others(clusters, tmp_path, before, after, optimizer):
    given = GIVEN | {"optimizer": optimizer}
    strategy = dlab.ZeRO(stage=1, bucket_mb=SMALL)
    dlab.train(network, data(), strategy, on=clusters[before], checkpoint=tmp_path, every=8, **given).wait(60)
    saved = tmp_path / "step-00000008"
    result = dlab.train(network, data(), strategy, on=clusters[after], resume=saved, **given).wait(60)
    assert result.identical
    assert difference(result.model, plain(1, **given)) < 1e-12


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (2, "stage 2 of ZeRO is not implemented yet: use stage=1"),
        (3, "stage 3 of ZeRO is not implemented yet: use stage=1"),
        (0, "ZeRO has no stage 0: use stage=1"),
        ("1", "ZeRO has no stage '1': use stage=1"),
    ],
)
def test_a_stage_that_is_not_there_gets_a_sentence(stage, words):
    with pytest.raises(ValueError, match=words):
        dlab.ZeRO(stage=stage)
