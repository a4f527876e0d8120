"""Save checkpoints atomically, in a folder that belongs to one training.

A checkpoint is written to a hidden folder, which is then renamed in one atomic step: a process that dies before the
rename leaves no checkpoint, one that dies after it a complete one. The last two are kept, so that when one is damaged
the one before it can be used. Taught in `03_sync_sgd.ipynb`.
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
_DYING = 0.2  # seconds within which the lock of a killed process is released


class FolderInUse(ValueError):
    """Another training is saving to this folder; the message says which process."""


class Folder:
    """The folder that one training saves to. In a `with` block, a lock is held from `claim` or `take` to the end.

    Rank 0 holds the lock; if it dies, the rank that replaces it takes the lock with the next checkpoint. The system
    releases the lock when its process ends, so a stale one never blocks a training. Between hosts it works as well as
    `flock` does on their shared file system; where there are no locks at all, no training is refused.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: TextIO | None = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self.clear_leftovers()
            (self.path / _LOCK).unlink(missing_ok=True)  # while the lock is still held
            self._lock.close()

    def check(self, resume: str | Path | None, overwrite: bool) -> None:
        """Refuse a path that cannot be a folder, and a folder with checkpoints of another training."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"checkpoint={str(self.path)!r}: {there} is a file; give a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"checkpoint={str(self.path)!r}: {there} cannot be written to; give another folder")
        if not overwrite and not self._is_resumed_by(resume) and (found := checkpoints_in(self.path)):
            raise ValueError(
                f"{self.path} holds the checkpoints of another training, up to {found[-1].name}: continue it with "
                f"resume={str(self.path)!r}, give another folder, or remove them with overwrite=True"
            )

    def check_free(self) -> None:
        """Refuse the folder, before any worker starts, if another training is saving to it."""
        if (self.path / _LOCK).is_file():
            with Folder(self.path) as mine:
                mine.take()

    def claim(self, resume: str | Path | None, overwrite: bool) -> None:
        """For rank 0, before the first step: lock the folder; with `overwrite`, remove the checkpoints in it."""
        self.take()
        self.check(resume, overwrite)
        self.clear_leftovers()
        if not self._is_resumed_by(resume):
            for other in checkpoints_in(self.path):
                _remove(other)

    def take(self) -> None:
        """Take the lock, unless it is held already; raises `FolderInUse` if another process holds it."""
        until = time.monotonic() + _DYING
        while self._lock is None:
            with _explaining_errors(self.path):
                _make(self.path)
                file = (self.path / _LOCK).open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    owner = file.read() or "another process"
                    raise FolderInUse(
                        f"{self.path} is in use, {owner} saves its checkpoints there: wait until it has finished, "
                        "or give another folder"
                    ) from None
                time.sleep(_DYING / 10)
                continue
            except OSError:  # a file system without locks
                pass
            with suppress(FileNotFoundError):  # the last owner may have just removed it
                if os.path.samestat(os.fstat(file.fileno()), (self.path / _LOCK).stat()):
                    self._lock = file
                    file.truncate(0)
                    print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)

    def clear_leftovers(self) -> None:
        """Remove unfinished checkpoints of interrupted saves; call it only while no rank is saving."""
        for partial in self.path.glob(_hidden("step-*")):
            shutil.rmtree(partial, ignore_errors=True)

    def _is_resumed_by(self, resume: str | Path | None) -> bool:
        where = None if resume is None else Path(resume).resolve()
        return where is not None and self.path.resolve() in (where, where.parent)


class Saving:
    """A checkpoint that is being written to a hidden folder until `commit` renames it."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.whole = folder, steps, checkpoint_after(steps, folder)
        self._partial = folder / _hidden(self.whole.name)

    def begin(self) -> None:
        """Make the hidden folder, and remove checkpoints of this and later steps, left from before a resume."""
        with _explaining_errors(self.folder):
            for abandoned in checkpoints_in(self.folder):
                if steps_of(abandoned) >= self.steps:
                    _remove(abandoned)
            _make(self._partial)

    def write(self, name: str, state: State) -> str:
        """Write a state to a file, and return the digest of the file."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.write_bytes(name, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, and wait until it is on the disk, so that it survives a crash of the machine."""
        if not self._partial.is_dir():
            raise ConnectionError(
                f"{self._partial} is missing: rank 0 gave up this save, or the hosts do not share the folder"
            )
        with _explaining_errors(self.folder), (self._partial / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, files: dict[str, str], ranks: int) -> None:
        """Write the manifest with the digests of all files, rename the folder, and remove old checkpoints."""
        manifest = json.dumps({"steps": self.steps, "ranks": ranks, "files": files}, indent=1)
        self.write_bytes(MANIFEST, manifest.encode())
        with _explaining_errors(self.folder):
            _sync(self._partial)
            self._partial.rename(self.whole)
            _sync(self.folder)
            for old in checkpoints_in(self.folder)[:-KEPT]:
                _remove(old)


def save_checkpoint(folder: Folder, steps: int, transport: Transport, common: State, own: State) -> None:
    """Save a checkpoint; every rank must call it with the same folder, which all hosts must share.

    Costs two barriers, an all-gather of digests, and the time to write to disk. When a rank dies, the others raise
    ConnectionError; the checkpoint exists if rank 0 has completed `commit`, and otherwise does not.
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
def _explaining_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise OSError(f"no checkpoint can be saved in {folder} ({reason}): make room, or give another folder") from None


def _hidden(name: str) -> str:
    """Return the name that a checkpoint has before it is complete and while it is being removed."""
    return f".{name}.partial"


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint to its hidden name before deleting it, so that no half-deleted one is ever visible."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(_hidden(checkpoint.name))))


def _make(folder: Path) -> None:
    """Make a folder and its parents, each synced to disk so that it survives a crash of the machine."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # the file system does not support fsync of a folder
            raise
    finally:
        os.close(file)
