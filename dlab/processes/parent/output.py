"""Show the output of workers in the cell that called them, line by line, as `[rank 2] …`."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Sequence

BAR_SECONDS = 5.0  # a progress bar that keeps changing is shown at this interval
_UP = "\x1b[A"
_CURSOR = re.compile(r"\x1b\[\d*[A-HJKSTf]")  # cursor movements would garble the other ranks' lines


class LineReader:
    """The reading end of a worker's stdout or stderr, which splits the stream into lines.

    A carriage return restarts the line, as on a terminal, so that only the last state of a progress bar is shown. A
    nested bar is drawn one line below before the cursor goes up again: it is left out, and the outer bar continues.
    """

    def __init__(self, rank: int, file: int) -> None:
        self.rank, self.file = rank, file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._line = ""
        self._above: list[str] = []  # bars that have ended, or that the cursor has only left for a moment
        self._bar_shown = time.monotonic()
        os.set_blocking(file, False)

    def read(self) -> tuple[list[str], bool]:
        """Return the complete lines that have arrived, and whether the stream continues."""
        lines: list[str] = []
        while True:
            try:
                data = os.read(self.file, 1 << 16)
            except BlockingIOError:
                return lines, True
            if not data:
                return lines + self.flush(), False
            lines += self._feed(self._decode(data))
            if len(lines) > 1000:  # let the other ranks have a turn
                return lines, True

    def flush(self) -> list[str]:
        """Return the last line, if it is unfinished."""
        line, self._line = self._shown(self._line), ""
        return self._take_bars() + ([line] if line else [])

    def _feed(self, text: str) -> list[str]:
        if "\r" not in self._line and not self._above:  # no bar so far: one that begins now has just begun
            self._bar_shown = time.monotonic()
        *complete, self._line = (self._line + text).split("\n")
        lines = []
        for line in complete:
            line = self._back_up(line)
            if "\r" in line or (self._above and not line):
                self._above.append(line)
            else:
                lines += [*self._take_bars(), self._shown(line)]
        self._line = self._back_up(self._line)
        if self._line.count("\r") > 1:
            lines += self._take_bars()  # the next bar is being redrawn, so those above are finished
        if "\r" in self._line:
            self._line = "\r" + self._shown(self._line) + ("\r" if self._line.endswith("\r") else "")
            if time.monotonic() - self._bar_shown > BAR_SECONDS:
                self._bar_shown = time.monotonic()
                lines.append(self._shown(self._line))
        return lines

    def _back_up(self, line: str) -> str:
        """Return to the bar above, if the cursor went down to draw this line and then up again."""
        while self._above and _UP in line:
            line = self._above.pop() + line.partition(_UP)[2]
        return line

    def _take_bars(self) -> list[str]:
        bars, self._above = [self._shown(bar) for bar in self._above], []
        return [bar for bar in bars if bar]

    @staticmethod
    def _shown(line: str) -> str:
        return _CURSOR.sub("", line).rstrip("\r").rsplit("\r", 1)[-1].rstrip()


def relay(readers: Sequence[tuple[LineReader, LineReader]], to_the_end: bool = False) -> list[LineReader]:
    """Print what has arrived, by rank, stdout before stderr; returns the readers that have ended.

    The order in which a rank wrote its lines is kept.
    """
    ended = []
    for error in (False, True):
        lines = []
        for pair in readers:
            reader = pair[error]
            texts, open_ = reader.read()
            if to_the_end:
                texts += reader.flush()
            if not open_:
                ended.append(reader)
            lines += [(reader.rank, text) for text in texts]
        show(lines, error)
    return ended


def say(text: str) -> None:
    """Print a message of dlab itself."""
    print(f"dlab: {text}", file=sys.stderr, flush=True)


def show(lines: list[tuple[int, str]], error: bool) -> None:
    """Print lines given as (rank, text)."""
    if lines:
        stream = sys.stderr if error else sys.stdout
        stream.write("".join(f"[rank {rank}] {text}\n" for rank, text in lines))
        stream.flush()
