"""The control: one shared-memory page set that the parent writes on and workers read while they run, and their events.

No message is sent and nobody waits: `run.set("lr", 0.05)` writes here, `dlab.knob("lr", 0.01)` reads here, and the
reader pays one memory access when nothing has changed.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any, NamedTuple

from dlab.events import RING_BYTES, EventRing
from dlab.memory.semaphore import Semaphore
from dlab.memory.waits import SLOTS, Slot

_KNOBS = 64 << 10  # room for the knobs, as JSON
_DELAYS = 64 << 10  # room for a delay per rank: 8192 ranks


class Front:
    """The first pages of a desk: the processes' numbers, their semaphores, and whether all is over."""

    ROOM = 1 << 16
    _SEMAPHORES = 1 << 14  # where they begin

    def __init__(self, memory: memoryview, processes: int) -> None:
        self.numbers = memory[: 8 * processes].cast("Q")
        begins = range(self._SEMAPHORES, self._SEMAPHORES + processes * Semaphore.ROOM, Semaphore.ROOM)
        self.semaphores = [Semaphore(memory[begin : begin + Semaphore.ROOM]) for begin in begins]
        self._over = memory[self.ROOM - 8 : self.ROOM].cast("Q")

    @property
    def over(self) -> bool:
        """Is no worker left to be served?"""
        return bool(self._over[0])

    def end(self) -> None:
        """Let the servers return."""
        if not self.over:
            self._over[0] = 1
            for semaphore in self.semaphores:
                semaphore.post()


class Desk:
    """Memory between workers and servers: an area for each of them, which it lays out as it likes, after a front.

    An area is far larger than what will be in it: pages that nobody has touched cost nothing.
    """

    AREA = 1 << 34

    def __init__(self, workers: int, servers: int, file: int | None = None) -> None:
        self._size = self.size(workers + servers)
        self.file = os.memfd_create("dlab-desk") if file is None else file
        if file is None:
            os.truncate(self.file, self._size)
        self.front = Front(memoryview(mmap.mmap(self.file, Front.ROOM)), workers + servers)

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
        return memoryview(mmap.mmap(self.file, self._size))


class Knobs(NamedTuple):
    """What was turned: values by name, and factors, which multiply that value or, where there is none, the default."""

    values: dict[str, Any]
    factors: dict[str, float]

    def get(self, name: str, default: Any = None) -> Any:
        """A knob's value now; nothing is computed where the factor is 1, and whole numbers stay whole."""
        value, factor = self.values.get(name, default), self.factors.get(name, 1)
        if factor == 1 or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        product = float(f"{value * factor:.12g}")  # 0.08, not 0.08000000000000002
        return round(product) if isinstance(value, int) else product


class ControlBlock:
    """Knobs, and for each rank a delay, what it waits for, and an event ring, in one anonymous shared-memory file."""

    def __init__(self, ranks: int, file: int | None = None) -> None:
        size = _KNOBS + _DELAYS + ranks * (SLOTS * Slot.ROOM + RING_BYTES)
        if file is None:
            file = os.memfd_create("dlab-control")
            os.truncate(file, size)
        self.file = file
        memory = memoryview(mmap.mmap(file, size))
        self._version = memory[:16].cast("Q")  # version, then length
        self._knobs = memory[16:_KNOBS]
        self.delays = memory[_KNOBS : _KNOBS + 8 * ranks].cast("d")
        slots, rings = memory[_KNOBS + _DELAYS :], memory[_KNOBS + _DELAYS + ranks * SLOTS * Slot.ROOM :]
        every = [Slot(slots[place * Slot.ROOM : (place + 1) * Slot.ROOM]) for place in range(ranks * SLOTS)]
        self.waits = [every[rank * SLOTS : (rank + 1) * SLOTS] for rank in range(ranks)]  # the main thread's first
        self.rings = [EventRing(rings[rank * RING_BYTES : (rank + 1) * RING_BYTES]) for rank in range(ranks)]
        self._seen, self._values = -1, Knobs({}, {})

    def clear(self) -> None:
        """A clean control for the next run; while no worker runs."""
        self.write(Knobs({}, {}))
        for rank, ring in enumerate(self.rings):
            self.delays[rank] = 0.0
            ring.clear()
            for slot in self.waits[rank]:
                slot.clear()

    def write(self, knobs: Knobs) -> None:
        """Replace all knobs. Only the parent writes; an odd version says that it is writing."""
        try:
            text = json.dumps(knobs).encode()
        except TypeError:
            raise TypeError("a knob must be a number, a string, a boolean, None, or a list of these") from None
        if len(text) > len(self._knobs):
            raise ValueError(f"the knobs take {len(text)} bytes together, there is room for {len(self._knobs)}")
        self._version[0] += 1
        self._knobs[: len(text)] = text
        self._version[1] = len(text)
        self._version[0] += 1

    def read(self) -> Knobs:
        """The knobs as they are now."""
        while self._version[0] != self._seen:
            version = self._version[0]
            text = bytes(self._knobs[: self._version[1]])
            if version % 2 == 0 and version == self._version[0]:
                self._values = Knobs(*json.loads(text)) if text else Knobs({}, {})
                self._seen = version
        return self._values
