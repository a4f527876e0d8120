"""The control block: shared memory in which workers read knobs and delays, and write waits and events, while they run.

No message is sent and no process waits: `run.set("lr", 0.05)` writes here, `dlab.knob("lr", 0.01)` reads here, and a
read costs one memory access when nothing has changed.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dlab.events import RING_BYTES, EventRing
from dlab.memory.mapping import map_file, new_file
from dlab.memory.versioned_text import VersionedText
from dlab.memory.waits import SLOTS, Slot

_KNOBS = 64 << 10  # room for the knobs, as JSON
_DELAYS = 64 << 10  # room for a delay per rank: 8192 ranks


class Knobs(NamedTuple):
    """The knobs that were set: values by name, and factors, which multiply that value or, without one, the default."""

    values: dict[str, Any]
    factors: dict[str, float]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a knob's current value; a factor of 1 leaves it as it is, and whole numbers stay whole."""
        value, factor = self.values.get(name, default), self.factors.get(name, 1)
        if factor == 1 or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        product = float(f"{value * factor:.12g}")  # 0.08, not 0.08000000000000002
        return round(product) if isinstance(value, int) else product


class ControlBlock:
    """Knobs, and for each rank a delay, what it waits for, and an event ring, in one anonymous shared-memory file.

    The parent writes knobs and delays; the workers write the rest, which the parent reads. A delay needs no fence,
    since it is a single number.
    """

    def __init__(self, ranks: int, file: int | None = None) -> None:
        size = _KNOBS + _DELAYS + ranks * (SLOTS * Slot.ROOM + RING_BYTES)
        self.file = new_file("dlab-control", size) if file is None else file
        memory = map_file(self.file, size)
        self._knobs = VersionedText(memory[:_KNOBS])
        self.delays = memory[_KNOBS : _KNOBS + 8 * ranks].cast("d")
        slots, rings = memory[_KNOBS + _DELAYS :], memory[_KNOBS + _DELAYS + ranks * SLOTS * Slot.ROOM :]
        every = [Slot(slots[place * Slot.ROOM : (place + 1) * Slot.ROOM]) for place in range(ranks * SLOTS)]
        self.waits = [every[rank * SLOTS : (rank + 1) * SLOTS] for rank in range(ranks)]  # the main thread's first
        self.rings = [EventRing(rings[rank * RING_BYTES : (rank + 1) * RING_BYTES]) for rank in range(ranks)]
        self._seen, self._values = -1, Knobs({}, {})

    def clear(self) -> None:
        """Reset everything for the next run; call it only while no worker runs."""
        self.write(Knobs({}, {}))
        for rank, ring in enumerate(self.rings):
            self.delays[rank] = 0.0
            ring.clear()
            for slot in self.waits[rank]:
                slot.clear()

    def write(self, knobs: Knobs) -> None:
        """Replace all knobs. Only the parent writes."""
        try:
            text = json.dumps(knobs).encode()
        except TypeError:
            raise TypeError("a knob must be a number, a string, a boolean, None, or a list of these") from None
        if len(text) > self._knobs.room:
            raise ValueError(f"the knobs take {len(text)} bytes together, but there is room for {self._knobs.room}")
        self._knobs.write(text)

    def read(self) -> Knobs:
        """Return the current knobs."""
        if (found := self._knobs.read_newer(self._seen)) is not None:
            version, text = found
            self._seen, self._values = version, Knobs(*json.loads(text)) if text else Knobs({}, {})
        return self._values
