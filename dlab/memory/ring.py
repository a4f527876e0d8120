"""Ring buffers with one writer and one reader: one for messages of any length, one for records that fit as a whole.

In both, `head` counts all bytes ever written and `tail` all bytes ever read; their difference is in the ring.
"""

from __future__ import annotations

import threading

from dlab.memory.fence import WEAK, fence
from dlab.memory.mapping import LINE


class Ring:
    """Bytes on their way from one rank to another.

    The sender writes the bytes and `head`, the receiver reads them and writes `tail`; it is safe because each moves
    its own counter only when it has finished with the bytes, with a fence in between.
    """

    ROOM = 2 * LINE + (1 << 20)  # bytes; a larger message takes several pieces, each of which costs a wait

    def __init__(self, memory: memoryview) -> None:
        self._head = memory[:LINE].cast("Q")
        self._tail = memory[LINE : 2 * LINE].cast("Q")
        self._bytes = memory[2 * LINE :]
        self._room = len(self._bytes)

    def put(self, source: memoryview) -> int:
        """Write as many bytes as there is room for, and return their number."""
        head, room = self._head[0], self._room
        count = min(len(source), room - (head - self._tail[0]))
        if count:
            if WEAK:
                fence()
            start = head % room
            first = min(count, room - start)
            self._bytes[start : start + first] = source[:first]
            if first < count:
                self._bytes[: count - first] = source[first:count]
            if WEAK:
                fence()
            self._head[0] = head + count
        return count

    def get(self, target: memoryview) -> int:
        """Read as many bytes as there are and fit, and return their number."""
        tail = self._tail[0]
        count = min(len(target), self._head[0] - tail)
        if count:
            if WEAK:
                fence()
            start = tail % self._room
            first = min(count, self._room - start)
            target[:first] = self._bytes[start : start + first]
            if first < count:
                target[first:count] = self._bytes[: count - first]
            if WEAK:
                fence()
            self._tail[0] = tail + count
        return count


class RecordRing:
    """Records of any length; one that does not fit is dropped and counted, so the writer never waits.

    One process writes records, `head` and the count of drops, another reads the records and writes `tail`; it is safe
    because a record is complete, and followed by a fence, before `head` moves on.
    """

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory[:LINE].cast("Q")  # head, tail, dropped
        self._bytes = memory[LINE:]
        self._room = len(self._bytes)
        self.turn = threading.Lock()  # between the threads of the writing process

    @property
    def dropped(self) -> int:
        """The number of records that were dropped since the ring was cleared."""
        return self._counters[2]

    def clear(self) -> None:
        """For the reader: empty the ring and reset the counters, while no thread writes."""
        self._counters[0] = self._counters[1] = self._counters[2] = 0
        fence()

    def append(self, record: bytes) -> bool:
        """For the writer, which holds `turn`: write a record, or drop it if the reader is too far behind."""
        head, length, room = self._counters[0], len(record), self._room
        if length > room - (head - self._counters[1]):
            self._counters[2] += 1
            return False
        if WEAK:
            fence()
        start = head % room
        first = min(length, room - start)
        self._bytes[start : start + first] = record[:first]
        if first < length:
            self._bytes[: length - first] = record[first:]
        if WEAK:
            fence()
        self._counters[0] = head + length
        return True

    def take_all(self) -> bytes:
        """For the reader: take all records written since the last call, one after another."""
        head, tail = self._counters[0], self._counters[1]
        if head == tail:
            return b""
        fence()
        start, end = tail % self._room, head % self._room
        if start < end:
            block = bytes(self._bytes[start:end])
        else:
            block = bytes(self._bytes[start:]) + bytes(self._bytes[:end])
        fence()
        self._counters[1] = head
        return block
