"""A text in shared memory that is replaced now and then, and costs almost nothing to check while it is the same."""

from __future__ import annotations

from dlab.memory.fence import fence


class VersionedText:
    """Bytes with a version number, which is odd while they are being written (a seqlock).

    One process writes, all others read; it is safe because a reader accepts the text only if the version was even, and
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
        """Replace the text by one that fits."""
        self._version[0] += 1
        fence()
        self._text[: len(text)] = text
        self._version[1] = len(text)
        fence()
        self._version[0] += 1

    def read_newer(self, seen: int) -> tuple[int, bytes] | None:
        """Return the version and its text; None, at the cost of one read, if the version is `seen` (-1 at first)."""
        while (version := self._version[0]) != seen:
            fence()
            text = bytes(self._text[: self._version[1]])
            fence()
            if version % 2 == 0 and version == self._version[0]:
                return version, text
        return None
