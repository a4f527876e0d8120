"""The logs of a launch: `worker_<rank>.log` with each rank's output, `scheduler.log` with the course of events."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path


def open_logs(folder: Path, n: int) -> list[Path | None]:
    """Make the folder and n empty files, and remove the logs of an earlier run, which would be mistaken for ours."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: the logs need a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if re.fullmatch(r"scheduler\.log|worker_\d+\.log", file.name):
                file.unlink()
        files: list[Path | None] = []
        for file in (folder / f"worker_{rank}.log" for rank in range(n)):
            file.touch()
            files.append(file)
        return files
    except OSError as error:
        raise OSError(f"the logs cannot be written into {folder} ({error.strerror})") from None


class SchedulerLog:
    """`scheduler.log`: a line with the time for each event; without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder.resolve() / "scheduler.log" if folder else None

    def write(self, text: str) -> None:
        if self.path:
            with self.path.open("a") as file:  # opened each time, because the keeper writes here too
                file.write(f"{datetime.now().isoformat(' ', 'milliseconds')}  {text}\n")
