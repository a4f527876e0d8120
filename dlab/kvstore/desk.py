"""The desk: memory that the workers and the servers of a cluster share, and no other process uses."""

from __future__ import annotations

import os

from dlab.memory.front import Front
from dlab.memory.mapping import map_file, new_file


class Desk:
    """Memory between workers and servers: a front, then an area for each process, which allocates from it.

    An area is far larger than its contents will be, because pages that were never touched cost nothing.
    """

    AREA = 1 << 34

    def __init__(self, workers: int, servers: int, file: int | None = None) -> None:
        self._size = self.size(workers + servers)
        self.file = new_file("dlab-desk", self._size) if file is None else file
        self._front = Front(map_file(self.file, Front.ROOM), workers + servers)

    @classmethod
    def size(cls, processes: int) -> int:
        """Return the number of bytes for so many processes."""
        return Front.ROOM + processes * cls.AREA

    def clear(self) -> None:
        """Set all bytes to zero and free the memory; call it only while no worker runs."""
        os.truncate(self.file, 0)
        os.truncate(self.file, self._size)

    def map(self) -> memoryview:
        """Map the memory into this process."""
        return map_file(self.file, self._size)

    def end(self) -> None:
        """Let the servers return."""
        self._front.end()
