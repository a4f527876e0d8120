"""Requests of one process to another, which answers them in order."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from dlab.memory.fence import fence
from dlab.memory.mapping import LINE
from dlab.memory.tensors import tensor_in

TEXT = 1 << 16  # bytes for what is not a number
_WORDS = 8  # in a request


class Request(NamedTuple):
    """What is asked for, of which part, and its numbers, of which there are three at most."""

    op: int
    part: int
    numbers: tuple[int, ...]


class RequestQueue:
    """Requests of one worker to one server, and the answers.

    The worker writes requests, their text and how many it has posted; the server reads them, and writes answers and
    how many it has served. It is safe because each counts a request after it has written it, with a fence in between,
    and because the worker posts no more than `DEPTH` that are not served, and only one of them with a text.
    """

    DEPTH = 256
    ROOM = 2 * LINE + 8 * _WORDS * DEPTH + TEXT

    def __init__(self, memory: memoryview) -> None:
        self._posted = memory[:LINE].cast("Q")  # how many; then the worker's epoch, and how its training has ended
        self._served = memory[LINE : 2 * LINE].cast("Q")  # how many; then how often the server was replaced
        self._words = memory[2 * LINE : self.ROOM - TEXT].cast("q")
        self._text = memory[self.ROOM - TEXT : self.ROOM]
        self.known = self.generation  # of the server that the worker means

    @property
    def posted(self) -> int:
        """How many there ever were."""
        return self._posted[0]

    @property
    def served(self) -> int:
        """How many of them are answered."""
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
        """For a server in the place of one that has died: it knows nothing of what was asked."""
        self._served[1] += 1
        fence()
        self._served[0] = self._posted[0]

    def begin_anew(self, generation: int, epoch: int) -> None:
        """For the worker: from now on it means this server, and nothing that it has asked before."""
        self.known, self._posted[1] = generation, epoch

    @property
    def outcome(self) -> int:
        """How the worker's training has ended: twice its epoch, and 1 if it was well or 2 if it was not; at first 0."""
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
        """For the worker: ask, and get the number that `served` will reach. There must be room."""
        number = self._posted[0]
        start = number % self.DEPTH * _WORDS
        for place, word in enumerate((op, part, self._tag(self.known), len(numbers), *numbers), start):
            self._words[place] = word
        fence()
        self._posted[0] = number + 1
        return number + 1

    def head(self) -> Request | None:
        """For the server: the oldest that is not answered; those that are not meant for it any more never are."""
        while (number := self._served[0]) < self._posted[0]:
            fence()
            start = number % self.DEPTH * _WORDS
            op, part, tag, count, *numbers = self._words[start : start + _WORDS].tolist()
            if tag == self._tag(self.generation):
                return Request(op, part, tuple(numbers[:count]))
            self._served[0] = number + 1
        return None

    def serve(self, reply: int = 0) -> None:
        """For the server: it is answered, perhaps with a number."""
        self._words[(self._served[0] % self.DEPTH + 1) * _WORDS - 1] = reply
        fence()
        self._served[0] += 1

    def reply(self, number: int) -> int:
        """For the worker: what the server has answered to a request that is served, soon after it was."""
        return self._words[((number - 1) % self.DEPTH + 1) * _WORDS - 1]

    def write(self, content: Any) -> int:
        """Text, for a request that has some. Only one such may be under way. Gives its length."""
        text = json.dumps(content).encode()
        if len(text) > TEXT - 8:
            raise ValueError(f"{len(text)} bytes of text are too many for a server: there is room for {TEXT - 8}")
        self._text[:8] = len(text).to_bytes(8, "little")
        self._text[8 : 8 + len(text)] = text
        return len(text)

    def text(self, length: int) -> torch.Tensor | None:
        """Where a text of this length is, or will be, with its length in front; None if there is none."""
        return tensor_in(self._text, torch.uint8, 8 + length) if length else None

    def read(self) -> Any:
        """The other end of `write`."""
        return json.loads(bytes(self._text[8 : 8 + int.from_bytes(self._text[:8], "little")]))
