"""The MNIST files: damage is noticed, many processes may unpack at once, and nothing is downloaded unless asked."""

import functools
import gzip
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from dlab.data import MNIST, describe, download, files, mnist

REPOSITORY = Path(__file__).resolve().parents[1]
PACKED = REPOSITORY / "data" / "mnist"
TEST_IMAGES = "t10k-images-idx3-ubyte"
# Written out here a second time: a sum changed in the code by mistake must not pass.
SUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of our own, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path, monkeypatch, cache):
    """A copy of the four files that a test may damage; `dlab.mnist` looks there."""
    shutil.copytree(PACKED, tmp_path / "data" / "mnist")
    monkeypatch.setenv("DLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "mnist"


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach the network fails the test."""

    def refuse(*args, **kwargs):
        pytest.fail("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def serve(monkeypatch):
    """serve(folder) starts a web server on loopback and gives its address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    def start(folder):
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        server.handle_error = lambda *_: None  # who asks may go before all has come
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def damage(packed, where=None):
    """Change one byte in the middle of a file, and put its times back."""
    before = packed.stat()
    content = bytearray(packed.read_bytes())
    content[where or len(content) // 2] ^= 0xFF
    packed.write_bytes(content)
    os.utime(packed, ns=(before.st_atime_ns, before.st_mtime_ns))


def leftovers(folder):
    return list(Path(folder).rglob("*.part"))


# ------------------------------------------------------------------------------------------ the files are there


@pytest.mark.parametrize("name", SUMS)
def test_the_repository_holds_the_real_files(name):
    assert hashlib.sha256(gzip.decompress((PACKED / f"{name}.gz").read_bytes())).hexdigest() == SUMS[name]
    assert files.SHA256[name] == SUMS[name]


def test_all_seventy_thousand_are_there_in_about_eleven_megabytes(offline):
    assert len(mnist(train=True)) == 60_000
    assert len(mnist(train=False)) == 10_000
    assert 10e6 < sum(path.stat().st_size for path in PACKED.iterdir()) < 12e6


def test_the_readme_says_origin_and_licence():
    text = (REPOSITORY / "data" / "README.md").read_text()
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", *SUMS.values()):
        assert word in text


@pytest.mark.parametrize("name", SUMS)
def test_the_sizes_are_those_of_the_real_files(name):
    assert files.SIZES[name] == len(gzip.decompress((PACKED / f"{name}.gz").read_bytes()))


BOMB = """
import resource, sys
from dlab.data import describe, mnist
limit = 20 * 1024**2  # of any file that is written: a process that writes more is killed
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    mnist(train=False)
except ValueError as problem:
    print(problem)
print(describe())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "kB")
"""


def test_a_gzip_bomb_is_cut_off_at_the_known_size(copy, cache):
    """300 MB of zeros in 300 kB. They are neither unpacked into memory nor onto the disk."""
    bomb = copy / f"{TEST_IMAGES}.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(bytes(1_000_000))
    assert bomb.stat().st_size < 3_000_000
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    sentence, *lines, memory = done.stdout.splitlines()
    assert sentence.startswith(f"{bomb} is damaged: unpacked, its sha256 must be {SUMS[TEST_IMAGES]}, found more than ")
    assert "the 7,840,016 bytes that it must have" in sentence and "git checkout -- data/mnist" in sentence
    assert [TEST_IMAGES in line for line in lines if "DAMAGED" in line] == [True]
    assert int(memory.split()[0]) < 60_000
    assert not leftovers(cache)


def test_one_byte_too_many_is_too_many(copy):
    content = gzip.decompress((copy / f"{TEST_IMAGES}.gz").read_bytes())
    (copy / f"{TEST_IMAGES}.gz").write_bytes(gzip.compress(content + b"x", 1))
    with pytest.raises(ValueError, match="found more than the 7,840,016 bytes"):
        mnist(train=False)


def test_a_mirror_that_sends_without_end_is_left(tmp_path, serve):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "train-images-idx3-ubyte.gz").write_bytes(bytes(60_000_000))
    with pytest.raises(ConnectionError, match="it has more than 47,040,016 bytes, and must have fewer"):
        download(tmp_path / "here", mirrors=[serve(tmp_path / "mirror")], report=lambda line: None)
    assert not list((tmp_path / "here" / "mnist").iterdir())


# -------------------------------------------------------------------------------------------- where they are sought


def test_dlab_data_names_another_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("DLAB_DATA", str(tmp_path))
    assert files.data_directory() == tmp_path


def test_without_it_the_repository_then_the_cache(monkeypatch, tmp_path, cache):
    monkeypatch.delenv("DLAB_DATA", raising=False)
    assert files.data_directory() == REPOSITORY / "data"
    elsewhere = tmp_path / "site-packages" / "dlab" / "data" / "files.py"
    monkeypatch.setattr(files, "__file__", str(elsewhere))
    (tmp_path / "site-packages" / "data").mkdir(parents=True)  # some other package
    assert files.data_directory() == cache / "dlab" / "data"


@pytest.mark.parametrize("as_torchvision", [False, True])
def test_a_missing_file_is_named_and_not_fetched(copy, offline, as_torchvision):
    (copy / f"{TEST_IMAGES}.gz").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{TEST_IMAGES}\.gz is missing.*dlab data --download"):
        mnist(train=False, as_torchvision=as_torchvision)


# ------------------------------------------------------------------------------------------------------ damage


def flip_a_byte(packed):
    damage(packed)


def scribble(packed):
    content = packed.read_bytes()
    packed.write_bytes(content[:500] + b"\xff" * 500 + content[1000:])


def cut_off(packed):
    packed.write_bytes(packed.read_bytes()[:-1000])


def cut_in_half(packed):
    packed.write_bytes(packed.read_bytes()[: packed.stat().st_size // 2])


def empty(packed):
    packed.write_bytes(b"")


def not_gzip(packed):
    packed.write_bytes(b"<html>404</html>")


def other_content(packed):
    content = bytearray(gzip.decompress(packed.read_bytes()))
    content[5000] ^= 1  # one pixel, by one shade, in a perfect gzip file
    packed.write_bytes(gzip.compress(bytes(content), compresslevel=1))


@pytest.mark.parametrize("spoil", [flip_a_byte, scribble, cut_off, cut_in_half, empty, not_gzip, other_content])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_damaged_file_is_an_error_with_its_name_and_sum(copy, cache, spoil, used_before):
    if used_before:
        mnist(train=False)
    spoil(copy / f"{TEST_IMAGES}.gz")
    with pytest.raises(ValueError) as caught:
        mnist(train=False)
    assert str(copy / f"{TEST_IMAGES}.gz") in str(caught.value)
    assert SUMS[TEST_IMAGES] in str(caught.value)
    assert not leftovers(cache)
    with pytest.raises(ValueError):  # and it stays one
        mnist(train=False)


def test_a_restored_file_is_good_again(copy):
    damage(copy / f"{TEST_IMAGES}.gz")
    with pytest.raises(ValueError):
        mnist(train=False)
    shutil.copy(PACKED / f"{TEST_IMAGES}.gz", copy)
    assert len(mnist(train=False)) == 10_000


def test_a_damaged_unpacked_file_is_made_again(copy, cache):
    truth = mnist(train=False).images.clone()
    (raw,) = cache.rglob(TEST_IMAGES)
    damage(raw)
    assert torch.equal(mnist(train=False).images, truth)


def test_what_a_killed_process_left_does_no_harm(copy, cache):
    mnist(train=False)
    (raw,) = cache.rglob(TEST_IMAGES)
    raw.with_suffix(".part").write_bytes(b"half of it")
    raw.unlink()
    next(cache.rglob(f"{TEST_IMAGES}.json")).write_text("[[1, 2")
    assert len(mnist(train=False)) == 10_000
    assert not leftovers(cache)


def test_unpacking_happens_once(copy, monkeypatch):
    mnist(train=False)
    monkeypatch.setattr(files, "_unpack", lambda *args: pytest.fail("unpacked again"))
    mnist(train=False)


# ------------------------------------------------------------------------------------------------ many at once

FOUR_FIRST_CALLS = """
import hashlib, multiprocessing
import dlab.data
from dlab.data import files

unpack, count = files._unpack, []
files._unpack = lambda *args: (count.append(1), unpack(*args))

def first_call(together):
    together.wait()
    digits = dlab.data.mnist(train=True)
    sum_of_pixels = hashlib.sha256(digits.images.numpy().tobytes()).hexdigest()
    print(f"{len(count)} {sum_of_pixels} {int(digits.targets.sum())}\\n", end="", flush=True)

fork = multiprocessing.get_context("fork")  # one import for all four, so that they come at the same moment
together = fork.Barrier(4)
workers = [fork.Process(target=first_call, args=[together]) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""


def test_four_processes_at_once_for_the_first_time(cache):
    answer = subprocess.run([sys.executable, "-c", FOUR_FIRST_CALLS], capture_output=True, text=True, timeout=100)
    said = [line.split() for line in answer.stdout.splitlines()]
    content = gzip.decompress((PACKED / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((PACKED / "train-labels-idx1-ubyte.gz").read_bytes())
    truth = [hashlib.sha256(content[16:]).hexdigest(), str(sum(labels[8:]))]
    assert [words[1:] for words in said] == [truth] * 4, answer.stderr
    assert sum(int(words[0]) for words in said) == 2  # images and labels, each unpacked by one of the four
    assert not leftovers(cache)


@pytest.mark.parametrize("as_torchvision", [False, True])
def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path, monkeypatch, as_torchvision):
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be made below a file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    digits = mnist(train=False, as_torchvision=as_torchvision)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [digits[i][1] for i in range(5)] == [7, 2, 1, 0, 4]
    assert abs(float(digits[0][0].mean())) < 1


# ---------------------------------------------------------------------------------------------------- download


def test_download_brings_the_files_and_keeps_whole_ones(tmp_path, serve, cache):
    said = []
    folder = download(tmp_path / "new", mirrors=[serve(PACKED)], report=said.append)
    assert folder == tmp_path / "new" / "mnist"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in PACKED.iterdir()
    }
    assert len(MNIST(train=False, directory=tmp_path / "new")) == 10_000
    assert any("sha256 ok" in line for line in said)
    said.clear()
    damage(folder / "t10k-labels-idx1-ubyte.gz")
    download(tmp_path / "new", mirrors=[serve(PACKED)], report=said.append)
    assert sum("already there" in line for line in said) == 3
    assert (folder / "t10k-labels-idx1-ubyte.gz").read_bytes() == (PACKED / "t10k-labels-idx1-ubyte.gz").read_bytes()


def test_download_passes_over_mirrors_that_are_wrong_or_dead(tmp_path, serve):
    shutil.copytree(PACKED, tmp_path / "wrong")
    damage(tmp_path / "wrong" / "train-labels-idx1-ubyte.gz")
    (tmp_path / "wrong" / "t10k-labels-idx1-ubyte.gz").unlink()
    cut_off(tmp_path / "wrong" / "t10k-images-idx3-ubyte.gz")
    said = []
    mirrors = ["http://127.0.0.1:9/", serve(tmp_path / "wrong"), serve(PACKED)]
    folder = download(tmp_path / "new", mirrors=mirrors, report=said.append)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in SUMS)
    for path in folder.iterdir():
        assert path.read_bytes() == (PACKED / path.name).read_bytes()
    assert any(SUMS["train-labels-idx1-ubyte"] in line for line in said)
    assert any("404" in line for line in said)


def test_download_that_fails_everywhere_says_so_and_leaves_nothing(tmp_path, serve):
    (tmp_path / "empty").mkdir()
    mirrors = [serve(tmp_path / "empty"), "http://127.0.0.1:9/"]
    with pytest.raises(ConnectionError, match="could not be fetched from any mirror") as caught:
        download(tmp_path / "new", mirrors=mirrors, report=lambda line: None)
    assert all(mirror in str(caught.value) for mirror in mirrors)
    assert list((tmp_path / "new" / "mnist").iterdir()) == []


def test_download_goes_to_the_usual_mirrors_by_default():
    assert files.MIRRORS == (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )


# ----------------------------------------------------------------------------------------------------- describe


def test_describe_says_where_they_are_and_whether_whole(copy, offline):
    text = describe()
    assert str(copy) in text
    assert text.count("sha256 ok") == 4
    damage(copy / "train-labels-idx1-ubyte.gz")
    (copy / f"{TEST_IMAGES}.gz").unlink()
    lines = describe().splitlines()
    assert sum("sha256 ok" in line for line in lines) == 2
    (damaged,) = [line for line in lines if "DAMAGED" in line]
    assert "train-labels" in damaged and SUMS["train-labels-idx1-ubyte"] in damaged
    (missing,) = [line for line in lines if "missing" in line]
    assert TEST_IMAGES in missing and "dlab data --download" in missing
