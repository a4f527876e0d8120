"""What several test files share: clusters, runs and browsers; tests for a GPU are skipped where there is none."""

import signal

import pytest
from hypothesis import settings

settings.register_profile("dlab", deadline=None)  # other processes may have the processor at any moment
settings.load_profile("dlab")

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # without such tests there is no need to wait for torch
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A Jupyter server for all tests in a browser."""
    from browser import Server

    server = Server(tmp_path_factory.mktemp("jupyter"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def chromium(server):
    """A browser for that server; its tests are skipped where there is none."""
    from browser import NoBrowser, open_browser

    try:
        with open_browser(server) as chromium:
            yield chromium
    except NoBrowser as reason:
        pytest.skip(str(reason))


@pytest.fixture
def notebook(opened):
    """What the file has `opened`; after each test nothing runs there, and nothing has gone wrong in page or cells."""
    opened.errors.clear()
    yield opened
    opened.ask("'run' in globals() and run.stop()")
    assert opened.failures() == []
    assert opened.errors == []


@pytest.fixture(scope="module")
def start_together(tmp_path_factory):
    """Starts several scripts at once, because most of their time each of them imports torch, twice, on one core."""
    from kernels import Script

    started = []

    def start(texts: dict[str, str]) -> dict[str, "Script"]:
        scripts = {name: Script(tmp_path_factory.mktemp("script"), text) for name, text in texts.items()}
        started.extend(scripts.values())
        return scripts

    yield start
    for script in started:
        script.close()


@pytest.fixture(scope="module")
def kernel(request, tmp_path_factory):
    """A Jupyter kernel for all tests of a file, in which its FIRST_CELL has run."""
    from kernels import Kernel, ok

    with Kernel(TMPDIR=str(tmp_path_factory.mktemp("kernel"))) as kernel:
        ok(kernel.run(request.module.FIRST_CELL))
        yield kernel


@pytest.fixture(scope="module")
def cluster(request):
    """One for all tests of a file, as it says: so many WORKERS or RANKS, else two; SERVERS, if any; a BACKEND."""
    import dlab

    said = vars(request.module)
    workers = said.get("WORKERS", said.get("RANKS", 2))
    with dlab.Cluster(workers, servers=said.get("SERVERS", 0), backend=said.get("BACKEND", "auto")) as cluster:
        yield cluster


@pytest.fixture(
    scope="module", params=["threads", "shared memory", "gloo", pytest.param("nccl", marks=pytest.mark.gpu)]
)
def transport(request):
    """`transport(work, inputs)` calls a function on every rank; who asks for it is run over every transport."""
    from over import Over

    over = Over(request.param)
    if len(over.numbers) < 2:
        pytest.skip("needs two CUDA devices")
    yield over
    over.close()


@pytest.fixture
def started(cluster):
    """Starts runs, and ends them with the test."""
    import dlab

    runs = []

    def start(fn, *args):
        runs.append(cluster.start(fn, *args))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
    assert cluster.run(dlab.rank, timeout=30) == list(range(cluster.workers))


@pytest.fixture
def the_next_run_works(cluster):
    """Whatever a test does to the cluster, the next line can use it."""
    from kernels import alive

    yield

    def total():
        import torch
        import torch.distributed as dist

        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert cluster.run(total, timeout=30) == [float(cluster.workers)] * cluster.workers
    assert len(alive(cluster.pids)) == cluster.workers
