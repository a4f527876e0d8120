"""With GPUs: NCCL when each worker has one, and the same functions, knobs and errors as without."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import dlab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def cluster():
    torch.ones(1, device="cuda")  # the notebook itself uses the GPU before and beside its workers
    with dlab.Cluster(torch.cuda.device_count()) as cluster:
        yield cluster


def test_auto_chooses_nccl_with_a_gpu_for_each_worker_and_gloo_otherwise(cluster):
    assert cluster.backend == "nccl"
    assert cluster.run(dist.get_backend) == ["nccl"] * cluster.workers
    with dlab.Cluster(cluster.workers + 1) as crowded:
        assert crowded.backend == "gloo"
        assert crowded.run(dlab.rank) == list(range(cluster.workers + 1))


def test_more_workers_than_gpus_on_nccl_are_refused_in_one_sentence(cluster):
    with pytest.raises(ValueError, match=rf"nccl needs a GPU for each .* this machine has {cluster.workers}"):
        dlab.Cluster(cluster.workers + 1, backend="nccl")


def test_each_worker_has_a_gpu_of_its_own(cluster):
    assert cluster.run(dlab.device) == [torch.device("cuda", rank) for rank in range(cluster.workers)]
    assert cluster.run(torch.cuda.current_device) == list(range(cluster.workers))


def test_all_reduce_works_on_the_gpus(cluster):
    def total():
        x = torch.full((1000,), float(dist.get_rank()), device=dlab.device())
        dist.all_reduce(x)
        return x.unique().tolist()

    assert cluster.run(total) == [[float(sum(range(cluster.workers)))]] * cluster.workers


def test_tensors_on_the_gpu_come_back_with_their_values(cluster):
    results = cluster.run(lambda: torch.arange(100_000, device=dlab.device()) + dlab.rank())
    for rank, result in enumerate(results):
        assert torch.equal(result.cpu(), torch.arange(100_000) + rank)


def test_a_tensor_on_the_notebooks_gpu_can_be_an_argument(cluster):
    x = torch.arange(100_000, device="cuda")
    assert cluster.run(lambda x: x.sum().item(), x) == [x.sum().item()] * cluster.workers


def test_losses_on_the_gpu_can_be_logged_and_watched(cluster):
    def train():
        model = torch.nn.Linear(10, 1).to(dlab.device())
        dlab.watch(model, every=1)
        loss = model(torch.ones(4, 10, device=dlab.device())).sum()
        loss.backward()
        dlab.log(loss=loss)
        return loss.item(), {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}

    run = cluster.start(train)
    for rank, (loss, norms) in enumerate(run.wait(120)):
        kinds = {event.kind: event.data for event in run.events if event.rank == rank}
        assert kinds["log"]["loss"] == pytest.approx(loss)
        assert kinds["gradients"]["norms"] == pytest.approx(norms, rel=1e-5)


def test_an_exception_beside_a_collective_is_named_and_the_next_run_works(cluster):
    def fail():
        if dist.get_rank() == 0:
            raise ValueError("no")
        x = torch.ones(1, device=dlab.device())
        dist.all_reduce(x)
        torch.cuda.synchronize()

    with pytest.raises(dlab.WorkerError, match="rank 0 failed: ValueError: no"):
        cluster.run(fail)
    assert cluster.run(dlab.rank) == list(range(cluster.workers))


def test_a_killed_worker_is_named_and_replaced(cluster):
    def die():
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), 9)
        time.sleep(1000)

    with pytest.raises(dlab.WorkerError, match=rf"rank {cluster.workers - 1} was killed by signal 9"):
        cluster.run(die)
    assert cluster.run(dlab.rank) == list(range(cluster.workers))
