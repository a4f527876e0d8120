"""Checkpoints: a folder per saved step, whole or not there at all, with the digest of every file in it.

Rank 0 writes what all ranks share, and every rank what is its own. The last two are kept, so that when one is damaged
the one before it can be used. Taught in `03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlab.collectives import all_gather
from dlab.transports import Transport

State = dict[str, Any]
MANIFEST, COMMON = "manifest.json", "common.pt"
KEPT = 2


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, or is not what was written; the message says which, and what can be used."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was found to be whole."""

    folder: Path
    ranks: int
    steps: int

    def common(self) -> State:
        """What all ranks share."""
        return _read(self.folder / COMMON)

    def own(self, rank: int) -> State:
        """What a rank had for itself."""
        return _read(self.folder / _name(rank))


def checkpoint_after(steps: int, folder: str | Path) -> Path:
    """Where it is, in the folder of all."""
    return Path(folder) / f"step-{steps:08d}"


def save_checkpoint(folder: str | Path, steps: int, wire: Transport, common: State, own: State) -> Path:
    """Every rank must call it, with the same folder (on hosts that share it), and gets the checkpoint's own.

    Costs a barrier and the writing.
    """
    folder = Path(folder)
    whole, partial = checkpoint_after(steps, folder), folder / f".step-{steps:08d}.partial"
    if wire.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # somebody was interrupted here
        partial.mkdir(parents=True)
    wire.barrier()
    digest = _write(partial / _name(wire.rank), own)
    digests = all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), wire)
    if wire.rank == 0:
        files = {_name(rank): bytes(each.tolist()).hex() for rank, each in enumerate(digests)}
        files[COMMON] = _write(partial / COMMON, common).hex()
        manifest = json.dumps({"steps": steps, "ranks": wire.size, "files": files}, indent=1)
        _write_bytes(partial / MANIFEST, manifest.encode())
        shutil.rmtree(whole, ignore_errors=True)  # of a training that came this far before
        partial.rename(whole)
        for old in _all(folder)[:-KEPT]:
            shutil.rmtree(old)
    wire.barrier()
    return whole


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The newest in a folder, or the one at this path, after a look at every file of it."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _check(path, _all(path.parent))
    found = _all(path)
    if not found:
        raise FileNotFoundError(f"there is no checkpoint in {path}: give the folder that checkpoint= named")
    return _check(found[-1], found)


def _check(folder: Path, all_of_them: list[Path]) -> Checkpoint:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name, digest in manifest["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise ValueError(f"{folder / name} is not what was written")
        return Checkpoint(folder, manifest["ranks"], manifest["steps"])
    except FileNotFoundError as problem:
        reason = f"{problem.filename} is missing"
    except (ValueError, KeyError, TypeError) as problem:
        reason = str(problem) if "not what was written" in str(problem) else f"{folder / MANIFEST} cannot be read"
    earlier = [other for other in all_of_them if other < folder]
    advice = f"resume from {earlier[-1]} instead" if earlier else "there is none before it"
    raise DamagedCheckpoint(f"the checkpoint {folder.name} is damaged: {reason}; {advice}")


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _name(rank: int) -> str:
    return f"rank-{rank}.pt"


def _write(path: Path, state: State) -> bytes:
    """Write a state, and give the digest of the file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    _write_bytes(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).digest()


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a checkpoint must outlive the machine's next breath


def _read(path: Path) -> State:
    return torch.load(path, map_location="cpu", weights_only=True)
