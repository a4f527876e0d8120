"""Stores and servers with weights on GPUs. Skipped, with the reason, where there are none."""

import pytest
import torch

import dlab
from dlab import kvstore

SERVERS = 1  # of the cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def _push_and_pull(type, compression=None):
    kv = kvstore.create(type)
    kv.init("w", torch.zeros(40, device=dlab.device()))
    if compression:
        kv.set_gradient_compression(compression)
    kv.push("w", torch.full((40,), kv.rank + 1.0, device=dlab.device()))
    out = torch.empty(40, device=dlab.device())
    kv.pull("w", out=out)
    return out.device.type, out.unique().tolist()


@pytest.mark.parametrize("type", ["dist_sync", "dist_device_sync"])
def test_values_come_from_and_go_to_gpus(cluster, type):
    assert cluster.run(_push_and_pull, type, timeout=120) == [("cuda", [3.0])] * 2
    assert cluster.run(_push_and_pull, type, "2bit", timeout=120) == [("cuda", [1.0])] * 2


@pytest.mark.parametrize(
    "strategy",
    [
        dlab.ParameterServer("sync"),
        dlab.ParameterServer("sync", compression="2bit"),
        dlab.ParameterServer("async", servers=0),
    ],
)
def test_a_model_on_gpus_learns_from_weights_on_the_cpu(cluster, strategy):
    result = dlab.train(dlab.MLP, strategy=strategy, on=cluster, batch_size=1200, lr=0.1).wait(120)
    assert result.identical
    assert result.accuracy > 0.8
