"""Shared memory as the weakest processors have it, in one process: stores arrive in any order, loads find old values.

Each `Core` has stores that have not arrived yet, and a memory of what it has seen. Only a fence makes all of its stores
arrive, and lets it see all that has arrived.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

_current = threading.local()  # the core on which this thread computes
_lock = threading.RLock()


def fence() -> None:
    """What `dlab.memory.fence.fence` is on such a processor."""
    with _lock:
        _current.core.flush()


class WeakMemory:
    """Bytes that several cores share."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self.content, self.random = bytearray(nbytes), random.Random(seed)

    def core(self) -> Core:
        """One more."""
        return Core(self)


class Core:
    """One process's view of the memory. `with core:` computes on it."""

    def __init__(self, memory: WeakMemory) -> None:
        self._memory, self._seen = memory, bytearray(memory.content)
        self._pending: list[tuple[int, bytes]] = []

    def __enter__(self) -> View:
        _current.core = self
        return View(self, 0, len(self._seen), "B")

    def __exit__(self, *_: object) -> None:
        _current.core = None

    def flush(self) -> None:
        """All stores arrive, and everything that has arrived is seen."""
        while self._pending:
            self._arrive(0)
        self._seen[:] = self._memory.content

    def store(self, offset: int, content: bytes) -> None:
        """Seen by this core at once, by others some time."""
        with _lock:
            self._seen[offset : offset + len(content)] = content
            self._pending.append((offset, content))
            self._let_some_arrive()

    def idle(self) -> None:
        """Time passes."""
        with _lock:
            self._let_some_arrive()

    def load(self, offset: int, nbytes: int) -> bytes:
        """Either what has arrived, or what this core has seen there before; its own stores always."""
        with _lock:
            self._let_some_arrive()
            if self._memory.random.random() < 0.5:
                self._seen[offset : offset + nbytes] = self._memory.content[offset : offset + nbytes]
                for at, content in self._pending:
                    self._seen[at : at + len(content)] = content
            return bytes(self._seen[offset : offset + nbytes])

    def _let_some_arrive(self) -> None:
        while self._pending and self._memory.random.random() < 0.3:
            self._arrive(self._memory.random.randrange(len(self._pending)))

    def _arrive(self, number: int) -> None:
        """Of stores to the same place, the oldest first."""
        offset, content = self._pending[number]
        number = next(
            place
            for place, (at, other) in enumerate(self._pending)
            if at < offset + len(content) and offset < at + len(other)
        )
        offset, content = self._pending.pop(number)
        self._memory.content[offset : offset + len(content)] = content


class View:
    """What stands in for a memoryview."""

    def __init__(self, core: Core, offset: int, nbytes: int, format: str) -> None:
        self._core, self._offset, self._nbytes, self._format = core, offset, nbytes, format
        self._item = struct.calcsize(format)

    def cast(self, format: str) -> View:
        """The same bytes as other numbers."""
        return View(self._core, self._offset, self._nbytes, format)

    def __len__(self) -> int:
        return self._nbytes // self._item

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            begin, end, _ = place.indices(len(self))
            length = max(0, end - begin)
            return View(self._core, self._offset + begin * self._item, length * self._item, self._format)
        if place >= len(self):
            raise IndexError
        return struct.unpack(self._format, self._core.load(self._offset + place * self._item, self._item))[0]

    def __setitem__(self, place: int | slice, value: Any) -> None:
        if isinstance(place, slice):
            begin, end, _ = place.indices(len(self))
            content = bytes(value)
            assert len(content) == (end - begin) * self._item
            if content:
                self._core.store(self._offset + begin * self._item, content)
        else:
            self._core.store(self._offset + place * self._item, struct.pack(self._format, value))

    def __bytes__(self) -> bytes:
        return self._core.load(self._offset, self._nbytes)

    def __iter__(self) -> Iterator[Any]:
        yield from (item for (item,) in struct.iter_unpack(self._format, bytes(self)))

    def tolist(self) -> list[Any]:
        """The numbers."""
        return list(self)
