"""What is sent between stages: tensors whose shapes are found by the first step and remembered by all others.

A rank sends without waiting, so that it computes the next micro-batch meanwhile. Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch

from dlab.pipeline.program import BACKWARD, FORWARD, Key, Program
from dlab.transports import SendRequest, Transport

Form = list[tuple[str, list[int]]]  # of a message: the type and the shape of each tensor
_LABELS = {FORWARD: "activations to stage {}", BACKWARD: "gradients to stage {}"}
_LONGEST = 600  # characters of an error that other ranks are told


class PipelineMessages:
    """One rank's messages of a step, in the order of its program.

    The first step of a kind (its batch has a new shape) sends a description before each message, so that shapes need
    not be given, and so that a rank that fails can tell the others why. Later steps send bare tensors and receive them
    in memory that nobody uses any more.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.device = device
        self._recorded, self._unrecorded = transport, transport.unrecorded()
        self.transport = transport
        self._slots: dict[tuple[str, tuple[int, ...]], list[torch.Tensor]] = {}
        self._known: dict[Hashable, dict[Key, Form]] = {}
        self.waited = 0.0  # seconds of this step in which this rank waited for messages

    def begin(self, program: Program, kind: Hashable, samples: int, recorded: bool) -> None:
        """Begin a step; `kind` is equal for steps whose messages have equal shapes."""
        self.transport = self._recorded if recorded else self._unrecorded
        self._kind, self._samples, self.waited = kind, samples, 0.0
        self._forms = self._known.get(kind)
        self._new: dict[Key, Form] = {}
        self._due = {source: deque(keys) for source, keys in program.incoming.items()}
        self._owed = [destination for _, destination in program.sends.values()]
        if program.rank_of[program.last] == self.transport.rank:
            self._owed += program.others
        self._arrived: dict[Key, list[torch.Tensor]] = {}
        self._activations: dict[Key, list[SendRequest]] = {}  # that are not known to be received
        self._requests: deque[SendRequest] = deque()

    def send(self, key: Key, tensors: Sequence[torch.Tensor], destination: int) -> None:
        """Send tensors to a rank, and do not wait; they must not change until the step has ended."""
        tensors = [_plain(each) for each in tensors]
        form = [(_name(each.dtype), list(each.shape)) for each in tensors]
        if self._forms is None:
            self._new[key] = form
            self._describe({"samples": self._samples, "form": form}, destination)
        elif form != self._forms[key]:
            raise ValueError(
                f"{_say(key)} are now {_show(form)}, and were {_show(self._forms[key])} for an equal batch: what a "
                "stage returns must have a shape that depends only on the shape of the batch"
            )
        self._owed.remove(destination)
        if label := _LABELS.get(key.direction):
            self.transport.label(label.format(key.stage), key.microbatch)
        while self._requests and self._requests[0].done:
            self._requests.popleft()
        requests = [self.transport.isend(each, destination) for each in tensors]
        if key.direction == FORWARD:
            self._activations[key] = requests
        self._requests.extend(requests)

    def receive(self, key: Key, source: int) -> list[torch.Tensor]:
        """Return what a rank sends under this key, and keep for later what it has sent before."""
        start = time.perf_counter()
        while key not in self._arrived:
            due = self._due[source].popleft()
            form = self._learn(due, source) if self._forms is None else self._forms[due]
            self._arrived[due] = tensors = self._empty(form)
            for each in tensors:
                self.transport.recv(each, source)
        self.waited += time.perf_counter() - start
        if key.direction == BACKWARD:  # then its activations have been received
            for request in self._activations.pop(Key(FORWARD, key.stage + 1, key.microbatch), ()):
                request.wait()
        return self._arrived.pop(key)

    def end(self) -> None:
        """Wait until all has been sent, and remember the shapes."""
        start = time.perf_counter()
        for request in self._requests:
            request.wait()
        self._requests.clear()
        self._activations.clear()
        if self._forms is None:
            self._known[self._kind] = self._new
        self.waited += time.perf_counter() - start

    def fail(self, problem: Exception) -> None:
        """Tell the ranks that wait for a description why there is none; they raise the same error."""
        if self._forms is not None:
            return  # they wait for bare tensors; whoever runs the ranks tells them
        text = str(problem).split("\n")[0][:_LONGEST]
        told = {"failed": text, "sort": type(problem).__name__}
        for destination in sorted(set(self._owed)):
            self._describe(told, destination)
        if self.transport.processes:  # a thread's messages can still be received when it has ended
            with suppress(Exception):  # of which the first one is the cause
                for request in self._requests:
                    request.wait()

    # descriptions

    def _describe(self, told: dict[str, Any], destination: int) -> None:
        text = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8, device=self.device)
        for each in (torch.tensor([len(text)], device=self.device), text):
            self._requests.append(self._unrecorded.isend(each, destination))

    def _learn(self, key: Key, source: int) -> Form:
        length = torch.empty(1, dtype=torch.int64, device=self.device)
        self._unrecorded.recv(length, source)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._unrecorded.recv(text, source)
        told = json.loads(bytes(text.tolist()))
        if "failed" in told:
            raise _ERRORS.get(told["sort"], RuntimeError)(told["failed"])
        if told["samples"] != self._samples:
            raise ValueError(
                f"rank {source} has a batch of {told['samples']} samples, but rank {self.transport.rank} one of "
                f"{self._samples}: every rank of a pipeline must be called with the same whole batch"
            )
        self._new[key] = [(name, shape) for name, shape in told["form"]]
        return self._new[key]

    def _empty(self, form: Form) -> list[torch.Tensor]:
        """Return tensors to receive in: old ones, if nothing else uses their memory, or new ones."""
        found: list[torch.Tensor] = []
        for name, shape in form:
            slots = self._slots.setdefault((name, tuple(shape)), [])
            free = next((each for each in slots if _users(each) == 1 and all(each is not one for one in found)), None)
            if free is None:
                with torch.inference_mode(False):  # it may be used again in a training step
                    free = torch.empty(shape, dtype=getattr(torch, name), device=self.device)
                slots.append(free)
            found.append(free)
        # views, so that whoever keeps one keeps the slot in use
        return [each.view(each.shape) for each in found]


_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def _users(tensor: torch.Tensor) -> int:
    """Return how many tensors lie in the memory of this one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without the object that asks


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show(form: Form) -> str:
    return " and ".join(f"{name} {tuple(shape)}" for name, shape in form)


def _say(key: Key) -> str:
    if key.direction == FORWARD:
        return f"the results of stage {key.stage - 1}"
    return f"the gradients of stage {key.stage + 1}" if key.direction == BACKWARD else "the results of the last stage"
