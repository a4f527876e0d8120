"""Saving: a checkpoint is whole or not there, and the folder that it is saved in belongs to one training.

All is written to a hidden folder beside the others, which then gets its name in a single moment. Whoever dies before
it leaves no checkpoint, whoever dies after it a whole one. The last two are kept, so that when one is damaged the one
before it can be used. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from dlab.collectives import all_gather
from dlab.training.checkpoints import COMMON, MANIFEST, State, checkpoint_after, checkpoints_in, own_file, steps_of
from dlab.transports import Transport

KEPT = 2
_LOCK = ".dlab-lock"
_DYING = 0.2  # seconds in which a process that was killed gives back its lock


class FolderInUse(ValueError):
    """Another training saves there now; the message says which process."""


class Folder:
    """Where one training saves. `with` it, a lock is held from `claim` on, or from the first `take`, to the end.

    Rank 0 holds the lock; if it dies, whoever takes its place takes the lock with the next checkpoint. It goes with
    its process, so none is left to be in the way. Between hosts it works as far as `flock` on their shared file
    system does; where there are no locks at all, nobody is refused.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: TextIO | None = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self.clear_leftovers()
            (self.path / _LOCK).unlink(missing_ok=True)  # while it is still ours
            self._lock.close()

    def check(self, resume: str | Path | None, overwrite: bool) -> None:
        """Refuse what cannot be a folder, and one with checkpoints of another training."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"checkpoint={str(self.path)!r}: {there} is a file; give a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"checkpoint={str(self.path)!r}: {there} cannot be written to; give another folder")
        if not overwrite and not self._is_resumed_by(resume) and (found := checkpoints_in(self.path)):
            raise ValueError(
                f"{self.path} holds the checkpoints of another training, up to {found[-1].name}: go on with it by "
                f"resume={str(self.path)!r}, give another folder, or remove them by overwrite=True"
            )

    def check_free(self) -> None:
        """Refuse if a training saves there now; for who can tell before it starts."""
        if (self.path / _LOCK).is_file():
            with Folder(self.path) as mine:
                mine.take()

    def claim(self, resume: str | Path | None, overwrite: bool) -> None:
        """For rank 0, before the first step: from now on it is ours; with `overwrite`, what was there is removed."""
        self.take()
        self.check(resume, overwrite)
        self.clear_leftovers()
        if not self._is_resumed_by(resume):
            for other in checkpoints_in(self.path):
                _remove(other)

    def take(self) -> None:
        """Hold the lock, unless it is held already."""
        until = time.monotonic() + _DYING
        while self._lock is None:
            with _in_a_sentence(self.path):
                _make(self.path)
                file = (self.path / _LOCK).open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    owner = file.read() or "another process"
                    raise FolderInUse(
                        f"{self.path} is in use, {owner} saves its checkpoints there: wait until it ends, or give "
                        "another folder"
                    ) from None
                time.sleep(_DYING / 10)
                continue
            except OSError:  # a file system without locks
                pass
            with suppress(FileNotFoundError):  # the last owner may have removed it just now
                if os.path.samestat(os.fstat(file.fileno()), (self.path / _LOCK).stat()):
                    self._lock = file
                    file.truncate(0)
                    print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)

    def clear_leftovers(self) -> None:
        """Remove what those who were interrupted have left; while nobody saves."""
        for partial in self.path.glob(_hidden("step-*")):
            shutil.rmtree(partial, ignore_errors=True)

    def _is_resumed_by(self, resume: str | Path | None) -> bool:
        where = None if resume is None else Path(resume).resolve()
        return where is not None and self.path.resolve() in (where, where.parent)


class Saving:
    """A checkpoint under way: the files, and the moment in which it is there."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.whole = folder, steps, checkpoint_after(steps, folder)
        self._partial = folder / _hidden(self.whole.name)

    def begin(self) -> None:
        """Checkpoints from this step on are of a line that was left when an earlier one was resumed: they go first."""
        with _in_a_sentence(self.folder):
            for abandoned in checkpoints_in(self.folder):
                if steps_of(abandoned) >= self.steps:
                    _remove(abandoned)
            _make(self._partial)

    def write(self, name: str, state: State) -> str:
        """Write a state, and give the digest of the file."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.write_bytes(name, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    def write_bytes(self, name: str, content: bytes) -> None:
        """On the disk, when this returns: a checkpoint must outlive the machine's next breath."""
        if not self._partial.is_dir():
            raise ConnectionError(
                f"{self._partial} is not there: rank 0 has given it up, or is on a host with other files"
            )
        with _in_a_sentence(self.folder), (self._partial / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, files: dict[str, str], ranks: int) -> None:
        """All files are there, with these digests: name them in a manifest, and let the checkpoint be."""
        manifest = json.dumps({"steps": self.steps, "ranks": ranks, "files": files}, indent=1)
        self.write_bytes(MANIFEST, manifest.encode())
        with _in_a_sentence(self.folder):
            _sync(self._partial)
            self._partial.rename(self.whole)
            _sync(self.folder)
            for old in checkpoints_in(self.folder)[:-KEPT]:
                _remove(old)


def save_checkpoint(folder: Folder, steps: int, transport: Transport, common: State, own: State) -> None:
    """Every rank must call it, with the same folder (on hosts that share it).

    Costs two barriers, the writing, and waiting for the disk. When a rank dies, the others raise ConnectionError; the
    checkpoint is there if rank 0 has come to the end of `commit`, and else it is not.
    """
    saving = Saving(folder.path, steps)
    if transport.rank == 0:
        folder.take()
        folder.clear_leftovers()
        saving.begin()
    transport.barrier()
    digest = saving.write(own_file(transport.rank), own)
    digests = all_gather(torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8), transport)
    if transport.rank == 0:
        files = {own_file(rank): bytes(each.tolist()).hex() for rank, each in enumerate(digests)}
        files[COMMON] = saving.write(COMMON, common)
        saving.commit(files, transport.size)
    transport.barrier()


@contextmanager
def _in_a_sentence(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise OSError(f"no checkpoint can be saved in {folder} ({reason}): make room, or give another folder") from None


def _hidden(name: str) -> str:
    """What a checkpoint is called before it is whole, and when it is none any more."""
    return f".{name}.partial"


def _remove(checkpoint: Path) -> None:
    """Also this in a single moment: half of one would be neither whole nor known to be left over."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(_hidden(checkpoint.name))))


def _make(folder: Path) -> None:
    """A folder that is still there when the machine fails, and those above it."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """The names in a folder are on the disk, too, when this returns."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # of a file system that has no need of it, or no way
            raise
    finally:
        os.close(file)
