"""Checkpoints: a folder per saved step, with the digest of every file in it, so that a damaged one is found.

Rank 0 has written what all ranks share, and every rank what is its own; `saving.py` says how. Taught in
`03_sync_sgd.ipynb`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]
MANIFEST, COMMON = "manifest.json", "common.pt"


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, or is not what was written; the message says which, and what can be used."""


class _Damage(Exception):
    """What is wrong with it."""


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
        return _read(self.folder / own_file(rank))


def checkpoint_after(steps: int, folder: str | Path) -> Path:
    """Where it is, in the folder of all."""
    return Path(folder) / f"step-{steps:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first; whatever else has such a name is none."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file() and not path.is_symlink()), key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """After how many steps it was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def own_file(rank: int) -> str:
    """The name of the file with what is a rank's own."""
    return f"rank-{rank}.pt"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The newest in a folder, or the one at this path, after a look at every file of it."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _open(path, checkpoints_in(path.parent))
    found = checkpoints_in(path)
    if not found:
        raise FileNotFoundError(f"there is no checkpoint in {path}: give the folder that checkpoint= named")
    return _open(found[-1], found)


def _open(folder: Path, all_of_them: list[Path]) -> Checkpoint:
    try:
        return _check(folder)
    except _Damage as damage:
        usable = [other for other in all_of_them if other != folder and _is_whole(other)]
        advice = f"resume from {usable[-1]} instead" if usable else f"no other one in {folder.parent} is whole"
        raise DamagedCheckpoint(f"the checkpoint {folder.name} is damaged: {damage}; {advice}") from None


def _is_whole(folder: Path) -> bool:
    try:
        return bool(_check(folder))
    except _Damage:
        return False


def _check(folder: Path) -> Checkpoint:
    """Only files that a checkpoint of so many ranks has are read, whatever the manifest names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        steps, ranks, files = manifest["steps"], manifest["ranks"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _Damage(f"{folder / MANIFEST} cannot be read") from None
    if type(steps) is not int or steps < 0 or type(ranks) is not int or ranks < 1:
        raise _Damage(f"{folder / MANIFEST} tells of steps={steps!r} and ranks={ranks!r}")
    if (
        not isinstance(files, dict)
        or len(files) != ranks + 1
        or set(files) != {COMMON, *(own_file(rank) for rank in range(ranks))}
    ):
        raise _Damage(f"{folder / MANIFEST} does not name the files of {ranks} ranks")
    for name, digest in files.items():
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise _Damage(f"{folder / name} is missing") from None
        except OSError as problem:
            raise _Damage(f"{folder / name} cannot be read ({problem.strerror})") from None
        if found != digest:
            raise _Damage(f"{folder / name} is not what was written")
    return Checkpoint(folder, ranks, steps)


def _read(path: Path) -> State:
    return torch.load(path, map_location="cpu", weights_only=True)
