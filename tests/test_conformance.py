"""The backend passes PyTorch's own tests: a choice of those that gloo passes. `make conformance` runs all of them."""

import threading

import psutil
import pytest
from conformance.client import Outcome, Suite
from conformance.table import exemption, faults, line, shortfalls, summary
from kernels import eventually

# The quick ones that tell most about each operation: alone, in a group of some ranks, asynchronous, complex, refused.
CHOICE = [
    *("send_recv", "send_recv_any_source", "send_recv_with_tag", "isend", "irecv"),
    *("batch_isend_irecv_gloo", "batch_isend_irecv_gloo_tags"),
    *("broadcast", "broadcast_group"),
    *("all_reduce_sum", "all_reduce_product", "all_reduce_min", "all_reduce_full_group_max", "all_reduce_group_sum"),
    *("all_reduce_sum_async", "all_reduce_sum_complex", "all_reduce_complex_unsupported_ops", "sparse_all_reduce_sum"),
    *("all_reduce_coalesced_sum", "all_reduce_coalesced_group_max", "all_reduce_coalesced_max_complex_unsupported"),
    *("reduce_sum", "reduce_max", "reduce_group_product", "reduce_sum_twice"),
    *("gather", "gather_group", "gather_checks", "gather_object", "gather_object_subgroup"),
    *("scatter", "scatter_group", "scatter_complex", "scatter_checks", "scatter_object_list"),
    *("all_gather", "all_gather_complex", "all_gather_group"),
    *("all_gather_coalesced_simple", "all_gather_coalesced_with_empty"),
    *("all_gather_object_default_pg", "all_gather_object_subgroup"),
    *("all_to_all_single_equal_split", "all_to_all_single_equal_split_group"),
    *("all_to_all_single_unequal_split", "all_to_all_single_unequal_split_complex"),
    *("barrier", "barrier_group", "barrier_timeout_global", "barrier_timeout_full_group"),
    *("get_backend", "Backend_enum_class", "get_rank_size_group", "destroy_group", "new_subgroups_with_group_param"),
    *("get_future", "accumulate_gradients_no_sync_allreduce_with_then_hook"),
    *("DistributedDataParallelCPU", "DistributedDataParallel_requires_grad"),
    *("static_graph_api_cpu", "ddp_create_graph"),
]


@pytest.fixture(scope="module")
def suite():
    with Suite() as suite:
        yield suite


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("name", CHOICE)
def test_dlab_passes(suite, name):
    outcome = suite.run("dlab", f"test_{name}")
    assert outcome.verdict == "pass", f"{outcome.reason}\n{outcome.log}"


# ------------------------------------------------------------------------------- the harness can say no


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "why"),
    [
        ("test_all_reduce_sum", "pass", ""),
        ("test_all_to_all", "fail", "invalid tensor size at index 1"),  # gloo's pieces must all have one size
        ("test_all_gather_v_cuda", "skip", "Only Nccl"),  # before there are ranks
        ("test_DistributedSampler_padding", "skip", "Need at least 4 CUDA devices"),  # by the ranks themselves
    ],
)
def test_gloo_gets_torchs_verdicts(suite, name, verdict, why):
    outcome = suite.run("gloo", name)
    assert outcome.verdict == verdict, outcome.reason
    assert why in outcome.why


@pytest.mark.slow
def test_the_backend_is_really_the_one_asked_for(suite):
    """A backend that does not exist cannot pass, however much its name is taken for gloo's."""
    outcome = suite.run("nosuch", "test_all_reduce_sum")
    assert outcome.verdict == "fail"
    assert "nosuch" in outcome.log + outcome.reason


@pytest.mark.slow
def test_ranks_go_when_their_test_hangs_and_when_the_process_that_forked_them_is_killed():
    with Suite(seconds=2) as suite:
        process = psutil.Process(suite.pid)
        slow = "test_barrier_timeout_group"  # waits for 5 s
        outcome = suite.run("gloo", slow)
        assert outcome.verdict == "fail"
        assert "timed out" in outcome.why
        assert process.children() == []

        waiting = threading.Thread(target=pytest.raises, args=(RuntimeError, suite.run, "gloo", slow))
        waiting.start()
        ranks = eventually(lambda: len(process.children()) == 4 and process.children())
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
        waiting.join(10)
        assert not waiting.is_alive()


def row(gloo: str, dlab: str) -> dict[str, Outcome]:
    return {"gloo": Outcome(gloo, 1.0), "dlab": Outcome(dlab, 2.0, "of dlab")}


def test_what_gloo_passes_dlab_must_pass():
    verdicts = ("pass", "skip", "fail")
    rows = {f"test_{gloo}_{dlab}": row(gloo, dlab) for gloo in verdicts for dlab in verdicts}
    assert faults(rows) == shortfalls(rows) == ["test_pass_skip", "test_pass_fail"]
    text = "\n".join(summary(rows))
    assert "gloo: 3 pass, 3 skip, 3 fail, in 9 s\ndlab: 3 pass, 3 skip, 3 fail, in 18 s" in text
    assert "gloo passes and dlab does not: test_pass_fail: of dlab" in text
    assert text.endswith("faults: 2")


def test_an_exemption_is_shown_with_its_reason_and_is_no_fault():
    refused = Outcome("fail", 2.0, "ValueError: monitored_barrier is only implemented for GLOO backend.")
    rows = {"test_monitored": row("pass", "fail") | {"dlab": refused}, "test_barrier": row("pass", "pass")}
    assert faults(rows) == []
    assert shortfalls(rows) == ["test_monitored"]
    assert any(exemption(refused) in text for text in summary(rows))
    assert exemption(row("pass", "fail")["dlab"]) is None


def test_a_row_shows_both_verdicts_and_why_not():
    assert line("test_gather", row("pass", "skip")).split(None, 3) == ["test_gather", "pass", "skip", "of dlab"]
    assert line("test_gather", row("pass", "pass")).split() == ["test_gather", "pass", "pass"]


def test_the_reason_in_one_line_is_what_ended_the_first_rank():
    began, introduced = "Traceback (most recent call last):\n  File …\n", "exited with error code 10 and exception:\n"
    first = f"{began}KeyError: 4\n\nDuring handling …\n{began}ValueError: 3 ranks, not 4\n\nTo execute this test, run …"
    second = f"{began}RuntimeError: Connection closed by peer"
    told = f"{began}RuntimeError: Process 1 {introduced}{first}\nProcess 2 {introduced}{second}\n"
    assert Outcome("fail", 1.0, told).why == "ValueError: 3 ranks, not 4"
    assert Outcome("fail", 1.0, f"{began}AssertionError\n").why == "AssertionError"
    assert Outcome("skip", 0.0, "CUDA is not available.").why == "CUDA is not available."
    assert Outcome("pass", 1.0).why == ""
