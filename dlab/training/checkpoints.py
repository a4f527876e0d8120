"""Read checkpoints: a folder per saved step, with a digest of every file in it, so that damage is detected.

Rank 0 writes the state that all ranks share, and every rank its own; `saving.py` shows how. Taught in
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
    """A file of a checkpoint is missing or damaged; the message names it, and a checkpoint to use instead."""


class _Damage(Exception):
    """A checkpoint failed a check; the message says which."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have all been checked."""

    folder: Path
    ranks: int
    steps: int

    def common(self) -> State:
        """Read the state that all ranks share."""
        return _read(self.folder / COMMON)

    def own(self, rank: int) -> State:
        """Read the state that belongs to one rank."""
        return _read(self.folder / own_file(rank))


def checkpoint_after(steps: int, folder: str | Path) -> Path:
    """Return the path of the checkpoint that is saved after so many steps."""
    return Path(folder) / f"step-{steps:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first; a folder without a manifest does not count."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file() and not path.is_symlink()), key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def own_file(rank: int) -> str:
    """Return the name of the file that holds a rank's own state."""
    return f"rank-{rank}.pt"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at this path, or the newest one in this folder, after checking the digest of every file."""
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
        advice = f"resume from {usable[-1]} instead" if usable else f"{folder.parent} holds no other complete one"
        raise DamagedCheckpoint(f"the checkpoint {folder.name} is damaged: {damage}; {advice}") from None


def _is_whole(folder: Path) -> bool:
    try:
        return bool(_check(folder))
    except _Damage:
        return False


def _check(folder: Path) -> Checkpoint:
    """Check every file of a checkpoint; only the expected names are read, whatever else the manifest lists."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        steps, ranks, files = manifest["steps"], manifest["ranks"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _Damage(f"{folder / MANIFEST} cannot be read") from None
    if type(steps) is not int or steps < 0 or type(ranks) is not int or ranks < 1:
        raise _Damage(f"{folder / MANIFEST} says steps={steps!r} and ranks={ranks!r}")
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
            raise _Damage(f"{folder / name} differs from what was written")
    return Checkpoint(folder, ranks, steps)


def _read(path: Path) -> State:
    return torch.load(path, map_location="cpu", weights_only=True)
