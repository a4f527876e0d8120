"""A text in shared memory that is replaced now and then, and costs nothing to look at as long as it is the same."""

from __future__ import annotations

from dlab.memory.fence import fence


class VersionedText:
    """Bytes with a version, which is odd while they are written.

    One process writes, all others read; it is safe because a reader takes the text only if its version was even, and
    the same before and after, with a fence on both sides.
    """

    def __init__(self, memory: memoryview) -> None:
        self._version = memory[:16].cast("Q")  # version, then length
        self._text = memory[16:]

    @property
    def room(self) -> int:
        """The bytes of the longest text that fits."""
        return len(self._text)

    def write(self, text: bytes) -> None:
        """Replace it by one that fits."""
        self._version[0] += 1
        fence()
        self._text[: len(text)] = text
        self._version[1] = len(text)
        fence()
        self._version[0] += 1

    def read_newer(self, seen: int) -> tuple[int, bytes] | None:
        """The version and its text; None if the reader has seen it. Costs one read of memory then. At first, -1."""
        while (version := self._version[0]) != seen:
            fence()
            text = bytes(self._text[: self._version[1]])
            fence()
            if version % 2 == 0 and version == self._version[0]:
                return version, text
        return None
