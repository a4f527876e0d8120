"""The relay: threads that carry requests, replies and tensors between workers and servers on different hosts.

Every process has its own desk, laid out as if all shared it. For each pair of a worker and a server there is a thread
at both ends for each direction: a request posted here is sent over, written to the same offset and posted there. So
neither a worker nor a server knows whether the other is on another host. The bytes are sent by torch.distributed's
send and recv.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist

from dlab.kvstore.channels import NOTHING, Channels, Span
from dlab.kvstore.desk import Desk
from dlab.kvstore.protocol import Op
from dlab.memory.backoff import ASK, Peers
from dlab.memory.gradient_slot import PushCount
from dlab.memory.request_queue import RequestQueue

END = 0  # the last message; requests have the numbers of their `Op`
ANSWER, APPLIED = 1, 2  # from the server: a request is served; pushes are applied
_WORDS = 12


class RemotePeers(Peers):
    """Processes on other hosts, which count as dead once a message to or from them has failed."""

    def __init__(self, numbers: memoryview, rank: int) -> None:
        super().__init__(numbers, rank)
        self.gone: set[int] = set()

    def _is_dead(self, rank: int) -> bool:
        return rank in self.gone


class RelayedChannels(Channels):
    """Channels of a worker or a server to processes that may be on other hosts; every rank must make them."""

    peers: RemotePeers

    def __init__(self, rank: int, workers: int, servers: int) -> None:
        super().__init__(Desk(workers, servers).map(), rank, workers, servers)
        self.peers = RemotePeers(self._front.numbers, rank)
        self.peers.workers = workers
        # a separate group, for tensors on the CPU, whose timeout never ends a thread that waits for a request
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        others = range(servers) if rank < workers else range(workers)
        self._asked: list[SimpleQueue[tuple[list[int], RequestQueue, Span]]] = [SimpleQueue() for _ in others]
        self._owed: list[deque[tuple[Op, int, Span]]] = [deque() for _ in others]
        self._places: list[dict[int, int]] = [{} for _ in others]  # by offset: pushes applied, as last reported
        work = (self._carry_requests, self._bring_answers) if rank < workers else (self._take_in, self._carry_answers)
        self._threads = [Thread(target=self._work, args=(each, other)) for other in others for each in work]
        for semaphore in self._front.semaphores:
            semaphore.hang()
        for thread in self._threads:
            thread.start()

    def _work(self, work: Callable[[int], None], other: int) -> None:
        """Run a thread's work until it is done or the other side is gone."""
        try:
            work(other)
        except RuntimeError:  # raised by torch.distributed for every failure
            self.peers.gone.add(self._rank_of(other))
            if self.rank < self.workers or len(self.peers.gone) == self.workers:
                self._front.end()
            self.semaphore.post()

    def _rank_of(self, other: int) -> int:
        return other + self.workers * (self.rank < self.workers)

    def end(self) -> None:
        """Send the end to all others, and wait for theirs, so that no thread is left receiving."""
        self._front.end()
        for jobs in self._asked:
            jobs.put(([END], self.queues[0], NOTHING))
        for thread in self._threads:
            thread.join()

    def silent(self) -> list[int]:
        """Return nothing: between hosts no server is replaced, so a worker that loses one simply fails."""
        return []

    # at the worker's end

    def ask(
        self, server: int, op: Op, part: int, *numbers: int, lays: Span = NOTHING, gets: Span = NOTHING, text: int = 0
    ) -> int:
        """Post a request here, so that its answer can be waited for, and hand it to the thread that sends it."""
        self.parts[server] += op == Op.INIT
        number = self.queues[server].post(op, part, *numbers)
        words = [op, part, text, *lays, *gets, len(numbers), *numbers]
        self._asked[server].put((words, self.queues[server], lays))
        return number

    def _carry_requests(self, server: int) -> None:
        op = -1
        while op != END:
            words, queue, lays = self._asked[server].get()
            op = words[0]
            self._send(server, words, queue.text(words[2]) if op != END else None, self._bytes(lays))

    def _bring_answers(self, server: int) -> None:
        queue = self.queues[server]
        while (words := self._receive(server))[0] != END:
            kind, *numbers = words
            if kind == APPLIED:
                offset, applied, staleness, *_ = numbers
                PushCount(self.memory, offset).write(applied, staleness)
            else:
                reply, *span = numbers[:3]
                self._fill(server, self._bytes((span[0], span[1])))
                queue.serve(reply)
            self.semaphore.post()
        self._front.end()

    # at the server's end

    def _take_in(self, worker: int) -> None:
        queue = self.queues[worker]
        while (words := self._receive(worker))[0] != END:
            op, part, text = Op(words[0]), *words[1:3]
            lays, gets, count = (words[3], words[4]), (words[5], words[6]), words[7]
            self._fill(worker, queue.text(text))
            self._fill(worker, self._bytes(lays))
            if op == Op.INIT:
                self._places[worker][queue.read()["place"]] = 0
            self._owed[worker].append((op, part, gets))
            queue.post(op, part, *words[8 : 8 + count])
            self.semaphore.post()
        self._front.end()

    def _carry_answers(self, worker: int) -> None:
        queue, semaphore, told = self.queues[worker], self._front.semaphores[worker], 0
        first: dict[int, int] = {}  # by part: the first offset of its weights, always used at the worker's end
        while not self.over or told < queue.served:
            semaphore.sleep(ASK)
            served = queue.served
            self._tell_what_is_applied(worker)  # first, so that a worker knows it when it gets its answer
            while told < served:
                told += 1
                (op, part, (at, nbytes)), reply = self._owed[worker].popleft(), queue.reply(told)
                content = self._bytes((at or reply, nbytes))
                if op == Op.PULL and not at:
                    at = reply = first.setdefault(part, reply)
                self._send(worker, [ANSWER, reply, at, nbytes], content)
        self._send(worker, [END])

    def _tell_what_is_applied(self, worker: int) -> None:
        for offset, told in list(self._places[worker].items()):
            applied, staleness = PushCount(self.memory, offset).read()
            if applied != told:
                self._places[worker][offset] = applied
                self._send(worker, [APPLIED, offset, applied, staleness])

    # both

    def _bytes(self, span: Span) -> torch.Tensor | None:
        offset, nbytes = span
        return self.tensor(offset, nbytes, torch.uint8) if nbytes else None

    def _send(self, other: int, words: Sequence[int], *contents: torch.Tensor | None) -> None:
        header = torch.zeros(_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        for tensor in (header, *contents):
            if tensor is not None:
                dist.send(tensor, self._rank_of(other), self._group)

    def _receive(self, other: int) -> list[int]:
        header = torch.empty(_WORDS, dtype=torch.int64)
        self._fill(other, header)
        return header.tolist()

    def _fill(self, other: int, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            dist.recv(tensor, self._rank_of(other), self._group)
