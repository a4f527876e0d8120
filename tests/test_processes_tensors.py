"""Arguments and results: large tensors travel by shared memory, arrive as they left, and leave no handle behind."""

import gc
import os
import sys
from collections import OrderedDict

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels import open_handles
from torch import nn

import dlab
from dlab.processes.between import messages

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
]  # fmt: skip
LARGE = messages.INLINE  # this many elements of any type are too large for the socket

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


def echo(value):
    return value


def mapping_of(tensor: torch.Tensor) -> str:
    """The name of the memory region in which the tensor's first element lies."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return line.split(maxsplit=5)[5].strip() if len(line.split()) > 5 else ""
    raise AssertionError("the tensor lies nowhere")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Type, shape, strides and every bit are equal."""

    def bits(x: torch.Tensor) -> bytes:
        return x.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()

    def kind(x: torch.Tensor) -> tuple:
        return type(x), x.dtype, x.shape, x.stride(), x.requires_grad

    return kind(a) == kind(b) and bits(a) == bits(b)


# ------------------------------------------------------------------------------------- by shared memory


def test_a_large_argument_and_a_large_result_lie_in_shared_memory(cluster):
    def where(x):
        return mapping_of(x), x * 2

    for place, result in cluster.run(where, torch.ones(1 << 20)):
        assert "memfd:dlab-message" in place
        assert "memfd:dlab-message" in mapping_of(result)
        assert result.sum() == 2 << 20


def test_a_kept_result_costs_no_file_handle(cluster):
    cluster.run(lambda: torch.ones(LARGE))
    before = open_handles()
    kept = [cluster.run(lambda: torch.ones(LARGE)) for _ in range(50)]
    assert open_handles() == before
    assert all(tensor.sum() == LARGE for results in kept for tensor in results)


def test_no_handle_leaks_here_or_in_a_worker_over_200_runs_with_large_results(cluster):
    def grow(x):
        return [x + dlab.rank(), np.ones(LARGE)]

    x = torch.ones(LARGE)
    cluster.run(grow, x)
    gc.collect()
    before = [open_handles(pid) for pid in ("self", *cluster.pids)]
    for _ in range(200):
        assert [tensor[0] for tensor, _ in cluster.run(grow, x)] == [1.0, 2.0]
    gc.collect()
    assert [open_handles(pid) for pid in ("self", *cluster.pids)] == before


def test_no_handle_leaks_when_a_large_argument_or_result_cannot_be_sent(cluster):
    def spoil():
        return [torch.ones(LARGE), (i for i in range(3))]

    def fail():
        for work in (lambda: cluster.run(spoil), lambda: cluster.run(echo, [torch.ones(LARGE), os.scandir()])):
            with pytest.raises((dlab.WorkerError, TypeError)):
                work()

    fail()
    cluster.run(lambda: dist.barrier())
    before = [open_handles(pid) for pid in ("self", *cluster.pids)]
    for _ in range(5):
        fail()
    cluster.run(lambda: dist.barrier())
    gc.collect()
    assert [open_handles(pid) for pid in ("self", *cluster.pids)] == before


# ------------------------------------------------------------------------------------- views and writers


@pytest.mark.parametrize("size", [100, 4 * LARGE])
def test_views_of_one_buffer_stay_views_of_one_buffer(cluster, size):
    def write_through(base, view, other):
        view.fill_(7.0)
        return base[10:12].tolist(), other.tolist(), [base, base[10:12], base.view(-1, 2)]

    base = torch.zeros(size)
    for seen, other, (whole, part, folded) in cluster.run(write_through, base, base[10:12], torch.zeros(2)):
        assert seen == [7.0, 7.0]
        assert other == [0.0, 0.0]
        whole[10] = 5.0
        assert part[0] == 5.0
        assert folded[5, 0] == 5.0


@pytest.mark.parametrize("size", [100, 4 * LARGE])
def test_workers_that_write_to_an_argument_do_not_disturb_each_other(cluster, size):
    def fill(x, array):
        x += dlab.rank()
        array += dlab.rank()
        dist.barrier()
        return x.unique().tolist(), np.unique(array).tolist()

    x, array = torch.zeros(size), np.zeros(size)
    assert cluster.run(fill, x, array) == [([0.0], [0.0]), ([1.0], [1.0])]
    assert not x.any(), "nor does the notebook's own tensor change"
    assert not array.any()


