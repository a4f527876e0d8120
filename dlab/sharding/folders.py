"""The folder of a checkpoint by slice: a file from each rank, and a manifest that makes them one checkpoint.

Files of a new save lie beside those of the one before, under other names; then a new manifest takes the place of the
old one in one atomic step. Whenever a process dies, one of the two is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dlab.collectives import all_gather
from dlab.memory.mapping import give_back
from dlab.transports import Transport

_MANIFEST = "manifest.json"
_READ = 1 << 20  # bytes of a file at a time


def together(transport: Transport, work: Callable[[], str]) -> list[str]:
    """Call a function on every rank, and return what it returned, by rank; if it failed on one, all raise its error.

    Costs two small all-gathers, so that no rank goes on alone or waits for one that has given up.
    """
    try:
        answer = " " + work()
    except Exception as problem:
        answer = "!" + (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    text = answer.encode()
    sizes = [int(each) for each in all_gather(torch.tensor([len(text)]), transport)]
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = all_gather(mine, transport)
    answers = [bytes(each[:size].tolist()).decode() for each, size in zip(texts, sizes, strict=True)]
    for each in answers:
        if each.startswith("!"):
            raise ValueError(each[1:])
    return [each[1:] for each in answers]


def own_file(number: int, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"save-{number}-rank-{rank}.pt"


def common_file(number: int) -> str:
    """Return the name of the file with what is the same on all ranks."""
    return f"save-{number}-common.pt"


def digest(content: Any) -> str:
    """Return the digest of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def begin(folder: Path) -> int:
    """Make the folder, remove what interrupted saves have left in it, and return the number of the next save."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"no checkpoint can be saved in {folder}: {there} is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = read_manifest(folder)["number"] if (folder / _MANIFEST).exists() else 0
    except DamagedSlices:
        number = max((int(found[1]) for each in folder.iterdir() if (found := _saved(each))), default=0)
    except OSError as problem:
        raise OSError(f"no checkpoint can be saved in {folder} ({problem.strerror}): give another folder") from None
    _remove_others(folder, number)
    return number + 1


def write(path: Path, content: Mapping[str, Any]) -> str:
    """Write a file, wait until it is on the disk, and return its digest."""
    try:
        with path.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        return _digest_of(path)
    except (OSError, RuntimeError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise OSError(f"{path} cannot be written ({reason}): make room, or give another folder") from None


def commit(folder: Path, body: Mapping[str, Any]) -> None:
    """Let a new manifest take the place of the old one, and remove the files that only the old one names."""
    new = folder / f".{_MANIFEST}.new"
    with new.open("w") as file:
        json.dump({"sha256": digest(body), "body": body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _MANIFEST)
    _remove_others(folder, body["number"])


class DamagedSlices(ValueError):
    """A file of a checkpoint by slice is missing or is not as it was written."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what the manifest says, if it is as it was written."""
    path = folder / _MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint in {folder}: give the folder of par.save(folder)")
    try:
        content = json.loads(path.read_bytes())
        body = content["body"]
        whole = content["sha256"] == digest(body)
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise DamagedSlices(f"the checkpoint in {folder} is damaged: {path.name} is not as it was written; use another")
    return body


def check(path: Path, expected: str) -> None:
    """Raise an error if a file is missing or is not as it was written; reads it a block at a time."""
    try:
        whole = _digest_of(path) == expected
    except OSError as problem:
        reason = "missing" if isinstance(problem, FileNotFoundError) else f"unreadable ({problem.strerror})"
        raise DamagedSlices(
            f"the checkpoint in {path.parent} is damaged: {path.name} is {reason}; use another"
        ) from None
    if not whole:
        raise DamagedSlices(
            f"the checkpoint in {path.parent} is damaged: {path.name} is not as it was written; use another"
        )


def read(path: Path) -> dict[str, Any]:
    """Map a file into memory: tensors in it are read from the disk where something uses them."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def copy_plain(source: torch.Tensor, box: tuple[slice, ...], target: torch.Tensor) -> None:
    """Copy a part of a tensor."""
    target.copy_(source[box])


def copy_mapped(source: torch.Tensor, box: tuple[slice, ...], target: torch.Tensor) -> None:
    """Copy a part of a tensor in a mapped file, a few rows at a time, and give the memory of the file back after each.

    Otherwise the system keeps the pages that were read in this process's memory as long as there is room. Never call it
    for a tensor in ordinary memory: its contents would be lost.
    """
    if not box:
        copy_plain(source, box, target)
        return
    rows, *rest = box
    step = max(1, _READ // max(1, source[:1].nbytes))
    for row in range(rows.start, rows.stop, step):
        part = source[row : min(row + step, rows.stop)]
        target[row - rows.start : row - rows.start + len(part)].copy_(part[(slice(None), *rest)])
        give_back(part.data_ptr(), part.nbytes)


def _digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ):
            found.update(block)
    return found.hexdigest()


def _saved(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"save-(\d+)-(?:rank-\d+|common)\.pt", path.name)


def _remove_others(folder: Path, number: int) -> None:
    """Remove the files of all saves but one."""
    for each in folder.iterdir():
        if (found := _saved(each)) and int(found[1]) != number and each.is_file():
            each.unlink(missing_ok=True)
