"""Parts that are sent: gathers and reduce-scatters over any transport, in an order on which the ranks agree.

Ranks may need layers in different orders, more than once, or not at all, yet all must take part in every exchange. So
before each they tell each other, in one small message, what they want and what they have to give. Taught in
`09_sharded_optimizers.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dlab.strategies.zero.buckets import Bucket
from dlab.strategies.zero.exchange import Exchange
from dlab.transports import SendRequest, Transport

_NONE = -1
_WANTED, _AFTER, _GIVEN, _ENDED, _SKIPPED = range(5)  # what a rank tells the others


class SentExchange(Exchange):
    """Sends each part to the ranks that need it; (n-1)/n of a bucket per rank, for a gather as for a reduction.

    A rank that asks for a bucket also says which it will probably need next. All send their parts of that one at once
    and without waiting, so that they travel while the ranks compute. With `whole=True` every rank holds all weights,
    and `publish` sends what was updated.
    """

    def __init__(
        self,
        group: Transport,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        gradient: torch.dtype,
        parameters: int,
        whole: bool,
    ) -> None:
        super().__init__(group, buckets, gradient)
        self._device, self._dtype, self._parameters = self.summed.device, dtype, parameters
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self.whole: list[torch.Tensor] = []
        if whole:
            self.whole = [torch.empty(bucket.length, dtype=dtype, device=self._device) for bucket in buckets]
            self.weights = [each[slice(*part)] for each, part in zip(self.whole, self.parts, strict=True)]
        else:
            self.weights = [torch.empty(end - begin, dtype=dtype, device=self._device) for begin, end in self.parts]
        self._asked = [_NONE] * 5
        self._full: dict[int, torch.Tensor] = {}  # gradients that this rank has given, by turn
        self._reduced, self._is_first = 0, True
        self._found: torch.Tensor | None = None  # what this rank has asked for
        self._ahead = _NONE  # the bucket that was sent before anybody asked for it
        self._ahead_whole: torch.Tensor | None = None
        self._coming: list[SendRequest] | None = None  # its parts are on their way
        self._skipped: Sequence[int] = ()
        self._unused: list[int] = []
        self._begin_pass()

    @property
    def buffer_bytes(self) -> int:
        """The bytes that gradients take while they are exchanged: a bucket, and a part of it from every other rank."""
        longest = max((self.buckets[number].length for number in self.trained), default=0)
        return 2 * longest * self._dtype.itemsize

    def put(self, number: int, values: torch.Tensor) -> None:
        """Store this rank's part of a bucket's values, or all of them."""
        if self.whole:
            self.whole[number].copy_(values)
        else:
            super().put(number, values)

    def gather(self, number: int, after: int | None) -> torch.Tensor:
        """Receive a whole bucket of weights, together with all ranks."""
        self._asked[_WANTED], self._asked[_AFTER] = number, _NONE if after is None else after
        self._converse(lambda: self._found is not None)
        assert self._found is not None
        whole, self._found = self._found, None
        return whole

    def give(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients to the ranks whose parts they are of, as soon as all ranks have theirs."""
        bucket, turn = self.buckets[number], self._asked[_GIVEN]
        flat = torch.zeros(bucket.length, dtype=self._dtype, device=self._device)
        for view, gradient in zip(bucket.views(flat), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        self._full[turn] = flat
        self._asked[_GIVEN] += 1
        self._converse(lambda: self._reduced > turn)

    def end_pass(self) -> None:
        """Take part in the exchanges of other ranks until all have ended their passes."""
        self._asked[_ENDED] = 1
        self._converse(lambda: self._asked[_ENDED] == 0)

    def leave(self) -> None:
        """Take part in the exchanges of other ranks until all have ended their evaluation."""
        self.end_pass()

    def skip(self, skipped: Sequence[int]) -> None:
        """Remember which parameters this rank has not used, to tell the others at the end of the pass."""
        self._skipped, self._asked[_SKIPPED] = skipped, int(bool(skipped))

    def finish(self) -> list[int]:
        """Divide the sums by the number of ranks, and return what all ranks have skipped."""
        self._is_first = True
        if self.group.size > 1:
            self.summed /= self.group.size
        return self._unused

    def publish(self) -> None:
        """Send the updated parts to all ranks, if each holds all weights; otherwise they are gathered when needed."""
        for number, whole in enumerate(self.whole):
            if self.buckets[number].trained:
                self._start(number)
                self._land(whole)

    # what the ranks agree on

    def _begin_pass(self) -> None:
        self._asked = [_NONE, _NONE, 0, 0, 0]
        self._reduced = 0

    def _converse(self, is_answered: Callable[[], bool]) -> None:
        """Tell each other what is wanted and given, and do what follows from it, until this rank has its answer."""
        while not is_answered():
            if self._coming is not None:
                self._ahead_whole = self._land(self._new(self._ahead))
            told = self._tell_all()
            self._check(told)
            given = min(each[_GIVEN] for each in told)
            while self._reduced < given:
                self._reduce(self._reduced)
                self._reduced += 1
            asking = next((each for each in told if each[_WANTED] != _NONE), None)
            if asking is not None:
                self._answer(asking[_WANTED], asking[_AFTER])
            elif all(each[_ENDED] for each in told):
                self._end(told)

    def _check(self, told: list[list[int]]) -> None:
        """Raise an error on all ranks if one has left its pass and will not give what another waits for."""
        most = max(each[_GIVEN] for each in told)
        for rank, each in zip(self.group.members, told, strict=True):
            if each[_ENDED] and each[_GIVEN] < most:
                raise RuntimeError(
                    f"rank {rank} ended a pass without a backward pass, and another rank has one: all ranks must "
                    "train, or all must only evaluate"
                )

    def _tell_all(self) -> list[list[int]]:
        """Return what every rank says, by rank; costs n-1 messages of 40 bytes."""
        mine = torch.tensor(self._asked, device=self._device)
        self.group.label("agree", 0)
        requests = [self.group.isend(mine, other) for other in self._others]
        every = [mine.clone() for _ in range(self.group.size)]
        for other in self._others:
            self.group.recv(every[other], other)
        for request in requests:
            request.wait()
        return torch.stack(every).tolist()

    def _answer(self, number: int, after: int) -> None:
        """Gather a bucket on all ranks, keep it if this one has asked for it, and send the next one ahead."""
        if number == self._ahead:
            whole = self._ahead_whole
            self._ahead, self._ahead_whole = _NONE, None
        else:
            self._start(number)
            whole = self._land(self._new(number))
        if self._asked[_WANTED] == number:
            self._found, self._asked[_WANTED] = whole, _NONE
        if after not in (_NONE, self._ahead):
            self._ahead, self._ahead_whole = after, None
            self._start(after)

    def _end(self, told: list[list[int]]) -> None:
        """End the pass on all ranks."""
        self._unused = self._skipped_by_all() if any(each[_SKIPPED] for each in told) else []
        self._skipped = ()
        if told[0][_GIVEN]:
            self._is_first = False
        self._ahead, self._ahead_whole = _NONE, None  # the weights will change
        self._begin_pass()

    def _skipped_by_all(self) -> list[int]:
        """Return the parameters that all ranks have skipped; each sends a byte per parameter to every other."""
        mine = torch.zeros(self._parameters, dtype=torch.uint8, device=self._device)
        mine[list(self._skipped)] = 1
        self.group.label("unused", 0)
        requests = [self.group.isend(mine, other) for other in self._others]
        common, theirs = mine.clone(), torch.empty_like(mine)
        for other in self._others:
            self.group.recv(theirs, other)
            common &= theirs
        for request in requests:
            request.wait()
        return common.nonzero().flatten().tolist()

    # what is sent

    def _new(self, number: int) -> torch.Tensor:
        return torch.empty(self.buckets[number].length, dtype=self._dtype, device=self._device)

    def _start(self, number: int) -> None:
        """Begin to send this rank's part of a bucket to all others."""
        self.group.label("all-gather", 0)
        self._coming_number = number
        self._coming = [self.group.isend(self.weights[number], other) for other in self._others]

    def _land(self, whole: torch.Tensor) -> torch.Tensor:
        """Receive the other ranks' parts of the bucket that is being sent into a tensor, and return it."""
        assert self._coming is not None
        number = self._coming_number
        chunks = whole.tensor_split(self.group.size)
        chunks[self.group.rank].copy_(self.weights[number])
        for other in self._others:
            self.group.recv(chunks[other], other)
            self.moved["gather"] += chunks[other].nbytes
        for request in self._coming:
            request.wait()
        self._coming = None
        return whole

    def _reduce(self, turn: int) -> None:
        """Send every rank its part of a bucket, and add up all ranks' gradients of this rank's part."""
        number, flat = self.trained[turn], self._full.pop(turn)
        chunks, total = flat.tensor_split(self.group.size), self.gradients[number]
        self.group.label("reduce-scatter", 0)
        requests = [self.group.isend(chunks[other], other) for other in self._others]
        every = [chunks[self.group.rank] for _ in range(self.group.size)]
        for other in self._others:
            every[other] = torch.empty_like(chunks[self.group.rank])
            self.group.recv(every[other], other)
            self.moved["reduce"] += every[other].nbytes
        for rank, each in enumerate(every):
            if rank == 0 and self._is_first:
                total.copy_(each)
            else:
                total += each
        for request in requests:
            request.wait()
