"""The four MNIST files: find them, verify them, and unpack them into a cache (`01_data_partitioning.ipynb`).

The files come with the repository, compressed with gzip. They are unpacked once, into a cache that all processes share
and that accepts only content with the right sha256. Only `download` uses the network.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: without file locks every process unpacks for itself, see `unpacked`
    fcntl = None  # type: ignore[assignment]

# name of the unpacked file: sha256 of its content
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
# the size of each in bytes: unpacking stops there
SIZES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

_CHUNK = 1 << 20
_TIMEOUT = 30  # seconds without data before the next mirror is tried


def data_directory() -> Path:
    """Return the folder that holds `mnist/`: $DLAB_DATA, else `data/` of the repository, else `~/.cache/dlab/data`."""
    if named := os.environ.get("DLAB_DATA"):
        return Path(named).expanduser().resolve()
    beside = Path(__file__).resolve().parents[2] / "data"
    # An installed package lies beside other packages, and one of them may be called `data`.
    if (beside / "mnist").is_dir() or (beside / "README.md").is_file():
        return beside
    return _cache_directory() / "data"


@contextmanager
def unpacked(names: Sequence[str], directory: Path | str | None = None) -> Iterator[Path]:
    """Yield a folder with the named files unpacked in `MNIST/raw/`, where torchvision looks for them.

    The first call costs about half a second and 55 MB of cache, later ones a few stats. What was read or mapped inside
    the `with` stays usable after it. If the cache cannot be written, the folder is a private one that is removed when
    the block ends.

        with unpacked(["t10k-labels-idx1-ubyte"]) as root:
            labels = (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    """
    source = _folder(directory)
    sources = [_existing(source / f"{name}.gz") for name in names]
    try:
        # One cache per source folder, so that two checkouts, or a damaged copy, never see each other's files.
        root = _cache_directory() / hashlib.sha256(str(source).encode()).hexdigest()[:12]
        for packed in sources:
            _unpack_once(packed, root)
        private = None
    except (OSError, RuntimeError):  # not writable; RuntimeError: there is no home folder
        root = private = Path(tempfile.mkdtemp(prefix="dlab-mnist-"))
    try:
        if private:
            for packed in sources:
                _unpack(packed, _raw(private, packed))
        yield root
    finally:
        if private:
            shutil.rmtree(private, ignore_errors=True)


def describe(directory: Path | str | None = None) -> str:
    """Return a text that says where the files are and whether they are complete; reads all four in about half a second.

    >>> print(describe())  # doctest: +SKIP
    MNIST in /home/ada/dlab/data/mnist
      train-images-idx3-ubyte.gz    9,719 kB  sha256 ok
      ...
    """
    folder = _folder(directory)
    lines = [f"MNIST in {folder}"]
    for name, expected in SHA256.items():
        packed = folder / f"{name}.gz"
        if not packed.is_file():
            lines.append(f"  {packed.name:<27}  missing: get it with `dlab data --download`")
            continue
        found = _sha256(packed, name)
        state = "sha256 ok" if found == expected else f"DAMAGED: sha256 must be {expected}, found {found}"
        lines.append(f"  {packed.name:<27}{_kilobytes(packed):>10}  {state}")
    return "\n".join(lines)


def download(
    directory: Path | str | None = None,
    mirrors: Sequence[str] = MIRRORS,
    report: Callable[[str], object] = print,
) -> Path:
    """Fetch the four files, 11 MB, into `directory/mnist` (default: `data_directory()`); complete files are kept.

    A file is put in place only if its content has the right sha256; when a mirror fails or serves something else, the
    next one is tried. `report` is called with a line per step. Returns the folder with the files.

        dlab.data.download("/tmp/somewhere")      # then: DLAB_DATA=/tmp/somewhere
    """
    folder = _folder(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in SHA256.items():
        packed = folder / f"{name}.gz"
        if packed.is_file() and _sha256(packed, name) == expected:
            report(f"{packed.name}: already there")
        else:
            _fetch(packed, mirrors, report)
    return folder


def _fetch(packed: Path, mirrors: Sequence[str], report: Callable[[str], object]) -> None:
    """Fetch one file from the first mirror that serves it completely."""
    part = packed.with_suffix(f".{os.getpid()}.part")
    failures = []
    for mirror in mirrors:
        url = mirror.rstrip("/") + "/" + packed.name
        report(f"{packed.name}: from {url}")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, part.open("wb") as file:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    if file.tell() > SIZES[packed.stem]:  # a packed file is smaller than its content
                        raise ValueError(f"it has more than {SIZES[packed.stem]:,} bytes, and must have fewer")
            if (found := _sha256(part, packed.stem)) != SHA256[packed.stem]:
                raise ValueError(f"unpacked, its sha256 must be {SHA256[packed.stem]}, found {found}")
            os.replace(part, packed)
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            failures.append(f"{url}: {error}")
            report(f"{packed.name}: failed, {error}")
        else:
            report(f"{packed.name}: {_kilobytes(packed)}, sha256 ok")
            return
        finally:
            part.unlink(missing_ok=True)
    raise ConnectionError(
        f"{packed.name} could not be fetched from any mirror ({'; '.join(failures)}): check the network, "
        f"or copy the file to {packed.parent} by hand."
    )


def _unpack_once(packed: Path, root: Path) -> None:
    """Unpack `packed` below `root`, unless that was done before and neither file has changed since."""
    raw = _raw(root, packed)
    stamp = root / f"{packed.stem}.json"
    if _unchanged(stamp, packed, raw):
        return
    raw.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock"):
        if _unchanged(stamp, packed, raw):  # another process did it while this one waited
            return
        before = _state(packed)
        _unpack(packed, raw)
        part = stamp.with_suffix(".part")
        part.write_text(json.dumps([before, _state(raw)]))
        os.replace(part, stamp)


def _unpack(packed: Path, raw: Path) -> None:
    """Write the content of `packed` to `raw`, which appears complete and verified or not at all."""
    raw.parent.mkdir(parents=True, exist_ok=True)
    part = raw.with_suffix(".part")
    expected = SHA256[packed.stem]
    try:
        with part.open("wb") as file:
            found = _sha256(packed, packed.stem, copy_to=file)
        if found != expected:
            raise ValueError(
                f"{packed} is damaged: unpacked, its sha256 must be {expected}, found {found}. "
                "Restore it with `git checkout -- data/mnist` or `dlab data --download`."
            )
        os.replace(part, raw)
    finally:
        part.unlink(missing_ok=True)


def _sha256(packed: Path, name: str, copy_to: BinaryIO | None = None) -> str:
    """Return the sha256 of the unpacked content, or why there is none; unpacks at most one byte more than expected."""
    digest, left = hashlib.sha256(), SIZES[name]
    try:
        with gzip.open(packed) as content:
            while chunk := content.read(min(_CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    return f"more than the {SIZES[name]:,} bytes that it must have"
                digest.update(chunk)
                if copy_to:
                    copy_to.write(chunk)
    except EOFError:
        return "a truncated gzip stream"
    except (gzip.BadGzipFile, zlib.error) as error:
        return f"a broken gzip stream ({error})"
    return digest.hexdigest()


def _existing(packed: Path) -> Path:
    if not packed.is_file():
        raise FileNotFoundError(
            f"{packed} is missing: restore it with `git checkout -- data/mnist` or get it with `dlab data --download`."
        )
    return packed


def _state(path: Path) -> list[int]:
    """Return values that change whenever a file does; ctime is included because a copy or an editor may reset mtime."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _unchanged(stamp: Path, packed: Path, raw: Path) -> bool:
    """Return whether both files are as recorded in `stamp` when one was unpacked from the other."""
    try:
        return json.loads(stamp.read_text()) == [_state(packed), _state(raw)]
    except (FileNotFoundError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system releases it even when the holder is killed."""
    if fcntl is None:
        raise OSError("this platform has no file locks")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dlab"


def _raw(root: Path, packed: Path) -> Path:
    return root / "MNIST" / "raw" / packed.stem


def _folder(directory: Path | str | None) -> Path:
    return (Path(directory).expanduser().resolve() if directory else data_directory()) / "mnist"


def _kilobytes(file: Path) -> str:
    return f"{file.stat().st_size / 1000:,.0f} kB"
