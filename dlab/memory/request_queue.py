"""A queue of requests from one process to another, which answers them in order."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import LINE
from dlab.memory.tensors import tensor_in

TEXT = 1 << 16  # bytes for the part of a request that is not numbers
_WORDS = 8  # in a request


class Request(NamedTuple):
    """A request: the operation, the part of a key, and at most three numbers."""

    op: int
    part: int
    numbers: tuple[int, ...]


class RequestQueue:
    """Requests of one worker to one server, and the replies.

    The worker writes requests, their text and how many it has posted; the server reads them, and writes replies and
    how many it has served. It is safe because each counts a request after it has written it, with a fence in between,
    and because at most `DEPTH` requests are unserved, only one of them with a text.
    """

    DEPTH = 256
    ROOM = 2 * LINE + 8 * _WORDS * DEPTH + TEXT

    def __init__(self, memory: memoryview) -> None:
        self._posted = memory[:LINE].cast("Q")  # their number; then the worker's epoch, and the outcome of its training
        self._served = memory[LINE : 2 * LINE].cast("Q")  # their number; then how often the server was replaced
        self._words = memory[2 * LINE : self.ROOM - TEXT].cast("q")
        self._text = memory[self.ROOM - TEXT : self.ROOM]
        self.known = self.generation  # the generation of the server that the worker addresses

    @property
    def posted(self) -> int:
        """The number of requests posted so far."""
        return self._posted[0]

    @property
    def served(self) -> int:
        """The number of requests answered so far."""
        served = self._served[0]
        fence()
        return served

    @property
    def generation(self) -> int:
        """How often the server was replaced."""
        generation = self._served[1]
        fence()
        return generation

    def renew(self) -> None:
        """For a server that replaces one that has died: drop all requests that were posted before."""
        self._served[1] += 1
        fence()
        self._served[0] = self._posted[0]

    def begin_anew(self, generation: int, epoch: int) -> None:
        """For the worker: address this server, and drop all requests that were posted before."""
        self.known, self._posted[1] = generation, epoch

    @property
    def outcome(self) -> int:
        """The outcome of the worker's training: 2 * epoch + 1 for success, 2 * epoch + 2 for failure; 0 at first."""
        outcome = self._posted[2]
        fence()
        return outcome

    @outcome.setter
    def outcome(self, outcome: int) -> None:
        fence()
        self._posted[2] = outcome

    def _tag(self, generation: int) -> int:
        return generation | self._posted[1] << 32

    def post(self, op: int, part: int, *numbers: int) -> int:
        """For the worker: post a request, for which there must be room; returns the number that `served` will reach."""
        number = self._posted[0]
        start = number % self.DEPTH * _WORDS
        for place, word in enumerate((op, part, self._tag(self.known), len(numbers), *numbers), start):
            self._words[place] = word
        fence()
        self._posted[0] = number + 1
        return number + 1

    def head(self) -> Request | None:
        """For the server: return the oldest unanswered request, and skip those for a server that was replaced."""
        while (number := self._served[0]) < self._posted[0]:
            fence()
            start = number % self.DEPTH * _WORDS
            op, part, tag, count, *numbers = self._words[start : start + _WORDS].tolist()
            if tag == self._tag(self.generation):
                return Request(op, part, tuple(numbers[:count]))
            self._served[0] = number + 1
        return None

    def serve(self, reply: int = 0) -> None:
        """For the server: mark the oldest request as answered, with a number as the reply."""
        self._words[(self._served[0] % self.DEPTH + 1) * _WORDS - 1] = reply
        fence()
        self._served[0] += 1

    def reply(self, number: int) -> int:
        """For the worker: return the reply to a served request, before its slot is reused."""
        return self._words[((number - 1) % self.DEPTH + 1) * _WORDS - 1]

    def write(self, content: Any) -> int:
        """Write the text of the next request, while no other request with a text is unserved; returns its length."""
        text = json.dumps(content).encode()
        if len(text) > TEXT - 8:
            raise ValueError(f"a request to a server has {len(text)} bytes of text: only {TEXT - 8} fit")
        self._text[:8] = len(text).to_bytes(8, "little")
        self._text[8 : 8 + len(text)] = text
        return len(text)

    def text(self, length: int) -> torch.Tensor | None:
        """Return the memory of a text of this length, which starts with the length; None if there is no text."""
        return tensor_in(self._text, torch.uint8, 8 + length) if length else None

    def read(self) -> Any:
        """Read the text that `write` has written."""
        return json.loads(bytes(self._text[8 : 8 + int.from_bytes(self._text[:8], "little")]))
