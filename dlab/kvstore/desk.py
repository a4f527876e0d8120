"""The desk: memory that the workers and the servers of a cluster share, and nobody else uses."""

from __future__ import annotations

import os

from dlab.memory.front import Front
from dlab.memory.mapping import map_file, new_file


class Desk:
    """Memory between workers and servers: an area for each of them, which it lays out as it likes, after a front.

    An area is far larger than what will be in it: pages that nobody has touched cost nothing.
    """

    AREA = 1 << 34

    def __init__(self, workers: int, servers: int, file: int | None = None) -> None:
        self._size = self.size(workers + servers)
        self.file = new_file("dlab-desk", self._size) if file is None else file
        self._front = Front(map_file(self.file, Front.ROOM), workers + servers)

    @classmethod
    def size(cls, processes: int) -> int:
        """Bytes for so many processes."""
        return Front.ROOM + processes * cls.AREA

    def clear(self) -> None:
        """All zeros again, and nothing kept; while no worker runs."""
        os.truncate(self.file, 0)
        os.truncate(self.file, self._size)

    def map(self) -> memoryview:
        """As this process sees it."""
        return map_file(self.file, self._size)

    def end(self) -> None:
        """Let the servers return."""
        self._front.end()
