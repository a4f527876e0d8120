"""With GPUs: NCCL's point to point, and `dlab.allreduce` by NCCL itself."""

import pytest
import torch

import dlab
from dlab.collectives import ring_allreduce
from dlab.transports import TorchTransport

WORKERS, BACKEND = torch.cuda.device_count(), "nccl"  # of the cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def _swap_with_the_neighbour(elements):
    transport = dlab.transport()
    assert type(transport._transport) is TorchTransport
    other = transport.rank ^ 1
    if other >= transport.size:
        return None
    mine = torch.full((elements,), float(transport.rank), device=dlab.device())
    theirs = torch.empty_like(mine)
    transport.exchange(mine, other, theirs, other)
    return theirs.unique().tolist()


def test_exchange_never_deadlocks_however_large_the_tensor(cluster):
    found = cluster.run(_swap_with_the_neighbour, 50_000_000, timeout=120)
    assert found[:2] == [[1.0], [0.0]]


def _disagree():
    transport = dlab.transport()
    if dlab.rank() == 0:
        transport.send(torch.ones(4, device=dlab.device()), 1)
    elif dlab.rank() == 1:
        transport.recv(torch.ones(5, device=dlab.device()), 0)


def test_ends_that_disagree_are_both_named(cluster):
    with pytest.raises(dlab.WorkerError, match="rank 0 sent 4 float32 to rank 1, which expected 5 float32"):
        cluster.run(_disagree, timeout=120)


def _auto(op):
    tensor = torch.full((1000,), dlab.rank() + 1.0, device=dlab.device())
    dlab.allreduce(tensor, op=op)
    return tensor.unique().tolist()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_auto_is_nccls_own(cluster, op):
    values = torch.arange(1.0, cluster.workers + 1)
    expected = {"sum": values.sum(), "mean": values.mean(), "max": values.max()}[op].item()
    assert cluster.run(_auto, op, timeout=120) == [[expected]] * cluster.workers


def _shared():
    tensor = dlab.shared_empty(10).fill_(1.0)
    dlab.allreduce(tensor)
    return tensor.device.type, tensor.unique().tolist()


def test_shared_empty_is_a_tensor_on_the_gpu_and_can_be_reduced(cluster):
    assert cluster.run(_shared, timeout=120) == [("cuda", [float(cluster.workers)])] * cluster.workers


def _averaged(allreduce):
    model = torch.nn.Linear(3, 2).to(dlab.device())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, dlab.rank() + 1.0)
    dlab.average_gradients(model, allreduce=allreduce)
    return model.weight.grad.unique().tolist()


@pytest.mark.parametrize("allreduce", [None, ring_allreduce], ids=["dist", "ring"])
def test_gradients_on_gpus_are_averaged(cluster, allreduce):
    mean = (cluster.workers + 1) / 2
    assert cluster.run(_averaged, allreduce, timeout=120) == [[mean]] * cluster.workers