def test_results_can_be_written_to_and_each_is_ones_own(cluster):
    first, second = cluster.run(lambda: (torch.zeros(LARGE), np.zeros(LARGE)))
    first[0].fill_(1.0)
    first[1].fill(1.0)
    assert second[0].sum() == second[1].sum() == 0.0


# ------------------------------------------------------------------------------------- every kind of tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 5, LARGE + 1])
def test_every_type_arrives_bit_by_bit(cluster, dtype, size):
    bytes_ = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
    x = bytes_.to(torch.uint8).view(dtype)
    for result in cluster.run(echo, x):
        assert same(result, x)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES[:12]),
    shape=st.lists(st.integers(0, 70), max_size=3),
    cut=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    transposed=st.booleans(),
)
def test_any_shape_and_stride_arrives_unchanged(cluster, dtype, shape, cut, transposed):
    x = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape).to(dtype)
    if x.dim():
        x = x[cut[0] :: cut[1]]
    if transposed and x.dim() > 1:
        x = x.transpose(0, -1)
    for result in cluster.run(echo, x):
        assert same(result, x)


@pytest.mark.filterwarnings("ignore")  # torch calls some of them beta and others deprecated
def test_special_tensors_arrive_as_what_they_are(cluster):
    base = torch.randn(200, 300, requires_grad=True)
    special = {
        "not a leaf": base * 2,
        "expanded": torch.ones(1, 3).expand(500, 3),
        "conjugated": torch.randn(300, 300, dtype=torch.complex64).conj(),
        "negative": torch.randn(300, 300, dtype=torch.complex64).conj().imag,
        "channels last": torch.randn(8, 16, 20, 20).to(memory_format=torch.channels_last),
        "zero-dimensional": torch.tensor(3.5),
        "sparse": torch.eye(300).to_sparse(),
        "csr": torch.eye(300).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(200, 300), 0.1, 0, torch.qint8),
    }
    for result in cluster.run(echo, special):
        for name, tensor in special.items():
            back = result[name]
            assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout), name
            if tensor.layout == torch.strided and not tensor.is_quantized:
                assert back.stride() == tensor.stride(), name
            plain = (lambda x: x.dequantize()) if tensor.is_quantized else (lambda x: x.detach().to_dense())
            assert torch.equal(plain(back), plain(tensor)), name
        assert result["not a leaf"].requires_grad


def test_parameters_stay_parameters(cluster):
    for result in cluster.run(echo, [nn.Parameter(torch.randn(300, 300)), nn.Parameter(torch.ones(3), False)]):
        assert [type(parameter) for parameter in result] == [nn.Parameter, nn.Parameter]
        assert [parameter.requires_grad for parameter in result] == [True, False]


def test_a_model_trains_on_the_other_side_and_comes_back(cluster):
    def step(model, x):
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return model

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 1)), torch.randn(50, 300)
    results = cluster.run(step, model, x)
    step(model, x)
    for result in results:
        assert all(map(torch.allclose, result.parameters(), model.parameters()))


def test_state_dicts_arrive_with_their_ties(cluster):
    model = nn.Sequential(OrderedDict(enter=nn.Linear(200, 200), leave=nn.Linear(200, 200), norm=nn.BatchNorm1d(200)))
    model.leave.weight = model.enter.weight
    state = model.state_dict()
    for result in cluster.run(echo, state):
        assert list(result) == list(state)
        assert all(same(result[name], state[name]) for name in state)
        assert result["enter.weight"].data_ptr() == result["leave.weight"].data_ptr()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE, dtype=np.float32),
        np.arange(LARGE)[::3],
        np.asfortranarray(np.random.default_rng(0).normal(size=(300, 200))),
        np.zeros((0, 3)),
        np.array(3.5),
        np.arange(LARGE, dtype=">i4"),
        np.array(["a", "bc"]),
        np.zeros(LARGE, dtype=[("x", "f4"), ("y", "i8")]),
        np.array([None, {}], dtype=object),
    ],
    ids=["large", "strided", "fortran", "empty", "scalar", "big-endian", "text", "records", "objects"],
)
def test_numpy_arrays_arrive_unchanged(cluster, array):
    for result in cluster.run(echo, array):
        assert type(result) is np.ndarray
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        assert (result == array).all()


@pytest.mark.parametrize("size", [LARGE - 200, LARGE - 100, LARGE - 50, LARGE, LARGE + 1, 3_000_000])
def test_other_objects_of_every_size_arrive(cluster, size):
    text = "x" * size
    assert cluster.run(echo, text) == [text, text]
